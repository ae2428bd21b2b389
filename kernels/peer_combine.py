"""Bring results home: written straight into the buffer of the rank that the token came from.

Knows rows, records and peers' buffers; knows nothing of what an expert computes. One launch: it weights and sums where
sums go home, writes, and tells every peer that its part is complete (peer_flags.py). The rank at home then combines
what lies in its own buffer with kernels/combine.py, in routing order.

Rows are written by their source and not fetched by their home: of two H200s a write reaches 375 GB/s and a read 359,
and a write needs no answer before the next.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_shape, cdiv, next_power_of_2, uses_triton
from kernels.combine import add_experts, combine_reference
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.peer_flags import WayState, signal_peers, signal_reference
from kernels.peer_layout import RETURNED, PeerLayout, Peers

MOST_PROGRAMS = 2048
"""As in peer_dispatch.py."""

_PIECE_ELEMENTS = 8192
"""Of a record's K rows, for one program: all its loads are under way at once."""

_SUM_COLUMNS = 1024
"""Of a sum, for one program: 16 bytes for each thread of 4 warps."""


def return_rows(
    peers: Peers,
    layout: PeerLayout,
    state: WayState,
    y_RD: Tensor,
    packed_row_XK: Tensor,
    weights_XK: Tensor | None,
    num_tokens: int,
) -> None:
    """Writes y_RD[packed_row_XK[r * B + t, k]] to row t * K + k of rank r's `home_RD`, or, with weights, the sum over k
    (fp32, k ascending, one cast) to its row rank * B + t; then signals. B = num_tokens, the same on all ranks.

    packed_row_XK int32 [N * B, K], -1 where there is no row here: nothing is written for it. `return_rows_reference`
    is the definition.
    """
    run = return_rows_triton if uses_triton(peers.own) else return_rows_reference
    run(peers, layout, state, y_RD, packed_row_XK, weights_XK, num_tokens)


# home_r[t * K + k] = y[row[r * B + t, k]], or home_r[rank * B + t] = sum over k of weights[r * B + t, k] * y[row[..]]
#   addresses_ptr int64 [N]: of each rank's buffer; progress_ptr int64 [2]; y_ptr [R, D], rows strided
#   row_ptr int32 [N * B, K]; weights_ptr fp32 [N * B, K] where SUMS, else unused
#   grid (at most MOST_PROGRAMS,): a piece is BLOCK_D columns of one record; a program takes every grid-th piece.
#   K and D are filled up by masks.


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def _return_kernel(
    addresses_ptr,
    progress_ptr,
    y_ptr,
    row_ptr,
    weights_ptr,
    num_tokens,
    num_columns,
    stride_y,
    rank,
    home_at,
    flags_at,
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    k = tl.arange(0, BLOCK_K)
    num_blocks = tl.cdiv(num_columns, BLOCK_D)
    for piece in range(tl.program_id(0), NUM_RANKS * num_tokens * num_blocks, tl.num_programs(0)):
        # Homes take turns, and each rank begins with another: all links are busy all the time.
        turn, block = piece // num_blocks, piece % num_blocks
        home = (turn + rank) % NUM_RANKS
        token = (turn // NUM_RANKS).to(tl.int64)
        record = home.to(tl.int64) * num_tokens + token
        d = block * BLOCK_D + tl.arange(0, BLOCK_D)
        row = tl.load(row_ptr + record * TOP_K + k, mask=k < TOP_K, other=-1)
        address = tl.load(addresses_ptr + home) + home_at
        home_ptr = tl.multiple_of(address.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
        if tl.max(row, axis=0) >= 0:
            if SUMS:
                total = tl.zeros((BLOCK_D,), tl.float32)
                total = add_experts(total, y_ptr, row_ptr, weights_ptr, record, True, d, num_columns, stride_y, TOP_K)
                place = (rank.to(tl.int64) * num_tokens + token) * num_columns
                tl.store(home_ptr + place + d, total.to(y_ptr.dtype.element_ty), mask=d < num_columns)
            else:
                here = (row >= 0)[:, None] & (d < num_columns)[None, :]
                y = tl.load(y_ptr + row.to(tl.int64)[:, None] * stride_y + d[None, :], mask=here)
                place = (token * TOP_K + k)[:, None] * num_columns
                tl.store(home_ptr + place + d[None, :], y, mask=here)
    signal_peers(addresses_ptr, progress_ptr, flags_at, rank, num_tokens, NUM_RANKS)


def return_rows_triton(
    peers: Peers,
    layout: PeerLayout,
    state: WayState,
    y_RD: Tensor,
    packed_row_XK: Tensor,
    weights_XK: Tensor | None,
    num_tokens: int,
) -> None:
    """`return_rows` as one launch; with no records too, since the others wait for the signal."""
    _check_operands(layout, y_RD, packed_row_XK, weights_XK, num_tokens)
    block_k = next_power_of_2(layout.top_k)
    piece = _SUM_COLUMNS if layout.sums else max(_PIECE_ELEMENTS // block_k, 128)
    block_d = min(next_power_of_2(layout.width), piece)
    num_pieces = layout.num_ranks * num_tokens * cdiv(layout.width, block_d)
    _return_kernel[(max(1, min(num_pieces, MOST_PROGRAMS)),)](
        peers.addresses_N,
        state.progress_2,
        y_RD,
        packed_row_XK,
        packed_row_XK if weights_XK is None else weights_XK,
        num_tokens,
        layout.width,
        y_RD.stride(0),
        peers.rank,
        layout.home_at,
        layout.flags_at(RETURNED),
        NUM_RANKS=layout.num_ranks,
        TOP_K=layout.top_k,
        SUMS=layout.sums,
        BLOCK_K=block_k,
        BLOCK_D=block_d,
        num_warps=4,
        **dependent_launch(y_RD),
    )


def _check_operands(
    layout: PeerLayout, y_RD: Tensor, packed_row_XK: Tensor, weights_XK: Tensor | None, num_tokens: int
) -> None:
    assert num_tokens <= layout.capacity, f"{num_tokens} tokens, the buffers have room for {layout.capacity}"
    assert (weights_XK is not None) == layout.sums, "weights are for sums, and only for them"
    shape = (layout.num_ranks * num_tokens, layout.top_k)
    assert_shape("y_RD", y_RD, (None, layout.width))
    assert_dtype("y_RD", y_RD, layout.dtype)
    assert_last_contiguous("y_RD", y_RD)
    assert_shape("packed_row_XK", packed_row_XK, shape)
    assert_dtype("packed_row_XK", packed_row_XK, torch.int32)
    assert packed_row_XK.is_contiguous(), "packed_row_XK lies together"
    if weights_XK is not None:
        assert_shape("weights_XK", weights_XK, shape)
        assert_dtype("weights_XK", weights_XK, torch.float32)
        assert weights_XK.is_contiguous(), "weights_XK lies together"


def return_rows_reference(
    peers: Peers,
    layout: PeerLayout,
    state: WayState,
    y_RD: Tensor,
    packed_row_XK: Tensor,
    weights_XK: Tensor | None,
    num_tokens: int,
) -> None:
    """The definition, in plain torch."""
    _check_operands(layout, y_RD, packed_row_XK, weights_XK, num_tokens)
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
    signal_reference(peers, layout, RETURNED, state, num_tokens)
