"""A head's rows through norm and rotation, as the stores of a step do it; and what a rotation is told. No launcher.

Knows rows, positions and angles; knows nothing of pages. Same operations as rmsnorm.py and rope.py, same roundings to
the model dtype between them.
"""
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_quantize import given_codes, row_codes, row_scale
from kernels.rmsnorm import rms_apply, rms_scale
from kernels.rope import rotate


class Rope(NamedTuple):
    """Where the rows stand, and by which angles a position is turned."""

    positions_T: Tensor
    """int64 [T], 0 <= position < P."""
    cos_sin_PR: Tensor
    """fp32 [P, R], contiguous: R/2 cosines, then R/2 sines. The first R entries of a head are turned."""
    interleaved: bool
    """Pairs lie side by side (2i, 2i + 1), else half apart (i, i + R/2)."""


class HeadNorms(NamedTuple):
    """Weights of the norms over each query head and each key head."""

    q_C: Tensor
    k_C: Tensor
    eps: float


def check_rope(rope: Rope, num_tokens: int, width: int, slot_mapping_T: Tensor) -> None:
    """Positions, slots and the table fit rows of this number and width."""
    rows = (rope.positions_T.shape, slot_mapping_T.shape, rope.positions_T.dtype, slot_mapping_T.dtype)
    assert rows == ((num_tokens,), (num_tokens,), torch.int64, torch.int64), f"positions and slots are {rows}"
    table = rope.cos_sin_PR
    assert table.dtype == torch.float32 and table.is_contiguous(), "the table of angles is fp32 and contiguous"
    assert table.shape[1] % 2 == 0 and 0 < table.shape[1] <= width, f"cannot turn {table.shape[1]} of {width} entries"


