"""Absorbed latent attention (MLA) of one new token per sequence: all heads share one latent and one rotary key.

Knows pages, lengths and heads; the projections into and out of the latent space are the model's affair.

    s[p] = scale * (q_latent[b, h] . c[p] + q_pe[b, h] . k_pe[p])
    o_latent[b, h] = sum over p < kv_len of softmax_p(s) * c[p]
    cache row p = (c[p] of width L, k_pe[p] of width R), X = L + R
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
    cdiv,
    next_power_of_2,
    uses_triton,
)
from kernels.kv_tiles import OnlineSoftmax, gather_kv_tile, tile_product
from kernels.split_kv import merge_splits, num_splits, split_workspace, tokens_per_split

_REFERENCE_TILE = 128  # keys visited at once by the reference, at multiples of this position


def mla_decode(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
) -> Tensor:
    """o_latent_BHL in q's dtype. `mla_decode_reference` is the definition.

    block_tables_BM int32 (entries past kv_len are never used), kv_lens_B int32 (with the new token; 0 gives zeros).
    max_kv_len >= every kv_len; it bounds the work and does not change a bit of the result.
    """
    return (mla_decode_triton if uses_triton(q_latent_BHL) else mla_decode_reference)(
        q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B, scale=scale, max_kv_len=max_kv_len
    )


def _check_operands(
    q_latent_BHL: Tensor, q_pe_BHR: Tensor, cache_NPX: Tensor, block_tables_BM: Tensor, kv_lens_B: Tensor
) -> None:
    num_sequences, num_heads, latent = q_latent_BHL.shape
    assert_shape("q_pe_BHR", q_pe_BHR, (num_sequences, num_heads, None))
    assert_shape("cache_NPX", cache_NPX, (None, None, latent + q_pe_BHR.shape[2]))
    assert_shape("block_tables_BM", block_tables_BM, (num_sequences, None))
    assert_shape("kv_lens_B", kv_lens_B, (num_sequences,))
    for name, x in (("block_tables_BM", block_tables_BM), ("kv_lens_B", kv_lens_B)):
        assert_dtype(name, x, torch.int32)
    for name, x in (("q_latent_BHL", q_latent_BHL), ("q_pe_BHR", q_pe_BHR), ("cache_NPX", cache_NPX)):
        assert_last_contiguous(name, x)
        assert_dtype(name, x, q_latent_BHL.dtype)
    assert_same_device(
        q_latent_BHL, q_pe_BHR=q_pe_BHR, cache_NPX=cache_NPX, block_tables_BM=block_tables_BM, kv_lens_B=kv_lens_B
    )


# Stage 1, per split of the keys: max = max_p s[p], total = sum_p 2^(s[p] - max), sum = sum_p 2^(s[p] - max) c[p],
#   s[p] = scale * log2(e) * (q_latent . c[p] + q_pe . k_pe[p]); stage 2 is kernels/split_kv.py
#   q_latent_ptr [B, H, L], q_pe_ptr [B, H, R], cache_ptr [N, P, L + R], one dtype, any strides but the last;
#   tables_ptr int32 [B, M], kv_lens_ptr int32 [B]; sums_ptr fp32 [B, S, H, L], stats_ptr fp32 [B, S, H, 2], contiguous
#   grid (B * cdiv(H, BLOCK_H), S): a program owns one split of one sequence for BLOCK_H heads, the rows of one tile;
#   the head tiles of a split run side by side and share its latents in L2. A latent is loaded once, for both products.
#   fp32 accumulation. Rows from H on are zero queries, not written; keys from kv_len on are not read.
#   A split without keys writes nothing and is not read.


@triton.jit
def _mla_kernel(
    q_latent_ptr,
    q_pe_ptr,
    cache_ptr,
    tables_ptr,
    kv_lens_ptr,
    sums_ptr,
    stats_ptr,
    scale_log2,
    page_size,
    num_heads,
    head_tiles,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    stride_cn,
    stride_cp,
    stride_tb,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    sequence, split = (tl.program_id(0) // head_tiles).to(tl.int64), tl.program_id(1)
    kv_len = tl.load(kv_lens_ptr + sequence)
    split_len = tokens_per_split(kv_len, SPLIT_LEN)
    first, end = split * split_len, tl.minimum(kv_len, (split + 1) * split_len)
    if first >= end:
        return
    head = (tl.program_id(0) % head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < num_heads
    l, r = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    q_latent_ptrs = q_latent_ptr + sequence * stride_lb + head[:, None] * stride_lh + l[None, :]
    q_latent = tl.load(q_latent_ptrs, mask=real[:, None] & (l < LATENT)[None, :], other=0.0)
    q_pe_ptrs = q_pe_ptr + sequence * stride_rb + head[:, None] * stride_rh + r[None, :]
    q_pe = tl.load(q_pe_ptrs, mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    table_ptr = tables_ptr + sequence * stride_tb
    maximum = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_L), tl.float32)
    for start in range(first, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        valid = key < end
        block = tl.load(table_ptr + key // page_size, mask=valid, other=0).to(tl.int64)
        row_ptrs = cache_ptr + block * stride_cn + (key % page_size).to(tl.int64) * stride_cp
        latent = tl.load(row_ptrs[:, None] + l[None, :], mask=valid[:, None] & (l < LATENT)[None, :], other=0.0)
        k_pe = tl.load(row_ptrs[:, None] + LATENT + r[None, :], mask=valid[:, None] & (r < ROPE)[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), scores, input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    part = (sequence * tl.num_programs(1) + split) * num_heads + head
    tl.store(stats_ptr + part * 2, maximum, mask=real)
    tl.store(stats_ptr + part * 2 + 1, total, mask=real)
    tl.store(sums_ptr + part[:, None] * LATENT + l[None, :], acc, mask=real[:, None] & (l < LATENT)[None, :])


def mla_decode_triton(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
) -> Tensor:
    """`mla_decode` as two launches: the splits, then their merge."""
    _check_operands(q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
    num_sequences, num_heads, latent = q_latent_BHL.shape
    if num_sequences == 0 or max_kv_len == 0:
        return q_latent_BHL.new_zeros(num_sequences, num_heads, latent)
    split_len, wide = _split_len(num_heads), q_latent_BHL.dtype == torch.float32
    block_h = 16 if num_heads <= 16 or wide else 32
    splits, head_tiles = num_splits(max_kv_len, split_len), cdiv(num_heads, block_h)
    sums_BSHL, stats_BSH2 = split_workspace(num_sequences, splits, num_heads, latent, q_latent_BHL.device)
    _mla_kernel[(num_sequences * head_tiles, splits)](
        q_latent_BHL,
        q_pe_BHR,
        cache_NPX,
        block_tables_BM,
        kv_lens_B,
        sums_BSHL,
        stats_BSH2,
        scale * log2(e),
        cache_NPX.shape[1],
        num_heads,
        head_tiles,
        *q_latent_BHL.stride()[:2],
        *q_pe_BHR.stride()[:2],
        *cache_NPX.stride()[:2],
        block_tables_BM.stride(0),
        LATENT=latent,
        ROPE=q_pe_BHR.shape[2],
        SPLIT_LEN=split_len,
        BLOCK_H=block_h,
        BLOCK_N=16 if wide else 32,
        BLOCK_L=max(16, next_power_of_2(latent)),
        BLOCK_R=max(16, next_power_of_2(q_pe_BHR.shape[2])),
        num_warps=4 if block_h == 16 else 8,
        num_stages=1 if wide else 2,
    )
    out_BHL = q_latent_BHL.new_empty(num_sequences, num_heads, latent)
    merge_splits(sums_BSHL, stats_BSH2, kv_lens_B, out_BHL, split_len=split_len, window=0)
    return out_BHL


def _split_len(num_heads: int) -> int:
    """Keys of one program. With many heads a split's partial sums (H * L fp32) weigh as much as its keys."""
    return 256 if num_heads <= 32 else 1024


