"""How decode cuts a sequence's keys into splits, and the merge of the splits' partial results, in order.

Knows lengths and partial softmax results; knows neither keys nor pages. Its idea: where a sequence is cut follows from
its own length alone, never from the batch, and the merge goes from the first split to the last: the same bits in any
company. A sequence of one split is done without it.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs

MAX_SPLITS = tl.constexpr(64)
"""Splits of one sequence at most: bounds the workspace. A longer sequence gets longer splits, by whole multiples."""

ALIGN = tl.constexpr(128)
"""A window's first split begins at a multiple of this, below its first key: tiles stand at multiples of their size."""


@dataclass(frozen=True)
class SplitRule:
    """Splits of `length` keys while `few` of them hold the sequence; then twice as long, and beyond that four times.

    Short splits are for short sequences, which have too few programs otherwise; in long ones a partial result should
    weigh little against its keys.
    """

    length: int
    few: int

    def most(self, max_kv_len: int, window: int = 0) -> int:
        """No sequence of at most this length has more splits."""
        span = min(max_kv_len, window + ALIGN.value) if window else max_kv_len
        return max(min(cdiv(span, self.length), self.few), min(cdiv(span, 4 * self.length), MAX_SPLITS.value))


def split_workspace(
    num_sequences: int, splits: int, num_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(parts_BSHV in `dtype`, lse_BSH fp32), uninitialised: the attention over a split alone, and the logarithm to base
    2 of its sum of 2^score."""
    parts_BSHV = torch.empty(num_sequences, splits, num_heads, width, dtype=dtype, device=device)
    return parts_BSHV, torch.empty(num_sequences, splits, num_heads, dtype=torch.float32, device=device)


@triton.jit
def split_bounds(kv_len, split, SPLIT_LEN: tl.constexpr, FEW_SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """(first key, end, number of splits with a key) of a sequence of this length."""
    seen = 0
    if WINDOW > 0:
        seen = tl.maximum(kv_len - WINDOW, 0)
    origin = seen // ALIGN * ALIGN
    span = kv_len - origin
    split_len = tl.cdiv(span, 4 * SPLIT_LEN * MAX_SPLITS) * (4 * SPLIT_LEN)
    split_len = tl.where(span <= 2 * FEW_SPLITS * SPLIT_LEN, 2 * SPLIT_LEN, split_len)
    split_len = tl.where(span <= FEW_SPLITS * SPLIT_LEN, SPLIT_LEN, split_len)
    first = origin + split * split_len
    end = tl.minimum(first + split_len, kv_len)
    return tl.maximum(first, seen), end, tl.cdiv(span, split_len)


# out[b, h] = sum_s w_s parts[b, s, h] / sum_s w_s,  w_s = 2^(lse[b, s, h] - max_s lse), s ascending
#   parts_ptr [B, S, H, V] in any dtype, lse_ptr fp32 [B, S, H], out_ptr [B, H, V], contiguous; kv_lens_ptr int32 [B]
#   grid (cdiv(V, BLOCK_V), cdiv(H, BLOCK_H), B): a program owns BLOCK_V columns of BLOCK_H heads of one sequence. A
#   sequence of one split or none is done already. fp32; heads from H on and columns from V on are masked.


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    parts_ptr,
    lse_ptr,
    kv_lens_ptr,
    out_ptr,
    num_splits,
    num_heads,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    sequence = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + sequence)
    _, _, splits = split_bounds(kv_len, 0, SPLIT_LEN, FEW_SPLITS, WINDOW)
    if splits <= 1:
        return
    head, s = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_S)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real, inside = head < num_heads, (head < num_heads)[:, None] & (v < VALUE_WIDTH)[None, :]
    first_row = sequence * num_splits * num_heads + head
    lse = tl.load(
        lse_ptr + first_row[None, :] + (s * num_heads)[:, None],
        mask=(s < splits)[:, None] & real[None, :],
        other=float("-inf"),
    )
    maximum = tl.max(lse, axis=0)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    for split in tl.range(0, splits, loop_unroll_factor=8):
        row = first_row + split * num_heads
        weight = tl.exp2(tl.load(lse_ptr + row, mask=real, other=float("-inf")) - maximum)
        part = tl.load(parts_ptr + row[:, None] * VALUE_WIDTH + v[None, :], mask=inside, other=0.0)
        total += weight
        acc = tl.fma(part.to(tl.float32), tl.broadcast_to(weight[:, None], (BLOCK_H, BLOCK_V)), acc)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + (sequence * num_heads + head)[:, None] * VALUE_WIDTH + v[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


def merge_splits(
    parts_BSHV: Tensor, lse_BSH: Tensor, kv_lens_B: Tensor, out_BHV: Tensor, rule: SplitRule, *, window: int = 0
) -> None:
    """Fills out_BHV (contiguous) from the parts of `split_workspace`, where a sequence has more than one."""
    num_sequences, splits, num_heads, width = parts_BSHV.shape
    assert out_BHV.is_contiguous(), f"out_BHV has strides {out_BHV.stride()}; the merge writes it as one block"
    # Few results: one warp for 128 columns, so that many programs share the latency. Many: eight columns a thread.
    block_h, block_v, num_warps = 1, min(next_power_of_2(width), 128), 1
    if num_sequences * num_heads * width > 2**19:
        block_h, block_v, num_warps = min(8, next_power_of_2(num_heads)), block_v, 4
    _merge_splits_kernel[(cdiv(width, block_v), cdiv(num_heads, block_h), num_sequences)](
        parts_BSHV,
        lse_BSH,
        kv_lens_B,
        out_BHV,
        splits,
        num_heads,
        VALUE_WIDTH=width,
        BLOCK_V=block_v,
        BLOCK_H=block_h,
        BLOCK_S=MAX_SPLITS.value,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        WINDOW=window,
        num_warps=num_warps,
        **dependent_launch(parts_BSHV),
    )
