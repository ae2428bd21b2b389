"""`OneSidedDispatcher` in real processes that map each other's buffers: bits, rounds, reuse of buffers, faults."""

from __future__ import annotations

from copy import copy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from expert_parallel import one_sided
from expert_parallel.group import ExpertGroup
from expert_parallel.one_sided import OneSidedDispatcher
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import Combine
from kernels.quantize import FP8
from tests.compare import assert_same_bits, max_rel
from tests.expert_checks import check_against_reference, check_one_ranks_bits, check_two_groups
from tests.expert_ranks import (
    CASES,
    COMBINES,
    DTYPES,
    WIDTH,
    Case,
    Key,
    Outcome,
    case_named,
    expected_bits,
    make_batch,
    make_experts,
    run_cases,
    run_norms,
)
from tests.peer_files import PeerFiles
from tests.ranks import run_ranks, world

UNEVEN = Key("uneven tokens", "exact", torch.float32)
TIMEOUT_S = 60.0  # of a wait that is expected to end


def make(
    folder: Path, group: ExpertGroup, replicas: ReplicaTable, slots_per_rank: tuple[int, ...], case: Case, key: Key
) -> OneSidedDispatcher:
    """`partial` of it with a folder is a `MakeDispatcher`; each key is made once in a folder."""
    own = folder / f"{case.name} {key.combine} {key.dtype}"
    own.mkdir(exist_ok=True)
    return OneSidedDispatcher(
        group,
        replicas,
        slots_per_rank,
        top_k=case.top_k,
        combine=key.combine,
        row_cap=case.row_cap(group.size, case.top_k) if case.row_cap else None,
        fp8_rows=key.dtype == FP8,
        timeout_s=TIMEOUT_S,
        make_peers=PeerFiles(str(own)),
        device="cpu",
    )


