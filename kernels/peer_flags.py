"""Tell peers that what was written into their buffers is complete, and wait until theirs is: flags, no host.

Knows buffers, flags and a clock; knows nothing of what is written. A kernel that writes into peers' buffers ends with
`signal_peers`; `wait_for_peers` is the launch that follows. Each way (rows there, results back) has its own flags:

    flag[source] = epoch << 20 | tokens of a rank in this round      in every rank's own buffer, written by the source

The epoch counts the rounds of a way, in memory of the device, so a captured graph counts on when it is replayed. It is
never reset, and no flag has to be lowered: a wait is for the epoch that this rank has itself just signalled.

Why one buffer is enough, without a barrier. Every rank signals every rank in every round, both ways in turn, also where
it has no rows: sent 1, returned 1, sent 2, ... Rank a writes rows of round e + 1 into b only after it has seen b's
"returned e", and b signals that after its experts have read their rows of round e. Rank b writes results of round e + 1
into a only after it has seen a's "sent e + 1", which a launches after it has summed up its results of round e. So what
a kernel overwrites was read, and a flag shows exactly the epoch that is waited for, never a later one. This needs both
ways in turn, in stream order, on one set of buffers; for rounds that overlap there is a second set.

Why a reader sees the rows. Each program's writes come before its own add to a counter (a barrier of its threads, then
release); the program that finds the counter full has acquired all of them, and raises the flags with release for the
whole system; the waiting thread acquires. Order is transitive, and the launch behind the wait begins after it.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import time
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


class WayState(NamedTuple):
    """What one rank keeps of one way, outside the buffers. `progress` and `stopped` are on the device."""

    progress_2: Tensor
    """int64: the epoch signalled last; programs of the launch under way that have ended."""
    stopped_1: Tensor
    """int64, one for both ways: not 0 once a wait was given up, so that the next ones end at once."""
    faults_2N: Tensor
    """int64, in memory that the host reads without waiting: [0, source] the epoch of a wait that was given up,
    [1, source] 1 + tokens where the source brought another number; 0: no fault."""


def new_states(num_ranks: int, device: torch.device) -> tuple[WayState, WayState]:
    """Of both ways."""
    pinned = device.type == "cuda"
    stopped_1 = torch.zeros(1, dtype=torch.int64, device=device)
    sent, returned = (
        WayState(
            torch.zeros(2, dtype=torch.int64, device=device),
            stopped_1,
            torch.zeros(2, num_ranks, dtype=torch.int64, pin_memory=pinned),
        )
        for _ in range(2)
    )
    return sent, returned


def signal_reference(peers: Peers, layout: PeerLayout, way: int, state: WayState, num_tokens: int) -> None:
    """What `signal_peers` does at the end of a launch. On CPUs that keep the order of stores (x86)."""
    state.progress_2[0] += 1
    for buffer in peers.buffers:
        layout.flags_N(buffer, way)[peers.rank] = (state.progress_2[0] << TOKEN_BITS) | num_tokens


@triton.jit
def signal_peers(addresses_ptr, progress_ptr, flags_at, rank, num_tokens, NUM_RANKS: tl.constexpr):
    """The last act of every program of a launch that writes into peers' buffers; the last program raises the flags."""
    tl.debug_barrier()
    ended = tl.atomic_add(progress_ptr + 1, 1, sem="acq_rel", scope="sys")
    if ended == tl.num_programs(0) - 1:
        epoch = tl.load(progress_ptr) + 1
        tl.store(progress_ptr, epoch)
        tl.store(progress_ptr + 1, 0)
        for peer in range(NUM_RANKS):
            address = tl.load(addresses_ptr + peer) + flags_at
            flag_ptr = address.to(tl.pointer_type(tl.int64)) + rank
            tl.atomic_xchg(flag_ptr, (epoch << _TOKEN_BITS) | num_tokens, sem="release", scope="sys")


def wait_for_peers(
    peers: Peers, layout: PeerLayout, way: int, state: WayState, num_tokens: int, timeout_s: float
) -> None:
    """Until every rank has signalled the epoch that this one has, or `timeout_s` has passed: a fault, not a hang.

    Work launched behind it sees what the peers wrote before they signalled. `wait_reference` is the definition.
    """
    run = wait_triton if uses_triton(peers.own) else wait_reference
    run(peers, layout, way, state, num_tokens, timeout_s)


# until flags[source] >> TOKEN_BITS == progress[0], for at most `limit`
#   flags_ptr int64 [N], of this rank; progress_ptr int64 [2]; stopped_ptr int64 [1]; faults_ptr int64 [2, N], host
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


def wait_triton(peers: Peers, layout: PeerLayout, way: int, state: WayState, num_tokens: int, timeout_s: float) -> None:
    """`wait_for_peers` as one launch of one warp for each rank."""
    clock = peers.own.is_cuda
    _wait_kernel[(layout.num_ranks,)](
        layout.flags_N(peers.own, way),
        *state,
        num_tokens,
        int(timeout_s * (1e9 if clock else _POLLS_PER_S)),
        CLOCK=clock,
        num_warps=1,
        **dependent_launch(peers.own),
    )


def wait_reference(
    peers: Peers, layout: PeerLayout, way: int, state: WayState, num_tokens: int, timeout_s: float
) -> None:
    """The definition of the wait, in plain torch."""
    flags_N, epoch = layout.flags_N(peers.own, way), int(state.progress_2[0])
    deadline = time.monotonic() + (0.0 if int(state.stopped_1) else timeout_s)
    for source in range(layout.num_ranks):
        pause_s = 1e-4
        while int(flags_N[source]) >> TOKEN_BITS != epoch and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)
        flag = int(flags_N[source])
        brought = flag & ((1 << TOKEN_BITS) - 1)
        if flag >> TOKEN_BITS != epoch:
            state.faults_2N[0, source] = epoch
        elif brought != num_tokens:
            state.faults_2N[1, source] = brought + 1
    if bool(state.faults_2N.any()):
        state.stopped_1.fill_(1)
