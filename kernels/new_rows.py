"""What decode attention does with the rows of its step before it reads keys, where it takes that along. No launcher.

Knows one key and one value, their place in a page, and where older keys lie; knows nothing of scores. Same operations
as qk_rope_store.py, same roundings, so the same bits.
"""
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import prefetch_rows
from kernels.turn_heads import HeadNorms, Rope, turned_rows


class NewRows(NamedTuple):
    """Keys and values of a step's tokens, as projected: one for each sequence."""

    k_BGC: Tensor
    v_BGC: Tensor
    norms: HeadNorms | None
    rope: Rope
    slots_B: Tensor
    """int64; -1: written nowhere."""


@triton.jit
def ask_for_keys(
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    end,
    stride_kn,
    stride_kp,
    stride_vn,
    stride_vp,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys and values of a head at positions [first, end), of 16 bits an entry, into the L2 cache. Nothing waits."""
    LINES: tl.constexpr = WIDTH // 64
    for start in range(first, end, BLOCK_N):
        key = tl.minimum(start + tl.arange(0, BLOCK_N), end - 1)
        block = tl.load(table_ptr + key // PAGE).to(tl.int64)
        prefetch_rows(k_ptr + block * stride_kn + key % PAGE * stride_kp, LINES)
        prefetch_rows(v_ptr + block * stride_vn + key % PAGE * stride_vp, LINES)


@triton.jit
def store_new(
    k_row_ptr,
    v_row_ptr,
    k_place_ptr,
    v_place_ptr,
    stored,
    eps,
    turn,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A key, normalised and turned, and its value to their place, where `stored`. The key is the first row of a tile as
    high as that of the queries: alone it would lie in other threads. No branch: it is loaded beside the queries."""
    row, c, cv = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_C)[None, :], tl.arange(0, BLOCK_V)
    used, used_v = (row == 0) & stored, (cv < VALUE_WIDTH) & stored
    v = tl.load(v_row_ptr + cv, mask=used_v, other=0.0)
    k = turned_rows(k_row_ptr + row * 0, c, used, eps, turn, WIDTH, HALF, INTERLEAVED, NORMED)
    tl.store(k_place_ptr + row * 0 + c, k, mask=used & (c < WIDTH))
    tl.store(v_place_ptr + cv, v, mask=used_v)
