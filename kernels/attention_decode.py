"""Attention of one new token per sequence over its paged keys and values (grouped-query heads).

Knows pages, lengths and heads; knows neither layers nor requests.

    out_BHV[b, h] = sum over positions p of softmax_p(scale * q[b, h] . k[p]) * v[p]
    max(0, kv_len - window) <= p < kv_len   (without a window: 0 <= p < kv_len)

With few sequences a launch takes along what qk_rope_store.py does (attention_decode_rows.py).
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_decode_int4 import attention_decode_int4
from kernels.attention_decode_rows import attention_decode_rows
from kernels.checks import assert_dtype, assert_same_device, assert_shape, next_power_of_2, uses_triton
from kernels.decode_cut import SPLITS, decode_tile, most_parts, takes_runs
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_int4 import Int4Scales
from kernels.kv_quantize import UNIT, KVScales
from kernels.kv_tiles import OnlineSoftmax, gather_kv_tile, tile_product
from kernels.new_rows import NewRows
from kernels.paged_kv import check_paged_kv
from kernels.split_kv import SplitRule
from kernels.split_runs import RUN, Parts, merge_next, merge_runs, no_keys, splits_of

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
    scales: KVScales | Int4Scales | None = None,
    new: NewRows | None = None,
) -> Tensor:
    """out_BHV in q's dtype. `attention_decode_reference` is the definition.

    block_tables_BM int32 (entries past kv_len are never used), kv_lens_B int32 (with the new token; 0 gives zeros),
    window 0: all positions; scales: of caches in e4m3 or int4. max_kv_len >= every kv_len; it bounds the work and does
    not change a bit of the result. `new`, where `stores_new` (attention_decode_rows.py): queries are as projected, and
    what `qk_rope_store` does with them, the keys and the values comes first, in the same launch, with the same bits.
    """
    operands = (q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B)
    options = {"scale": scale, "window": window, "max_kv_len": max_kv_len, "scales": scales}
    if uses_triton(q_BHC):
        return attention_decode_triton(*operands, **options, new=new)
    assert new is None, "the reference stores nothing"
    return attention_decode_reference(*operands, **options)


def _check_operands(
    q_BHC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    scales: KVScales | Int4Scales | None,
) -> None:
    check_paged_kv(q_BHC, k_cache_NPGC, v_cache_NPGV, scales, q_BHC.shape[2])
    assert_shape("block_tables_BM", block_tables_BM, (q_BHC.shape[0], None))
    assert_shape("kv_lens_B", kv_lens_B, (q_BHC.shape[0],))
    for name, x in (("block_tables_BM", block_tables_BM), ("kv_lens_B", kv_lens_B)):
        assert_dtype(name, x, torch.int32)
    assert_same_device(
        q_BHC, k_cache=k_cache_NPGC, v_cache=v_cache_NPGV, block_tables_BM=block_tables_BM, kv_lens_B=kv_lens_B
    )


# The partial result of each split, or of each run of splits (kernels/split_runs.py), s[p] = scale * log2(e) * q . k[p];
#   a sequence of one is done then: out[b, h] = sum_p 2^s[p] v[p] / sum_p 2^s[p]
#   q_ptr [B, H, C], k_ptr, v_ptr [N, P, G, C] and [N, P, G, V], one dtype, any strides but the last; or k and v e4m3,
#   with k_scale_ptr, v_scale_ptr fp32 [N, P, G] (else None): k's go into the scores, v's into the weights, which makes
#   acc a multiple of UNIT; int32: tables_ptr [B, M], kv_lens_ptr [B]; out_ptr [B, H, V]; acc_ptr fp32 [B, S, H, V] and
#   sums_ptr fp32 [2, B, S, H]
#   grid (G, S, B): a program owns one split or, WHOLE, one run of one kv head with all its query heads, as the rows of
#   one tile. fp32 accumulation. Rows from H / G on are zero queries, not written. Tiles stand at multiples of BLOCK_N;
#   keys outside [first, end) are not read (the nearest key inside stands in) and weigh 0. A program without keys ends.


@triton.jit(do_not_specialize=["stride_tb", "stride_sum"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tables_ptr,
    kv_lens_ptr,
    out_ptr,
    acc_ptr,
    sums_ptr,
    scale_log2,
    num_heads,
    stride_qb,
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
    stride_sum,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, place, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + sequence)
    seen, origin, split_len, splits = splits_of(kv_len, SPLIT_LEN, FEW_SPLITS, WINDOW)  # pyright: ignore
    own: tl.constexpr = RUN if WHOLE else 1
    split = place * own
    if (split >= splits) & (place > 0):
        wait_for_inputs(PDL)
        return
    first = tl.maximum(origin + split * split_len, seen)
    end = tl.minimum(origin + (split + own) * split_len, kv_len)
    row = tl.arange(0, BLOCK_H)
    head, real = kv_head * GROUP + row, row < GROUP
    n, c, cv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_V)
    table_ptr = tables_ptr + sequence * stride_tb
    k_ptr += kv_head * stride_kg
    v_ptr += kv_head * stride_vg
    maximum, total, acc = no_keys(BLOCK_H, BLOCK_V)
    if WHOLE:
        run_maximum, run_total, run_acc = no_keys(BLOCK_H, BLOCK_V)
        split_end = origin + (split + 1) * split_len
    # The table's entries are fetched a tile ahead, so that the loads of keys and values wait for no other load.
    begin = first // BLOCK_N * BLOCK_N
    index = tl.minimum(tl.maximum(begin + n, first), end - 1)
    block = tl.load(table_ptr + index // PAGE, mask=index >= 0, other=0)
    wait_for_inputs(PDL)  # lengths and tables are older than the launch before
    q_ptrs = q_ptr + sequence * stride_qb + head[:, None] * stride_qh + c[None, :]
    q = tl.load(q_ptrs, mask=real[:, None] & (c < WIDTH)[None, :], other=0.0)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        in_page = tl.minimum(tl.maximum(key, first), end - 1) % PAGE
        next_index = tl.minimum(tl.maximum(key + BLOCK_N, first), end - 1)
        next_block = tl.load(table_ptr + next_index // PAGE)
        k_ptrs = k_ptr + (block.to(tl.int64) * stride_kn + in_page * stride_kp)[:, None] + c[None, :]
        v_ptrs = v_ptr + (block.to(tl.int64) * stride_vn + in_page * stride_vp)[:, None] + cv[None, :]
        if WIDTH == BLOCK_C:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(c < WIDTH)[None, :], other=0.0)
        if VALUE_WIDTH == BLOCK_V:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=(cv < VALUE_WIDTH)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2
        if k_scale_ptr is not None:
            scale_place = block.to(tl.int64) * stride_sn + in_page * stride_sp + kv_head * stride_sg
            scores *= tl.load(k_scale_ptr + scale_place)[None, :]
        scores = tl.where(((key >= first) & (key < end))[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        if v_scale_ptr is not None:
            weights *= (tl.load(v_scale_ptr + scale_place) * UNIT)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        maximum, block = new_maximum, next_block
        if WHOLE:  # noqa: SIM102 - known when it is compiled, what follows is not
            if start + BLOCK_N >= tl.minimum(split_end, end):
                run_maximum, run_total, run_acc = merge_next(run_maximum, run_total, run_acc, maximum, total, acc)
                maximum, total, acc = no_keys(BLOCK_H, BLOCK_V)
                split_end += split_len
    if WHOLE:
        maximum, total, acc = run_maximum, run_total, run_acc
    inside = real[:, None] & (cv < VALUE_WIDTH)[None, :]
    if splits > own:
        part = (sequence * tl.num_programs(1) + place) * num_heads + head
        tl.store(sums_ptr + part, maximum, mask=real)
        tl.store(sums_ptr + stride_sum + part, total, mask=real)
        tl.store(acc_ptr + part[:, None] * VALUE_WIDTH + cv[None, :], acc, mask=inside)
        return
    if v_scale_ptr is not None:
        acc = acc / UNIT
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + (sequence * num_heads + head)[:, None] * VALUE_WIDTH + cv[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


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
    scales: KVScales | Int4Scales | None = None,
    whole: bool | None = None,
    rule: SplitRule = SPLITS,
    new: NewRows | None = None,
) -> Tensor:
    """`attention_decode` as two launches, or as one where no sequence has more than one part. `whole`: a program for
    each run of splits, else for each split; by `takes_runs` unless given. `new`: see `attention_decode`."""
    _check_operands(q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B, scales)
    num_sequences, num_heads, width = q_BHC.shape
    num_kv_heads, value_width = v_cache_NPGV.shape[2:]
    group = num_heads // num_kv_heads
    int4 = isinstance(scales, Int4Scales)
    if num_sequences == 0 or max_kv_len == 0:
        return q_BHC.new_zeros(num_sequences, num_heads, width if int4 else value_width)
    if new is not None:
        assert scales is None and not whole, "new rows are taken by splits of a cache in the model's dtype"
        operands = (q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B, new, rule)
        return attention_decode_rows(*operands, scale=scale, window=window, max_kv_len=max_kv_len)
    if int4:
        operands = (q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B, scales, rule)
        return attention_decode_int4(*operands, scale=scale, window=window, max_kv_len=max_kv_len)
    if whole is None:
        whole = takes_runs(num_sequences * num_kv_heads, max_kv_len, rule)
    number = most_parts(max_kv_len, window, rule, whole=whole)
    num_programs = num_sequences * num_kv_heads * (1 if whole else number)
    tile = decode_tile(num_programs, max_kv_len, rule, wide=q_BHC.dtype == torch.float32, whole=whole)
    out_BHV = q_BHC.new_empty(num_sequences, num_heads, value_width)
    parts = Parts.of(num_sequences, number, num_heads, value_width, q_BHC.device)
    k_NPG, v_NPG = scales[:2] if scales else (None, None)
    _decode_kernel[(num_kv_heads, number, num_sequences)](
        q_BHC,
        k_cache_NPGC,
        v_cache_NPGV,
        k_NPG,
        v_NPG,
        block_tables_BM,
        kv_lens_B,
        out_BHV,
        *parts,
        scale * log2(e),
        num_heads,
        *q_BHC.stride()[:2],
        *k_cache_NPGC.stride()[:3],
        *v_cache_NPGV.stride()[:3],
        *((0, 0, 0) if k_NPG is None else k_NPG.stride()),
        block_tables_BM.stride(0),
        parts.sums_2BPH.stride(0),
        GROUP=group,
        PAGE=k_cache_NPGC.shape[1],
        WIDTH=width,
        VALUE_WIDTH=value_width,
        WINDOW=window,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        WHOLE=whole,
        BLOCK_H=max(16, next_power_of_2(group)),
        BLOCK_N=tile.block_n,
        BLOCK_C=max(16, next_power_of_2(width)),
        BLOCK_V=max(16, next_power_of_2(value_width)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(q_BHC),
    )
    if number > 1:
        unit = UNIT.value if scales else 1.0
        merge_runs(parts, kv_lens_B, out_BHV, rule, window=window, unit=unit, whole=whole)
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
    scales: KVScales | Int4Scales | None = None,
) -> Tensor:
    """The definition, and the CPU's product path: fp32, tiles of keys at fixed positions, in order."""
    _check_operands(q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B, scales)
    num_sequences, num_heads, width = q_BHC.shape
    int4 = isinstance(scales, Int4Scales)
    num_kv_heads, value_width = v_cache_NPGV.shape[2], width if int4 else v_cache_NPGV.shape[3]
    group, device = num_heads // num_kv_heads, q_BHC.device
    q_BGMC = q_BHC.float().reshape(num_sequences, num_kv_heads, group, width)
    kv_lens_B = kv_lens_B.long()
    first_B = (kv_lens_B - window).clamp_min(0) if window else torch.zeros_like(kv_lens_B)
    state = OnlineSoftmax(num_sequences * num_kv_heads, group, value_width, device)
    head_G = torch.arange(num_kv_heads, device=device)
    of_keys, of_values = scales[:2] if scales else (None, None)
    for start in range(0, int(kv_lens_B.max()) if num_sequences else 0, _REFERENCE_TILE):
        live_b = ((kv_lens_B > start) & (first_B < start + _REFERENCE_TILE)).nonzero().flatten()
        if live_b.shape[0] == 0:
            continue
        position_bW = torch.arange(start, start + _REFERENCE_TILE, device=device).expand(live_b.shape[0], -1)
        valid_bW = (position_bW >= first_B[live_b, None]) & (position_bW < kv_lens_B[live_b, None])
        tables_bM = block_tables_BM[live_b]
        k_bGWC = gather_kv_tile(k_cache_NPGC, tables_bM, position_bW, valid_bW, of_keys, int4=int4)
        v_bGWV = gather_kv_tile(v_cache_NPGV, tables_bM, position_bW, valid_bW, of_values, int4=int4)
        scores_IMW = tile_product(q_BGMC[live_b].flatten(0, 1), k_bGWC.flatten(0, 1).transpose(1, 2)) * scale
        scores_bGMW = scores_IMW.view(live_b.shape[0], num_kv_heads, group, _REFERENCE_TILE)
        scores_bGMW.masked_fill_(~valid_bW[:, None, None, :], float("-inf"))
        live_I = (live_b.unsqueeze(1) * num_kv_heads + head_G).flatten()
        state.add(live_I, scores_IMW, v_bGWV.flatten(0, 1))
    out_IMV, _ = state.result()
    return out_IMV.view(num_sequences, num_heads, value_width).to(q_BHC.dtype)
