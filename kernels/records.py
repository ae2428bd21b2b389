"""Rows into the records that a collective moves, and results out of the experts' order into the order they go home in.

Knows rows, records and bytes (expert_parallel/record.py says what lies where); knows no transport. One launch each.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_shape, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.quantize import FP8

_BLOCK_COLUMNS = 2048
"""Of a row, for one turn of a program of 4 warps: 32 bytes for each thread."""


class RecordParts(NamedTuple):
    """The parts of records [X, bytes], as views of them: rows, and what else travels or None."""

    rows_XD: Tensor
    slots_XK: Tensor  # int32
    weights_XK: Tensor | None  # fp32
    scales_XG: Tensor | None  # fp32


class RecordSource(NamedTuple):
    """What records are made of: rows of tokens with their choices, and which token each record takes, rank by rank."""

    x_TD: Tensor
    scales_GT: Tensor | None  # fp32, of rows in fp8
    weights_TK: Tensor  # fp32
    ranks_TK: Tensor  # int32, as are the following
    slots_TK: Tensor
    token_X: Tensor
    offsets_N1: Tensor


def write_records(parts: RecordParts, source: RecordSource) -> None:
    """Record i holds row token_X[i] of x, and for the rank n with offsets[n] <= i < offsets[n + 1] the slots of those
    choices of the token that go to n, -1 for the others; weights and scales of the row, where the parts have room.
    `write_records_reference` is the definition."""
    run = write_records_triton if uses_triton(source.x_TD) else write_records_reference
    run(parts, source)


# rows[i] = x[token[i]]; slots[i, k] = slots[token[i], k] if ranks[token[i], k] is i's rank, else -1; weights and scales
#   parts: the first column of each, record i is stride_* elements further; x_ptr [T, D], rows strided
#   scales_ptr fp32 [G, T] strided or None; weights_ptr fp32, ranks_ptr, slots_ptr int32 [T, K]; token_ptr int32 [X]
#   offsets_ptr int32 [N + 1]; grid (X,): a program owns a record. K, N, G and D are filled up by masks.


@triton.jit
def _write_kernel(
    rows_ptr,
    out_slots_ptr,
    out_weights_ptr,
    out_scales_ptr,
    x_ptr,
    scales_ptr,
    weights_ptr,
    ranks_ptr,
    slots_ptr,
    token_ptr,
    offsets_ptr,
    num_columns,
    num_scales,
    num_ranks,
    stride_row,
    stride_word,
    stride_x,
    stride_scale_g,
    stride_scale_t,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    record = tl.program_id(0)
    token = tl.load(token_ptr + record).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    end = tl.load(offsets_ptr + 1 + n, mask=n < num_ranks, other=2147483647)
    rank = tl.sum((end <= record).to(tl.int32), axis=0)
    k = tl.arange(0, BLOCK_K)
    choice = token * TOP_K + k
    to_rank = tl.load(ranks_ptr + choice, mask=k < TOP_K, other=-1)
    slot = tl.load(slots_ptr + choice, mask=k < TOP_K, other=-1)
    word = record.to(tl.int64) * stride_word
    tl.store(out_slots_ptr + word + k, tl.where(to_rank == rank, slot, -1), mask=k < TOP_K)
    if out_weights_ptr is not None:
        weight = tl.load(weights_ptr + choice, mask=k < TOP_K, other=0.0)
        tl.store(out_weights_ptr + word + k, weight, mask=k < TOP_K)
    if scales_ptr is not None:
        g = tl.arange(0, BLOCK_G)
        scale = tl.load(scales_ptr + g * stride_scale_g + token * stride_scale_t, mask=g < num_scales, other=0.0)
        tl.store(out_scales_ptr + word + g, scale, mask=g < num_scales)
    row = record.to(tl.int64) * stride_row
    for start in range(0, num_columns, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + token * stride_x + d, mask=d < num_columns)
        tl.store(rows_ptr + row + d, x, mask=d < num_columns)


def write_records_triton(parts: RecordParts, source: RecordSource) -> None:
    """`write_records` as one launch."""
    _check_records(parts, source)
    x_TD, scales_GT, weights_TK, ranks_TK, slots_TK, token_X, offsets_N1 = source
    num_records, num_columns = parts.rows_XD.shape
    if num_records == 0:
        return
    rows_XD = parts.rows_XD
    if x_TD.dtype == FP8:
        x_TD, rows_XD = x_TD.view(torch.int8), rows_XD.view(torch.int8)  # bytes are moved, nothing is computed
    num_ranks, top_k = offsets_N1.shape[0] - 1, ranks_TK.shape[1]
    num_scales = 0 if scales_GT is None else scales_GT.shape[0]
    _write_kernel[(num_records,)](
        rows_XD,
        parts.slots_XK,
        parts.weights_XK,
        parts.scales_XG,
        x_TD,
        scales_GT,
        weights_TK.contiguous(),
        ranks_TK,
        slots_TK,
        token_X,
        offsets_N1,
        num_columns,
        num_scales,
        num_ranks,
        rows_XD.stride(0),
        parts.slots_XK.stride(0),
        x_TD.stride(0),
        *((0, 0) if scales_GT is None else scales_GT.stride()),
        TOP_K=top_k,
        BLOCK_K=next_power_of_2(top_k),
        BLOCK_N=next_power_of_2(num_ranks),
        BLOCK_G=next_power_of_2(num_scales),
        BLOCK_D=min(next_power_of_2(num_columns), _BLOCK_COLUMNS),
        num_warps=4,
        **dependent_launch(x_TD),
    )


def _check_records(parts: RecordParts, source: RecordSource) -> None:
    x_TD, scales_GT, weights_TK, ranks_TK, slots_TK, token_X, offsets_N1 = source
    num_records, num_columns = parts.rows_XD.shape
    assert_shape("x_TD", x_TD, (None, num_columns))
    assert_dtype("x_TD", x_TD, parts.rows_XD.dtype)
    assert_last_contiguous("x_TD", x_TD)
    assert_shape("token_X", token_X, (num_records,))
    assert (scales_GT is None) == (parts.scales_XG is None), "scales travel with rows in fp8, and only with them"
    words = [each for each in parts[1:] if each is not None]
    assert len({each.stride(0) for each in words}) == 1, "all words of a record lie in it"
    for name, each in {"ranks_TK": ranks_TK, "slots_TK": slots_TK}.items():
        assert_shape(name, each, tuple(weights_TK.shape))
        assert each.is_contiguous(), f"{name} lies together"
    for name, each in {"ranks": ranks_TK, "slots": slots_TK, "tokens": token_X, "offsets": offsets_N1}.items():
        assert_dtype(name, each, torch.int32)
    assert_dtype("weights_TK", weights_TK, torch.float32)


def write_records_reference(parts: RecordParts, source: RecordSource) -> None:
    """The definition, in plain torch."""
    _check_records(parts, source)
    x_TD, scales_GT, weights_TK, ranks_TK, slots_TK, token_X, offsets_N1 = source
    fill_rows(parts.rows_XD, x_TD, token_X)
    record_X = torch.arange(len(token_X), dtype=torch.int32, device=x_TD.device)
    rank_X = torch.searchsorted(offsets_N1[1:].contiguous(), record_X, right=True)
    here_XK = ranks_TK[token_X] == rank_X[:, None]
    parts.slots_XK.copy_(torch.where(here_XK, slots_TK[token_X], -1))
    if parts.weights_XK is not None:
        torch.index_select(weights_TK, 0, token_X, out=parts.weights_XK)
    if parts.scales_XG is not None and scales_GT is not None:
        torch.index_select(scales_GT.T, 0, token_X, out=parts.scales_XG)


def fill_rows(part_XD: Tensor, x_TD: Tensor, token_X: Tensor | None = None) -> None:
    """Row token_X[i] of x into row i of a part of records, or row i without an index. No bit changes."""
    if x_TD.dtype == FP8:
        # Not every torch indexes fp8; as the widest integer that divides a row it is also the faster copy.
        whole = torch.int64 if x_TD.shape[1] % 8 == 0 else torch.uint8
        part_XD, x_TD = part_XD.view(whole), x_TD.view(whole)
    if token_X is None:
        part_XD.copy_(x_TD)
    else:
        torch.index_select(x_TD, 0, token_X, out=part_XD)


def rows_in_order(y_RD: Tensor, packed_row_XK: Tensor, num_rows: int) -> Tensor:
    """[num_rows, D]: y_RD[packed_row_XK[x, k]] of all (x, k) that have a row, in the order of x, then k; so many there
    are. No host sync. `rows_in_order_reference` is the definition."""
    run = rows_in_order_triton if uses_triton(y_RD) else rows_in_order_reference
    return run(y_RD, packed_row_XK, num_rows)


# out[place[x, k]] = y[row[x, k]] where row[x, k] >= 0
#   y_ptr [R, D], rows strided; row_ptr int32 [X, K]; place_ptr int64 [X, K]: one more than the place; out_ptr [_, D]
#   grid (X * K,): a program owns a pair. Columns beyond D are masked.


@triton.jit
def _order_kernel(y_ptr, row_ptr, place_ptr, out_ptr, num_columns, stride_y, BLOCK_D: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    pair = tl.program_id(0)
    row = tl.load(row_ptr + pair).to(tl.int64)
    if row >= 0:
        place = tl.load(place_ptr + pair) - 1
        for start in range(0, num_columns, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            y = tl.load(y_ptr + row * stride_y + d, mask=d < num_columns)
            tl.store(out_ptr + place * num_columns + d, y, mask=d < num_columns)


def rows_in_order_triton(y_RD: Tensor, packed_row_XK: Tensor, num_rows: int) -> Tensor:
    """`rows_in_order` as a running sum and one launch."""
    _check_order(y_RD, packed_row_XK)
    out_RD = y_RD.new_empty(num_rows, y_RD.shape[1])
    if num_rows == 0:
        return out_RD
    place_R = (packed_row_XK.view(-1) >= 0).cumsum(0)
    _order_kernel[(packed_row_XK.numel(),)](
        y_RD,
        packed_row_XK,
        place_R,
        out_RD,
        y_RD.shape[1],
        y_RD.stride(0),
        BLOCK_D=min(next_power_of_2(y_RD.shape[1]), _BLOCK_COLUMNS),
        num_warps=4,
        **dependent_launch(y_RD),
    )
    return out_RD


def _check_order(y_RD: Tensor, packed_row_XK: Tensor) -> None:
    assert_last_contiguous("y_RD", y_RD)
    assert_dtype("packed_row_XK", packed_row_XK, torch.int32)
    assert packed_row_XK.is_contiguous(), "packed_row_XK lies together"


def rows_in_order_reference(y_RD: Tensor, packed_row_XK: Tensor, num_rows: int) -> Tensor:
    """The definition, in plain torch."""
    _check_order(y_RD, packed_row_XK)
    row_R = packed_row_XK.flatten().long()
    here_R = row_R >= 0
    # Pairs without a row are all written behind the last one, where nobody reads.
    place_R = torch.where(here_R, here_R.cumsum(0) - 1, num_rows)
    return y_RD[row_R.new_empty(num_rows + 1).scatter_(0, place_R, row_R)[:num_rows]]
