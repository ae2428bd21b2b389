"""Signals and waits: epochs, faults that end instead of hanging, and numbers beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from kernels.peer_flags import TOKEN_BITS, _wait_kernel, signal_reference, wait_for_peers, wait_reference, wait_triton
from kernels.peer_layout import RETURNED, SENT, PeerLayout
from tests.aot import ARCHS, aot, compile_ahead
from tests.one_process import OneProcess

WAITS = [
    pytest.param(wait_reference, "cpu", id="reference"),
    pytest.param(wait_triton, "cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param(wait_triton, "cuda", marks=pytest.mark.gpu, id="gpu"),
]
each_wait = pytest.mark.parametrize(("wait", "device"), WAITS)


def three_ranks(device: str) -> OneProcess:
    return OneProcess(PeerLayout(3, 4, 8, 2, torch.float32, torch.float32, sums=False), device)


def signal(ranks: OneProcess, rank: int, way: int, num_tokens: int) -> None:
    signal_reference(ranks.peers(rank), ranks.layout, way, ranks.states[rank][way], num_tokens)


@each_wait
def test_both_ways_count_by_themselves(wait, device: str) -> None:
    """Also past epoch 2^31, and the other way's flags are not looked at."""
    ranks = three_ranks(device)
    for sent, _ in ranks.states:
        sent.progress_2[0] = 2**31 - 2
    for epoch in range(3):
        for way in (SENT, RETURNED):
            for rank in range(3):
                signal(ranks, rank, way, num_tokens=4)
            for rank in range(3):
                state = ranks.states[rank][way]
                wait(ranks.peers(rank), ranks.layout, way, state, 4, 60.0)
                assert state.faults_2N.tolist() == [[0] * 3] * 2 and state.stopped_1.tolist() == [0]
                high = 2**31 - 1 if way == SENT else 1
                assert (ranks.layout.flags_N(ranks.buffers[rank], way) >> TOKEN_BITS).tolist() == [high + epoch] * 3


@each_wait
def test_who_does_not_come_is_noted_and_later_waits_end_at_once(wait, device: str) -> None:
    ranks = three_ranks(device)
    for rank in (0, 2):
        signal(ranks, rank, SENT, 4)
        signal(ranks, rank, RETURNED, 4)
    sent, returned = ranks.states[0]
    wait(ranks.peers(0), ranks.layout, SENT, sent, 4, 0.02)
    torch.cuda.synchronize() if device == "cuda" else None
    assert sent.faults_2N.tolist() == [[0, 1, 0], [0, 0, 0]] and sent.stopped_1.tolist() == [1]
    wait(ranks.peers(0), ranks.layout, RETURNED, returned, 4, 1e6)
    torch.cuda.synchronize() if device == "cuda" else None
    assert returned.faults_2N.tolist() == [[0, 1, 0], [0, 0, 0]]


@each_wait
def test_who_brings_another_number_is_noted(wait, device: str) -> None:
    """0 tokens are a number too."""
    ranks = three_ranks(device)
    for rank, num_tokens in enumerate((4, 0, 3)):
        signal(ranks, rank, SENT, num_tokens)
    sent, _ = ranks.states[0]
    wait(ranks.peers(0), ranks.layout, SENT, sent, 4, 60.0)
    torch.cuda.synchronize() if device == "cuda" else None
    assert sent.faults_2N.tolist() == [[0, 0, 0], [0, 1, 4]] and sent.stopped_1.tolist() == [1]


def test_the_cpu_waits_by_the_reference() -> None:
    ranks = three_ranks("cpu")
    for rank in range(3):
        signal(ranks, rank, SENT, 4)
    wait_for_peers(ranks.peers(0), ranks.layout, SENT, ranks.states[0][SENT], 4, 60.0)
    assert not ranks.states[0][SENT].faults_2N.any()


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    args: dict[str, object] = dict.fromkeys(("flags_ptr", "progress_ptr", "stopped_ptr", "faults_ptr"), "*i64")
    args |= {"num_tokens": "i32", "limit": "i64", "CLOCK": True, "PDL": arch >= 90}
    assert compile_ahead(_wait_kernel, arch, args, num_warps=1)
