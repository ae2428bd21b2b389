"""`kernels/attention_prefill.py` on any card, where no other kernel serves: keys and values as such or in e4m3.
The reference there defines it.

Knows pages, positions and heads; knows neither layers nor requests.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_quantize import UNIT, KVScales
from kernels.tiles import TileConfig, device_generation

# out[i] = sum_j 2^(s[i, j] - max) v[j] / sum_j 2^(s[i, j] - max), s = scale * log2(e) * q . k, tiles of keys in order
#   q_ptr [T, H, C], k_ptr [N, P, G, C], v_ptr [N, P, G, V], one dtype, any strides but the last; or k and v e4m3, with
#   k_scale_ptr, v_scale_ptr fp32 [N, P, G] (else None): k's go into the scores, v's into the weights; int32: tables_ptr
#   [B, M], query_starts_ptr [B + 1], query_offsets_ptr, kv_lens_ptr, kv_starts_ptr (or None) [B]; out_ptr [T, H, V] and
#   lse_ptr fp32 [T, H] (or None) contiguous
#   grid (cdiv(max_query_len, BLOCK_M / PACK), H / PACK, B): a program owns BLOCK_M / PACK queries of PACK heads that
#   share a kv head, the last ones first (they see the most keys). fp32 accumulation; the head width is summed in two
#   parts, so that 192 costs 128 + 64 and not 256.
#   Tiles of keys stand at multiples of BLOCK_N, wherever the chunk begins; a tile that a row does not see leaves it
#   exactly as it was. Tiles that every row sees whole go without a mask, with the same arithmetic. Keys that no row
#   sees are not read: the nearest key that is seen stands in for them. Rows past the chunk are zero queries, not
#   written.


@triton.jit
def _attend_tiles(
    state,
    q,
    q_rest,
    query,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    scale_log2,
    kv_start,
    first,
    end,
    begin_tile,
    end_tile,
    stride_kn,
    stride_kp,
    stride_vn,
    stride_vp,
    stride_sn,
    stride_sp,
    MASKED: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Keys begin_tile to end_tile, tile by tile, into (acc, total, maximum)."""
    acc, total, maximum = state
    n, c, rest, cv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_REST), tl.arange(0, BLOCK_V)
    # The table's entries are fetched a tile ahead, so that the loads of keys and values wait for no other load.
    index = tl.minimum(tl.maximum(begin_tile + n, first), end - 1) - kv_start
    block = tl.load(table_ptr + index // PAGE, mask=index >= 0, other=0)
    for start in range(begin_tile, end_tile, BLOCK_N):
        key = start + n
        index = key - kv_start
        if MASKED:
            index = tl.minimum(tl.maximum(key, first), end - 1) - kv_start
        next_index = tl.minimum(tl.maximum(key + BLOCK_N, first), end - 1) - kv_start
        next_block = tl.load(table_ptr + next_index // PAGE)
        in_page = index % PAGE
        k_ptrs = k_ptr + (block.to(tl.int64) * stride_kn + in_page * stride_kp)[:, None]
        if WIDTH >= BLOCK_C:
            k = tl.load(k_ptrs + c[None, :])
        else:
            k = tl.load(k_ptrs + c[None, :], mask=(c < WIDTH)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if WIDTH > BLOCK_C:
            if WIDTH == BLOCK_C + BLOCK_REST:
                k_rest = tl.load(k_ptrs + BLOCK_C + rest[None, :])
            else:
                k_rest = tl.load(k_ptrs + BLOCK_C + rest[None, :], mask=(rest < WIDTH - BLOCK_C)[None, :], other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, input_precision="ieee")
        if k_scale_ptr is not None:
            scale_place = block.to(tl.int64) * stride_sn + in_page * stride_sp
            scores *= tl.load(k_scale_ptr + scale_place)[None, :]
        if MASKED:
            seen = (key >= first)[None, :] & (key < end)[None, :] & (key[None, :] <= query[:, None])
            if WINDOW > 0:
                seen &= key[None, :] > query[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale_log2)
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(tl.fma(scores, scale_log2, -base[:, None]))
        decay = tl.exp2(maximum - base)
        total = tl.fma(total, decay, tl.sum(weights, axis=1))
        v_ptrs = v_ptr + (block.to(tl.int64) * stride_vn + in_page * stride_vp)[:, None] + cv[None, :]
        if VALUE_WIDTH == BLOCK_V:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=(cv < VALUE_WIDTH)[None, :], other=0.0)
        if v_scale_ptr is not None:
            weights *= (tl.load(v_scale_ptr + scale_place) * UNIT)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        maximum, block = new_maximum, next_block
    return acc, total, maximum


@triton.jit(do_not_specialize=["stride_tb"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
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
    stride_kn,
    stride_kp,
    stride_kg,
    stride_vn,
    stride_vp,
    stride_vg,
    stride_sn,
    stride_sp,
    stride_sg,
    stride_tb,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
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
    m = tl.arange(0, BLOCK_M)
    in_chunk = tile * BLOCK_Q + m // PACK
    head = tl.program_id(1) * PACK + m % PACK
    query, row, real = offset + in_chunk, first_row + in_chunk, in_chunk < query_len
    c, rest, cv = tl.arange(0, BLOCK_C), BLOCK_C + tl.arange(0, BLOCK_REST), tl.arange(0, BLOCK_V)
    q_ptrs = q_ptr + (row * stride_qt + head.to(tl.int64) * stride_qh)[:, None]
    q = tl.load(q_ptrs + c[None, :], mask=real[:, None] & (c < WIDTH)[None, :], other=0.0)
    q_rest = q
    if WIDTH > BLOCK_C:
        q_rest = tl.load(q_ptrs + rest[None, :], mask=real[:, None] & (rest < WIDTH)[None, :], other=0.0)
    first_query, end_query = offset + tile * BLOCK_Q, offset + tl.minimum(query_len, (tile + 1) * BLOCK_Q)
    kv_end = kv_start + tl.load(kv_lens_ptr + sequence)
    first, end = kv_start, tl.minimum(kv_end, end_query)
    # Tiles from begin_full to end_full are seen whole by every row: no edge of the keys, the diagonal or the window.
    begin_full = kv_start
    if WINDOW > 0:
        first = tl.maximum(first, first_query - WINDOW + 1)
        begin_full = tl.maximum(begin_full, end_query - WINDOW)
    begin_full = tl.minimum(tl.cdiv(begin_full, BLOCK_N) * BLOCK_N, end)
    end_full = tl.maximum(tl.minimum(end, first_query + 1) // BLOCK_N * BLOCK_N, begin_full)
    kv_head = (tl.program_id(1) * PACK // GROUP).to(tl.int64)
    table_ptr = tables_ptr + sequence * stride_tb
    k_ptr += kv_head * stride_kg
    v_ptr += kv_head * stride_vg
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head * stride_sg
        v_scale_ptr += kv_head * stride_sg
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    state = acc, total, maximum
    # fmt: off
    if WINDOW > 0 or kv_starts_ptr is not None:
        state = _attend_tiles(
            state, q, q_rest, query, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, scale_log2,
            kv_start, first, end, tl.where(first < end, first // BLOCK_N * BLOCK_N, end), begin_full,
            stride_kn, stride_kp, stride_vn, stride_vp, stride_sn, stride_sp, True,
            PAGE, WIDTH, VALUE_WIDTH, WINDOW, BLOCK_N, BLOCK_C, BLOCK_REST, BLOCK_V,
        )
    state = _attend_tiles(
        state, q, q_rest, query, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, scale_log2,
        kv_start, first, end, begin_full, end_full,
        stride_kn, stride_kp, stride_vn, stride_vp, stride_sn, stride_sp, False,
        PAGE, WIDTH, VALUE_WIDTH, WINDOW, BLOCK_N, BLOCK_C, BLOCK_REST, BLOCK_V,
    )
    acc, total, maximum = _attend_tiles(
        state, q, q_rest, query, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, scale_log2,
        kv_start, first, end, end_full, end,
        stride_kn, stride_kp, stride_vn, stride_vp, stride_sn, stride_sp, True,
        PAGE, WIDTH, VALUE_WIDTH, WINDOW, BLOCK_N, BLOCK_C, BLOCK_REST, BLOCK_V,
    )
    # fmt: on
    total = tl.where(total == 0.0, 1.0, total)
    if v_scale_ptr is not None:
        acc /= UNIT
    out = acc / total[:, None]
    out_row = row * num_heads + head
    out_ptrs = out_ptr + out_row[:, None] * VALUE_WIDTH + cv[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (cv < VALUE_WIDTH)[None, :])
    if lse_ptr is not None:
        # A row without keys keeps -inf, its maximum. The factor, ln 2, turns log2 into ln.
        tl.store(lse_ptr + out_row, (maximum + tl.log2(total)) * 0.6931471805599453, mask=real)


def attention_prefill_tiles(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    kv_starts_B: Tensor | None,
    out_THV: Tensor,
    lse_TH: Tensor,
    scales: KVScales | None,
    *,
    scale: float,
    window: int,
    max_query_len: int,
) -> None:
    """Fills out_THV and lse_TH. Operands are checked by the caller."""
    num_heads, width = q_THC.shape[1:]
    num_kv_heads, value_width = v_cache_NPGV.shape[2:]
    group = num_heads // num_kv_heads
    tile = prefill_tile(q_THC.dtype, width, value_width, device_generation(q_THC))
    k_NPG, v_NPG = scales[:2] if scales else (None, None)
    pack = min(group & -group, tile.block_m)  # heads of one kv head in a tile: a power of two that divides the group
    _prefill_kernel[(cdiv(max_query_len * pack, tile.block_m), num_heads // pack, block_tables_BM.shape[0])](
        q_THC,
        k_cache_NPGC,
        v_cache_NPGV,
        k_NPG,
        v_NPG,
        block_tables_BM,
        query_starts_B1,
        query_offsets_B,
        kv_lens_B,
        kv_starts_B,
        out_THV,
        lse_TH,
        scale * log2(e),
        num_heads,
        *q_THC.stride()[:2],
        *k_cache_NPGC.stride()[:3],
        *v_cache_NPGV.stride()[:3],
        *((0, 0, 0) if k_NPG is None else k_NPG.stride()),
        block_tables_BM.stride(0),
        GROUP=group,
        PACK=pack,
        PAGE=k_cache_NPGC.shape[1],
        WIDTH=width,
        VALUE_WIDTH=value_width,
        WINDOW=window,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_C=tile.block_k,
        BLOCK_REST=max(16, next_power_of_2(width - tile.block_k)),
        BLOCK_V=max(16, next_power_of_2(value_width)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(q_THC),
    )


def prefill_tile(dtype: torch.dtype, width: int, value_width: int, generation: int) -> TileConfig:
    """One tile per (dtype, widths), whatever the chunk's length: the row sum's order may follow the tile's shape.

    For what `attention_prefill_hopper.py` does not serve. block_k is the first part of the head width, its largest
    power of two. Queries take (width x 128) x 2 bytes of shared memory, each stage (width + value_width) x 64 x 2.
    """
    block_c = max(16, 1 << (width.bit_length() - 1))
    if dtype == torch.float32:
        return TileConfig(32, 32, block_c, num_warps=4, num_stages=1)
    if generation >= 9 and max(width, value_width) <= 128:
        return TileConfig(128, 64, block_c, num_warps=8, num_stages=3)
    if max(width, value_width) <= 128:
        return TileConfig(128, 64, block_c, num_warps=8, num_stages=2)
    return TileConfig(64, 32, block_c, num_warps=4, num_stages=2)
