"""Copy cached rows of several sequences out of their pages into one packed tensor (MLA's prefill expands them there).

Knows pages, token positions and rows; knows nothing of what the rows mean.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import (
    assert_dtype,
    assert_last_contiguous,
    assert_same_device,
    assert_shape,
    next_power_of_2,
    uses_triton,
)
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_quantize import check_scales


class LatentScaling(NamedTuple):
    """How rows of a cache in e4m3 become numbers: columns below `latent` times the first scale, the others the second.

    The product is made in fp32 and rounded once, to `dtype`.
    """

    scales_NP2: Tensor
    latent: int
    dtype: torch.dtype


def gather_paged(
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    token_starts_B: Tensor,
    row_starts_B1: Tensor,
    *,
    num_rows: int,
    scaling: LatentScaling | None = None,
) -> Tensor:
    """rows_RX: row row_starts[b] + i is token token_starts[b] + i of sequence b. See `gather_paged_reference`.

    block_tables_BM, token_starts_B, row_starts_B1 int32; row_starts ascend from 0. R = num_rows >= row_starts[B];
    rows past row_starts[B] are zero. Table entries are read only for the tokens copied. `scaling`: of a cache in e4m3.
    """
    gather = gather_paged_triton if uses_triton(cache_NPX) else gather_paged_reference
    return gather(cache_NPX, block_tables_BM, token_starts_B, row_starts_B1, num_rows=num_rows, scaling=scaling)


def _check_operands(
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    token_starts_B: Tensor,
    row_starts_B1: Tensor,
    scaling: LatentScaling | None,
) -> None:
    num_sequences = block_tables_BM.shape[0]
    assert_shape("cache_NPX", cache_NPX, (None, None, None))
    assert_last_contiguous("cache_NPX", cache_NPX)
    scales_shape = (*cache_NPX.shape[:2], 2)
    check_scales(cache_NPX, scaling and scaling.scales_NP2, scales_shape, cache_NPX.dtype)
    assert_shape("token_starts_B", token_starts_B, (num_sequences,))
    assert_shape("row_starts_B1", row_starts_B1, (num_sequences + 1,))
    for name, x in (
        ("block_tables_BM", block_tables_BM),
        ("token_starts_B", token_starts_B),
        ("row_starts_B1", row_starts_B1),
    ):
        assert_dtype(name, x, torch.int32)
    assert_same_device(
        cache_NPX, block_tables_BM=block_tables_BM, token_starts_B=token_starts_B, row_starts_B1=row_starts_B1
    )


# rows[r] = cache[tables[b, token // P], token % P], token = token_starts[b] + r - row_starts[b], row_starts[b] <= r
#   cache_ptr [N, P, X], rows_ptr [R, X] of one dtype; int32: tables_ptr [B, M], token_starts_ptr [B],
#   row_starts_ptr [B + 1]; scales_ptr None, or fp32 [N, P, 2] of a cache in e4m3: columns below LATENT are multiplied
#   with the first, the others with the second, in fp32, and rounded to the dtype of the rows
#   grid (R,): a program owns one row; it finds b by counting the sequences that end at or before r. Rows past the last
#   sequence are written as zeros; columns from X on are masked: the block is a power of two.


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_sequences", "stride_tb"])
def _gather_kernel(
    cache_ptr,
    tables_ptr,
    token_starts_ptr,
    row_starts_ptr,
    scales_ptr,
    rows_ptr,
    num_sequences,
    page_size,
    stride_cn,
    stride_cp,
    stride_sn,
    stride_sp,
    stride_tb,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    sequence = tl.full((), 0, tl.int32)
    for start in range(0, num_sequences, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        ends = tl.load(row_starts_ptr + 1 + b, mask=b < num_sequences, other=2147483647)
        sequence += tl.sum((ends <= row).to(tl.int32), axis=0)
    found = sequence < num_sequences
    first_row = tl.load(row_starts_ptr + sequence, mask=found, other=0)
    token = tl.load(token_starts_ptr + sequence, mask=found, other=0) + row - first_row
    table_ptr = tables_ptr + sequence.to(tl.int64) * stride_tb
    block = tl.load(table_ptr + token // page_size, mask=found, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_X)
    source_ptr = cache_ptr + block * stride_cn + (token % page_size).to(tl.int64) * stride_cp
    values = tl.load(source_ptr + column, mask=found & (column < WIDTH), other=0.0)
    if scales_ptr is not None:
        scale_ptr = scales_ptr + block * stride_sn + (token % page_size).to(tl.int64) * stride_sp
        latent_scale, rope_scale = (
            tl.load(scale_ptr, mask=found, other=0.0),
            tl.load(scale_ptr + 1, mask=found, other=0.0),
        )
        values = values.to(tl.float32) * tl.where(column < LATENT, latent_scale, rope_scale)
        values = values.to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + row.to(tl.int64) * WIDTH + column, values, mask=column < WIDTH)


def gather_paged_triton(
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    token_starts_B: Tensor,
    row_starts_B1: Tensor,
    *,
    num_rows: int,
    scaling: LatentScaling | None = None,
) -> Tensor:
    """`gather_paged` as one launch."""
    _check_operands(cache_NPX, block_tables_BM, token_starts_B, row_starts_B1, scaling)
    num_sequences, width = block_tables_BM.shape[0], cache_NPX.shape[2]
    scales_NP2, latent, dtype = scaling or (None, 0, cache_NPX.dtype)
    rows_RX = cache_NPX.new_empty(num_rows, width, dtype=dtype)
    if num_rows == 0:
        return rows_RX
    _gather_kernel[(num_rows,)](
        cache_NPX,
        block_tables_BM,
        token_starts_B,
        row_starts_B1,
        scales_NP2,
        rows_RX,
        num_sequences,
        cache_NPX.shape[1],
        *cache_NPX.stride()[:2],
        *((0, 0) if scales_NP2 is None else scales_NP2.stride()[:2]),
        block_tables_BM.stride(0),
        LATENT=latent,
        WIDTH=width,
        BLOCK_X=next_power_of_2(width),
        BLOCK_B=64,
        **dependent_launch(cache_NPX),
    )
    return rows_RX


def gather_paged_reference(
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    token_starts_B: Tensor,
    row_starts_B1: Tensor,
    *,
    num_rows: int,
    scaling: LatentScaling | None = None,
) -> Tensor:
    """The definition, and the CPU's product path."""
    _check_operands(cache_NPX, block_tables_BM, token_starts_B, row_starts_B1, scaling)
    page_size, width = cache_NPX.shape[1:]
    rows_RX = cache_NPX.new_zeros(num_rows, width, dtype=scaling.dtype if scaling else cache_NPX.dtype)
    row_starts_B1 = row_starts_B1.long()
    lens_B = row_starts_B1[1:] - row_starts_B1[:-1]
    sequence_R = torch.repeat_interleave(torch.arange(lens_B.shape[0], device=lens_B.device), lens_B)
    row_R = torch.arange(sequence_R.shape[0], device=lens_B.device)
    token_R = token_starts_B.long()[sequence_R] + row_R - row_starts_B1[sequence_R]
    block_R = block_tables_BM[sequence_R, token_R // page_size].long()
    copied_RX = cache_NPX[block_R, token_R % page_size]
    if scaling is not None:
        widths = torch.tensor((scaling.latent, width - scaling.latent), device=rows_RX.device)
        scales_R2 = scaling.scales_NP2[block_R, token_R % page_size]
        copied_RX = copied_RX.float() * scales_R2.repeat_interleave(widths, 1)
    rows_RX[: sequence_R.shape[0]] = copied_RX
    return rows_RX
