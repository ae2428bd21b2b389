"""`AllToAllDispatcher` in real gloo processes: bits, arrivals, rounds and bytes, against the reference of all ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from expert_parallel.all_to_all import AllToAllDispatcher
from expert_parallel.group import ExpertGroup, split
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import Combine
from tests.compare import assert_same_bits
from tests.expert_ranks import (
    CASES,
    COMBINES,
    DTYPES,
    EXPERT_WIDTH,
    WIDTH,
    Case,
    Key,
    Outcome,
    case_named,
    expected_bits,
    expected_of_reference,
    run_case,
    run_cases,
    run_norms,
)
from tests.ranks import RanksFailed, run_ranks, world


def make_dispatcher(
    group: ExpertGroup, replicas: ReplicaTable, slots_per_rank: tuple[int, ...], case: Case, combine: Combine
) -> AllToAllDispatcher:
    cap = case.row_cap(group.size, case.top_k) if case.row_cap else None
    return AllToAllDispatcher(
        group, replicas, slots_per_rank, top_k=case.top_k, combine=combine, row_cap=cap, device="cpu"
    )


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8], ids=lambda n: f"{n}-ranks")
def outcomes(request: pytest.FixtureRequest) -> list[dict[Key, Outcome]]:
    return run_ranks(run_cases, request.param, make_dispatcher, False)


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_exact_has_the_bits_of_one_rank(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    for dtype in DTYPES:
        for rank, of_rank in enumerate(outcomes):
            expected = expected_bits(case, rank, len(outcomes), dtype, padded=False)
            assert_same_bits(of_rank[Key(case.name, "exact", dtype)].out_TD, expected)


@each_case
def test_both_ways_equal_the_reference_of_all_ranks(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    """Rows arrive in the reference's order and come home with its bits, summed rank by rank too."""
    for combine in COMBINES:
        for dtype in DTYPES:
            expected = expected_of_reference(case, len(outcomes), combine, dtype, padded=False)
            for rank, of_rank in enumerate(outcomes):
                got = of_rank[Key(case.name, combine, dtype)]
                # In a later round a token's index, and with it its replica and so its rank, is another one.
                one_sum = combine == "exact" or case.row_cap is None or "replicas" not in case.name
                if one_sum:
                    assert_same_bits(got.out_TD, expected.outs[rank])
                else:
                    torch.testing.assert_close(got.out_TD, expected.outs[rank], rtol=0.05, atol=0.5)
                if case.row_cap is None:
                    assert_same_bits(got.rows_RD, expected.inputs[rank].rows_XD)
                    assert_same_bits(got.offsets_S1, expected.inputs[rank].offsets_S1)


@each_case
def test_rounds_stay_below_the_cap_and_are_the_same_on_all_ranks(
    outcomes: list[dict[Key, Outcome]], case: Case
) -> None:
    num_ranks = len(outcomes)
    rounds = {of_rank[Key(case.name, "exact", torch.float32)].num_rounds for of_rank in outcomes}
    assert len(rounds) == 1
    if case.row_cap is None:
        assert rounds == {1}
        return
    cap = case.row_cap(num_ranks, case.top_k)
    most = [of_rank[Key(case.name, "exact", torch.float32)].most_rows for of_rank in outcomes]
    assert max(most) <= cap
    most_tokens = max(case.num_tokens(rank, num_ranks) for rank in range(num_ranks))
    assert min(max(most_tokens, 1), 2) <= rounds.pop() <= max(most_tokens, 1)  # one token of each rank always fits