def mla_decode_reference(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
) -> Tensor:
    """The definition, and the CPU's product path: fp32, tiles of keys at fixed positions, in order."""
    _check_operands(q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
    num_sequences, num_heads, latent = q_latent_BHL.shape
    q_BHX = torch.cat([q_latent_BHL, q_pe_BHR], dim=2).float()
    kv_lens_B = kv_lens_B.long()
    state = OnlineSoftmax(num_sequences, num_heads, latent, q_BHX.device)
    for start in range(0, int(kv_lens_B.max()) if num_sequences else 0, _REFERENCE_TILE):
        live_b = (kv_lens_B > start).nonzero().flatten()
        position_bW = torch.arange(start, start + _REFERENCE_TILE, device=q_BHX.device).expand(live_b.shape[0], -1)
        valid_bW = position_bW < kv_lens_B[live_b, None]
        rows_bWX = gather_kv_tile(cache_NPX.unsqueeze(2), block_tables_BM[live_b], position_bW, valid_bW).squeeze(1)
        scores_bHW = tile_product(q_BHX[live_b], rows_bWX.transpose(1, 2)) * scale
        scores_bHW.masked_fill_(~valid_bW.unsqueeze(1), float("-inf"))
        state.add(live_b, scores_bHW, rows_bWX[..., :latent])
    out_BHL, _ = state.result()
    return out_BHL.to(q_latent_BHL.dtype)
