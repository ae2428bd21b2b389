"""`DeepEPDispatcher` and its decode form: our arithmetic over a stand-in for the package, and what is refused.

The package itself is tested on several GPUs: test_collectives_gpu.py.
"""

from __future__ import annotations

import sys
from copy import copy
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from expert_parallel.choice import Dispatchers
from expert_parallel.deep_ep import DeepEPDecodeDispatcher, DeepEPDispatcher
from expert_parallel.deep_ep_buffer import SharedBuffer, deep_ep_problem, low_latency_problem
from expert_parallel.group import ExpertGroup
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import rounds
from kernels.quantize import FP8
from tests import fake_deep_ep
from tests.compare import max_rel
from tests.expert_checks import check_against_reference
from tests.expert_ranks import (
    CASES,
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
from tests.ranks import run_ranks, world

DTYPES = (torch.bfloat16, FP8)


class AnyRows(SharedBuffer):
    """The stand-in moves rows that the package's kernels would not."""

    def check_rows(self, width: int, dtype: torch.dtype, *, fp8_rows: bool) -> None:
        assert dtype == torch.bfloat16

    def check_low_latency(self, width: int, top_k: int) -> None:
        pass


def make_over_fake(
    decode: bool,
    group: ExpertGroup,
    replicas: ReplicaTable,
    slots_per_rank: tuple[int, ...],
    case: Case,
    key: Key,
) -> DeepEPDispatcher:
    normal = DeepEPDispatcher(
        group,
        replicas,
        slots_per_rank,
        shared=AnyRows(group, max(1, *slots_per_rank), fake_deep_ep),
        top_k=case.top_k,
        combine=key.combine,
        row_cap=case.row_cap(group.size, case.top_k) if case.row_cap else None,
        fp8_rows=key.dtype == FP8,
        device="cpu",
    )
    return normal.for_decode() if decode else normal


@pytest.fixture(
    scope="module",
    params=[(2, False), (4, False), (4, True)],
    ids=lambda p: f"{p[0]}-{'low' if p[1] else 'normal'}",
)
def outcomes(request: pytest.FixtureRequest) -> tuple[bool, list[dict[Key, Outcome]]]:
    num_ranks, decode = request.param
    return decode, run_ranks(run_cases, num_ranks, partial(make_over_fake, decode), True, DTYPES, ("fast",))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_over_a_stand_in_sums_and_rows_are_the_references(
    outcomes: tuple[bool, list[dict[Key, Outcome]]], case: Case
) -> None:
    """Low latency has no order of rows, and moves bf16: there the sums are compared."""
    decode, of_ranks = outcomes
    check_against_reference(of_ranks, case, padded=True, same_order=False, arrived=not decode)
    num_ranks = len(of_ranks)
    num_tokens = max(case.num_tokens(rank, num_ranks) for rank in range(num_ranks))
    at_once = case.row_cap(num_ranks, case.top_k) // (num_ranks * case.top_k) if case.row_cap else max(num_tokens, 1)
    for of_rank in of_ranks:
        for key in (key for key in of_rank if key.case == case.name):
            assert of_rank[key].num_rounds == of_rank[key].traffic.rounds == max(1, -(-num_tokens // at_once))


def test_over_a_stand_in_the_norm_that_follows_has_the_bits_of_one_after_the_other() -> None:
    for decode in (False, True):
        run_ranks(run_norms, 2, partial(make_over_fake, decode), True, ("fast",))


def take_turns(rank: int, num_ranks: int) -> list[Any]:
    """Prompts and decode over one buffer, also from another layer; then what the buffer was made with."""
    case, dtype = case_named("replicas and empty slots"), torch.bfloat16
    placement = case.placement(case.num_experts, num_ranks)
    slots = tuple(map(len, placement.ranks))
    key = Key(case.name, "fast", dtype)
    table = ReplicaTable(placement, num_ranks + 1, "cpu")
    normal = make_over_fake(False, world(rank, num_ranks), table, slots, case, key)
    decode = normal.for_decode()
    experts = make_experts(placement.experts_of(rank), dtype)
    outs = []
    for dispatcher in (normal, decode, copy(normal), copy(decode), normal):
        batch = make_batch(case, rank, num_ranks, dtype, padded=True)
        out_TD = torch.full_like(batch.x_TD, torch.nan)
        for rows, inputs in rounds(dispatcher, *batch):
            out_TD[rows] = dispatcher.combine(experts(inputs), inputs.handle)
        outs.append(out_TD)
    buffer = normal.shared.of(WIDTH)
    assert buffer is copy(decode).shared.of(WIDTH)
    made = (buffer.bytes, buffer.low_latency_mode, buffer.num_qps_per_rank)
    assert Dispatchers(normal, decode).held_bytes == sum(buffer.bytes)
    normal.close()
    assert normal.held_bytes == 0
    return [outs, made, decode.buffer_bytes(64, WIDTH, dtype), normal.buffer_bytes(10, WIDTH, dtype)]


def test_over_a_stand_in_prompts_and_decode_share_one_buffer_of_the_right_size() -> None:
    """Two ranks, at most 7 slots, K = 3, 20 columns of bf16: 40 bytes a row. NVLink: 5 x 40 x 2. Low latency has room
    for 128 tokens of each rank in 2 x 7 slots: 4 x 128 x 20 x 14. Its places come and go: 2 x (7 x 2 x 128) x 40. Of a
    round of the normal kernels 2 x 10 rows come and 20 sums go."""
    for rank, (outs, made, low_bytes, normal_bytes) in enumerate(run_ranks(take_turns, 2)):
        expected = expected_bits(case_named("replicas and empty slots"), rank, 2, torch.bfloat16, padded=True)
        assert all(max_rel(out_TD, expected) <= 0.02 for out_TD in outs)
        library = 5 * 40 * 2 + 4 * 128 * 20 * 14
        assert made == ((5 * 40 * 2, 4 * 128 * 20 * 14), True, 7)
        assert low_bytes == library + 2 * (7 * 2 * 128) * 40
        assert normal_bytes == library + 20 * (40 + 40)


def alone(num_ranks: int = 2, **settings: Any) -> DeepEPDispatcher:
    """A dispatcher that moves nothing."""
    placement = Placement.contiguous(8, num_ranks)
    group = ExpertGroup(0, num_ranks, None)  # pyright: ignore
    slots = tuple(map(len, placement.ranks))
    shared = SharedBuffer(group, max(slots), fake_deep_ep)
    common: dict[str, Any] = {"top_k": 2, "combine": "fast", "device": "cpu"} | settings
    return DeepEPDispatcher(group, ReplicaTable(placement, 1, "cpu"), slots, shared=shared, **common)


def test_what_it_declares() -> None:
    normal = alone()
    decode = normal.for_decode()
    assert isinstance(decode, DeepEPDecodeDispatcher) and decode.shared is normal.shared
    assert (normal.graph_safe, normal.equal_rows, normal.two_open) == (False, True, False)
    assert (decode.graph_safe, decode.equal_rows, decode.two_open) == (True, True, False)


def test_room_of_low_latency_follows_the_cap() -> None:
    """Ranks x room is a multiple of 4; 128 tokens at most."""
    rooms = {
        (num_ranks, cap): alone(num_ranks, row_cap=cap).for_decode().shared.low_latency_tokens
        for num_ranks, cap in ((2, None), (2, 4), (2, 400), (2, 4000), (4, 24), (8, 32))
    }
    assert rooms == {(2, None): 128, (2, 4): 2, (2, 400): 100, (2, 4000): 128, (4, 24): 3, (8, 32): 2}


def test_exact_sums_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"deep_ep sums rows on their way.*parallel.combine=exact.*give parallel.combine=fast"
    ):
        alone(combine="exact")


@pytest.mark.parametrize(
    ("width", "dtype", "fp8_rows", "text"),
    [
        (64, torch.float16, False, "sums in bfloat16, and the model is in float16"),
        (20, torch.bfloat16, False, "multiple of 32 bytes up to 16368, and these have 40"),
        (8192, torch.bfloat16, False, "up to 16368, and these have 16384"),
        (2896, torch.bfloat16, True, "and these have 2896"),
    ],
)
def test_rows_it_cannot_move_are_refused(width: int, dtype: torch.dtype, fp8_rows: bool, text: str) -> None:
    dispatcher = alone(fp8_rows=fp8_rows)
    x_TD, ids_TK = torch.zeros(1, width, dtype=dtype), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"parallel.dispatcher=deep_ep: .*{text}; choose another dispatcher"):
        dispatcher.dispatch(x_TD, ids_TK, torch.ones(1, 2))


def test_low_latency_takes_the_widths_it_is_compiled_for() -> None:
    assert low_latency_problem(7168, 8) is None
    assert "not 2880" in str(low_latency_problem(2880, 4))
    assert "up to 11 experts per token, not 12" in str(low_latency_problem(2048, 12))
    with pytest.raises(ValueError, match=r"parallel.dispatcher=deep_ep: .*not 64; choose another dispatcher"):
        alone().for_decode().dispatch(
            torch.zeros(1, 64).bfloat16(), torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)
        )


def test_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of what is looked at first, over a card that is not there."""
    assert "these are on cpu" in str(deep_ep_problem(torch.device("cpu")))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert deep_ep_problem(gpu) == "DeepEP needs compute capability 9.0, and a card has less"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "the package deep_ep cannot be imported" in str(deep_ep_problem(gpu))
    with pytest.raises(ValueError, match=r"cannot be imported .*the extra sortyard.deepep. installs it"):
        SharedBuffer(ExpertGroup(0, 2, None), 4)  # pyright: ignore
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    assert deep_ep_problem(gpu) is None
    assert "not for 3" in str(deep_ep_problem(gpu, num_ranks=3))
    reach = SimpleNamespace(to=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: other == reach.to)
    assert "GPU 0 cannot reach the memory of GPUs [2]" in str(deep_ep_problem(gpu, num_ranks=2))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: True)
    assert deep_ep_problem(gpu, num_ranks=2, width=2048) is None
    assert "these have 40" in str(deep_ep_problem(gpu, num_ranks=2, width=20))
    assert "between nodes in pieces of 256 columns, and they have 128" in str(
        deep_ep_problem(gpu, num_ranks=16, width=128)
    )
