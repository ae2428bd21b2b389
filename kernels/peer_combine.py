"""Bring results home and sum them up there: one launch that writes into peers' buffers and reads what they write.

Knows rows, records and peers' buffers; knows nothing of what an expert computes. Some programs write this rank's
results for other ranks' tokens, with a flag behind each token or few (peer_flags.py); the others sum up this rank's own
tokens as those come in, in routing order, with the norm that follows. So rows travel while others are summed: results
that stay here are read where the experts left them.

Rows are written by their source and not fetched by their home: of two H200s a write reaches 375 GB/s and a read 359,
and a write needs no answer before the next.

No rank waits for a program that cannot run. Those that write come first in the grid, wait for nothing and leave. Where
another half-step runs beside this one, on another rank perhaps before this one, those that wait take only half of the
multiprocessors: what the other rank waits for runs on the rest. The launch behind is placed only when this one ends.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.checks import assert_dtype, assert_last_contiguous, assert_shape, cdiv, uses_triton
from kernels.combine import combine_norm_reference, combine_reference
from kernels.dependent_launch import dependent_launch
from kernels.peer_flags import RoundState, wait_done_reference, wait_limit, wait_until_done
from kernels.peer_layout import PeerLayout, Peers
from kernels.peer_tiles import send_tile, sum_tile
from kernels.rmsnorm import norm_tile
from kernels.tiles import num_multiprocessors

WARPS, SENDING, SENDING_ROWS = 32, 16, 12
"""Of each multiprocessor: of all programs, and how many of these send, sums or rows.

Two H200s, K = 8, us of a combine by warps that send | that sum. Fast, 7,168 columns, 4,096 tokens: 12 | 20 206, 16 | 16
198, 20 | 12 208; a plain copy of the bytes 157. In programs of 8 warps 212, 204, 203; with the norm 225, 214, 252.
Exact, 16,384 tokens: 12 | 20 2,660, 16 | 16 2,724, 20 | 12 2,894; with the norm 2,647 and 2,871. Sending 4,096 tokens'
sums alone takes 182, summing alone 100: programs' stores cross at 356 GB/s both ways (165 us), at 336 with a flag for
each row; copies from shared memory do too, the copy engine's at 374.

Instructions were what bounded it: with each choice's place and weight looked up for each part of a row, and each rank's
sum added once a choice, 221 and 278, exact 3,150. Rows that are here four at a time, by their numbers: 239 to 275."""

_REGISTERS = 64
"""Of a thread, so that all programs have room at a time. The same case with 56 207, with 72 209."""

_THREAD_COLUMNS = 8
"""Of a row at a time: 16 bytes."""

_WARPS_OF_MANY = 4
"""Of a program where there are more tiles than programs that sum, and no norm behind, whose tile has its own."""

_FLAG_BYTES, _FLAGS = 8192, 512
"""Behind one flag, where so many flags are left: the same on all ranks, whatever their GPUs are. Fast, 2,048 columns:
16,384 tokens take 260 us with flags for one token, 233 for two and 232 for four, 4,096 tokens 79, 75 and 81; of 7,168
columns 4,096 tokens 206, 217 for two."""

MOST_SUMMERS_BESIDE = 66
"""Beside the work of another half-step: half of the multiprocessors are left to what others may wait for."""


class NormAfter(NamedTuple):
    """What follows the sum: `combine_norm` of combine.py says how."""

    residual_BD: Tensor
    norm_D: Tensor
    eps: float
    shared_BD: Tensor | None = None


class Results(NamedTuple):
    """Rows of this rank's experts, and whose they are. B tokens of each of N ranks: record r * B + t."""

    y_RD: Tensor
    packed_row_XK: Tensor
    """int32 [N * B, K]: the row of each choice, -1 where it is not here."""
    weights_XK: Tensor | None
    """fp32 [N * B, K], where sums go home."""


class Tokens(NamedTuple):
    """This rank's own, as they were sent: `home_row` is what `send_rows` returned."""

    home_row_BK: Tensor
    weights_BK: Tensor


