"""Tell peers that what was written into their buffers is complete, and wait until theirs is: flags, no host.

Knows buffers, flags and a clock; knows nothing of what is written. A round goes two ways, rows out and results home:

    flag[source] = epoch << 20 | tokens of a rank in this round    rows: by the source, into every rank's buffer
    done[source, group of tokens] = epoch                          results: by the source, into the home's buffer

A kernel that sends rows ends with `signal_peers`, and `wait_for_peers` is the launch that follows. Results are waited
for a few tokens at a time, by the kernel that sums them up (peer_combine.py), with `wait_until_done`.

The epoch counts rounds, in memory of the device, so a captured graph counts on when it is replayed. It is never reset,
and no flag has to be lowered: a wait is for the epoch that this rank is in.

Why one buffer is enough, without a barrier. Every rank signals every rank in every round, both ways in turn, also where
it has no rows: sent 1, done 1, sent 2, ... Rank a writes rows of round e + 1 into b only after it has seen b's "done e"
for all of its tokens, and b signals that after its experts have read their rows of round e. Rank b writes results of
round e + 1 into a only after it has seen a's "sent e + 1", which a launches after it has summed up its results of round
e. So what a kernel overwrites was read, and a flag shows exactly the epoch that is waited for, never a later one. This
needs both ways in turn, in stream order, on one set of buffers; for rounds that overlap there is a second set.

Why a reader sees the rows. Each program's writes come before its own add to a counter (a barrier of its threads, then
release); the program that finds the counter full has acquired all of them, and raises the flags with release for the
whole system; the waiting thread acquires. Order is transitive, and the launch behind the wait begins after it. Results:
the program that wrote them raises their flag, in the same way, and the program that reads them has waited for it.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from kernels.checks import uses_triton
from kernels.dependent_launch import dependent_launch
from kernels.peer_layout import PeerLayout, Peers

TOKEN_BITS = 20
"""Of a flag, for the tokens of a round, which a layout's capacity bounds. The others count more rounds than any run."""

_TOKEN_BITS = tl.constexpr(TOKEN_BITS)
_TOKENS = tl.constexpr((1 << TOKEN_BITS) - 1)

_POLLS_PER_S = 1000
"""The interpreter has no clock: there, seconds are so many looks at a flag."""


class RoundState(NamedTuple):
    """What one rank keeps of its rounds, outside the buffers. `progress` and `stopped` are on the device."""

    progress_2: Tensor
    """int64: the epoch signalled last; programs of the launch under way that have ended."""
    stopped_1: Tensor
    """int64: not 0 once a wait was given up, so that the next ones end at once."""
    faults_3N: Tensor
    """int64, in memory that the host reads without waiting: [0, source] the epoch in which a wait for its rows was
    given up, [1, source] 1 + tokens where the source brought another number, [2, source] the epoch in which a wait for
    its results was given up; 0: no fault."""


def new_state(num_ranks: int, device: torch.device) -> RoundState:
    """Before the first round."""
    return RoundState(
        torch.zeros(2, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(3, num_ranks, dtype=torch.int64, pin_memory=device.type == "cuda"),
    )


def signal_reference(peers: Peers, layout: PeerLayout, state: RoundState, num_tokens: int) -> None:
    """What `signal_peers` does at the end of a launch. On CPUs that keep the order of stores (x86)."""
    state.progress_2[0] += 1
    for buffer in peers.buffers:
        layout.flags_N(buffer)[peers.rank] = (state.progress_2[0] << TOKEN_BITS) | num_tokens


@triton.jit
def signal_peers(addresses_ptr, progress_ptr, rank, num_tokens, NUM_RANKS: tl.constexpr):
    """The last act of every program of a launch that writes into peers' buffers; the last program raises the flags."""
    tl.debug_barrier()
    ended = tl.atomic_add(progress_ptr + 1, 1, sem="acq_rel", scope="sys")
    if ended == tl.num_programs(0) - 1:
        epoch = tl.load(progress_ptr) + 1
        tl.store(progress_ptr, epoch)
        tl.store(progress_ptr + 1, 0)
        for peer in range(NUM_RANKS):
            flag_ptr = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int64)) + rank
            tl.atomic_xchg(flag_ptr, (epoch << _TOKEN_BITS) | num_tokens, sem="release", scope="sys")


def wait_for_peers(peers: Peers, layout: PeerLayout, state: RoundState, num_tokens: int, timeout_s: float) -> None:
    """Until every rank has signalled the epoch that this one has, or `timeout_s` has passed: a fault, not a hang.

    Work launched behind it sees what the peers wrote before they signalled. `wait_reference` is the definition.
    """
    run = wait_triton if uses_triton(peers.own) else wait_reference
    run(peers, layout, state, num_tokens, timeout_s)


# until flags[source] >> TOKEN_BITS == progress[0], for at most `limit`
#   flags_ptr int64 [N], of this rank; progress_ptr int64 [2]; stopped_ptr int64 [1]; faults_ptr int64 [3, N], host
#   grid (N,): a program waits for one source. limit in nanoseconds with CLOCK, else in looks


