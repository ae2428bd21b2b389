"""Rates that ranks measure and agree on, and what is decided from them."""

from __future__ import annotations

import torch

from expert_parallel.dispatcher import ExpertInput
from expert_parallel.placement import Placement
from expert_parallel.proposal import MoveRates
from expert_parallel.rebalance import ExpertMover
from moe.engine import balance_rates
from moe.engine.balance_rates import MeasuredRates
from tests.ranks import run_ranks, world


class Clock:
    """Of experts that take 2 ms and 10 us a row on rank 0, half of that on rank 1."""

    def __init__(self, rank: int) -> None:
        self.now = 0.0
        self.share = 1 if rank == 0 else 0.5
        self.rows: list[int] = []

    def perf_counter(self) -> float:
        return self.now

    def experts(self, inputs: ExpertInput) -> torch.Tensor:
        offsets = inputs.offsets_S1.tolist()
        assert offsets[0] == 0 and offsets[-1] == inputs.num_rows == len(inputs.rows_XD)
        assert max(offsets[i + 1] - offsets[i] for i in range(len(offsets) - 1)) <= inputs.num_rows // 2 + 1
        self.rows.append(inputs.num_rows)
        self.now += self.share * (2e-3 + 1e-5 * inputs.num_rows)
        return inputs.rows_XD


def measure(rank: int, num_ranks: int) -> tuple[list[MoveRates], list[int]]:
    """Of 8 and 9 rows, then of 3; the last rank has no experts."""
    group, clock = world(rank, num_ranks), Clock(rank)
    balance_rates.time = clock  # pyright: ignore[reportAttributeAccessIssue]
    mover = ExpertMover(group, bundle_bytes=1000, most=1, device="cpu")
    num_slots = Placement.of_ranks(4, [[0, 1], [2, 3], []]).num_slots(rank)
    device = torch.device("cpu")
    rates = MeasuredRates(group, mover, clock.experts, num_slots, width=4, dtype=torch.float32, device=device)
    return [rates.rates(8.0, 64), rates.rates(9.0, 32), rates.rates(3.0, 32)], clock.rows


def test_ranks_agree_on_the_mean_of_those_that_have_experts() -> None:
    results = run_ranks(measure, 3, timeout_s=180)
    (first, again, few), rows = results[0]
    assert all(rates == results[0][0] for rates, _ in results)
    assert abs(first.seconds_per_row - 0.75e-5) < 1e-11 and abs(few.seconds_per_row - 0.75e-5) < 1e-11
    assert (first.expert_bytes, first.steps, again.steps) == (1000, 64, 32)
    assert 0 < first.bytes_per_s < 1e13 and again.bytes_per_s == first.bytes_per_s  # not measured again
    assert set(rows) == {8, 16, 2, 4} and results[2][1] == []
