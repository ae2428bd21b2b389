"""`kernels/attention_prefill.py` over a cache in int4; its reference defines it.

Knows pages, positions and heads; knows neither layers nor requests.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_int4 import attend_int4_tile, empty_state, int4_result
from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_int4 import Int4Scales
from kernels.tiles import TileConfig

# out[i] = sum_j 2^(s[i, j] - max) v[j] / sum_j 2^(s[i, j] - max), s = scale * log2(e) * q . k, tiles of keys in order
#   q_ptr [T, H, C]; k_ptr, v_ptr uint8 [N, P, G, C / 2] and k_words_ptr, v_words_ptr int32 [N, P, G, 2], keys and
#   values with the same strides; int32: tables_ptr [B, M], query_starts_ptr [B + 1], query_offsets_ptr, kv_lens_ptr,
#   kv_starts_ptr (or None) [B]; out_ptr [T, H, C] and lse_ptr fp32 [T, H] contiguous
#   grid (cdiv(max_query_len, BLOCK_M / PACK), H / PACK, B): a program owns BLOCK_M / PACK queries of PACK heads that
#   share a kv head, the last ones first (they see the most keys). fp32 accumulation.
#   Tiles of keys stand at multiples of BLOCK_N, wherever the chunk begins; a tile that a row does not see leaves it
#   exactly as it was. Keys that no row sees are not read: the nearest key that is seen stands in for them. Rows past
#   the chunk are zero queries, not written.


@triton.jit(do_not_specialize=["stride_tb"])
def _prefill_int4_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_words_ptr,
    v_words_ptr,
    tables_ptr,
    query_starts_ptr,
    query_offsets_ptr,
    kv_lens_ptr,
    kv_starts_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    num_heads,
    stride_qt,
    stride_qh,
    stride_cn,
    stride_cp,
    stride_cg,
    stride_wn,
    stride_wp,
    stride_wg,
    stride_tb,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    HALF_WIDTH: tl.constexpr = WIDTH // 2
    BLOCK_Q: tl.constexpr = BLOCK_M // PACK
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tl.program_id(2).to(tl.int64)
    first_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
    query_len = (tl.load(query_starts_ptr + sequence + 1) - first_row).to(tl.int32)
    if tile * BLOCK_Q >= query_len:
        return
    offset = tl.load(query_offsets_ptr + sequence)
    kv_start = 0
    if kv_starts_ptr is not None:
        kv_start = tl.load(kv_starts_ptr + sequence)
    m, n, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    in_chunk = tile * BLOCK_Q + m // PACK
    head = tl.program_id(1) * PACK + m % PACK
    query, row, real = offset + in_chunk, first_row + in_chunk, in_chunk < query_len
    inside = real[:, None] & (c < HALF_WIDTH)[None, :]
    q_ptrs = q_ptr + (row * stride_qt + head.to(tl.int64) * stride_qh)[:, None] + c[None, :]
    q_lower = tl.load(q_ptrs, mask=inside, other=0.0)
    q_upper = tl.load(q_ptrs + HALF_WIDTH, mask=inside, other=0.0)
    first_query, end_query = offset + tile * BLOCK_Q, offset + tl.minimum(query_len, (tile + 1) * BLOCK_Q)
    first, end = kv_start, tl.minimum(kv_start + tl.load(kv_lens_ptr + sequence), end_query)
    if WINDOW > 0:
        first = tl.maximum(first, first_query - WINDOW + 1)
    kv_head = (tl.program_id(1) * PACK // GROUP).to(tl.int64)
    table_ptr = tables_ptr + sequence * stride_tb
    state = empty_state(BLOCK_M, BLOCK_C)
    # The table's entries are fetched a tile ahead, so that the loads of keys and values wait for no other load.
    begin = tl.where(first < end, first // BLOCK_N * BLOCK_N, end)
    index = tl.minimum(tl.maximum(begin + n, first), end - 1) - kv_start
    block = tl.load(table_ptr + index // PAGE, mask=index >= 0, other=0)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        in_page = (tl.minimum(tl.maximum(key, first), end - 1) - kv_start) % PAGE
        next_index = tl.minimum(tl.maximum(key + BLOCK_N, first), end - 1) - kv_start
        next_block = tl.load(table_ptr + next_index // PAGE)
        place = (block.to(tl.int64) * stride_cn + in_page * stride_cp + kv_head * stride_cg)[:, None]
        word_place = block.to(tl.int64) * stride_wn + in_page * stride_wp + kv_head * stride_wg
        seen = (key >= first)[None, :] & (key < end)[None, :] & (key[None, :] <= query[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > query[:, None] - WINDOW
        state = attend_int4_tile(
            state, q_lower, q_upper, k_ptr + place, v_ptr + place, k_words_ptr + word_place, v_words_ptr + word_place,
            seen, scale_log2, HALF_WIDTH, BLOCK_C,
        )  # fmt: skip
        block = next_block
    lower, upper, lse = int4_result(state)
    out_row = row * num_heads + head
    out_ptrs = out_ptr + out_row[:, None] * WIDTH + c[None, :]
    tl.store(out_ptrs, lower.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptrs + HALF_WIDTH, upper.to(out_ptr.dtype.element_ty), mask=inside)
    # The factor, ln 2, turns log2 into ln.
    tl.store(lse_ptr + out_row, lse * 0.6931471805599453, mask=real)


def attention_prefill_int4(
    q_THC: Tensor,
    k_cache_NPGc: Tensor,
    v_cache_NPGc: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    kv_starts_B: Tensor | None,
    out_THC: Tensor,
    lse_TH: Tensor,
    scales: Int4Scales,
    *,
    scale: float,
    window: int,
    max_query_len: int,
) -> None:
    """Fills out_THC and lse_TH. Operands are checked by the caller."""
    num_heads, width = q_THC.shape[1:]
    group = num_heads // k_cache_NPGc.shape[2]
    assert k_cache_NPGc.stride() == v_cache_NPGc.stride(), "keys and values lie alike"
    tile = _prefill_tile(q_THC.dtype, width)
    pack = min(group & -group, tile.block_m)  # heads of one kv head in a tile: a power of two that divides the group
    k_words_NPG2, v_words_NPG2 = scales.words()
    _prefill_int4_kernel[(cdiv(max_query_len * pack, tile.block_m), num_heads // pack, block_tables_BM.shape[0])](
        q_THC,
        k_cache_NPGc,
        v_cache_NPGc,
        k_words_NPG2,
        v_words_NPG2,
        block_tables_BM,
        query_starts_B1,
        query_offsets_B,
        kv_lens_B,
        kv_starts_B,
        out_THC,
        lse_TH,
        scale * log2(e),
        num_heads,
        *q_THC.stride()[:2],
        *k_cache_NPGc.stride()[:3],
        *k_words_NPG2.stride()[:3],
        block_tables_BM.stride(0),
        GROUP=group,
        PACK=pack,
        PAGE=k_cache_NPGc.shape[1],
        WIDTH=width,
        WINDOW=window,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_C=max(16, next_power_of_2(width // 2)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(q_THC),
    )


def _prefill_tile(dtype: torch.dtype, width: int) -> TileConfig:
    """One tile per (dtype, width), whatever the chunk's length: the row sum's order may follow the tile's shape."""
    if dtype == torch.float32:
        return TileConfig(32, 32, 0, num_warps=4, num_stages=1)
    return TileConfig(128 if width <= 128 else 64, 64, 0, num_warps=8 if width <= 128 else 4, num_stages=2)
