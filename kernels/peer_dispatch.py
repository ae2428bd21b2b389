"""Send rows to the ranks that hold their experts: written straight into those ranks' buffers, each row once per rank.

Knows rows, tables of replicas and peers' buffers; knows nothing of what an expert computes. One launch: it chooses
replicas, writes, and tells every peer that its part is complete (peer_flags.py).

Worked example: rank 1 of 2 has one token with experts 4 and 2 (K = 2); expert 4 lives in slot 1 of rank 0, expert 2 in
slot 0 of rank 1. Record 1 * B + 0 = 1 of both buffers gets the row; its slots are [1, -1] on rank 0 and [-1, 0] on
rank 1; the results come home to rows [0, 1], or as sums, one of each rank, to rows [0, 1] (rank * B + token).
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_shape, cdiv, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.peer_flags import TOKEN_BITS, RoundState, signal_peers, signal_reference
from kernels.peer_layout import PeerLayout, Peers
from kernels.quantize import FP8, Quantized
from kernels.replica_choice import ReplicaColumns, choose_replicas_reference, replica_of

MOST_PROGRAMS = 2048
"""16 of 4 warps on each multiprocessor of an H200: each takes several pieces in turn, and ends with one release."""

_PIECE_BYTES = 4096
"""Of a row, for one program: 32 bytes for each thread of 4 warps. Few rows still fill the card."""


def send_rows(
    peers: Peers,
    layout: PeerLayout,
    state: RoundState,
    x: Tensor | Quantized,
    expert_ids_BK: Tensor,
    weights_BK: Tensor,
    replicas: ReplicaColumns,
) -> Tensor:
    """Writes into every rank's buffer what this rank's B tokens have for it, and signals. Returns home_row_BK, int32:
    the row of `layout.home_RD` where the result of each choice will lie, -1 for none.

    Token t goes to replica (t + rank) mod count of each expert; ids int32, those outside [0, E) to none. Where sums
    come home there is one row of each rank that has any choice, in the order of the first one there, and behind these
    -1. `send_rows_reference` is the definition.
    """
    run = send_rows_triton if uses_triton(peers.own) else send_rows_reference
    return run(peers, layout, state, x, expert_ids_BK, weights_BK, replicas)


# For each rank n that holds a chosen expert of token t: rows_n[r * B + t] = x[t]; for every n: slots_n[r * B + t, k]
#   addresses_ptr int64 [N]: of each rank's buffer, parts of it at the offsets *_at; progress_ptr int64 [2]
#   x_ptr [B, D], rows strided; scales_ptr fp32 [G, B] strided, or None; ids_ptr int32 [B, K]; weights_ptr fp32 [B, K],
#   sent where SUMS; ranks_ptr, slots_ptr int32 [E, C]; count_ptr int32 [E]; home_row_ptr int32 [B, K]
#   grid (at most MOST_PROGRAMS,): a piece is BLOCK_D columns of one token; a program takes every grid-th piece. The
#   first piece of a token brings slots, weights and scales along. K, D and G are filled up by masks.


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def _send_kernel(
    addresses_ptr,
    progress_ptr,
    x_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    ranks_ptr,
    slots_ptr,
    count_ptr,
    home_row_ptr,
    num_tokens,
    num_columns,
    num_scales,
    num_experts,
    num_replicas,
    stride_x,
    stride_scale_g,
    stride_scale_t,
    rank,
    slots_at,
    weights_at,
    scales_at,
    rows_at,
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    k = tl.arange(0, BLOCK_K)
    num_blocks = tl.cdiv(num_columns, BLOCK_D)
    for piece in range(tl.program_id(0), num_tokens * num_blocks, tl.num_programs(0)):
        token, block = (piece // num_blocks).to(tl.int64), piece % num_blocks
        record = rank.to(tl.int64) * num_tokens + token
        choice, turn = token * TOP_K + k, token + rank
        to_rank, to_slot = replica_of(
            ids_ptr, ranks_ptr, slots_ptr, count_ptr, choice, turn, k < TOP_K, num_experts, num_replicas
        )
        d = block * BLOCK_D + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + token * stride_x + d, mask=d < num_columns)
        for turn in range(NUM_RANKS):
            # Each rank begins with another, so that not all write to the same one at once.
            peer = (rank + turn) % NUM_RANKS
            address = tl.load(addresses_ptr + peer)
            here = to_rank == peer
            goes = tl.max(here.to(tl.int32), axis=0) > 0
            row_ptr = tl.multiple_of((address + rows_at).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
            tl.store(row_ptr + record * num_columns + d, x, mask=goes & (d < num_columns))
            if block == 0:
                slot_ptr = (address + slots_at).to(tl.pointer_type(tl.int32))
                tl.store(slot_ptr + record * TOP_K + k, tl.where(here, to_slot, -1), mask=k < TOP_K)
                if SUMS:
                    weights = tl.load(weights_ptr + token * TOP_K + k, mask=k < TOP_K, other=0.0)
                    weight_ptr = (address + weights_at).to(tl.pointer_type(tl.float32))
                    tl.store(weight_ptr + record * TOP_K + k, weights, mask=goes & (k < TOP_K))
                if scales_ptr is not None:
                    g = tl.arange(0, BLOCK_G)
                    in_g = g < num_scales
                    scales = tl.load(scales_ptr + g * stride_scale_g + token * stride_scale_t, mask=in_g, other=0.0)
                    scale_ptr = (address + scales_at).to(tl.pointer_type(tl.float32))
                    tl.store(scale_ptr + record * num_scales + g, scales, mask=goes & in_g)
        if block == 0:
            home_ptr = home_row_ptr + token * TOP_K
            if SUMS:
                same_earlier = (to_rank[:, None] == to_rank[None, :]) & (k[None, :] < k[:, None])
                sums = ((tl.max(same_earlier.to(tl.int32), axis=1) == 0) & (to_rank >= 0)).to(tl.int32)
                home = to_rank.to(tl.int64) * num_tokens + token
                tl.store(home_ptr + tl.cumsum(sums, axis=0) - 1, home.to(tl.int32), mask=sums > 0)
                tl.store(home_ptr + k, -1, mask=(k >= tl.sum(sums, axis=0)) & (k < TOP_K))
            else:
                home = tl.where(to_rank >= 0, token * TOP_K + k, -1)
                tl.store(home_ptr + k, home.to(tl.int32), mask=k < TOP_K)
    signal_peers(addresses_ptr, progress_ptr, rank, num_tokens, NUM_RANKS)


def send_rows_triton(
    peers: Peers,
    layout: PeerLayout,
    state: RoundState,
    x: Tensor | Quantized,
    expert_ids_BK: Tensor,
    weights_BK: Tensor,
    replicas: ReplicaColumns,
) -> Tensor:
    """`send_rows` as one launch; with no tokens too, since the others wait for the signal."""
    x_BD, scales_GB = _check_operands(peers, layout, x, expert_ids_BK, weights_BK)
    if x_BD.dtype == FP8:
        x_BD = x_BD.view(torch.int8)  # bytes are moved, nothing is computed
    num_tokens = x_BD.shape[0]
    home_row_BK = torch.empty_like(expert_ids_BK, memory_format=torch.contiguous_format)
    block_d = min(next_power_of_2(layout.width), _PIECE_BYTES // x_BD.element_size())
    num_pieces = num_tokens * cdiv(layout.width, block_d)
    _send_kernel[(max(1, min(num_pieces, MOST_PROGRAMS)),)](
        peers.addresses_N,
        state.progress_2,
        x_BD,
        scales_GB,
        expert_ids_BK.contiguous(),
        weights_BK.contiguous(),
        *replicas,
        home_row_BK,
        num_tokens,
        layout.width,
        layout.num_scales,
        *replicas.ranks_EC.shape,
        x_BD.stride(0),
        *((0, 0) if scales_GB is None else scales_GB.stride()),
        peers.rank,
        layout.slots_at,
        layout.weights_at,
        layout.scales_at,
        layout.rows_at,
        NUM_RANKS=layout.num_ranks,
        TOP_K=layout.top_k,
        SUMS=layout.sums,
        BLOCK_K=next_power_of_2(layout.top_k),
        BLOCK_D=block_d,
        BLOCK_G=next_power_of_2(layout.num_scales),
        num_warps=4,
        **dependent_launch(x_BD),
    )
    return home_row_BK


def _check_operands(
    peers: Peers, layout: PeerLayout, x: Tensor | Quantized, expert_ids_BK: Tensor, weights_BK: Tensor
) -> tuple[Tensor, Tensor | None]:
    x_BD, scales_GB = x if isinstance(x, Quantized) else (x, None)
    num_tokens = x_BD.shape[0]
    assert num_tokens <= layout.capacity, f"{num_tokens} tokens, the buffers have room for {layout.capacity}"
    assert layout.capacity < 1 << TOKEN_BITS, f"a capacity of {layout.capacity} tokens does not fit the flags"
    assert_shape("x_BD", x_BD, (None, layout.width))
    assert_dtype("x_BD", x_BD, layout.row_dtype)
    assert_last_contiguous("x_BD", x_BD)
    if scales_GB is not None:
        assert_shape("scales_GB", scales_GB, (layout.num_scales, num_tokens))
    assert_shape("expert_ids_BK", expert_ids_BK, (num_tokens, layout.top_k))
    assert_dtype("expert_ids_BK", expert_ids_BK, torch.int32)
    assert_shape("weights_BK", weights_BK, (num_tokens, layout.top_k))
    assert_dtype("weights_BK", weights_BK, torch.float32)
    num_bytes = peers.own.numel()
    assert num_bytes == layout.num_bytes, f"a buffer of {num_bytes} bytes, the layout has {layout.num_bytes}"
    return x_BD, scales_GB


def send_rows_reference(
    peers: Peers,
    layout: PeerLayout,
    state: RoundState,
    x: Tensor | Quantized,
    expert_ids_BK: Tensor,
    weights_BK: Tensor,
    replicas: ReplicaColumns,
) -> Tensor:
    """The definition, in plain torch."""
    x_BD, scales_GB = _check_operands(peers, layout, x, expert_ids_BK, weights_BK)
    num_tokens, rank = x_BD.shape[0], peers.rank
    to_rank_BK, to_slot_BK, first_BK = choose_replicas_reference(expert_ids_BK, replicas, rank)
    own = slice(rank * num_tokens, (rank + 1) * num_tokens)
    for peer, buffer in enumerate(peers.buffers):
        here_BK = to_rank_BK == peer
        goes_B = here_BK.any(dim=1)
        layout.slots_XK(buffer, num_tokens)[own] = to_slot_BK.where(here_BK, -1)
        layout.rows_XD(buffer, num_tokens)[own].view(torch.uint8)[goes_B] = x_BD.contiguous().view(torch.uint8)[goes_B]
        if scales_GB is not None:
            layout.scales_XG(buffer, num_tokens)[own][goes_B] = scales_GB.T[goes_B]
        if layout.sums:
            layout.weights_XK(buffer, num_tokens)[own][goes_B] = weights_BK[goes_B]
    signal_reference(peers, layout, state, num_tokens)
    token_B1 = torch.arange(num_tokens)[:, None]
    if layout.sums:
        home_BK = (first_BK.long() * num_tokens + token_B1).masked_fill(first_BK < 0, -1)
        return home_BK.gather(1, (first_BK < 0).int().argsort(dim=1, stable=True)).int()
    home_BK = token_B1 * layout.top_k + torch.arange(layout.top_k)
    return home_BK.masked_fill(to_rank_BK < 0, -1).int()
