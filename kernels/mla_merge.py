"""The merge of MLA decode's splits on Hopper, where no program had all splits of a sequence. Knows partial softmax
results; knows neither keys nor pages.

One step for each split, in order, as `kernels/mla_few_heads.py` takes it in registers: the same bits either way.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.split_kv import SplitRule, split_bounds


class Splits(NamedTuple):
    """Attention over splits, not merged yet, as `split_workspace` lays it out."""

    parts_BSHL: Tensor
    lse_BSH: Tensor
    whole_B: Tensor | None
    """int32: 1 where out_BHL is written already, though of several splits; None: nowhere."""
    out_BHL: Tensor
    """Written where a sequence has one split or none."""
    rule: SplitRule


@triton.jit
def merge_step(maximum, total, acc, lse, part):
    """The merge so far [rows], [rows], [rows, columns] and one split more."""
    new_maximum = tl.maximum(maximum, lse)
    decay, weight = tl.exp2(maximum - new_maximum), tl.exp2(lse - new_maximum)
    total = tl.fma(total, decay, weight)
    acc = tl.fma(part.to(tl.float32), tl.broadcast_to(weight[:, None], part.shape), acc * decay[:, None])
    return new_maximum, total, acc


# acc = part_s * 2^(lse_s - max_s) + acc * 2^(max_{s-1} - max_s), max_s = max(lse_0 .. lse_s), total likewise of ones;
#   out = acc / total, s ascending
#   parts_ptr [B, S, H, V] in any dtype, lse_ptr fp32 [B, S, H], out_ptr [B, H, V], contiguous; int32 [B]: kv_lens_ptr,
#   whole_ptr (or None; 1: nothing to merge, out is written)
#   grid (cdiv(V, BLOCK_V), cdiv(H, BLOCK_H), B): a program owns BLOCK_V columns of BLOCK_H heads of one sequence. A
#   sequence of one split or none is done already. fp32; heads from H on and columns from V on are masked.


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    parts_ptr,
    lse_ptr,
    kv_lens_ptr,
    whole_ptr,
    out_ptr,
    num_splits,
    num_heads,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + sequence)
    _, _, splits = split_bounds(kv_len, 0, SPLIT_LEN, FEW_SPLITS, 0)  # pyright: ignore
    wait_for_inputs(PDL)  # lengths are older than the launch before
    whole = 0
    if whole_ptr is not None:
        whole = tl.load(whole_ptr + sequence)
    if (splits <= 1) | (whole != 0):
        return
    head, v = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real, inside = head < num_heads, (head < num_heads)[:, None] & (v < VALUE_WIDTH)[None, :]
    first_row = sequence * num_splits * num_heads + head
    maximum = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    for first in range(0, splits, CHUNK):
        # No load needs a result (but see `merge_parts`). A step behind the last split changes no bit: its weight
        # is 0, and adding its product, -0, leaves even the sign of a zero.
        for i in tl.static_range(CHUNK):  # pyright: ignore
            there = first + i < splits
            row = first_row + (first + i) * num_heads
            lse = tl.load(lse_ptr + row, mask=real & there, other=float("-inf"))
            ptrs = parts_ptr + row[:, None] * VALUE_WIDTH + v[None, :]
            part = tl.load(ptrs, mask=inside & there, other=-0.0)
            maximum, total, acc = merge_step(maximum, total, acc, lse, part)  # pyright: ignore
    out_ptrs = out_ptr + (sequence * num_heads + head)[:, None] * VALUE_WIDTH + v[None, :]
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def merge_parts(splits: Splits, kv_lens_B: Tensor) -> None:
    """Fills out_BHL (contiguous) where a sequence has more than one split and whole_B, if given, is 0.

    It tells ahead of its wait (dependent_launch.py): what follows finds its place while the splits are worked on. One
    H200, us with the splits, so / not, 16 heads: 64 x 4096 86.4 / 88.2, 128 x 4096 159.5 / 161.9, 256 x 1024 80.6 /
    81.9, 1 x 4096 16.4 / 17.0; layers of dsv2-lite, 256 rows, 397.9 / 400.4.

    For sm_90 a program of four warps has each split's loads behind the steps before it, in 40 registers. Carried
    from turn to turn they stand together, in 128 (with one warp 64 either way). One H200, us with the splits, so / as
    it is, 16 heads: 64 of 512 to 7500 keys 63.4 / 67.3, 64 x 4096 83.5 / 84.6, 128 x 4096 144.6 / 141.9, 256 x 1024
    83.0 / 81.7; 128 heads, four splits in 80 registers for 32: 64 x 4096 154.5 / 153.9, 128 x 4096 336 / 334, 256 x
    1024 215.9 / 205.6. It gained where all programs have room at once, 528 of 128 registers: up to 66 sequences of 16
    heads. A network brings none of these here: up to 96 go through kernels/mla_values.py.
    """
    num_sequences, most, num_heads, width = splits.parts_BSHL.shape
    # Few results: one warp for 128 columns, so that many programs share the latency. Many: eight columns a thread. One
    # H200, 64 sequences of 16 heads, with the splits: 90.4 and 88.6 us for 4096 keys, 27.3 and 25.3 for 600. All eight
    # splits asked for at once, in brackets four: 64 x 4096 84.5 (86.4), 128 x 4096 157.6 (159.5), 256 x 1024, where no
    # sequence waits for the merge, 81.6 (80.6); of 128 heads, which have half as many splits, 64 x 4096 162.6 (158.7).
    block_h, block_v, num_warps, chunk = 1, min(next_power_of_2(width), 128), 1, 8
    if num_sequences * num_heads * width >= 2**19:
        block_h, num_warps, chunk = min(8, next_power_of_2(num_heads)), 4, 8 if num_heads <= 32 else 4
    _merge_kernel[(cdiv(width, block_v), cdiv(num_heads, block_h), num_sequences)](
        splits.parts_BSHL,
        splits.lse_BSH,
        kv_lens_B,
        splits.whole_B,
        splits.out_BHL,
        most,
        num_heads,
        VALUE_WIDTH=width,
        BLOCK_V=block_v,
        BLOCK_H=block_h,
        CHUNK=chunk,
        SPLIT_LEN=splits.rule.length,
        FEW_SPLITS=splits.rule.few,
        num_warps=num_warps,
        **dependent_launch(splits.out_BHL, ahead=True),
    )
