"""Replayed steps of decode rows beside prompt tokens: answers and loads of launched ones, whatever is padding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import CacheConfig, Config, EngineConfig
from moe import LLM, SamplingParams
from moe.engine import mixed_graphs, spread
from moe.engine.mixed_graphs import MixedGraphs
from tests.tiny_models import write_variant

VARIANTS = ["mixtral-window", "qwen3_moe", "deepseek_v2-groups", "deepseek_v3-yarn"]
ROWS = 40


class Again:
    """A graph for devices that have none: what was to be captured runs again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replays = -1
        self.run = run
        self.replay()

    def replay(self) -> None:
        self.run()
        self.replays += 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and steps of few rows, captured at once."""
    monkeypatch.setattr(spread, "LEAST_TOKENS", ROWS)
    monkeypatch.setattr(mixed_graphs, "PROMPT_ROWS", ROWS)
    monkeypatch.setattr(mixed_graphs, "CHUNKS", 5)
    monkeypatch.setattr(mixed_graphs, "SIZE_STEP", 8)
    monkeypatch.setattr(mixed_graphs, "WANTED_TIMES", 2)


def lengths() -> list[tuple[int, int]]:
    """(prompt, output) of 24 requests; a few prompts take more than one step, and one is too long for a graph."""
    r = random.Random(3)
    sizes = [(r.randint(3, 60), r.randint(4, 40)) for _ in range(22)]
    return [(7, 44), *sizes, (130, 5)]


def answers(llm: LLM) -> list[list[int]]:
    r = random.Random(5)
    prompts = [[r.randrange(4, 250) for _ in range(prompt)] for prompt, _ in lengths()]
    params = [
        SamplingParams(max_tokens=output, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, detokenize=False)
        for i, (_, output) in enumerate(lengths())
    ]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]


def replays_with(llm: LLM) -> list[Again]:
    """Give an engine on the CPU such graphs."""
    runner, made = llm.engine.runner, []

    def record(run: Callable[[], None]) -> Again:
        made.append(Again(run))
        return made[-1]

    assert llm.engine.scheduler.spreads
    graphs = MixedGraphs(
        runner.network, runner.pool.caches, runner.places, bounds=[64, 256], limits=runner.limits, record=record
    )
    graphs.prompt_bound = 96
    runner.mixed = graphs
    return made


def opened(folder: Path, dtype: str = "auto", **engine: Any) -> LLM:
    sizes: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_batched_tokens": 100, "spread": True}
    cache = CacheConfig(num_blocks=400)
    return LLM(config=Config(str(folder), dtype=dtype, engine=EngineConfig(**sizes | engine), cache=cache))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3-yarn"])
def test_replayed_steps_give_the_same_ids_and_loads(tmp_path: Path, variant: str) -> None:
    write_variant(tmp_path, variant)
    with opened(tmp_path) as llm:
        launched, loads = answers(llm), llm.stats().expert_counts
        assert llm.stats().mixed_steps > 15
    for every in (0, 7):
        with opened(tmp_path, force_preempt_every=every) as llm:
            made = replays_with(llm)
            assert answers(llm) == launched
            assert sum(each.replays for each in made) > 5 and len(made) > 1
            if not every:
                assert llm.stats().expert_counts == loads, "padding rows were counted, or went to experts"


@pytest.mark.usefixtures("small")
def test_a_step_of_which_more_is_asked_is_launched(tmp_path: Path) -> None:
    write_variant(tmp_path, "qwen3_moe")
    with opened(tmp_path) as llm:
        made = replays_with(llm)
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, prompt_logprobs=0, detokenize=False)
        short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate([[5, 6, 7]] + [[8] * 20] * 12, [params] + [short] * 12)
        assert not made and all(len(each.prompt_logprobs or ()) > 2 for each in outputs)


@pytest.mark.gpu
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("variant", [*VARIANTS, "deepseek_v2-lite"])
def test_captured_steps_give_the_same_ids_and_loads(tmp_path: Path, variant: str) -> None:
    """Also when all that a graph may read and that was given back is filled with nonsense."""
    write_variant(tmp_path, variant, dtype="bfloat16")
    gpu: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
    with opened(tmp_path, **gpu, spread=False) as llm:
        launched, loads = answers(llm), llm.stats().expert_counts
        assert llm.engine.runner.mixed is None
    with opened(tmp_path, **gpu) as llm:
        assert answers(llm) == launched and llm.stats().expert_counts == loads
        mixed = llm.engine.runner.mixed
        assert mixed is not None and len(mixed._graphs) > 1
        sizes = (1, 2, 4, 8, 32, 64, 512, 2**20)
        junk = [torch.full((size,), 2**40, device="cuda") for size in sizes for _ in range(64)]
        assert answers(llm) == launched and len(junk) == 512
    with opened(tmp_path, **gpu, force_preempt_every=5) as llm:
        assert answers(llm) == launched and llm.stats().preemptions > 0
