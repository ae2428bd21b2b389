"""Absorbed latent attention with the way back from its latents to values: two launches, where it was three.

Knows partial softmax results and weights; knows neither keys nor pages. The merge of a sequence's splits and a head's
product are one program's: its weights are on their way while the launch before still runs, and merged latents go
through no memory. The same steps and roundings as in kernels/mla_merge.py and kernels/linear.py, so the same bits.

Of few sequences a program has one, all splits of which are on their way at once.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_last_contiguous, assert_shape, cdiv
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.linear import head_linear
from kernels.mla_decode import check_operands, mla_decode
from kernels.mla_decode_hopper import attend_splits, runs_on_hopper
from kernels.mla_merge import Splits, merge_step
from kernels.mla_order import PieceList
from kernels.row_tiles import multiply
from kernels.split_kv import split_bounds

_FEW_ROWS = 8
"""Sequences, of which a program then has one. One H200, us, with splits asked for one after another / eight at once: 16
heads, 1 sequence of 576 keys 4.05 / 2.53, of 4096 4.77 / 2.92, 8 of up to 5000 keys 6.80 / 4.72; 5 heads, 3
sequences 3.95 / 2.21. With weights as the tensor core's 64 rows 4.23, 4.61, 5.15, 3.93. dsv2-lite's step of 4 rows
3.287 / 3.267 ms; of one row none the less, where the output map then waits for its weights."""

_ROWS = 16
"""Sequences of a program, where there are more."""

_MOST_BYTES = 12 << 20
"""Of weights, read once for every _ROWS sequences. One H200, layers of dsv2-lite (2 MB each) in graphs, 64 sequences:
353.3 us with merge and product apart, 350.5 with 64 columns a program, 347.9 with 128, which merge once for them."""


def mla_decode_values(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    w_HVL: Tensor,
    *,
    scale: float,
    max_kv_len: int,
    scales_NP2: Tensor | None = None,
    pieces: PieceList | None = None,
) -> Tensor:
    """y_BHV = w_HVL[h] o_latent[b, h], `head_linear` of `mla_decode`, which are the definition; so are their bits."""
    operands = (q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
    num_rows = kv_lens_B.shape[0]
    serves = num_rows > 0 and cdiv(num_rows, _ROWS) * w_HVL.numel() * w_HVL.element_size() <= _MOST_BYTES
    if serves and max_kv_len > 0 and scales_NP2 is None and runs_on_hopper(*operands[:3]):
        check_operands(*operands, None)
        splits = attend_splits(*operands, scale=scale, max_kv_len=max_kv_len, pieces=pieces)
        return values_of_splits(splits, kv_lens_B, w_HVL)
    bounds: dict[str, Any] = {"scale": scale, "max_kv_len": max_kv_len}
    return head_linear(mla_decode(*operands, **bounds, scales_NP2=scales_NP2, pieces=pieces), w_HVL)


# y[b, h] = w[h] x[b, h]; x[b, h] = out[b, h] where a sequence has one split at most or is whole, else the merge of its
#   parts (kernels/mla_merge.py), rounded to out's dtype
#   parts_ptr [B, S, H, L], lse_ptr fp32 [B, S, H], out_ptr [B, H, L], y_ptr [B, H, V], contiguous; w_ptr [H, V, L], H
#   and V strided; int32 [B]: kv_lens_ptr, whole_ptr (or None)
#   grid (cdiv(V, BLOCK_N), B or cdiv(B, BLOCK_M), H): a program owns BLOCK_N columns of one sequence, or of BLOCK_M, of
#   one head, and merges whole latents for them. fp32 sums. Sequences from B on and columns from V on are masked. The
#   tensor core wants 16 rows: of one sequence they are all the same.


@triton.jit
def _splits_from(parts_ptrs, lse_ptr, first, splits, HEADS: tl.constexpr, LATENT: tl.constexpr, CHUNK: tl.constexpr):
    """(logarithms [1], parts [1, L]) of CHUNK splits, of which `first` is the first. One behind the last changes no bit
    of the merge: see mla_merge.py."""
    lses, parts = (), ()
    for i in tl.static_range(CHUNK):  # pyright: ignore
        lses += (tl.load(lse_ptr + i * HEADS, mask=first + i < splits, other=float("-inf")),)
        parts += (tl.load(parts_ptrs + i * (HEADS * LATENT), mask=first + i < splits, other=-0.0),)
    return lses, parts


@triton.jit(do_not_specialize=["num_splits"])
def _value_rows_kernel(
    parts_ptr,
    lse_ptr,
    kv_lens_ptr,
    whole_ptr,
    out_ptr,
    w_ptr,
    y_ptr,
    num_splits,
    num_columns,
    stride_wh,
    stride_wn,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, LATENT)
    kv_len = tl.load(kv_lens_ptr + sequence)
    _, _, splits = split_bounds(kv_len, 0, SPLIT_LEN, FEW_SPLITS, 0)  # pyright: ignore
    w_ptrs = w_ptr + head.to(tl.int64) * stride_wh + n[None, :] * stride_wn + k[:, None]
    w = tl.load(w_ptrs, mask=(n < num_columns)[None, :], other=0.0)
    row, first_row = sequence * HEADS + head, sequence * num_splits * HEADS + head
    parts_ptrs, lse_ptr = parts_ptr + first_row * LATENT + k[None, :], lse_ptr + first_row
    wait_for_inputs(PDL)  # lengths and weights are older than the launch before
    # Where a sequence is done its latent lies in `out`, else in parts: both are asked for before it is known which.
    whole = 0
    if whole_ptr is not None:
        whole = tl.load(whole_ptr + sequence)
    x = tl.load(out_ptr + row * LATENT + k[None, :])
    lses, parts = _splits_from(parts_ptrs, lse_ptr, 0, splits, HEADS, LATENT, CHUNK)
    parted = (splits > 1) & (whole == 0)
    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, LATENT), tl.float32)
    # Splits come from the turn before: what a loop carries is asked for outside of the sums, all of it at once.
    for first in range(0, tl.where(parted, splits, 0), CHUNK):
        for i in tl.static_range(CHUNK):
            maximum, total, acc = merge_step(maximum, total, acc, lses[i], parts[i])  # pyright: ignore
        parts_ptrs, lse_ptr = parts_ptrs + CHUNK * HEADS * LATENT, lse_ptr + CHUNK * HEADS
        lses, parts = _splits_from(parts_ptrs, lse_ptr, first + CHUNK, splits, HEADS, LATENT, CHUNK)
    if parted:
        x = (acc / total[:, None]).to(x.dtype)
    ROWS: tl.constexpr = 16
    x = tl.broadcast_to(x, (ROWS, LATENT))
    r, y_ptrs = tl.arange(0, ROWS), y_ptr + row * num_columns + n
    y = multiply(x, w, tl.zeros((ROWS, BLOCK_N), tl.float32), False)  # pyright: ignore
    inside = (r == 0)[:, None] & (n < num_columns)[None, :]
    tl.store(y_ptrs[None, :] + 0 * r[:, None], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits", "num_sequences"])
def _values_kernel(
    parts_ptr,
    lse_ptr,
    kv_lens_ptr,
    whole_ptr,
    out_ptr,
    w_ptr,
    y_ptr,
    num_splits,
    num_sequences,
    num_heads,
    num_columns,
    stride_wh,
    stride_wn,
    LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, LATENT)
    used = m < num_sequences
    kv_len = tl.load(kv_lens_ptr + m, mask=used, other=0)
    _, _, splits = split_bounds(kv_len, 0, SPLIT_LEN, FEW_SPLITS, 0)  # pyright: ignore
    w_ptrs = w_ptr + head.to(tl.int64) * stride_wh + n[None, :] * stride_wn + k[:, None]
    w = tl.load(w_ptrs, mask=(n < num_columns)[None, :], other=0.0)
    wait_for_inputs(PDL)  # lengths and weights are older than the launch before
    done = splits <= 1
    parted = used & (done == 0)
    if whole_ptr is not None:
        done |= tl.load(whole_ptr + m, mask=parted, other=1) != 0
    row = m.to(tl.int64) * num_heads + head
    x = tl.load(out_ptr + row[:, None] * LATENT + k[None, :], mask=(used & done)[:, None], other=0.0)
    first_row = m.to(tl.int64) * num_splits * num_heads + head
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, LATENT), tl.float32)
    for first in range(0, tl.max(tl.where(parted, splits, 0), axis=0), CHUNK):
        # Parts are asked for before it is known which sequences are whole; theirs are dropped.
        for i in tl.static_range(CHUNK):  # pyright: ignore
            there = parted & (first + i < splits)
            at = first_row + (first + i) * num_heads
            lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"))
            part = tl.load(parts_ptr + at[:, None] * LATENT + k[None, :], mask=there[:, None], other=-0.0)
            maximum, total, acc = merge_step(maximum, total, acc, lse, part)  # pyright: ignore
    x = tl.where(done[:, None], x, (acc / total[:, None]).to(x.dtype))
    y = multiply(x, w, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), False)  # pyright: ignore
    y_ptrs = y_ptr + row[:, None] * num_columns + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=used[:, None] & (n < num_columns)[None, :])


def values_of_splits(splits: Splits, kv_lens_B: Tensor, w_HVL: Tensor) -> Tensor:
    """y_BHV; fills nothing else."""
    num_sequences, most, num_heads, latent = splits.parts_BSHL.shape
    assert_shape("w_HVL", w_HVL, (num_heads, None, latent))
    assert_last_contiguous("w_HVL", w_HVL)
    assert splits.out_BHL.dtype == w_HVL.dtype, f"latents are {splits.out_BHL.dtype}, weights {w_HVL.dtype}"
    num_columns = w_HVL.shape[1]
    y_BHV = splits.out_BHL.new_empty(num_sequences, num_heads, num_columns)
    results = (splits.parts_BSHL, splits.lse_BSH, kv_lens_B, splits.whole_B, splits.out_BHL, w_HVL, y_BHV)
    rule: dict[str, Any] = {"LATENT": latent, "SPLIT_LEN": splits.rule.length, "FEW_SPLITS": splits.rule.few}
    rule |= dependent_launch(w_HVL)
    strides = w_HVL.stride()[:2]
    if num_sequences <= _FEW_ROWS:
        block_n = 32
        _value_rows_kernel[(cdiv(num_columns, block_n), num_sequences, num_heads)](
            *results, most, num_columns, *strides, HEADS=num_heads, BLOCK_N=block_n, CHUNK=8, num_warps=4, **rule
        )
        return y_BHV
    block_n = 128
    _values_kernel[(cdiv(num_columns, block_n), cdiv(num_sequences, _ROWS), num_heads)](
        *results,
        most,
        num_sequences,
        num_heads,
        num_columns,
        *strides,
        BLOCK_M=_ROWS,
        BLOCK_N=block_n,
        CHUNK=4,
        num_warps=8,
        **rule,
    )
    return y_BHV
