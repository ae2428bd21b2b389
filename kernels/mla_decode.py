"""Absorbed latent attention (MLA) of one new token per sequence: all heads share one latent and one rotary key.

Knows pages, lengths and heads; the projections into and out of the latent space are the model's affair.

    s[p] = scale * (q_latent[b, h] . c[p] + q_pe[b, h] . k_pe[p])
    o_latent[b, h] = sum over p < kv_len of softmax_p(s) * c[p]
    cache row p = (c[p] of width L, k_pe[p] of width R), X = L + R
"""
# pyright: reportCallIssue=false, reportOperatorIssue=false

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
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_quantize import UNIT, check_scales
from kernels.kv_tiles import OnlineSoftmax, gather_kv_tile, tile_product
from kernels.mla_decode_hopper import mla_decode_hopper, runs_on_hopper, split_rule
from kernels.mla_order import PieceList
from kernels.split_kv import merge_splits, split_bounds, split_workspace
from kernels.tiles import TileConfig, device_generation

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
    scales_NP2: Tensor | None = None,
    pieces: PieceList | None = None,
) -> Tensor:
    """o_latent_BHL in q's dtype. `mla_decode_reference` is the definition.

    block_tables_BM int32 (entries past kv_len are never used), kv_lens_B int32 (with the new token; 0 gives zeros).
    max_kv_len >= every kv_len; it bounds the work and does not change a bit of the result. scales_NP2 fp32, of a cache
    in e4m3: the latent's and the rotary key's. `pieces`: the step's list, where `list_rule` gives a rule for it
    (mla_decode_hopper.py); it changes no bit.
    """
    return (mla_decode_triton if uses_triton(q_latent_BHL) else mla_decode_reference)(
        q_latent_BHL,
        q_pe_BHR,
        cache_NPX,
        block_tables_BM,
        kv_lens_B,
        scale=scale,
        max_kv_len=max_kv_len,
        scales_NP2=scales_NP2,
        pieces=pieces,
    )


def check_operands(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    scales_NP2: Tensor | None,
) -> None:
    """Shapes, dtypes and devices of `mla_decode`'s operands."""
    num_sequences, num_heads, latent = q_latent_BHL.shape
    assert_shape("q_pe_BHR", q_pe_BHR, (num_sequences, num_heads, None))
    assert_shape("cache_NPX", cache_NPX, (None, None, latent + q_pe_BHR.shape[2]))
    assert_shape("block_tables_BM", block_tables_BM, (num_sequences, None))
    assert_shape("kv_lens_B", kv_lens_B, (num_sequences,))
    for name, x in (("block_tables_BM", block_tables_BM), ("kv_lens_B", kv_lens_B)):
        assert_dtype(name, x, torch.int32)
    for name, x in (("q_latent_BHL", q_latent_BHL), ("q_pe_BHR", q_pe_BHR), ("cache_NPX", cache_NPX)):
        assert_last_contiguous(name, x)
    assert_dtype("q_pe_BHR", q_pe_BHR, q_latent_BHL.dtype)
    check_scales(cache_NPX, scales_NP2, (*cache_NPX.shape[:2], 2), q_latent_BHL.dtype)
    assert_same_device(
        q_latent_BHL, q_pe_BHR=q_pe_BHR, cache_NPX=cache_NPX, block_tables_BM=block_tables_BM, kv_lens_B=kv_lens_B
    )


# Per split of the keys: out = sum_p 2^s[p] c[p] / sum_p 2^s[p] and lse = log2(sum_p 2^s[p]), s[p] = scale * log2(e) *
#   (q_latent . c[p] + q_pe . k_pe[p]); a sequence of one split is done then, else kernels/split_kv.py merges
#   q_latent_ptr [B, H, L], q_pe_ptr [B, H, R], cache_ptr [N, P, L + R], one dtype, any strides but the last; or a
#   cache in e4m3 with scales_ptr fp32 [N, P, 2] (else None), which go into the scores and the weights; int32:
#   tables_ptr [B, M], kv_lens_ptr [B]; out_ptr [B, H, L], parts_ptr [B, S, H, L], lse_ptr fp32 [B, S, H], contiguous
#   grid (cdiv(H, BLOCK_H), S, B): a program owns one split of one sequence for BLOCK_H heads, the rows of one tile;
#   the head tiles of a split run side by side and share its latents in L2. A latent is loaded once, for both products.
#   fp32 accumulation. Rows from H on are zero queries, not written; keys outside [first, end) are not read (the nearest
#   key inside stands in) and weigh 0. A split without keys ends at once.


