"""How decode cuts a sequence's keys into splits, and the merge of the splits' partial sums, in order.

Knows lengths and partial softmax sums; knows neither keys nor pages. Its idea: where a sequence is cut follows from its
own length alone, never from the batch, and the merge goes from the first split to the last: the same bits in any
company. A sequence of one split takes the same way.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2

MAX_SPLITS = tl.constexpr(64)
"""Splits of one sequence at most: bounds the workspace. A longer sequence gets longer splits, by whole multiples."""


def num_splits(max_kv_len: int, split_len: int) -> int:
    """Splits of the longest sequence of a step."""
    return min(cdiv(max_kv_len, split_len), MAX_SPLITS.value)


def split_workspace(
    num_sequences: int, splits: int, num_heads: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(sums_BSHV, stats_BSH2) fp32, uninitialised: a split's unnormalised sum; its largest score (log2), its total."""
    sums_BSHV = torch.empty(num_sequences, splits, num_heads, width, dtype=torch.float32, device=device)
    stats_BSH2 = torch.empty(num_sequences, splits, num_heads, 2, dtype=torch.float32, device=device)
    return sums_BSHV, stats_BSH2


@triton.jit
def tokens_per_split(kv_len, SPLIT_LEN: tl.constexpr):
    """The length of a split of a sequence of this length."""
    return tl.cdiv(kv_len, SPLIT_LEN * MAX_SPLITS) * SPLIT_LEN


# out[b, h] = sum_s 2^(max_s - max) sum_s / sum_s 2^(max_s - max) total_s, s ascending over splits with a key
#   sums_ptr fp32 [B, S, H, V], stats_ptr fp32 [B, S, H, 2], out_ptr [B, H, V], contiguous; kv_lens_ptr int32 [B]
#   grid (B, H): a program owns one head of one sequence. Splits without a key are not read (they were not written).
#   fp32; a sequence without keys gives 0; columns from V on are masked: the block is a power of two.


@triton.jit
def _merge_splits_kernel(
    sums_ptr,
    stats_ptr,
    kv_lens_ptr,
    out_ptr,
    num_splits,
    num_heads,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    WINDOW: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_len = tl.load(kv_lens_ptr + sequence)
    first_split, end_split = 0, 0
    if kv_len > 0:
        split_len = tokens_per_split(kv_len, SPLIT_LEN)
        end_split = tl.cdiv(kv_len, split_len)
        if WINDOW > 0:
            first_split = tl.maximum(kv_len - WINDOW, 0) // split_len
    column = tl.arange(0, BLOCK_V)
    maximum, total = float("-inf"), 0.0
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for split in range(first_split, end_split):
        part = (sequence * num_splits + split) * num_heads + head
        part_maximum = tl.load(stats_ptr + part * 2)
        part_total = tl.load(stats_ptr + part * 2 + 1)
        part_sum = tl.load(sums_ptr + part * VALUE_WIDTH + column, mask=column < VALUE_WIDTH, other=0.0)
        new_maximum = tl.maximum(maximum, part_maximum)
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay, weight = tl.exp2(maximum - base), tl.exp2(part_maximum - base)
        total = total * decay + part_total * weight
        acc = acc * decay + part_sum * weight
        maximum = new_maximum
    out = acc / tl.where(total == 0.0, 1.0, total)
    out_ptrs = out_ptr + (sequence * num_heads + head) * VALUE_WIDTH + column
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=column < VALUE_WIDTH)


def merge_splits(
    sums_BSHV: Tensor, stats_BSH2: Tensor, kv_lens_B: Tensor, out_BHV: Tensor, *, split_len: int, window: int
) -> None:
    """Fills out_BHV (contiguous) from the partial sums of `split_workspace`."""
    num_sequences, splits, num_heads, width = sums_BSHV.shape
    assert out_BHV.is_contiguous(), f"out_BHV has strides {out_BHV.stride()}; the merge writes it as one block"
    _merge_splits_kernel[(num_sequences, num_heads)](
        sums_BSHV,
        stats_BSH2,
        kv_lens_B,
        out_BHV,
        splits,
        num_heads,
        VALUE_WIDTH=width,
        BLOCK_V=next_power_of_2(width),
        SPLIT_LEN=split_len,
        WINDOW=window,
        num_warps=2 if width <= 256 else 4,
    )
