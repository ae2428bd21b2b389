"""Signals and waits: epochs, faults that end instead of hanging, and numbers beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from kernels.peer_flags import TOKEN_BITS, _wait_kernel, signal_reference, wait_for_peers, wait_reference, wait_triton
from kernels.peer_layout import PeerLayout
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


def signal(ranks: OneProcess, rank: int, num_tokens: int) -> None:
    signal_reference(ranks.peers(rank), ranks.layout, ranks.states[rank], num_tokens)


@each_wait
def test_epochs_beyond_32_bits(wait, device: str) -> None:
    ranks = three_ranks(device)
    for state in ranks.states:
        state.progress_2[0] = 2**31 - 2
    for epoch in range(3):
        for rank in range(3):
            signal(ranks, rank, num_tokens=4)
        for rank in range(3):
            state = ranks.states[rank]
            wait(ranks.peers(rank), ranks.layout, state, 4, 60.0)
            assert state.faults_3N.tolist() == [[0] * 3] * 3 and state.stopped_1.tolist() == [0]
            assert (ranks.layout.flags_N(ranks.buffers[rank]) >> TOKEN_BITS).tolist() == [2**31 - 1 + epoch] * 3


@each_wait
def test_who_does_not_come_is_noted_and_later_waits_end_at_once(wait, device: str) -> None:
    ranks = three_ranks(device)
    for rank in (0, 2):
        signal(ranks, rank, 4)
    state = ranks.states[0]
    for timeout_s in (0.02, 1e6):
        state.faults_3N.zero_()
        wait(ranks.peers(0), ranks.layout, state, 4, timeout_s)
        torch.cuda.synchronize() if device == "cuda" else None
        assert state.faults_3N.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]] and state.stopped_1.tolist() == [1]


@each_wait
def test_who_brings_another_number_is_noted(wait, device: str) -> None:
    """0 tokens are a number too."""
    ranks = three_ranks(device)
    for rank, num_tokens in enumerate((4, 0, 3)):
        signal(ranks, rank, num_tokens)
    state = ranks.states[0]
    wait(ranks.peers(0), ranks.layout, state, 4, 60.0)
    torch.cuda.synchronize() if device == "cuda" else None
    assert state.faults_3N.tolist() == [[0, 0, 0], [0, 1, 4], [0, 0, 0]] and state.stopped_1.tolist() == [1]


def test_the_cpu_waits_by_the_reference() -> None:
    ranks = three_ranks("cpu")
    for rank in range(3):
        signal(ranks, rank, 4)
    wait_for_peers(ranks.peers(0), ranks.layout, ranks.states[0], 4, 60.0)
    assert not ranks.states[0].faults_3N.any()


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    args: dict[str, object] = dict.fromkeys(("flags_ptr", "progress_ptr", "stopped_ptr", "faults_ptr"), "*i64")
    args |= {"num_tokens": "i32", "limit": "i64", "CLOCK": True, "PDL": arch >= 90}
    assert compile_ahead(_wait_kernel, arch, args, num_warps=1)