@each_case
def test_bytes_a_row_goes_once_to_a_rank(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    """However many of a token's experts live there. What comes home counts once for each pair, or for each rank."""
    if case.row_cap is not None:
        return  # replicas follow a token's index within its round
    num_ranks = len(outcomes)
    for combine in COMBINES:
        handles = [
            inputs.handle
            for inputs in expected_of_reference(case, num_ranks, combine, torch.float32, padded=False).inputs
        ]
        for rank, of_rank in enumerate(outcomes):
            traffic = of_rank[Key(case.name, combine, torch.float32)].traffic
            away = [(to, row.token) for to, rows in enumerate(handles) for row in rows if row.source == rank != to]
            assert traffic.records_sent == len(set(away))
            record = -(-(4 * WIDTH + 4 * case.top_k * (2 if combine == "fast" else 1)) // 64) * 64
            assert traffic.dispatch_bytes == len(set(away)) * record
            computed = [(row.source, row.token) for row in handles[rank] if row.source != rank]
            sent_home = len(computed) if combine == "exact" else len(set(computed))
            assert traffic.combine_bytes == 4 * WIDTH * sent_home
            assert traffic.count_bytes == 4 * (num_ranks - 1) * (2 * num_ranks + 3)


def test_the_norm_that_follows_has_the_bits_of_one_after_the_other() -> None:
    run_ranks(run_norms, 3, make_dispatcher, False)


def two_groups(rank: int, num_ranks: int) -> tuple[int, Tensor]:
    """Two expert groups at once, with other weights and other tokens, and after them one group of all ranks."""
    everyone = world(rank, num_ranks)
    group = split(everyone, 2, timedelta(seconds=30))
    seed = 1 + rank // 2
    case = case_named("uneven tokens")
    outcome = run_case(group, case, "exact", torch.bfloat16, make_dispatcher, padded=False, seed=seed)
    joint = run_case(everyone, case, "exact", torch.bfloat16, make_dispatcher, padded=False)
    return group.rank, torch.cat([outcome.out_TD, joint.out_TD])


def test_C28_two_groups_at_once() -> None:
    results = run_ranks(two_groups, 4)
    assert [group_rank for group_rank, _ in results] == [0, 1, 0, 1]
    case = case_named("uneven tokens")
    for rank, (group_rank, out_TD) in enumerate(results):
        alone = expected_bits(case, group_rank, 2, torch.bfloat16, padded=False, seed=1 + rank // 2)
        joint = expected_bits(case, rank, 4, torch.bfloat16, padded=False)
        assert_same_bits(out_TD, torch.cat([alone, joint]))


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
        run_case(group, case_named("uneven tokens"), "exact", torch.float32, make_dispatcher, padded=False)
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
    run_case(group, case_named("uneven tokens"), "exact", torch.float32, make_dispatcher, padded=False)


def test_a_rank_that_fails_is_named_and_the_others_end() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 of 3: .*ValueError: the cause itself"):
        run_ranks(leave_out_a_rank, 3)


def alone(num_ranks: int, row_cap: int | None = None, top_k: int = 2) -> AllToAllDispatcher:
    """A dispatcher that is only asked for sizes."""
    placement = Placement.contiguous(8, num_ranks)
    group = ExpertGroup(0, num_ranks, None)  # pyright: ignore
    slots = tuple(len(held) for held in placement.ranks)
    return AllToAllDispatcher(
        group, ReplicaTable(placement, 1, "cpu"), slots, top_k=top_k, row_cap=row_cap, device="cpu"
    )


def test_a_cap_below_one_token_of_each_rank_is_refused() -> None:
    alone(4, row_cap=8)
    with pytest.raises(ValueError, match=r"parallel.row_cap=7 is less than 4 ranks x 2 experts per token = 8 rows"):
        alone(4, row_cap=7)


def test_buffer_bytes_are_bounded_by_the_cap() -> None:
    """20 columns of bf16: records of 64 bytes sent and received, rows of 40 returned and at home."""
    assert alone(4, row_cap=100).buffer_bytes(1000, WIDTH, torch.bfloat16) == 100 * (2 * 64 + 2 * 40)
    assert alone(4).buffer_bytes(10, WIDTH, torch.bfloat16) == 4 * 10 * 2 * (2 * 64 + 2 * 40)
    assert EXPERT_WIDTH < WIDTH
