"""`kernels/attention_decode.py` over a cache in int4; its reference defines it.

Knows pages, lengths and heads; knows neither layers nor requests.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_int4 import attend_int4_tile, empty_state, int4_result
from kernels.checks import next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_int4 import Int4Scales
from kernels.split_kv import SplitRule, merge_splits, split_bounds, split_workspace

# Per split of the keys: out = sum_p 2^s[p] v[p] / sum_p 2^s[p] and lse = log2(sum_p 2^s[p]), s[p] = scale * log2(e) *
#   q . k[p]; a sequence of one split is done then, else kernels/split_kv.py merges
#   q_ptr [B, H, C]; k_ptr, v_ptr uint8 [N, P, G, C / 2] and k_words_ptr, v_words_ptr int32 [N, P, G, 2], keys and
#   values with the same strides; int32: tables_ptr [B, M], kv_lens_ptr [B]; out_ptr [B, H, C], parts_ptr fp32
#   [B, S, H, C], lse_ptr fp32 [B, S, H], contiguous
#   grid (G, S, B): a program owns one split of one kv head with all its query heads, as the rows of one tile.
#   fp32 accumulation. Rows from H / G on are zero queries, not written. Tiles stand at multiples of BLOCK_N; keys
#   outside [first, end) are not read (the nearest key inside stands in) and weigh 0. A split without keys ends at once.


@triton.jit(do_not_specialize=["stride_tb"])
def _decode_int4_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_words_ptr,
    v_words_ptr,
    tables_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_heads,
    stride_qb,
    stride_qh,
    stride_cn,
    stride_cp,
    stride_cg,
    stride_wn,
    stride_wp,
    stride_wg,
    stride_tb,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    HALF_WIDTH: tl.constexpr = WIDTH // 2
    kv_head, split, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + sequence)
    first, end, splits = split_bounds(kv_len, split, SPLIT_LEN, FEW_SPLITS, WINDOW)
    if (first >= end) & (split > 0):
        return
    row = tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + row
    n, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    table_ptr = tables_ptr + sequence * stride_tb
    state = empty_state(BLOCK_H, BLOCK_C)
    # The table's entries are fetched a tile ahead, so that the loads of keys and values wait for no other load.
    begin = first // BLOCK_N * BLOCK_N
    index = tl.minimum(tl.maximum(begin + n, first), end - 1)
    block = tl.load(table_ptr + index // PAGE, mask=index >= 0, other=0)
    q_ptrs = q_ptr + sequence * stride_qb + head[:, None] * stride_qh + c[None, :]
    inside = (row < GROUP)[:, None] & (c < HALF_WIDTH)[None, :]
    q_lower = tl.load(q_ptrs, mask=inside, other=0.0)
    q_upper = tl.load(q_ptrs + HALF_WIDTH, mask=inside, other=0.0)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        in_page = tl.minimum(tl.maximum(key, first), end - 1) % PAGE
        next_index = tl.minimum(tl.maximum(key + BLOCK_N, first), end - 1)
        next_block = tl.load(table_ptr + next_index // PAGE)
        place = (block.to(tl.int64) * stride_cn + in_page * stride_cp + kv_head * stride_cg)[:, None]
        word_place = block.to(tl.int64) * stride_wn + in_page * stride_wp + kv_head * stride_wg
        seen = ((key >= first) & (key < end))[None, :]
        state = attend_int4_tile(
            state, q_lower, q_upper, k_ptr + place, v_ptr + place, k_words_ptr + word_place, v_words_ptr + word_place,
            seen, scale_log2, HALF_WIDTH, BLOCK_C,
        )  # fmt: skip
        block = next_block
    lower, upper, lse = int4_result(state)
    if splits <= 1:
        out_ptrs = out_ptr + (sequence * num_heads + head)[:, None] * WIDTH + c[None, :]
        tl.store(out_ptrs, lower.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptrs + HALF_WIDTH, upper.to(out_ptr.dtype.element_ty), mask=inside)
        return
    part = (sequence * tl.num_programs(1) + split) * num_heads + head
    tl.store(lse_ptr + part, lse, mask=row < GROUP)
    part_ptrs = parts_ptr + part[:, None] * WIDTH + c[None, :]
    tl.store(part_ptrs, lower, mask=inside)
    tl.store(part_ptrs + HALF_WIDTH, upper, mask=inside)


def attention_decode_int4(
    q_BHC: Tensor,
    k_cache_NPGc: Tensor,
    v_cache_NPGc: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    scales: Int4Scales,
    rule: SplitRule,
    *,
    scale: float,
    window: int,
    max_kv_len: int,
) -> Tensor:
    """out_BHC as two launches: the splits, then their merge. Operands are checked by the caller, and not empty."""
    num_sequences, num_heads, width = q_BHC.shape
    num_kv_heads = k_cache_NPGc.shape[2]
    assert k_cache_NPGc.stride() == v_cache_NPGc.stride(), "keys and values lie alike"
    splits = rule.most(max_kv_len, window)
    wide = q_BHC.dtype == torch.float32
    parts_BSHC, lse_BSH = split_workspace(num_sequences, splits, num_heads, width, torch.float32, q_BHC.device)
    out_BHC = q_BHC.new_empty(num_sequences, num_heads, width)
    k_words_NPG2, v_words_NPG2 = scales.words()
    _decode_int4_kernel[(num_kv_heads, splits, num_sequences)](
        q_BHC,
        k_cache_NPGc,
        v_cache_NPGc,
        k_words_NPG2,
        v_words_NPG2,
        block_tables_BM,
        kv_lens_B,
        out_BHC,
        parts_BSHC,
        lse_BSH,
        scale * log2(e),
        num_heads,
        *q_BHC.stride()[:2],
        *k_cache_NPGc.stride()[:3],
        *k_words_NPG2.stride()[:3],
        block_tables_BM.stride(0),
        GROUP=num_heads // num_kv_heads,
        PAGE=k_cache_NPGc.shape[1],
        WIDTH=width,
        WINDOW=window,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        BLOCK_H=max(16, next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_N=32 if wide else 64,
        BLOCK_C=max(16, next_power_of_2(width // 2)),
        num_warps=4,
        num_stages=1 if wide else 3,
        **dependent_launch(q_BHC),
    )
    if splits > 1:
        merge_splits(parts_BSHC, lse_BSH, kv_lens_B, out_BHC, rule, window=window)
    return out_BHC
