"""`AllToAllDispatcher` in real gloo processes: bits, arrivals, rounds and bytes, against the reference of all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from expert_parallel.all_to_all import AllToAllDispatcher
from expert_parallel.group import ExpertGroup
from expert_parallel.placement import Placement
from expert_parallel.reference import ReferenceRanks
from expert_parallel.replicas import ReplicaTable
from tests.expert_checks import check_against_reference, check_one_ranks_bits, check_two_groups, record_bytes
from tests.expert_ranks import (
    CASES,
    DTYPES_OF_RANKS,
    FP8_WIDTH,
    WIDTH,
    Case,
    Key,
    Outcome,
    make_dispatcher,
    model_dtype,
    reference_batches,
    run_case,
    run_cases,
    run_norms,
    width_of,
)
from tests.ranks import RanksFailed, run_ranks, world

make = partial(make_dispatcher, AllToAllDispatcher)
UNEVEN = Key("uneven tokens", "exact", torch.float32)


@pytest.fixture(scope="module", params=DTYPES_OF_RANKS, ids=lambda n: f"{n}-ranks")
def outcomes(request: pytest.FixtureRequest) -> list[dict[Key, Outcome]]:
    return run_ranks(run_cases, request.param, make, False, DTYPES_OF_RANKS[request.param])


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_exact_has_the_bits_of_one_rank(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    check_one_ranks_bits(outcomes, case, padded=False)


@each_case
def test_both_ways_equal_the_reference_of_all_ranks(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    """Rows arrive in the reference's order and come home with its bits, summed rank by rank too."""
    check_against_reference(outcomes, case, padded=False)


@each_case
def test_rounds_stay_below_the_cap_and_are_the_same_on_all_ranks(
    outcomes: list[dict[Key, Outcome]], case: Case
) -> None:
    num_ranks = len(outcomes)
    keys = [key for key in outcomes[0] if key.case == case.name]
    rounds = {of_rank[key].num_rounds for of_rank in outcomes for key in keys}
    assert len(rounds) == 1
    if case.row_cap is None:
        assert rounds == {1}
        return
    assert max(of_rank[key].most_rows for of_rank in outcomes for key in keys) <= case.row_cap(num_ranks, case.top_k)
    most_tokens = max(case.num_tokens(rank, num_ranks) for rank in range(num_ranks))
    assert min(max(most_tokens, 1), 2) <= rounds.pop() <= max(most_tokens, 1)  # one token of each rank always fits


@each_case
def test_bytes_a_row_goes_once_to_a_rank(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    """However many of a token's experts live there. What comes home counts once for each pair, or for each rank."""
    if case.row_cap is not None:
        return  # replicas follow a token's index within its round
    num_ranks = len(outcomes)
    reference = ReferenceRanks(case.placement(case.num_experts, num_ranks), "exact")
    inputs = reference.dispatch(reference_batches(case, num_ranks, torch.float32, padded=False))
    handles = [of_rank.handle for of_rank in inputs]
    for key in (key for key in outcomes[0] if key.case == case.name):
        row_home = width_of(key.dtype) * model_dtype(key.dtype).itemsize
        for rank, of_rank in enumerate(outcomes):
            traffic = of_rank[key].traffic
            away = [(to, row.token) for to, rows in enumerate(handles) for row in rows if row.source == rank != to]
            assert traffic.records_sent == len(set(away))
            assert traffic.dispatch_bytes == len(set(away)) * record_bytes(case, key)
            computed = [(row.source, row.token) for row in handles[rank] if row.source != rank]
            sent_home = len(computed) if key.combine == "exact" else len(set(computed))
            assert traffic.combine_bytes == row_home * sent_home
            assert traffic.count_bytes == 4 * (num_ranks - 1) * (2 * num_ranks + 3)


def test_the_norm_that_follows_has_the_bits_of_one_after_the_other() -> None:
    run_ranks(run_norms, 3, make, False)


def test_C28_two_groups_at_once() -> None:
    check_two_groups(make, padded=False)


class LyingGroup(ExpertGroup):
    """Rank 1 announces one record fewer for rank 0 than it holds."""

    def all_gather(self, out_XD: Tensor, x_XD: Tensor) -> None:
        if self.rank == 1:
            x_XD = x_XD.clone()
            x_XD[self.size] -= 1
        super().all_gather(out_XD, x_XD)

    def all_to_all(self, *args: object) -> None:
        raise AssertionError("rows must not travel")


def announce_one_too_few(rank: int, num_ranks: int) -> str:
    group = LyingGroup(rank, num_ranks, world(rank, num_ranks).process_group)
    try:
        run_case(group, UNEVEN, make, padded=False)
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def test_C22_a_mismatch_is_seen_by_all_ranks_before_rows_travel() -> None:
    texts = run_ranks(announce_one_too_few, 2)
    assert texts[0] == texts[1]
    assert "rank 1 announces" in texts[0] and "nothing was sent" in texts[0]
    announced, held = (int(word) for word in texts[0].replace(";", " ").split() if word.isdigit() and int(word) > 1)
    assert held == announced + 1


def leave_out_a_rank(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise ValueError("the cause itself")
    group = world(rank, num_ranks)
    run_case(group, UNEVEN, make, padded=False)


def test_a_rank_that_fails_is_named_and_the_others_end() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 of 3: .*ValueError: the cause itself"):
        run_ranks(leave_out_a_rank, 3)


def alone(num_ranks: int, row_cap: int | None = None, top_k: int = 2, fp8_rows: bool = False) -> AllToAllDispatcher:
    """A dispatcher that is only asked for sizes."""
    placement = Placement.contiguous(8, num_ranks)
    group = ExpertGroup(0, num_ranks, None)  # pyright: ignore
    slots = tuple(len(held) for held in placement.ranks)
    return AllToAllDispatcher(
        group, ReplicaTable(placement, 1, "cpu"), slots, top_k=top_k, row_cap=row_cap, fp8_rows=fp8_rows, device="cpu"
    )


def test_a_cap_below_one_token_of_each_rank_is_refused() -> None:
    alone(4, row_cap=8)
    with pytest.raises(ValueError, match=r"parallel.row_cap=7 is less than 4 ranks x 2 experts per token = 8 rows"):
        alone(4, row_cap=7)


def test_buffer_bytes_are_bounded_by_the_cap() -> None:
    """20 columns of bf16: records of 64 bytes sent and received, rows of 40 returned and at home."""
    assert alone(4, row_cap=100).buffer_bytes(1000, WIDTH, torch.bfloat16) == 100 * (2 * 64 + 2 * 40)
    assert alone(4).buffer_bytes(10, WIDTH, torch.bfloat16) == 4 * 10 * 2 * (2 * 64 + 2 * 40)


def test_buffer_bytes_of_rows_in_fp8() -> None:
    """148 columns: records of 148 + 2 scales + 2 slots, so 192 bytes; rows of 296 come home; beside them 156 bytes for
    each of this rank's rows before they leave and each row of its experts."""
    dispatcher = alone(4, row_cap=100, fp8_rows=True)
    assert dispatcher.buffer_bytes(1000, FP8_WIDTH, torch.bfloat16) == 100 * (2 * 192 + 2 * 296) + (100 + 100) * 156
    assert dispatcher.buffer_bytes(5, FP8_WIDTH, torch.bfloat16) == 40 * (2 * 192 + 2 * 296) + (5 + 40) * 156
