"""Decode's splits in runs of eight: partial results kept as sums, and merged in order, by whoever has them.

Knows lengths and partial softmax results; knows neither keys nor pages. The splits of a sequence (split_kv.py) are
merged in two levels that follow from its own length alone: those of a run from the first to the last, then the runs.
So a program may take a whole run and never write its splits, or many programs a split each: the bits are the same.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import AHEAD_ROWS, dependent_launch, wait_for_inputs
from kernels.split_kv import ALIGN, MAX_SPLITS, SplitRule

RUN = tl.constexpr(8)
"""Splits that are merged first. No sequence has more than 64 splits, so none has more than eight runs."""


def most_runs(rule: SplitRule, max_kv_len: int, window: int = 0) -> int:
    """No sequence of at most this length has more runs."""
    return cdiv(rule.most(max_kv_len, window), RUN.value)


class Parts(NamedTuple):
    """Room for P partial results of each of B sequences. In any of them: the largest score, the sum of
    2^(score - largest), and the values weighted so; -inf, 0 and 0 without keys."""

    acc_BPHV: Tensor  # fp32
    sums_2BPH: Tensor  # fp32: the largest scores, then the sums

    @classmethod
    def of(cls, num_sequences: int, number: int, num_heads: int, width: int, device: torch.device) -> Parts:
        acc_BPHV = torch.empty(num_sequences, number, num_heads, width, dtype=torch.float32, device=device)
        return cls(acc_BPHV, torch.empty(2, *acc_BPHV.shape[:3], dtype=torch.float32, device=device))


@triton.jit
def splits_of(kv_len, SPLIT_LEN: tl.constexpr, FEW_SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """(first key that counts, where the first split begins, length of a split, number of splits with a key)."""
    seen = 0
    if WINDOW > 0:
        seen = tl.maximum(kv_len - WINDOW, 0)
    origin = seen // ALIGN * ALIGN
    span = kv_len - origin
    split_len = tl.cdiv(span, 4 * SPLIT_LEN * MAX_SPLITS) * (4 * SPLIT_LEN)
    split_len = tl.where(span <= 2 * FEW_SPLITS * SPLIT_LEN, 2 * SPLIT_LEN, split_len)
    split_len = tl.where(span <= FEW_SPLITS * SPLIT_LEN, SPLIT_LEN, split_len)
    return seen, origin, split_len, tl.cdiv(span, split_len)


@triton.jit
def no_keys(BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr):
    """The partial result of no keys."""
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    return largest, tl.zeros((BLOCK_H,), tl.float32), tl.zeros((BLOCK_H, BLOCK_V), tl.float32)


@triton.jit
def merge_next(largest, total, acc, next_largest, next_total, next_acc):
    """The partial result of the keys so far and the next ones. Spelt as fma, so that every kernel rounds alike."""
    both = tl.maximum(largest, next_largest)
    base = tl.where(both == float("-inf"), 0.0, both)
    decay, weight = tl.exp2(largest - base), tl.exp2(next_largest - base)
    total = tl.fma(next_total, weight, total * decay)
    acc = tl.fma(next_acc, tl.broadcast_to(weight[:, None], next_acc.shape), acc * decay[:, None])
    return both, total, acc


# out[b, h] = acc / total of all parts of [b, h], merged run by run
#   acc_ptr fp32 [B, P, H, V], sums_ptr fp32 [2, B, P, H], out_ptr [B, H, V], contiguous; kv_lens_ptr int32 [B]
#   grid (cdiv(V, BLOCK_V), cdiv(H, BLOCK_H), B): a program owns BLOCK_V columns of BLOCK_H heads of a sequence; a part
#   is a split or, WHOLE, a run. A sequence of one part or none is done already. Heads and columns beyond the last are
#   masked.


@triton.jit
def _run_from(
    acc_ptrs, largest_ptrs, total_ptrs, number, real, inside, HEADS: tl.constexpr, VALUE_WIDTH: tl.constexpr
):  # fmt: skip
    """(largest scores [BLOCK_H], sums [BLOCK_H], values [BLOCK_H, BLOCK_V]) of RUN parts, `number` of which are there;
    the pointers: of the first."""
    largests, totals, accs = (), (), ()
    for part in tl.static_range(RUN):  # pyright: ignore
        here = part < number
        largests += (tl.load(largest_ptrs + part * HEADS, mask=here & real, other=float("-inf")),)
        totals += (tl.load(total_ptrs + part * HEADS, mask=here & real, other=0.0),)
        accs += (tl.load(acc_ptrs + part * (HEADS * VALUE_WIDTH), mask=here & inside, other=0.0),)
    return largests, totals, accs


@triton.jit(do_not_specialize=["num_parts", "stride_sum"])
def _merge_runs_kernel(
    acc_ptr,
    sums_ptr,
    kv_lens_ptr,
    out_ptr,
    num_parts,
    stride_sum,
    unit,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + sequence)
    _, _, _, parts = splits_of(kv_len, SPLIT_LEN, FEW_SPLITS, WINDOW)  # pyright: ignore
    if WHOLE:
        parts = tl.cdiv(parts, RUN)
    head, v = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = head < HEADS
    inside = real[:, None] & (v < VALUE_WIDTH)[None, :]
    row = sequence * num_parts * HEADS + head
    largest_ptrs, total_ptrs = sums_ptr + row, sums_ptr + stride_sum + row
    acc_ptrs = acc_ptr + row[:, None] * VALUE_WIDTH + v[None, :]
    wait_for_inputs(PDL)  # lengths are older than the launch before
    largests, totals, accs = _run_from(acc_ptrs, largest_ptrs, total_ptrs, parts, real, inside, HEADS, VALUE_WIDTH)
    whole_largest, whole_total, whole_acc = no_keys(BLOCK_H, BLOCK_V)  # pyright: ignore
    # Parts come from the turn before: what a loop carries is asked for outside of the sums, all of it at once. Beside
    # its use, ptxas would ask for three parts, for two behind their sums, and for the others behind those. One H200,
    # microseconds, so / so: 1 row, 32 heads of 128, 1000 keys 1.5 / 1.9, 20000 keys 3.3 / 6.5; 5 rows of up to 9000
    # keys, 3 heads of 96, 2.3 / 3.5. A branch around it all would have addresses made behind the wait.
    for first in range(0, tl.where(parts > 1, parts, 0), RUN):
        largest, total, acc = no_keys(BLOCK_H, BLOCK_V)  # pyright: ignore
        for part in tl.static_range(RUN):  # pyright: ignore
            here = first + part < parts
            merged = merge_next(largest, total, acc, largests[part], totals[part], accs[part])  # pyright: ignore
            largest, total = tl.where(here, merged[0], largest), tl.where(here, merged[1], total)
            acc = tl.where(here, merged[2], acc)
        merged = merge_next(whole_largest, whole_total, whole_acc, largest, total, acc)  # pyright: ignore
        whole_largest = tl.where(first == 0, largest, merged[0])
        whole_total, whole_acc = tl.where(first == 0, total, merged[1]), tl.where(first == 0, acc, merged[2])
        largest_ptrs, total_ptrs = largest_ptrs + RUN * HEADS, total_ptrs + RUN * HEADS
        acc_ptrs += RUN * HEADS * VALUE_WIDTH
        largests, totals, accs = _run_from(
            acc_ptrs, largest_ptrs, total_ptrs, parts - first - RUN, real, inside, HEADS, VALUE_WIDTH
        )
    if parts > 1:
        out = whole_acc / unit / tl.where(whole_total == 0.0, 1.0, whole_total)[:, None]
        out_ptrs = out_ptr + (sequence * HEADS + head)[:, None] * VALUE_WIDTH + v[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


def merge_runs(
    parts: Parts,
    kv_lens_B: Tensor,
    out_BHV: Tensor,
    rule: SplitRule,
    *,
    window: int = 0,
    unit: float = 1.0,
    whole: bool,
) -> None:
    """Fills out_BHV (contiguous), where a sequence has more than one part: its splits or, `whole`, its runs. The parts'
    values are multiples of `unit`."""
    num_sequences, number, num_heads, width = parts.acc_BPHV.shape
    assert out_BHV.is_contiguous(), f"out_BHV has strides {out_BHV.stride()}; the merge writes it as one block"
    # Few results: one warp for 128 columns, so that many programs share the latency. Many: four heads a program.
    block_h, block_v, num_warps = 1, min(next_power_of_2(width), 128), 1
    if num_sequences * num_heads * width > 2**19:
        block_h, num_warps = min(4, next_power_of_2(num_heads)), 4
    _merge_runs_kernel[(cdiv(width, block_v), cdiv(num_heads, block_h), num_sequences)](
        *parts,
        kv_lens_B,
        out_BHV,
        number,
        parts.sums_2BPH.stride(0),
        unit,
        HEADS=num_heads,
        VALUE_WIDTH=width,
        BLOCK_V=block_v,
        BLOCK_H=block_h,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        WINDOW=window,
        WHOLE=whole,
        num_warps=num_warps,
        **dependent_launch(out_BHV, ahead=num_sequences <= AHEAD_ROWS),
    )
