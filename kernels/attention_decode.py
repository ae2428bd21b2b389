"""Attention of one new token per sequence over its paged keys and values (grouped-query heads).

Knows pages, lengths and heads; knows neither layers nor requests.

    out_BHV[b, h] = sum over positions p of softmax_p(scale * q[b, h] . k[p]) * v[p]
    max(0, kv_len - window) <= p < kv_len   (without a window: 0 <= p < kv_len)
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import (
    assert_dtype,
    assert_last_contiguous,
    assert_same_device,
    assert_shape,
    next_power_of_2,
    uses_triton,
)
from kernels.kv_tiles import OnlineSoftmax, gather_kv_tile, tile_product
from kernels.split_kv import merge_splits, num_splits, split_workspace, tokens_per_split

_SPLIT_LEN = 256  # keys of one program; longer only in sequences of more than 64 such splits

_REFERENCE_TILE = 128  # keys visited at once by the reference, at multiples of this position


def attention_decode(
    q_BHC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_kv_len: int,
) -> Tensor:
    """out_BHV in q's dtype. `attention_decode_reference` is the definition.

    block_tables_BM int32 (entries past kv_len are never used), kv_lens_B int32 (with the new token; 0 gives zeros),
    window 0: all positions. max_kv_len >= every kv_len; it bounds the work and does not change a bit of the result.
    """
    return (attention_decode_triton if uses_triton(q_BHC) else attention_decode_reference)(
        q_BHC,
        k_cache_NPGC,
        v_cache_NPGV,
        block_tables_BM,
        kv_lens_B,
        scale=scale,
        window=window,
        max_kv_len=max_kv_len,
    )


def _check_operands(
    q_BHC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGV: Tensor, block_tables_BM: Tensor, kv_lens_B: Tensor
) -> None:
    num_sequences, num_heads, width = q_BHC.shape
    num_blocks, page_size, num_kv_heads, _ = k_cache_NPGC.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} kv heads"
    assert_shape("k_cache_NPGC", k_cache_NPGC, (num_blocks, page_size, num_kv_heads, width))
    assert_shape("v_cache_NPGV", v_cache_NPGV, (num_blocks, page_size, num_kv_heads, None))
    assert_shape("block_tables_BM", block_tables_BM, (num_sequences, None))
    assert_shape("kv_lens_B", kv_lens_B, (num_sequences,))
    for name, x in (("block_tables_BM", block_tables_BM), ("kv_lens_B", kv_lens_B)):
        assert_dtype(name, x, torch.int32)
    for name, x in (("q_BHC", q_BHC), ("k_cache_NPGC", k_cache_NPGC), ("v_cache_NPGV", v_cache_NPGV)):
        assert_last_contiguous(name, x)
        assert_dtype(name, x, q_BHC.dtype)
    assert_same_device(
        q_BHC, k_cache=k_cache_NPGC, v_cache=v_cache_NPGV, block_tables_BM=block_tables_BM, kv_lens_B=kv_lens_B
    )


# Stage 1, per split of the keys: max = max_p s[p], total = sum_p 2^(s[p] - max), sum = sum_p 2^(s[p] - max) v[p],
#   s[p] = scale * log2(e) * q . k[p]; stage 2 is kernels/split_kv.py
#   q_ptr [B, H, C], k_ptr [N, P, G, C], v_ptr [N, P, G, V], one dtype, any strides but the last; int32: tables_ptr
#   [B, M], kv_lens_ptr [B]; sums_ptr fp32 [B, S, H, V], stats_ptr fp32 [B, S, H, 2], contiguous
#   grid (B, G, S): a program owns one split of one kv head with all its query heads, as the rows of one tile.
#   fp32 accumulation. Rows from H / G on are zero queries, not written; keys outside [first, end) are not read: their
#   score is -inf, their value 0. A split without keys writes nothing and is not read.


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    kv_lens_ptr,
    sums_ptr,
    stats_ptr,
    scale_log2,
    page_size,
    num_heads,
    stride_qb,
    stride_qh,
    stride_kn,
    stride_kp,
    stride_kg,
    stride_vn,
    stride_vp,
    stride_vg,
    stride_tb,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_head = tl.program_id(1).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + sequence)
    split_len = tokens_per_split(kv_len, SPLIT_LEN)
    first, end = split * split_len, tl.minimum(kv_len, (split + 1) * split_len)
    start_tile = first
    if WINDOW > 0:
        first = tl.maximum(first, kv_len - WINDOW)
        start_tile = tl.maximum(start_tile, first // BLOCK_N * BLOCK_N)
    if first >= end:
        return
    row = tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + row
    c, cv = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_V)
    q_ptrs = q_ptr + sequence * stride_qb + head[:, None] * stride_qh + c[None, :]
    q = tl.load(q_ptrs, mask=(row < GROUP)[:, None] & (c < WIDTH)[None, :], other=0.0)
    table_ptr = tables_ptr + sequence * stride_tb
    k_ptr += kv_head * stride_kg
    v_ptr += kv_head * stride_vg
    maximum = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    for start in range(start_tile, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        valid = (key >= first) & (key < end)
        block = tl.load(table_ptr + key // page_size, mask=valid, other=0).to(tl.int64)
        offset = (key % page_size).to(tl.int64)
        k_ptrs = k_ptr + (block * stride_kn + offset * stride_kp)[:, None] + c[None, :]
        k = tl.load(k_ptrs, mask=valid[:, None] & (c < WIDTH)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        v_ptrs = v_ptr + (block * stride_vn + offset * stride_vp)[:, None] + cv[None, :]
        v = tl.load(v_ptrs, mask=valid[:, None] & (cv < VALUE_WIDTH)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    part = (sequence * tl.num_programs(2) + split) * num_heads + head
    tl.store(stats_ptr + part * 2, maximum, mask=row < GROUP)
    tl.store(stats_ptr + part * 2 + 1, total, mask=row < GROUP)
    sums_ptrs = sums_ptr + part[:, None] * VALUE_WIDTH + cv[None, :]
    tl.store(sums_ptrs, acc, mask=(row < GROUP)[:, None] & (cv < VALUE_WIDTH)[None, :])


def attention_decode_triton(
    q_BHC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_kv_len: int,
) -> Tensor:
    """`attention_decode` as two launches: the splits, then their merge."""
    _check_operands(q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B)
    num_sequences, num_heads, width = q_BHC.shape
    num_kv_heads, value_width = v_cache_NPGV.shape[2:]
    group, wide = num_heads // num_kv_heads, q_BHC.dtype == torch.float32
    if num_sequences == 0 or max_kv_len == 0:
        return q_BHC.new_zeros(num_sequences, num_heads, value_width)
    splits = num_splits(max_kv_len, _SPLIT_LEN)
    sums_BSHV, stats_BSH2 = split_workspace(num_sequences, splits, num_heads, value_width, q_BHC.device)
    _decode_kernel[(num_sequences, num_kv_heads, splits)](
        q_BHC,
        k_cache_NPGC,
        v_cache_NPGV,
        block_tables_BM,
        kv_lens_B,
        sums_BSHV,
        stats_BSH2,
        scale * log2(e),
        k_cache_NPGC.shape[1],
        num_heads,
        *q_BHC.stride()[:2],
        *k_cache_NPGC.stride()[:3],
        *v_cache_NPGV.stride()[:3],
        block_tables_BM.stride(0),
        GROUP=group,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        WINDOW=window,
        SPLIT_LEN=_SPLIT_LEN,
        BLOCK_H=max(16, next_power_of_2(group)),
        BLOCK_N=32 if wide else 64,
        BLOCK_C=max(16, next_power_of_2(width)),
        BLOCK_V=max(16, next_power_of_2(value_width)),
        num_warps=4,
        num_stages=1 if wide else 2,
    )
    out_BHV = q_BHC.new_empty(num_sequences, num_heads, value_width)
    merge_splits(sums_BSHV, stats_BSH2, kv_lens_B, out_BHV, split_len=_SPLIT_LEN, window=window)
    return out_BHV


def attention_decode_reference(
    q_BHC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_kv_len: int,
) -> Tensor:
    """The definition, and the CPU's product path: fp32, tiles of keys at fixed positions, in order."""
    _check_operands(q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B)
    num_sequences, num_heads, width = q_BHC.shape
    num_kv_heads, value_width = v_cache_NPGV.shape[2:]
    group, device = num_heads // num_kv_heads, q_BHC.device
    q_BGMC = q_BHC.float().reshape(num_sequences, num_kv_heads, group, width)
    kv_lens_B = kv_lens_B.long()
    first_B = (kv_lens_B - window).clamp_min(0) if window else torch.zeros_like(kv_lens_B)
    state = OnlineSoftmax(num_sequences * num_kv_heads, group, value_width, device)
    head_G = torch.arange(num_kv_heads, device=device)
    for start in range(0, int(kv_lens_B.max()) if num_sequences else 0, _REFERENCE_TILE):
        live_b = ((kv_lens_B > start) & (first_B < start + _REFERENCE_TILE)).nonzero().flatten()
        if live_b.shape[0] == 0:
            continue
        position_bW = torch.arange(start, start + _REFERENCE_TILE, device=device).expand(live_b.shape[0], -1)
        valid_bW = (position_bW >= first_B[live_b, None]) & (position_bW < kv_lens_B[live_b, None])
        tables_bM = block_tables_BM[live_b]
        k_bGWC = gather_kv_tile(k_cache_NPGC, tables_bM, position_bW, valid_bW)
        v_bGWV = gather_kv_tile(v_cache_NPGV, tables_bM, position_bW, valid_bW)
        scores_IMW = tile_product(q_BGMC[live_b].flatten(0, 1), k_bGWC.flatten(0, 1).transpose(1, 2)) * scale
        scores_bGMW = scores_IMW.view(live_b.shape[0], num_kv_heads, group, _REFERENCE_TILE)
        scores_bGMW.masked_fill_(~valid_bW[:, None, None, :], float("-inf"))
        live_I = (live_b.unsqueeze(1) * num_kv_heads + head_G).flatten()
        state.add(live_I, scores_IMW, v_bGWV.flatten(0, 1))
    out_IMV, _ = state.result()
    return out_IMV.view(num_sequences, num_heads, value_width).to(q_BHC.dtype)