def combine_home(
    peers: Peers,
    layout: PeerLayout,
    state: RoundState,
    results: Results,
    tokens: Tokens,
    timeout_s: float,
    after: NormAfter | None = None,
    *,
    beside: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Sends results to all ranks and returns what `combine` gives of this rank's own, or `combine_norm` with `after`.

    Choice k of token t adds weights_BK[t, k] * y[packed_row] (fp32, k ascending, one cast), of whichever rank has the
    row. Where sums go home each rank first sums what it has of a token in the same way, rounds it, and the ranks' sums
    are added, each where its first choice stands. `beside`: another half-step may run on the device at the same time.
    `combine_home_reference` is the definition.
    """
    run = combine_home_triton if uses_triton(peers.own) else combine_home_reference
    return run(peers, layout, state, results, tokens, timeout_s, after, beside=beside)


# home_r[t * K + k] = y[row[r * B + t, k]], or home_r[rank * B + t] = sum over k of weights[r * B + t, k] * y[row[..]]
# out[t] = sum over k of w[t, k] * (y[row[rank * B + t, k]] or home[home_row[t, k]]), then what combine.py's norm does
#   addresses_ptr int64 [N]: of each rank's buffer; progress_ptr int64 [2]; stopped_ptr int64 [1]; faults_ptr int64 [N]
#   y_ptr [R, D], rows strided; row_ptr int32 [N * B, K]; weights_ptr fp32 [N * B, K] where SUMS, else unused
#   home_row_ptr int32, home_weights_ptr fp32 [B, K]; shared_ptr, residual_ptr [B, D], rows strided, norm_ptr [D], or
#   None; out_ptr, sum_ptr [B, D]
#   grid (num_senders + summers,): of the first, each takes every num_senders-th (token group, other rank), of the rest
#   each every so-manieth token group, of flag_tiles tiles of BLOCK_R tokens. K and D are filled up by masks.


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_tokens", "rank", "num_senders", "flag_tiles", "limit"])
def _home_kernel(
    addresses_ptr,
    progress_ptr,
    stopped_ptr,
    faults_ptr,
    y_ptr,
    row_ptr,
    weights_ptr,
    home_row_ptr,
    home_weights_ptr,
    shared_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    sum_ptr,
    num_tokens,
    num_columns,
    stride_y,
    stride_shared,
    stride_residual,
    eps,
    rank,
    done_at,
    home_at,
    num_senders,
    flag_tiles,
    limit,
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW_D: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    epoch = tl.load(progress_ptr)
    num_tiles = tl.cdiv(num_tokens, BLOCK_R)
    num_groups = tl.cdiv(num_tiles, flag_tiles)
    program = tl.program_id(0)
    pointer = tl.pointer_type(y_ptr.dtype.element_ty)
    own_first = rank.to(tl.int64) * num_tokens
    results, tokens = (y_ptr, row_ptr, weights_ptr, stride_y), (home_row_ptr, home_weights_ptr)
    after = (shared_ptr, residual_ptr, norm_ptr, stride_shared, stride_residual, eps)
    out, sizes = (out_ptr, sum_ptr), (num_tokens, num_columns)
    if program < num_senders:
        for piece in range(program, (NUM_RANKS - 1) * num_groups, num_senders):
            # Homes take turns, and each rank begins with another: all links are busy all the time.
            group, turn = piece // (NUM_RANKS - 1), piece % (NUM_RANKS - 1)  # pyright: ignore
            home = (rank + 1 + turn) % NUM_RANKS
            address = tl.load(addresses_ptr + home)
            for tile in range(group * flag_tiles, tl.minimum((group + 1) * flag_tiles, num_tiles)):
                home_ptr, first = tl.multiple_of((address + home_at).to(pointer), 16), home.to(tl.int64) * num_tokens
                send_tile(home_ptr, results, tile, first, own_first, sizes, TOP_K, SUMS, BLOCK_R, BLOCK_D)
            tl.debug_barrier()
            done_ptr = (address + done_at).to(tl.pointer_type(tl.int64)) + own_first + group
            tl.atomic_xchg(done_ptr, epoch, sem="release", scope="sys")
    else:
        own = tl.load(addresses_ptr + rank)
        done_ptr = (own + done_at).to(tl.pointer_type(tl.int64))
        for group in range(program - num_senders, num_groups, tl.num_programs(0) - num_senders):
            for turn in tl.static_range(1, NUM_RANKS):  # pyright: ignore
                source = (rank + turn) % NUM_RANKS
                word_ptr = done_ptr + source.to(tl.int64) * num_tokens + group
                wait_until_done(word_ptr, epoch, stopped_ptr, faults_ptr + source, limit, CLOCK)
            for tile in range(group * flag_tiles, tl.minimum((group + 1) * flag_tiles, num_tiles)):
                home_ptr = tl.multiple_of((own + home_at).to(pointer), 16)
                sum_tile(
                    home_ptr, results, tokens, after, out, tile, own_first, sizes,
                    NUM_RANKS, TOP_K, SUMS, BLOCK_R, BLOCK_D, ROW_D,
                )  # fmt: skip
    # The next launch is placed only now: its programs would wait in the room that another stream's may need.
    if PDL:
        gdc_launch_dependents()


def combine_home_triton(
    peers: Peers,
    layout: PeerLayout,
    state: RoundState,
    results: Results,
    tokens: Tokens,
    timeout_s: float,
    after: NormAfter | None = None,
    *,
    beside: bool = False,
    sends: bool = True,
    sums: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`combine_home` as one launch; or its halves as one each, first all ranks' sends, for ranks that take turns."""
    _check_operands(layout, results, tokens, after)
    num_tokens = tokens.home_row_BK.shape[0]
    out_BD = results.y_RD.new_empty(num_tokens, layout.width)
    sum_BD = None if after is None else torch.empty_like(out_BD)
    if num_tokens == 0:
        return out_BD, sum_BD
    block_r, row_d, num_warps = norm_tile(layout.width)
    num_tiles, multiprocessors = cdiv(num_tokens, block_r), num_multiprocessors(out_BD.device)
    sending = SENDING if layout.sums else SENDING_ROWS
    if after is None and num_tiles > (WARPS - sending) * multiprocessors // _WARPS_OF_MANY:
        num_warps = _WARPS_OF_MANY
    most_senders = sending * multiprocessors // num_warps
    most_summers = (WARPS - sending) * multiprocessors // num_warps
    tile_bytes = block_r * layout.width * out_BD.element_size() * (1 if layout.sums else layout.top_k)
    flag_tiles = max(1, min(_FLAG_BYTES // tile_bytes, num_tiles // _FLAGS))
    num_groups = cdiv(num_tiles, flag_tiles)
    num_senders = min((layout.num_ranks - 1) * num_groups, most_senders) if sends else 0
    num_summers = min(num_groups, MOST_SUMMERS_BESIDE if beside else most_summers) if sums else 0
    residual_BD, norm_D, eps, shared_BD = after or (None, None, 0.0, None)
    clock = peers.own.is_cuda
    _home_kernel[(num_senders + num_summers,)](
        peers.addresses_N,
        state.progress_2,
        state.stopped_1,
        state.faults_3N[2],
        results.y_RD,
        results.packed_row_XK,
        results.packed_row_XK if results.weights_XK is None else results.weights_XK,
        *tokens,
        shared_BD,
        residual_BD,
        norm_D,
        out_BD,
        sum_BD,
        num_tokens,
        layout.width,
        results.y_RD.stride(0),
        0 if shared_BD is None else shared_BD.stride(0),
        0 if residual_BD is None else residual_BD.stride(0),
        eps,
        peers.rank,
        layout.done_at,
        layout.home_at,
        num_senders,
        flag_tiles,
        wait_limit(timeout_s, clock=clock),
        NUM_RANKS=layout.num_ranks,
        TOP_K=layout.top_k,
        SUMS=layout.sums,
        BLOCK_R=block_r,
        BLOCK_D=min(row_d, 32 * num_warps * _THREAD_COLUMNS),
        ROW_D=row_d,
        CLOCK=clock,
        num_warps=num_warps,
        maxnreg=_REGISTERS,
        **dependent_launch(out_BD),
    )
    return out_BD, sum_BD


def _check_operands(layout: PeerLayout, results: Results, tokens: Tokens, after: NormAfter | None) -> None:
    y_RD, packed_row_XK, weights_XK = results
    num_tokens = tokens.home_row_BK.shape[0]
    assert num_tokens <= layout.capacity, f"{num_tokens} tokens, the buffers have room for {layout.capacity}"
    assert (weights_XK is not None) == layout.sums, "weights are for sums, and only for them"
    shape, own_shape = (layout.num_ranks * num_tokens, layout.top_k), (num_tokens, layout.top_k)
    assert_shape("y_RD", y_RD, (None, layout.width))
    assert_dtype("y_RD", y_RD, layout.dtype)
    assert_last_contiguous("y_RD", y_RD)
    words = {"packed_row_XK": (packed_row_XK, shape, torch.int32), "weights_XK": (weights_XK, shape, torch.float32)}
    words |= {"home_row_BK": (tokens.home_row_BK, own_shape, torch.int32)}
    words |= {"weights_BK": (tokens.weights_BK, own_shape, torch.float32)}
    for name, (each, wanted, dtype) in words.items():
        if each is not None:
            assert_shape(name, each, wanted)
            assert_dtype(name, each, dtype)
            assert each.is_contiguous(), f"{name} lies together"
    if after is not None:
        rows = {"residual_BD": after.residual_BD, "shared_BD": after.shared_BD}
        for name, each in rows.items():
            if each is not None:
                assert_shape(name, each, (num_tokens, layout.width))
                assert_dtype(name, each, layout.dtype)
                assert_last_contiguous(name, each)
        assert_shape("norm_D", after.norm_D, (layout.width,))
        assert_dtype("norm_D", after.norm_D, layout.dtype)


def combine_home_reference(
    peers: Peers,
    layout: PeerLayout,
    state: RoundState,
    results: Results,
    tokens: Tokens,
    timeout_s: float,
    after: NormAfter | None = None,
    *,
    beside: bool = False,
    sends: bool = True,
    sums: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The definition, in plain torch: results go home, all of them are waited for, and combine.py sums them up."""
    _check_operands(layout, results, tokens, after)
    num_tokens = tokens.home_row_BK.shape[0]
    if sends:
        _send_reference(peers, layout, state, results, num_tokens)
    if not sums:
        return results.y_RD.new_empty(0, layout.width), None
    wait_done_reference(peers, layout, state, num_tokens, timeout_s)
    home_RD = layout.home_RD(peers.own, num_tokens)
    weights_BK = torch.ones_like(tokens.weights_BK) if layout.sums else tokens.weights_BK
    if after is None:
        return combine_reference(home_RD, tokens.home_row_BK, weights_BK), None
    return combine_norm_reference(home_RD, tokens.home_row_BK, weights_BK, *after)


def _send_reference(peers: Peers, layout: PeerLayout, state: RoundState, results: Results, num_tokens: int) -> None:
    """To this rank's own buffer too. On CPUs that keep the order of stores (x86)."""
    y_RD, packed_row_XK, weights_XK = results
    here_XK = packed_row_XK >= 0
    sums_XD = None if weights_XK is None else combine_reference(y_RD, packed_row_XK, weights_XK)
    for home, buffer in enumerate(peers.buffers):
        of_home = slice(home * num_tokens, (home + 1) * num_tokens)
        home_RD = layout.home_RD(buffer, num_tokens)
        if sums_XD is None:
            here_R = here_XK[of_home].flatten()
            home_RD[here_R] = y_RD[packed_row_XK[of_home].flatten()[here_R].long()]
        else:
            here_B = here_XK[of_home].any(dim=1)
            own = home_RD[peers.rank * num_tokens : (peers.rank + 1) * num_tokens]
            own[here_B] = sums_XD[of_home][here_B]
        if num_tokens:
            done_B = layout.done_NB(buffer, num_tokens)[peers.rank]
            done_B[:-1] = state.progress_2[0]
            done_B[-1] = state.progress_2[0]