@triton.jit(do_not_specialize=["stride_tb"])
def _mla_kernel(
    q_latent_ptr,
    q_pe_ptr,
    cache_ptr,
    scales_ptr,
    tables_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    stride_cn,
    stride_cp,
    stride_sn,
    stride_sp,
    stride_tb,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    split, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + sequence)
    first, end, splits = split_bounds(kv_len, split, SPLIT_LEN, FEW_SPLITS, 0)
    if (first >= end) & (split > 0):
        return
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < num_heads
    n, l, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    # The table's entries are fetched a tile ahead, so that the loads of latents wait for no other load.
    table_ptr = tables_ptr + sequence * stride_tb
    if PAGE % BLOCK_N == 0:  # a tile lies in one page
        block = tl.load(table_ptr + first // PAGE, mask=first < end, other=0)
    else:
        index = tl.minimum(first + n, end - 1)
        block = tl.load(table_ptr + index // PAGE, mask=index >= 0, other=0)
    q_latent_ptrs = q_latent_ptr + sequence * stride_lb + (head * stride_lh)[:, None] + l[None, :]
    q_latent = tl.load(q_latent_ptrs, mask=real[:, None] & (l < LATENT)[None, :], other=0.0)
    q_pe_ptrs = q_pe_ptr + sequence * stride_rb + (head * stride_rh)[:, None] + r[None, :]
    q_pe = tl.load(q_pe_ptrs, mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    maximum = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_L), tl.float32)
    for start in range(first, end, BLOCK_N):
        key = start + n
        if PAGE % BLOCK_N == 0:
            next_block = tl.load(table_ptr + tl.minimum(start + BLOCK_N, end - 1) // PAGE)
            in_page = start % PAGE + tl.minimum(n, end - 1 - start)
            row_ptrs = (cache_ptr + block.to(tl.int64) * stride_cn) + (in_page * stride_cp)[:, None]
        else:
            next_block = tl.load(table_ptr + tl.minimum(key + BLOCK_N, end - 1) // PAGE)
            in_page = tl.minimum(key, end - 1) % PAGE
            row_ptrs = cache_ptr + (block.to(tl.int64) * stride_cn + in_page * stride_cp)[:, None]
        if LATENT == BLOCK_L:
            latent = tl.load(row_ptrs + l[None, :])
        else:
            latent = tl.load(row_ptrs + l[None, :], mask=(l < LATENT)[None, :], other=0.0)
        if ROPE == BLOCK_R:
            k_pe = tl.load(row_ptrs + LATENT + r[None, :])
        else:
            k_pe = tl.load(row_ptrs + LATENT + r[None, :], mask=(r < ROPE)[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent.to(q_latent.dtype)), input_precision="ieee")
        if scales_ptr is not None:
            scale_ptrs = scales_ptr + block.to(tl.int64) * stride_sn + in_page * stride_sp
            latent_scale = tl.load(scale_ptrs)
            turned = tl.dot(q_pe, tl.trans(k_pe.to(q_pe.dtype)), input_precision="ieee")
            scores = scores * latent_scale[None, :] + turned * tl.load(scale_ptrs + 1)[None, :]
        else:
            scores = tl.dot(q_pe, tl.trans(k_pe), scores, input_precision="ieee")
        scores *= scale_log2
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        if scales_ptr is not None:
            weights *= (latent_scale * UNIT)[None, :]
        latent = latent.to(q_latent.dtype)
        acc = tl.dot(weights.to(q_latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
        maximum, block = new_maximum, next_block
    real_columns = real[:, None] & (l < LATENT)[None, :]
    total = tl.where(total == 0.0, 1.0, total)
    if scales_ptr is not None:
        acc /= UNIT
    out = acc / total[:, None]
    if splits <= 1:
        out_ptrs = out_ptr + (sequence * num_heads + head)[:, None] * LATENT + l[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=real_columns)
        return
    part = (sequence * tl.num_programs(1) + split) * num_heads + head
    tl.store(lse_ptr + part, maximum + tl.log2(total), mask=real)
    part_ptrs = parts_ptr + part[:, None] * LATENT + l[None, :]
    tl.store(part_ptrs, out.to(parts_ptr.dtype.element_ty), mask=real_columns)


def mla_decode_triton(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
    scales_NP2: Tensor | None = None,
    pieces: PieceList | None = None,
) -> Tensor:
    """`mla_decode` as two launches: the splits, then their merge."""
    check_operands(q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B, scales_NP2)
    num_sequences, num_heads, latent = q_latent_BHL.shape
    if num_sequences == 0 or max_kv_len == 0:
        return q_latent_BHL.new_zeros(num_sequences, num_heads, latent)
    if scales_NP2 is None and runs_on_hopper(q_latent_BHL, q_pe_BHR, cache_NPX):
        operands = (q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
        return mla_decode_hopper(*operands, scale=scale, max_kv_len=max_kv_len, pieces=pieces)
    rule, wide = split_rule(num_heads), q_latent_BHL.dtype == torch.float32
    splits = rule.most(max_kv_len)
    # Latents come out of a norm, so a half holds their means, and rounds eight times finer than bf16 does in the end.
    part_dtype = torch.float32 if wide else torch.float16
    parts_BSHL, lse_BSH = split_workspace(num_sequences, splits, num_heads, latent, part_dtype, q_latent_BHL.device)
    out_BHL = q_latent_BHL.new_empty(num_sequences, num_heads, latent)
    tile = _mla_tile(q_latent_BHL.dtype, num_heads, device_generation(q_latent_BHL))
    _mla_kernel[(cdiv(num_heads, tile.block_m), splits, num_sequences)](
        q_latent_BHL,
        q_pe_BHR,
        cache_NPX,
        scales_NP2,
        block_tables_BM,
        kv_lens_B,
        out_BHL,
        parts_BSHL,
        lse_BSH,
        scale * log2(e),
        num_heads,
        *q_latent_BHL.stride()[:2],
        *q_pe_BHR.stride()[:2],
        *cache_NPX.stride()[:2],
        *((0, 0) if scales_NP2 is None else scales_NP2.stride()[:2]),
        block_tables_BM.stride(0),
        PAGE=cache_NPX.shape[1],
        LATENT=latent,
        ROPE=q_pe_BHR.shape[2],
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        BLOCK_H=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_L=max(16, next_power_of_2(latent)),
        BLOCK_R=max(16, next_power_of_2(q_pe_BHR.shape[2])),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(q_latent_BHL),
    )
    if splits > 1:
        merge_splits(parts_BSHL, lse_BSH, kv_lens_B, out_BHL, rule)
    return out_BHL


def _mla_tile(dtype: torch.dtype, num_heads: int, generation: int) -> TileConfig:
    """Heads x keys of a program, where `mla_decode_hopper.py` does not serve."""
    if dtype == torch.float32:
        return TileConfig(16, 16, 0, num_warps=4, num_stages=1)
    # A tile of 32 latents of 576 takes 36 KiB: two stages fit any card, three those with more shared memory.
    return TileConfig(16 if num_heads <= 16 else 32, 32, 0, num_warps=4, num_stages=3 if generation >= 9 else 2)


def mla_splits(num_heads: int, max_kv_len: int) -> int:
    """Splits that the workspace of a step has room for, of each sequence."""
    return split_rule(num_heads).most(max_kv_len)


def mla_decode_reference(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
    scales_NP2: Tensor | None = None,
    pieces: PieceList | None = None,
) -> Tensor:
    """The definition, and the CPU's product path: fp32, tiles of keys at fixed positions, in order. Reads no list."""
    check_operands(q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B, scales_NP2)
    num_sequences, num_heads, latent = q_latent_BHL.shape
    q_BHX = torch.cat([q_latent_BHL, q_pe_BHR], dim=2).float()
    kv_lens_B = kv_lens_B.long()
    state = OnlineSoftmax(num_sequences, num_heads, latent, q_BHX.device)
    for start in range(0, int(kv_lens_B.max()) if num_sequences else 0, _REFERENCE_TILE):
        live_b = (kv_lens_B > start).nonzero().flatten()
        position_bW = torch.arange(start, start + _REFERENCE_TILE, device=q_BHX.device).expand(live_b.shape[0], -1)
        valid_bW = position_bW < kv_lens_B[live_b, None]
        rows_bWX = gather_kv_tile(cache_NPX.unsqueeze(2), block_tables_BM[live_b], position_bW, valid_bW).squeeze(1)
        if scales_NP2 is not None:
            scales_b1W2 = gather_kv_tile(scales_NP2.unsqueeze(2), block_tables_BM[live_b], position_bW, valid_bW)
            rows_bWX[..., :latent] *= scales_b1W2[:, 0, :, :1]
            rows_bWX[..., latent:] *= scales_b1W2[:, 0, :, 1:]
        scores_bHW = tile_product(q_BHX[live_b], rows_bWX.transpose(1, 2)) * scale
        scores_bHW.masked_fill_(~valid_bW.unsqueeze(1), float("-inf"))
        state.add(live_b, scores_bHW, rows_bWX[..., :latent])
    out_BHL, _ = state.result()
    return out_BHL.to(q_latent_BHL.dtype)
