"""`AllGatherDispatcher` in real gloo processes: bits, shapes, rounds and bytes, against the reference of all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from expert_parallel.all_gather import AllGatherDispatcher
from expert_parallel.group import ExpertGroup
from expert_parallel.group_dispatcher import GroupDispatcher
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import Combine
from tests.compare import assert_same_bits
from tests.expert_checks import check_against_reference, check_one_ranks_bits, check_two_groups, record_bytes
from tests.expert_ranks import (
    CASES,
    DTYPES_OF_RANKS,
    FP8_WIDTH,
    WIDTH,
    Case,
    Key,
    Outcome,
    case_named,
    make_batch,
    make_dispatcher,
    model_dtype,
    run_case,
    run_cases,
    run_norms,
    width_of,
)
from tests.ranks import run_ranks, world

make = partial(make_dispatcher, AllGatherDispatcher)
UNEVEN = Key("uneven tokens", "exact", torch.float32)


@pytest.fixture(scope="module", params=DTYPES_OF_RANKS, ids=lambda n: f"{n}-ranks")
def outcomes(request: pytest.FixtureRequest) -> list[dict[Key, Outcome]]:
    return run_ranks(run_cases, request.param, make, True, DTYPES_OF_RANKS[request.param])


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def padded_tokens(case: Case, num_ranks: int) -> int:
    return max(case.num_tokens(rank, num_ranks) for rank in range(num_ranks))


@each_case
def test_exact_has_the_bits_of_one_rank(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    """Rows that fill up a batch (NaN here) come out as zeros."""
    check_one_ranks_bits(outcomes, case, padded=True)


@each_case
def test_both_ways_equal_the_reference_of_all_ranks(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    """Rows arrive in the reference's order. The order in which `fast` adds ranks is the library's."""
    check_against_reference(outcomes, case, padded=True, same_order=False)


@each_case
def test_shapes_rounds_and_bytes_follow_from_the_number_of_rows_alone(
    outcomes: list[dict[Key, Outcome]], case: Case
) -> None:
    """Never from the routing: that is what lets a graph be replayed."""
    num_ranks, num_tokens = len(outcomes), padded_tokens(case, len(outcomes))
    at_once = case.row_cap(num_ranks, case.top_k) // (num_ranks * case.top_k) if case.row_cap else max(num_tokens, 1)
    num_rounds = max(1, -(-num_tokens // at_once))
    slots = [len(held) for held in case.placement(case.num_experts, num_ranks).ranks]
    for key in (key for key in outcomes[0] if key.case == case.name):
        row_home = width_of(key.dtype) * model_dtype(key.dtype).itemsize
        for rank, of_rank in enumerate(outcomes):
            got = of_rank[key]
            assert got.num_rounds == got.traffic.rounds == num_rounds
            if case.row_cap is not None:
                assert got.most_rows <= case.row_cap(num_ranks, case.top_k)
            assert got.traffic.records_sent == (num_ranks - 1) * num_tokens
            assert got.traffic.dispatch_bytes == (num_ranks - 1) * num_tokens * record_bytes(case, key)
            rows_home = 1 if key.combine == "fast" else min(case.top_k, slots[rank])
            assert got.traffic.combine_bytes == (num_ranks - 1) * num_tokens * rows_home * row_home


def test_the_norm_that_follows_has_the_bits_of_one_after_the_other() -> None:
    run_ranks(run_norms, 3, make, True)


def test_C28_two_groups_at_once() -> None:
    check_two_groups(make, padded=True)


def bring_other_numbers_of_rows(rank: int, num_ranks: int) -> str:
    group = world(rank, num_ranks)
    try:
        run_case(group, UNEVEN, make, padded=False)
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def test_C22_unequal_numbers_of_rows_are_seen_by_all_ranks_before_rows_travel() -> None:
    texts = run_ranks(bring_other_numbers_of_rows, 2)
    assert texts == ["all_gather: ranks bring [3, 19] rows; all must bring the same number, with padding."] * 2


def move_experts(rank: int, num_ranks: int) -> list[Tensor]:
    """One dispatcher, its table rewritten in place between two calls: as a captured graph sees it."""
    case = case_named("uneven tokens")
    before = Placement.contiguous(8, num_ranks)
    after = Placement.of_ranks(8, [tuple(reversed(held)) for held in reversed(before.ranks)])
    replicas = ReplicaTable(before, 1, "cpu")
    slots = tuple(len(held) for held in before.ranks)
    dispatcher = make(world(rank, num_ranks), replicas, slots, case, UNEVEN)
    outs = []
    for placement in (before, after):
        replicas.set(placement)
        outs.append(run_held(dispatcher, placement.experts_of(rank), case, rank, num_ranks))
    return outs


def run_held(
    dispatcher: GroupDispatcher, held: tuple[int | None, ...], case: Case, rank: int, num_ranks: int
) -> Tensor:
    """Expert e computes (e + 1) x."""
    inputs = dispatcher.dispatch(*make_batch(case, rank, num_ranks, torch.float32, padded=True))
    assert inputs.row_index_R is not None
    y_RD = torch.full((inputs.num_rows, WIDTH), torch.nan)
    offsets = inputs.offsets_S1.tolist()
    for expert, start, stop in zip(held, offsets, offsets[1:]):
        assert expert is not None
        y_RD[start:stop] = inputs.rows_XD[inputs.row_index_R[start:stop].long()] * (expert + 1.0)
    return dispatcher.combine(y_RD, inputs.handle)


def test_C25_moved_experts_give_the_same_bits() -> None:
    case = case_named("uneven tokens")
    for rank, (before, after) in enumerate(run_ranks(move_experts, 2)):
        assert_same_bits(before, after)
        x_TD, ids_TK, weights_TK = make_batch(case, rank, 2, torch.float32, padded=True)
        factor_T1 = (weights_TK * (ids_TK + 1)).sum(1, keepdim=True)
        real = case.num_tokens(rank, 2)
        torch.testing.assert_close(before[:real], (factor_T1 * x_TD)[:real])


def test_buffer_bytes() -> None:
    """10 tokens of 20 bf16 columns on 4 ranks with 2 slots, K = 3: records of 64 bytes, one own and four gathered;
    exact sends 4 x 2 rows a token and gets as many, fast sums 4 rows a token and gets one."""
    placement = Placement.contiguous(8, 4)
    group = ExpertGroup(0, 4, None)  # pyright: ignore
    table = ReplicaTable(placement, 1, "cpu")
    combines: tuple[Combine, ...] = ("exact", "fast")
    for combine, rows in zip(combines, (16, 5)):
        dispatcher = AllGatherDispatcher(group, table, (2, 2, 2, 2), top_k=3, combine=combine, device="cpu")
        assert dispatcher.buffer_bytes(10, WIDTH, torch.bfloat16) == 10 * (5 * 64 + rows * 40)
    # In fp8, 148 columns: records of 148 + 2 scales + 3 slots, so 192 bytes; beside them rows of 156, 1 own, 8 in slots
    fp8 = AllGatherDispatcher(group, table, (2, 2, 2, 2), top_k=3, fp8_rows=True, device="cpu")
    assert fp8.buffer_bytes(10, FP8_WIDTH, torch.bfloat16) == 10 * (5 * 192 + 16 * 296 + 9 * 156)
    capped = AllGatherDispatcher(group, table, (2, 2, 2, 2), top_k=3, row_cap=24, device="cpu")
    assert capped.buffer_bytes(10, WIDTH, torch.bfloat16) == 2 * (5 * 64 + 16 * 40)
    with pytest.raises(ValueError, match=r"parallel.row_cap=11 is less than 4 ranks x 3 experts per token"):
        AllGatherDispatcher(group, table, (2, 2, 2, 2), top_k=3, row_cap=11, device="cpu")