@triton.jit(do_not_specialize=["num_tokens", "limit"])
def _wait_kernel(
    flags_ptr,
    progress_ptr,
    stopped_ptr,
    faults_ptr,
    num_tokens,
    limit,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    source = tl.program_id(0)
    epoch = tl.load(progress_ptr)
    limit = tl.where(tl.load(stopped_ptr) == 0, limit, 0).to(tl.int64)
    waited = tl.full((), 0, tl.int64)
    if CLOCK:
        begin = globaltimer()
    flag = tl.atomic_add(flags_ptr + source, 0, sem="acquire", scope="sys")
    while ((flag >> _TOKEN_BITS) != epoch) & (waited < limit):
        flag = tl.atomic_add(flags_ptr + source, 0, sem="acquire", scope="sys")
        if CLOCK:
            waited = globaltimer() - begin  # pyright: ignore
        else:
            waited += 1
    late = (flag >> _TOKEN_BITS) != epoch
    brought = flag & _TOKENS
    if late:
        tl.store(faults_ptr + source, epoch)
        tl.store(stopped_ptr, 1)
    elif brought != num_tokens:
        tl.store(faults_ptr + tl.num_programs(0) + source, brought + 1)
        tl.store(stopped_ptr, 1)
    # The next launch is placed only now: nothing that it may read early is older than the flags.
    if PDL:
        gdc_launch_dependents()


def wait_triton(peers: Peers, layout: PeerLayout, state: RoundState, num_tokens: int, timeout_s: float) -> None:
    """`wait_for_peers` as one launch of one warp for each rank."""
    clock = peers.own.is_cuda
    _wait_kernel[(layout.num_ranks,)](
        layout.flags_N(peers.own),
        *state,
        num_tokens,
        wait_limit(timeout_s, clock=clock),
        CLOCK=clock,
        num_warps=1,
        **dependent_launch(peers.own),
    )


def wait_limit(timeout_s: float, *, clock: bool) -> int:
    """Of a kernel's wait: nanoseconds, or looks where there is no clock."""
    return int(timeout_s * (1e9 if clock else _POLLS_PER_S))


@triton.jit
def wait_until_done(done_ptr, epoch, stopped_ptr, fault_ptr, limit, CLOCK: tl.constexpr):
    """In the midst of a kernel: until the word shows the epoch, for at most `limit`; then the fault is noted."""
    word = tl.atomic_add(done_ptr, 0, sem="acquire", scope="sys")
    if word != epoch:
        most = tl.where(tl.load(stopped_ptr, volatile=True) == 0, limit, 0).to(tl.int64)  # limit may be an int32
        waited = tl.full((), 0, tl.int64)
        if CLOCK:
            begin = globaltimer()
        while (word != epoch) & (waited < most):
            word = tl.atomic_add(done_ptr, 0, sem="acquire", scope="sys")
            if CLOCK:
                waited = globaltimer() - begin  # pyright: ignore
            else:
                waited += 1
        if word != epoch:
            tl.store(fault_ptr, epoch)
            tl.store(stopped_ptr, 1)


def wait_reference(peers: Peers, layout: PeerLayout, state: RoundState, num_tokens: int, timeout_s: float) -> None:
    """The definition of the wait, in plain torch."""
    flags_N, epoch = layout.flags_N(peers.own), int(state.progress_2[0])
    for source in range(layout.num_ranks):
        flag = _looked_at(flags_N[source], lambda word: word >> TOKEN_BITS == epoch, state, timeout_s)
        brought = flag & ((1 << TOKEN_BITS) - 1)
        if flag >> TOKEN_BITS != epoch:
            state.faults_3N[0, source] = epoch
        elif brought != num_tokens:
            state.faults_3N[1, source] = brought + 1
    if bool(state.faults_3N.any()):
        state.stopped_1.fill_(1)


def wait_done_reference(peers: Peers, layout: PeerLayout, state: RoundState, num_tokens: int, timeout_s: float) -> None:
    """Until the results of all this rank's tokens are here, from every other rank."""
    done_NB, epoch = layout.done_NB(peers.own, num_tokens), int(state.progress_2[0])
    for source in range(layout.num_ranks):
        if source == peers.rank or not num_tokens:
            continue
        # The last one is written last.
        if _looked_at(done_NB[source, -1], lambda word: word == epoch, state, timeout_s) != epoch:
            state.faults_3N[2, source] = epoch
            state.stopped_1.fill_(1)


def _looked_at(word: Tensor, wanted: Callable[[int], bool], state: RoundState, timeout_s: float) -> int:
    """The word when it is as wanted, or when the time is over, which it is at once after another wait was given up."""
    deadline = time.monotonic() + (0.0 if int(state.stopped_1) else timeout_s)
    pause_s = 1e-4
    while not wanted(int(word)) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-3)
    return int(word)