@pytest.fixture(scope="module", params=[1, 2, 3, 8], ids=lambda n: f"{n}-ranks")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Key, Outcome]]:
    num_ranks = request.param
    # Waits of many processes are slow on few cores, and dtypes are moved as bytes.
    dtypes = {1: (torch.bfloat16,), 2: DTYPES, 3: (torch.bfloat16,), 8: (torch.float32,)}[num_ranks]
    folder = tmp_path_factory.mktemp("peers")
    body = partial(run_cases, make=partial(make, folder), padded=True, dtypes=dtypes)
    return run_ranks(body, num_ranks, timeout_s=120.0)


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_exact_has_the_bits_of_one_rank(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    """Rows that fill up a batch (NaN here) come out as zeros; what nobody wrote is NaN, and is not read."""
    check_one_ranks_bits(outcomes, case, padded=True)


@each_case
def test_both_ways_equal_the_reference_of_all_ranks(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    check_against_reference(outcomes, case, padded=True, same_order=True)


@each_case
def test_C22_rounds_follow_from_the_number_of_rows_alone(outcomes: list[dict[Key, Outcome]], case: Case) -> None:
    """Never from the routing: that is what lets a graph be replayed, and ranks agree without a word."""
    num_ranks = len(outcomes)
    num_tokens = max(case.num_tokens(rank, num_ranks) for rank in range(num_ranks))
    at_once = case.row_cap(num_ranks, case.top_k) // (num_ranks * case.top_k) if case.row_cap else max(num_tokens, 1)
    num_rounds = max(1, -(-num_tokens // at_once))
    for of_rank in outcomes:
        for got in (got for key, got in of_rank.items() if key.case == case.name):
            assert got.num_rounds == got.traffic.rounds == num_rounds
            if case.row_cap is not None:
                assert got.most_rows <= case.row_cap(num_ranks, case.top_k)


def test_the_norm_that_follows_has_the_bits_of_one_after_the_other(tmp_path: Path) -> None:
    run_ranks(run_norms, 3, partial(make, tmp_path), True)


def test_C28_two_groups_at_once(tmp_path: Path) -> None:
    check_two_groups(partial(make, tmp_path), padded=True)


def dispatcher_of(
    folder: Path, group: ExpertGroup, case: Case, key: Key, *, timeout_s: float = TIMEOUT_S
) -> OneSidedDispatcher:
    placement = case.placement(case.num_experts, group.size)
    dispatcher = make(
        folder,
        group,
        ReplicaTable(placement, group.size + 1, "cpu"),
        tuple(len(held) for held in placement.ranks),
        case,
        key,
    )
    dispatcher.timeout_s = timeout_s
    return dispatcher


NUM_ROUNDS = 12
PADDING = Key("padding and strangers", "exact", torch.float32)


def reuse_buffers(rank: int, num_ranks: int, folder: Path, key: Key) -> list[Tensor]:
    """The same buffers for rounds of other routing and other sizes, each part spoilt as soon as this rank has read it:
    where a peer had written the next round already, its rows would be lost."""
    group, case = world(rank, num_ranks), case_named(key.case)
    dispatcher = dispatcher_of(folder, group, case, key)
    held = case.placement(case.num_experts, num_ranks).experts_of(rank)
    outs = []
    for seed in range(NUM_ROUNDS):
        x_TD, ids_TK, weights_TK = make_batch(case, rank, num_ranks, key.dtype, padded=True, seed=seed)
        used = x_TD.shape[0] - seed % 3  # the first round is a largest one
        inputs = dispatcher.dispatch(x_TD[:used], ids_TK[:used], weights_TK[:used])
        y_RD = make_experts(held, key.dtype, seed=seed)(inputs)
        (buffers,) = dispatcher._sets
        layout, own = buffers.layout, buffers.peers.own
        layout.rows_XD(own, layout.capacity).view(torch.uint8).fill_(255)
        layout.slots_XK(own, layout.capacity).fill_(12345)
        outs.append(dispatcher.combine(y_RD, inputs.handle))
        layout.home_RD(own, layout.capacity).fill_(torch.nan)
    return outs


@pytest.mark.parametrize("combine", COMBINES)
def test_buffers_are_used_again_without_a_barrier(tmp_path: Path, combine: Combine) -> None:
    key = PADDING._replace(combine=combine)
    for rank, outs in enumerate(run_ranks(reuse_buffers, 3, tmp_path, key)):
        for seed, out_TD in enumerate(outs):
            expected_TD = expected_bits(case_named(key.case), rank, 3, key.dtype, padded=True, seed=seed)
            expected_TD = expected_TD[: out_TD.shape[0]]
            if combine == "exact":
                assert_same_bits(out_TD, expected_TD)
            else:
                assert max_rel(out_TD, expected_TD) <= 1e-6


class Arrived(NamedTuple):
    """Of the first dispatch of a rank."""

    begins_at: int  # of the rows, counted from the buffer's begin
    expected_at: int
    rows_XD: Tensor
    slots_XK: Tensor


def look_at_arrivals(rank: int, num_ranks: int, folder: Path) -> Arrived:
    case = case_named(UNEVEN.case)
    dispatcher = dispatcher_of(folder, world(rank, num_ranks), case, UNEVEN)
    inputs = dispatcher.dispatch(*make_batch(case, rank, num_ranks, torch.float32, padded=True))
    (buffers,) = dispatcher._sets
    own, layout = buffers.peers.own, buffers.layout
    arrived = Arrived(
        inputs.rows_XD.data_ptr() - own.data_ptr(),
        layout.rows_at,
        inputs.rows_XD.clone(),
        layout.slots_XK(own, layout.capacity).clone(),
    )
    dispatcher.combine(make_experts(range(4 * rank, 4 * rank + 4), torch.float32)(inputs), inputs.handle)
    return arrived


def test_rows_lie_in_the_own_buffer_where_the_peer_wrote_them(tmp_path: Path) -> None:
    """Record source * B + token; rows that were not sent were not written."""
    case = case_named(UNEVEN.case)
    for rank, arrived in enumerate(run_ranks(look_at_arrivals, 2, tmp_path)):
        assert arrived.begins_at == arrived.expected_at
        for source in range(2):
            x_TD, ids_TK, _ = make_batch(case, source, 2, torch.float32, padded=True)
            records = slice(source * x_TD.shape[0], (source + 1) * x_TD.shape[0])
            here_TK = ids_TK.div(4, rounding_mode="floor") == rank
            assert torch.equal(arrived.slots_XK[records], torch.where(here_TK, ids_TK % 4, -1))
            sent_T = here_TK.any(dim=1)
            assert 0 < int(sent_T.sum()) < len(sent_T)
            assert_same_bits(arrived.rows_XD[records][sent_T], x_TD[sent_T])
            assert arrived.rows_XD[records][~sent_T].isnan().all()


def two_at_a_time(rank: int, num_ranks: int, folder: Path) -> list[Tensor]:
    """As half-steps go: the second is dispatched before the first is combined. Layers take turns by copies."""
    case = case_named(UNEVEN.case)
    dispatcher = dispatcher_of(folder, world(rank, num_ranks), case, UNEVEN)
    other_layer = copy(dispatcher)
    held = case.placement(case.num_experts, num_ranks).experts_of(rank)
    outs = []
    for seed in range(0, 4, 2):
        batches = [make_batch(case, rank, num_ranks, torch.float32, padded=True, seed=seed + half) for half in range(2)]
        first = dispatcher.dispatch(*batches[0])
        second = other_layer.dispatch(*batches[1])
        experts = [make_experts(held, torch.float32, seed=seed + half) for half in range(2)]
        outs.append(dispatcher.combine(experts[0](first), first.handle))
        outs.append(other_layer.combine(experts[1](second), second.handle))
    assert dispatcher.held_bytes == other_layer.held_bytes == 2 * dispatcher._sets[0].layout.num_bytes
    return outs


def test_two_rounds_may_be_open(tmp_path: Path) -> None:
    for rank, outs in enumerate(run_ranks(two_at_a_time, 2, tmp_path)):
        for seed, out_TD in enumerate(outs):
            expected_TD = expected_bits(case_named(UNEVEN.case), rank, 2, torch.float32, padded=True, seed=seed)
            assert_same_bits(out_TD, expected_TD)


def rounds_on_two_streams(rank: int, num_ranks: int, folder: Path) -> list[bool]:
    """Whether each half goes on in the set it began with, though the other's is free: what that holds may still be read
    on the other stream."""
    case = case_named(UNEVEN.case)
    streams = ["main"]
    one_sided._current_stream = lambda device: streams[-1]
    dispatcher = dispatcher_of(folder, world(rank, num_ranks), case, UNEVEN)
    batch = make_batch(case, rank, num_ranks, torch.float32, padded=True)
    experts = make_experts(case.placement(case.num_experts, num_ranks).experts_of(rank), torch.float32)
    same = []
    for _ in range(2):
        begun = {}
        for half in ("main", "side"):
            streams.append(half)
            begun[half] = dispatcher.dispatch(*batch)
        for half in ("main", "side"):
            streams.append(half)
            dispatcher.combine(experts(begun[half]), begun[half].handle)
        for half in ("side", "main"):
            streams.append(half)
            more = dispatcher.dispatch(*batch)
            dispatcher.combine(experts(more), more.handle)
            same.append(more.handle.buffers is begun[half].handle.buffers)
    streams.append("a graph's own")
    whole = dispatcher.dispatch(*batch)
    dispatcher.combine(experts(whole), whole.handle)
    return [*same, whole.handle.buffers is dispatcher._sets[0], len(dispatcher._sets) == 2]


def test_each_half_stays_with_its_buffers_in_all_rounds(tmp_path: Path) -> None:
    assert run_ranks(rounds_on_two_streams, 1, tmp_path) == [[True] * 6]


def move_experts(rank: int, num_ranks: int, folder: Path) -> list[Tensor]:
    """One table, rewritten in place between two calls: as a captured graph sees it."""
    case = case_named(UNEVEN.case)
    before = case.placement(8, num_ranks)
    after = Placement.of_ranks(8, [tuple(reversed(held)) for held in reversed(before.ranks)])
    dispatcher = dispatcher_of(folder, world(rank, num_ranks), case, UNEVEN)
    outs = []
    for placement in (before, after):
        dispatcher.replicas.set(placement)
        inputs = dispatcher.dispatch(*make_batch(case, rank, num_ranks, torch.float32, padded=True))
        y_RD = make_experts(placement.experts_of(rank), torch.float32)(inputs)
        outs.append(dispatcher.combine(y_RD, inputs.handle))
    return outs


def test_C25_moved_experts_give_the_same_bits(tmp_path: Path) -> None:
    for rank, outs in enumerate(run_ranks(move_experts, 2, tmp_path)):
        for out_TD in outs:
            assert_same_bits(out_TD, expected_bits(case_named(UNEVEN.case), rank, 2, torch.float32, padded=True))


def miss_a_rank(rank: int, num_ranks: int, folder: Path) -> str:
    """Rank 1 joins the first round and then ends."""
    case, group = case_named(UNEVEN.case), world(rank, num_ranks)
    dispatcher = dispatcher_of(folder, group, case, UNEVEN)
    batch = make_batch(case, rank, num_ranks, torch.float32, padded=True)
    experts = make_experts(case.placement(8, num_ranks).experts_of(rank), torch.float32)
    inputs = dispatcher.dispatch(*batch)
    dispatcher.combine(experts(inputs), inputs.handle)
    dispatcher.check()
    if rank == 1:
        return "ended"
    dispatcher.timeout_s = 0.2
    inputs = dispatcher.dispatch(*batch)
    dispatcher.timeout_s = 1e6  # once a wait was given up, the others end at once
    dispatcher.combine(experts(inputs), inputs.handle)
    dispatcher.timeout_s = 0.2
    with pytest.raises(RuntimeError) as caught:
        dispatcher.dispatch(*batch)
    return str(caught.value)


def test_C44_a_rank_that_does_not_come_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    assert run_ranks(miss_a_rank, 2, tmp_path) == [
        "one_sided: rank 0 waited 0.2 s (parallel.timeout_s) for the rows of rank 1 in round 2; it has ended, or hangs.",  # noqa: E501
        "ended",
    ]


def bring_other_numbers_of_rows(rank: int, num_ranks: int, folder: Path) -> str:
    case, group = case_named(UNEVEN.case), world(rank, num_ranks)
    dispatcher = dispatcher_of(folder, group, case, UNEVEN)
    experts = make_experts(case.placement(8, num_ranks).experts_of(rank), torch.float32)
    for missing in (0, 2 * rank):
        x_TD, ids_TK, weights_TK = make_batch(case, 1, num_ranks, torch.float32, padded=True)
        used = x_TD.shape[0] - missing
        inputs = dispatcher.dispatch(x_TD[:used], ids_TK[:used], weights_TK[:used])
        dispatcher.combine(experts(inputs), inputs.handle)
    with pytest.raises(RuntimeError) as caught:
        dispatcher.check()
    return str(caught.value)


def test_C22_other_numbers_of_rows_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    texts = run_ranks(bring_other_numbers_of_rows, 2, tmp_path)
    for rank, brought in enumerate(("{1: 17}", "{0: 19}")):
        assert texts[rank].startswith(f"one_sided: ranks {brought} (rank: rows) bring other numbers of rows than rank")


def begin_with_other_numbers(rank: int, num_ranks: int, folder: Path) -> str:
    case = case_named(UNEVEN.case)
    dispatcher = dispatcher_of(folder, world(rank, num_ranks), case, UNEVEN)
    with pytest.raises(RuntimeError) as caught:
        dispatcher.dispatch(*make_batch(case, rank, num_ranks, torch.float32, padded=False))
    return str(caught.value)


def test_C22_buffers_of_other_sizes_are_never_made(tmp_path: Path) -> None:
    for text in run_ranks(begin_with_other_numbers, 2, tmp_path):
        assert "ranks would make different buffers" in text and "capacity=3" in text and "capacity=19" in text


def test_buffer_bytes() -> None:
    """10 tokens of 20 bf16 columns on 4 ranks, K = 3: flags of 32 and of 320 bytes, slots of 480, rows of 1600 and
    results of 1200 (exact), or weights of 480 and sums of 1600 (fast), each up to a multiple of 256."""
    placement = Placement.contiguous(8, 4)
    group = ExpertGroup(0, 4, None)  # pyright: ignore
    table = ReplicaTable(placement, 1, "cpu")
    for combine, num_bytes in (("exact", 768 + 512 + 1792 + 1280), ("fast", 768 + 512 + 512 + 1792 + 1792)):
        dispatcher = OneSidedDispatcher(group, table, (2, 2, 2, 2), top_k=3, combine=combine, device="cpu")
        assert dispatcher.buffer_bytes(10, WIDTH, torch.bfloat16) == num_bytes
        assert dispatcher.held_bytes == 0
    capped = OneSidedDispatcher(group, table, (2, 2, 2, 2), top_k=3, row_cap=24, device="cpu")
    assert capped.buffer_bytes(10, WIDTH, torch.bfloat16) == 256 + 256 + 256 + 512 + 256
    with pytest.raises(ValueError, match=r"parallel.row_cap=11 is less than 4 ranks x 3 experts per token"):
        OneSidedDispatcher(group, table, (2, 2, 2, 2), top_k=3, row_cap=11, device="cpu")
