"""Halves of a step over ranks: the bits of one rank, and the same collectives in the same order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import ParallelConfig
from expert_parallel.group import ExpertGroup
from moe.model.load_model import Spread
from moe.model.overlap import Overlap
from moe.model.step_input import StepOfAll
from tests.compare import assert_same_bits
from tests.ranks import run_ranks, world
from tests.step_driver import StepDriver
from tests.test_model.test_network_ranks import STEPS, load, take_step
from tests.tiny_models import write_variant


@dataclass(eq=False)
class RecordedGroup(ExpertGroup):
    """Writes down which collective was called, in order."""

    calls: list[str] = field(default_factory=list)

    def all_to_all(self, *args: Any) -> None:
        self.calls.append("all_to_all")
        super().all_to_all(*args)

    def all_gather(self, *args: Any) -> None:
        self.calls.append("all_gather")
        super().all_gather(*args)


def take_steps_in_halves(rank: int, num_ranks: int, folder: Path, parallels: Sequence[ParallelConfig]) -> list[Any]:
    """One rank: for each of `parallels` the logits of its rows in each step, its load, and the calls of each step."""
    results = []
    for parallel in parallels:
        plain = world(rank, num_ranks)
        group = RecordedGroup(plain.rank, plain.size, plain.process_group)
        model = load(folder, Spread(group, parallel, max_rows=64))
        if num_ranks == 1:  # where nothing travels, nothing overlaps unless asked by hand
            model.overlap = Overlap(halves_from=parallel.overlap_rows)
        driver, found, calls, seen = StepDriver(model), [], [], set()
        for step in STEPS:
            counts = [sum(len(ids) for ids in of_rank.values()) for of_rank in step]
            starts = {name for of_rank in step for name in of_rank} - seen
            seen |= starts
            own: dict[str, Sequence[int]] = dict(step[rank]) if rank < len(step) else {}
            if num_ranks == 1:
                own = {name: ids for of_rank in step for name, ids in of_rank.items()}
                counts = [sum(counts)]
            first = len(group.calls)
            found.append(take_step(driver, own, StepOfAll(max(counts), has_prefill=bool(starts))))
            calls.append(group.calls[first:])
        assert model.load is not None
        results.append((found, model.load.snapshot(), calls))
    return results


def one_rank(folder: Path) -> tuple[list[dict[str, Tensor]], Tensor]:
    model = load(folder)
    driver = StepDriver(model)
    found = [
        take_step(driver, {name: ids for of_rank in step for name, ids in of_rank.items()}, None) for step in STEPS
    ]
    assert model.load is not None
    return found, model.load.snapshot()


@pytest.mark.parametrize(
    ("variant", "num_ranks", "row_cap"),
    [
        ("deepseek_v3", 1, None),
        ("deepseek_v3", 2, None),
        ("mixtral-window", 3, 24),  # a rank without rows, several rounds in each half
    ],
)
def test_halves_have_the_bits_of_one_rank(variant: str, num_ranks: int, row_cap: int | None, tmp_path: Path) -> None:
    write_variant(tmp_path, variant)
    expected, expected_load = one_rank(tmp_path)
    names = ("all_to_all", "all_gather") if num_ranks > 1 else ("auto",)
    whole = [ParallelConfig(dispatcher=name, row_cap=row_cap) for name in names]
    # From two rows up every step is split; from 20 up the first alone.
    halves = [
        ParallelConfig(dispatcher=name, row_cap=row_cap, overlap="halves", overlap_rows=rows)
        for name in names
        for rows in (2, 20)
    ]
    by_rank = run_ranks(take_steps_in_halves, num_ranks, tmp_path, [*whole, *halves], timeout_s=120.0)
    calls = []
    for results in zip(*by_rank, strict=True):
        for number in range(len(STEPS)):
            found = {name: rows for of_rank, _, _ in results for name, rows in of_rank[number].items()}
            assert found.keys() == expected[number].keys()
            for name, rows in found.items():
                assert_same_bits(rows, expected[number][name])
        assert torch.equal(torch.stack([load for _, load, _ in results]).sum(dim=0), expected_load)
        calls.append(results[0][2])
        assert all(of_rank == results[0][2] for _, _, of_rank in results)
    for at, name in enumerate(names if num_ranks > 1 else ()):
        two, twenty = calls[len(whole) + 2 * at], calls[len(whole) + 2 * at + 1]
        if row_cap is None:
            assert [len(each) for each in two] == [2 * len(each) for each in calls[at]], name
        assert [len(each) for each in twenty[1:]] == [len(each) for each in calls[at][1:]], name
        assert len(twenty[0]) == len(two[0]), name
