"""Experts that move while ranks answer: the same text, loads that add up, files, and a fault on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moe.engine.balance as balance_module
from configs.schema import BalanceConfig, CacheConfig, Config, EngineConfig, ParallelConfig
from expert_parallel.placement import Placement
from expert_parallel.plan_file import ModelShape, load_plan
from expert_parallel.rebalance import ExpertMover
from moe.engine.llm import LLM
from moe.engine.request import SamplingParams
from router.load_window import read_load
from tests.ranks import run_ranks
from tests.test_engine.test_llm_ranks import as_torchrun, free_port, texts
from tests.tiny_models import write_variant

PROMPTS = ["In the beginning", "And", "Blessed are the meek, for they shall", "Thus saith"]
PARAMS = [SamplingParams(max_tokens=n, temperature=0.8 * (n % 2), seed=1, ignore_eos=True) for n in (17, 2, 6, 1)]
EVERY_5 = {"interval": 5, "move": "always", "layers_per_step": 2, "window": 2}


def config(model: str, parallel: dict[str, Any] | None = None, **balance: Any) -> Config:
    return Config(
        model=model,
        engine=EngineConfig(device="cpu", max_batched_tokens=16, max_num_seqs=4),
        cache=CacheConfig(num_blocks=32),
        parallel=ParallelConfig(timeout_s=60, **(parallel or {})),
        balance=BalanceConfig(**balance),
    )


def anywhere(loads_LE: np.ndarray, current: Sequence[Placement], shape: Any) -> tuple[Placement, ...]:
    """In place of the rule: every expert anywhere, replicas and empty slots too. Alike on all ranks."""
    found = []
    for load_E, placement in zip(loads_LE, current, strict=True):
        draw = random.Random(repr((load_E.tolist(), placement.ranks)))
        more = sum(map(len, placement.ranks)) - placement.num_experts
        held = [*range(placement.num_experts), *draw.choices([None, *range(placement.num_experts)], k=more)]
        draw.shuffle(held)
        rest = iter(held)
        found.append(Placement.of_ranks(placement.num_experts, [[next(rest) for _ in s] for s in placement.ranks]))
    return tuple(found)


def answer(rank: int, num_ranks: int, port: int, kinds: list[tuple[Config, bool]]) -> list[Any]:
    """Of each kind all answers, and how many experts arrived here."""
    results, rule = [], balance_module.next_placements
    for number, (each, shuffled) in enumerate(kinds):
        as_torchrun(rank, num_ranks, port + number)
        balance_module.next_placements = anywhere if shuffled else rule  # pyright: ignore
        with LLM(config=each) as llm:
            found = texts(llm.generate(PROMPTS, PARAMS))
            stats = llm.stats()
            assert stats.balance_seconds > 0
            layout = llm.engine.parts.network.layout  # pyright: ignore[reportAttributeAccessIssue]
            results.append((found, stats.experts_moved, stats.rebalances, layout.experts))
    return results


@cache
def alone(model: str) -> list[Any]:
    with LLM(config=config(model, **EVERY_5)) as llm:
        found = texts(llm.generate(PROMPTS, PARAMS))
        assert llm.stats().experts_moved == 0
        return found


@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [
        (2, [("demo", {}, {}, False), ("demo-deepseek", {"row_cap": 16}, {"redundant_experts": 3}, True)]),
        (
            4,
            [
                ("demo", {"dispatcher": "all_gather"}, {"redundant_experts": 2}, True),
                ("demo-deepseek", {}, {"redundant_experts": 4, "buffer_mb": 1e-6}, False),
            ],
        ),
    ],
)
def test_answers_are_those_of_one_rank_while_experts_move(num_ranks: int, kinds: list[Any]) -> None:
    """Two ranks and four, by the rule and anywhere, in slots for each expert and in more, one expert at a time too."""
    made = [(config(model, parallel, **EVERY_5, **more), shuffled) for model, parallel, more, shuffled in kinds]
    results = run_ranks(answer, num_ranks, free_port(), made, joined=False, timeout_s=400)
    for number, (model, _, _, shuffled) in enumerate(kinds):
        expected = alone(model)
        assert all(of_rank[number][0] == expected for of_rank in results)
        assert sum(of_rank[number][1] for of_rank in results) > (40 if shuffled else 2)
        assert results[0][number][2] >= 1
        layers = results[0][number][3]
        assert len(set(layers.values())) == len(layers) > 1  # each layer has a placement of its own


MORE_RANKS = {"dispatcher": "all_gather", "combine": "fast", "overlap": "halves", "overlap_rows": 2}


def few_experts(folder: Path, **parallel: Any) -> Config:
    made = config(str(folder), parallel, **EVERY_5, redundant_experts=0)
    made.engine.max_num_seqs = 2  # steps of one row and of two: some are split
    return made


def answer_with_few(rank: int, num_ranks: int, port: int, folder: Path) -> tuple[list[Any], int, list[Any]]:
    as_torchrun(rank, num_ranks, port)
    balance_module.next_placements = anywhere  # pyright: ignore
    with LLM(config=few_experts(folder, **MORE_RANKS)) as llm:
        layout = llm.engine.parts.network.layout  # pyright: ignore[reportAttributeAccessIssue]
        num_slots = layout.num_slots
        found = llm.generate(ID_PROMPTS, ID_PARAMS)
        return [each.outputs[0].token_ids for each in found], num_slots, list(layout.placements.values())


ID_PROMPTS = [[5, 9, 60, 7], [30], [8, 8, 41, 100, 3, 17, 90], [77, 2], [11, 12, 13]]
ID_PARAMS = [
    SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False) for n in (20, 3, 9, 1, 14)
]


def test_C01_more_ranks_than_experts_while_these_move_and_steps_are_split(tmp_path: Path) -> None:
    """Three experts on four ranks, one to each of three: the fourth works for nobody and moves along."""
    write_variant(tmp_path, "mixtral-window", num_local_experts=3)
    with LLM(config=few_experts(tmp_path)) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(ID_PROMPTS, ID_PARAMS)]
    results = run_ranks(answer_with_few, 4, free_port(), tmp_path, joined=False, timeout_s=300)
    assert [num_slots for _, num_slots, _ in results] == [1, 1, 1, 0]
    assert all(found == expected for found, _, _ in results)
    placements = results[0][2]
    assert all(of_rank[2] == placements for of_rank in results)
    assert any(each.ranks != ((0,), (1,), (2,), ()) for each in placements), "nothing has moved"


def profile_and_plan(rank: int, num_ranks: int, port: int, folder: Path) -> tuple[Any, Any, Any]:
    """A run that writes a plan and its load, then one with that plan: both answers, and the slots here."""
    files = {"profile": str(folder / "plan.json"), "profile_steps": 8, "load_file": str(folder / "load.json")}
    steps = {"overlap": False, "max_batched_tokens": 64}
    first = config("demo-deepseek", None, interval=4, window=3, move="never", redundant_experts=3, **files)
    second = config("demo-deepseek", None, interval=4, plan=str(folder / "plan.json"))
    found = []
    for number, each in enumerate((first, second)):
        as_torchrun(rank, num_ranks, port + number)
        each.engine = EngineConfig(device="cpu", max_num_seqs=8, **steps)
        each.cache = CacheConfig(num_blocks=64, prefix_caching=False)
        with LLM(config=each) as llm:
            found.append(texts(llm.generate(PROMPTS, PARAMS)))
            assert llm.stats().experts_moved == 0
            layout = llm.engine.parts.network.layout  # pyright: ignore[reportAttributeAccessIssue]
    return found[0], found[1], layout.placements


def test_C46_loads_add_up_and_a_profile_becomes_a_plan(tmp_path: Path) -> None:
    """Rows of routed experts alone are counted, each once, however many ranks there are and wherever replicas lie."""
    model = ModelShape(num_layers=5, num_experts=16, sparse_layers=(1, 2, 3, 4))
    counts = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        if num_ranks == 1:
            files = {"load_file": str(folder / "load.json"), "interval": 4, "window": 3}
            one = config("demo-deepseek", None, **files)
            one.engine = EngineConfig(device="cpu", max_num_seqs=8, overlap=False, max_batched_tokens=64)
            one.cache = CacheConfig(num_blocks=64, prefix_caching=False)
            with LLM(config=one) as llm:
                expected = texts(llm.generate(PROMPTS, PARAMS))
                stats = llm.stats()
            num_tokens = stats.computed_prompt_tokens + stats.output_tokens - stats.requests
        else:
            results = run_ranks(profile_and_plan, num_ranks, free_port(), folder, joined=False, timeout_s=400)
            assert all(first == second == expected for first, second, _ in results)
            plan = load_plan(folder / "plan.json", model, num_ranks)
            assert all(placements == plan for _, _, placements in results)
            assert plan[1] != plan[2] and [len(slots) for slots in plan[1].ranks] == [10, 9]
        record = read_load(folder / "load.json")
        assert record.sparse_layers == model.sparse_layers and len(record.trace_ILE) == 3
        assert all(0 < point.balancedness <= 1 for point in record.timeline) and len(record.timeline) > 3
        counts.append(record.total_LE)
    assert (counts[0] == counts[1]).all()
    assert counts[0][1:].sum(axis=1).tolist() == [num_tokens * 4] * 4


def test_a_file_that_cannot_be_written_at_the_end_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder was there when the run began; the answers are given all the same."""
    folder = tmp_path / "loads"
    folder.mkdir()
    one = config("demo", None, load_file=str(folder / "load.json"))
    with LLM(config=one) as llm:
        assert len(llm.generate(["And"], SamplingParams(max_tokens=2, temperature=0))) == 1
        folder.rmdir()
        with caplog.at_level("WARNING"):
            llm.close()
    assert caplog.messages == [f"balance.load_file={folder}/load.json is not written: No such file or directory."]


def fails(rank: int, num_ranks: int, port: int) -> str:
    as_torchrun(rank, num_ranks, port)
    llm = LLM(config=config("demo", None, **EVERY_5))
    exchange, rounds = ExpertMover._exchange, []

    def failing(self: ExpertMover, *args: Any) -> Any:
        rounds.append(1)
        if rank == 1 and len(rounds) == 2:
            raise ArithmeticError("the cause itself")
        return exchange(self, *args)

    ExpertMover._exchange = failing  # pyright: ignore[reportAttributeAccessIssue]
    try:
        llm.generate(PROMPTS, [SamplingParams(max_tokens=12, ignore_eos=True)] * len(PROMPTS))
    except RuntimeError as error:
        llm.close()
        return str(error)
    raise AssertionError("nothing was raised")


def test_a_fault_while_experts_move_is_told_on_all_ranks() -> None:
    for text in run_ranks(fails, 2, free_port(), joined=False, timeout_s=200):
        assert "the ranks stop: rank 1: StepError: stage 'balance'" in text
        assert "ArithmeticError: the cause itself" in text