@triton.jit
def load_pairs(row_ptr, used, ROWS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr):
    """Both entries of each pair [ROWS, BLOCK_P] of the rows at row_ptr [ROWS, 1], read as they lie in memory."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * BLOCK_P)[None, :]
        x = tl.load(row_ptr + c, mask=used & (c < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(x, (ROWS, BLOCK_P, 2)))
    else:
        c = tl.arange(0, BLOCK_P)[None, :]
        first = tl.load(row_ptr + c, mask=used & (c < HALF), other=0.0)
        second = tl.load(row_ptr + HALF + c, mask=used & (c < HALF), other=0.0)
    return first, second


@triton.jit
def store_pairs(
    row_ptr,
    first,
    second,
    used,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The way back of `load_pairs`."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * BLOCK_P)[None, :]
        x = tl.reshape(tl.join(first, second), (ROWS, 2 * BLOCK_P))
        tl.store(row_ptr + c, x, mask=used & (c < 2 * HALF))
    else:
        c = tl.arange(0, BLOCK_P)[None, :]
        tl.store(row_ptr + c, first, mask=used & (c < HALF))
        tl.store(row_ptr + HALF + c, second, mask=used & (c < HALF))


@triton.jit
def angles_of(table_ptr, position, HALF: tl.constexpr, BLOCK_P: tl.constexpr):
    """Cosines and sines of a position (or of a column of them), fp32 [.., BLOCK_P]."""
    pair = tl.arange(0, BLOCK_P)[None, :]
    angle_ptr = table_ptr + position * (2 * HALF) + pair
    return tl.load(angle_ptr, mask=pair < HALF, other=0.0), tl.load(angle_ptr + HALF, mask=pair < HALF, other=0.0)


# The rows of BLOCK_H heads, from row_ptr [BLOCK_H, 1] to out_ptr [BLOCK_H, 1]: normalised, the first 2 * HALF entries
# turned, the others copied. scale_ptr [BLOCK_H, 1] or None: out_ptr takes codes, and their scales lie there, read where
# GIVEN, else written.


@triton.jit
def turn_heads(
    row_ptr,
    out_ptr,
    scale_ptr,
    saturated_ptr,
    weight_ptr,
    table_ptr,
    position,
    used,
    stored,
    eps,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GIVEN: tl.constexpr,
):
    scale = 1.0
    c = tl.arange(0, BLOCK_C)[None, :]
    if weight_ptr is not None:
        scale = rms_scale(tl.load(row_ptr + c, mask=used & (c < WIDTH), other=0.0), WIDTH, eps)
    # Read again, from the L1 cache, as pairs.
    first, second = load_pairs(row_ptr, used, BLOCK_H, HALF, INTERLEAVED, BLOCK_P)  # pyright: ignore
    if weight_ptr is not None:
        first_weight, second_weight = load_pairs(weight_ptr, True, 1, HALF, INTERLEAVED, BLOCK_P)
        first, second = rms_apply(first, scale, first_weight), rms_apply(second, scale, second_weight)
    cos, sin = angles_of(table_ptr, position, HALF, BLOCK_P)
    first, second = rotate(first, second, cos, sin)
    in_rest = (c >= 2 * HALF) & (c < WIDTH)
    if WIDTH > 2 * HALF:
        rest = tl.load(row_ptr + c, mask=used & in_rest, other=0.0)
        if weight_ptr is not None:
            rest = rms_apply(rest, scale, tl.load(weight_ptr + c, mask=in_rest, other=0.0))
    if scale_ptr is not None:
        # The rows are those that a cache in the model dtype would hold.
        if GIVEN:
            row_scales = tl.load(scale_ptr, mask=stored, other=1.0)
            first = given_codes(first, row_scales, stored, out_ptr, saturated_ptr)
            second = given_codes(second, row_scales, stored, out_ptr, saturated_ptr)
            if WIDTH > 2 * HALF:
                rest = given_codes(rest, row_scales, stored, out_ptr, saturated_ptr)
        else:
            largest = tl.max(tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32))), axis=1)
            if WIDTH > 2 * HALF:
                largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), axis=1))
            row_scales = row_scale(largest)[:, None]
            tl.store(scale_ptr, row_scales, mask=stored)
            first, second = row_codes(first, row_scales, out_ptr), row_codes(second, row_scales, out_ptr)
            if WIDTH > 2 * HALF:
                rest = row_codes(rest, row_scales, out_ptr)
    store_pairs(out_ptr, first, second, stored, BLOCK_H, HALF, INTERLEAVED, BLOCK_P)
    if WIDTH > 2 * HALF:
        tl.store(out_ptr + c, rest, mask=stored & in_rest)


@triton.jit
def other_column(c, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(whether each column is the second of its pair, the pair, the pair's other column, or itself beyond the turn)"""
    if INTERLEAVED:
        pair, is_second, other = c // 2, c % 2 == 1, c ^ 1
    else:
        is_second = c >= HALF
        pair = tl.where(is_second, c - HALF, c)
        other = tl.where(is_second, c - HALF, c + HALF)
    return is_second, pair, tl.where(c < 2 * HALF, other, c)


@triton.jit
def turn_of_columns(
    c, weight_ptr, table_ptr, position, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """What `turned_columns` does to columns c [1, X] at a position, whatever the rows: both weights, cosine, sine."""
    in_turn = c < 2 * HALF
    _, pair, other = other_column(c, HALF, INTERLEAVED)  # pyright: ignore
    weight, other_weight = 1.0, 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=c < WIDTH, other=0.0)
        other_weight = tl.load(weight_ptr + other, mask=c < WIDTH, other=0.0)
    angle_ptr = table_ptr + position * (2 * HALF) + pair
    cos, sin = tl.load(angle_ptr, mask=in_turn, other=0.0), tl.load(angle_ptr + HALF, mask=in_turn, other=0.0)
    return weight, other_weight, cos, sin


@triton.jit
def turned_columns(
    row_ptr,
    c,
    used,
    scale,
    turn,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Columns c [1, X] of the same rows, wherever they lie in their pairs. `scale`: the rows' `rms_scale`; `turn`: what
    `turn_of_columns` says of c."""
    is_second, _, other = other_column(c, HALF, INTERLEAVED)  # pyright: ignore
    weight, other_weight, cos, sin = turn
    x = tl.load(row_ptr + c, mask=used & (c < WIDTH), other=0.0)
    y = tl.load(row_ptr + other, mask=used & (c < WIDTH), other=0.0)
    if NORMED:
        x, y = rms_apply(x, scale, weight), rms_apply(y, scale, other_weight)
    first, second = rotate(tl.where(is_second, y, x), tl.where(is_second, x, y), cos, sin)
    return tl.where(c < 2 * HALF, tl.where(is_second, second, first), x)
