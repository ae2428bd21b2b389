"""Replayed decode steps: the same answers as launched ones, whatever the batch is padded to."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import CacheConfig, Config, EngineConfig
from moe import LLM, SamplingParams
from moe.engine.cuda_graphs import HOST_STEPS, graph_sizes
from tests.tiny_models import write_variant


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 100, 256, 1000])
def test_the_ladder_covers_every_batch_with_little_padding(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch <= max(batch / 4, 1) or size - batch <= (15 if batch <= 256 else 31)


def answers(folder: Path, *, graphs: bool, **options: Any):
    """Token ids of 21 mixed requests and what each expert was given, with or without replay."""
    llm = LLM(str(folder), device="cuda", dtype="bfloat16", num_blocks=400, cuda_graphs=graphs, **options)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, 250, (3 + 5 * i,), generator=generator).tolist() for i in range(21)]
    params = [
        SamplingParams(max_tokens=5 + 3 * (i % 6), temperature=0.7 * (i % 2), seed=i, ignore_eos=True, detokenize=False)
        for i in range(21)
    ]
    ids = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
    loads = llm.stats().expert_counts
    # What a graph reads must outlive its capture: fill all that was given back meanwhile, then replay.
    junk = [torch.full((size,), 2**40, device="cuda") for size in (1, 2, 4, 8, 32, 64, 512, 2**20) for _ in range(64)]
    again = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
    assert again == ids and len(junk) == 512
    return ids, loads, llm


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("mixtral-window", {}),
        ("qwen3_moe", {}),
        ("deepseek_v2-groups", {}),
        ("deepseek_v3-yarn", {}),
        # A step's list of pieces lies in its graph.
        ("deepseek_v3", {"num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    ],
)
def test_replayed_steps_give_the_same_ids_and_loads(tmp_path: Path, variant: str, options: dict[str, int]) -> None:
    write_variant(tmp_path, variant, dtype="bfloat16", **options)
    launched, launched_load, llm = answers(tmp_path, graphs=False)
    assert llm.engine.runner.graphs is None
    llm.close()
    replayed, replayed_load, llm = answers(tmp_path, graphs=True)
    assert llm.engine.runner.graphs is not None and llm.engine.runner.graphs.num_graphs > 2
    assert replayed == launched
    assert replayed_load == launched_load, "padding rows were counted, or went to experts"
    llm.close()
    preempted, _, llm = answers(tmp_path, graphs=True, force_preempt_every=4)
    assert preempted == launched and llm.stats().preemptions > 0
    llm.close()
    gc.collect()


def opened(folder: Path, **engine: Any) -> LLM:
    config = Config(
        model=str(folder),
        dtype="bfloat16",
        engine=EngineConfig(device="cuda", **engine),
        cache=CacheConfig(num_blocks=400, prefix_caching=False),
    )
    return LLM(config=config)


def prompts_of(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 250, (5 + 7 * i % 40,), generator=generator).tolist() for i in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_drawn_in_a_graph_are_those_of_the_sampler(tmp_path: Path, overlap: bool) -> None:
    """Alone in a batch of plain rows the graph draws; beside a row that is cut, or wants more, the sampler does."""
    write_variant(tmp_path, "qwen3_moe", dtype="bfloat16")
    plain = [SamplingParams(max_tokens=20, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0, 0.6, 1.3))]
    asking: tuple[dict[str, Any], ...] = (
        {"logprobs": 2},
        {"top_k": 5, "temperature": 1.0},
        {"repetition_penalty": 1.2},
        {"min_tokens": 5, "temperature": 0.0},
    )
    with opened(tmp_path, overlap=overlap) as llm:
        alone = [list(each.outputs[0].token_ids) for each in llm.generate(prompts_of(3), plain)]
        for more in asking:
            params = [*plain, SamplingParams(max_tokens=9, ignore_eos=True, **more)]
            beside = [list(each.outputs[0].token_ids) for each in llm.generate(prompts_of(4), params)]
            assert beside[:3] == alone, more
        assert llm.engine.graphs is not None and llm.engine.graphs.num_graphs >= 4
    with opened(tmp_path, cuda_graphs=False, overlap=overlap) as llm:
        assert [list(each.outputs[0].token_ids) for each in llm.generate(prompts_of(3), plain)] == alone


@pytest.mark.gpu
def test_replayed_graphs_follow_tables_that_moved(tmp_path: Path) -> None:
    """The same graphs, places and lengths, but other blocks: a request that stays takes the first ones meanwhile."""
    write_variant(tmp_path, "qwen3_moe", dtype="bfloat16")
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with opened(tmp_path, max_model_len=256) as llm:
        ids = [list(each.outputs[0].token_ids) for each in llm.generate(prompts_of(5), params)]
        graphs = llm.engine.graphs
        assert graphs is not None
        count = graphs.num_graphs
        stays = llm.stream([9] * 100, SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True))
        next(stays)
        moved = [list(each.outputs[0].token_ids) for each in llm.generate(prompts_of(5), params)]
        assert moved == ids and graphs.num_graphs >= count
        again = [list(each.outputs[0].token_ids) for each in llm.generate(prompts_of(5), params)]
        assert again == ids
        for _ in stays:
            pass


@pytest.mark.gpu
@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_graphs_are_captured_before_the_first_step_or_when_wanted(tmp_path: Path, seconds: float) -> None:
    """Twelve requests reach sizes up to 12: all of the ladder up to there, or only those that steps had."""
    write_variant(tmp_path, "qwen3_moe", dtype="bfloat16")
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with opened(tmp_path, capture_seconds=seconds) as llm:
        llm.generate(prompts_of(12), params)
        graphs = llm.engine.graphs
        assert graphs is not None
        assert graphs.num_graphs == (10 if seconds else 1)
    assert graphs.num_graphs == 0


@pytest.mark.gpu
def test_ids_stay_while_somebody_has_them(tmp_path: Path) -> None:
    """Steps of padding alone, whose ids nobody waits for: each has a part of its own until it is let go of."""
    write_variant(tmp_path, "qwen3_moe", dtype="bfloat16")
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with opened(tmp_path) as llm:
        llm.generate(prompts_of(2), params)
        graphs = llm.engine.graphs
        assert graphs is not None
        draw = partial(torch.inference_mode()(graphs.draw), np.zeros((4, 0), np.int64))
        held = [draw() for _ in range(HOST_STEPS)]
        # A tensor without entries has no address.
        assert len({each.storage_offset() for each in held}) == HOST_STEPS and graphs._ids.is_pinned()
        with pytest.raises(AssertionError, match=f"ids of {HOST_STEPS} steps"):
            draw()
        place = held.pop(1).storage_offset()
        assert draw().storage_offset() == place
        held.clear()
        assert llm.generate(prompts_of(2), params)[0].outputs[0].token_ids
