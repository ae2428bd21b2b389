"""Copy cached rows of several sequences out of their pages into packed ones (MLA's prefill expands them there).

Knows pages, token positions and rows of two parts, which go to tensors of their own; knows nothing of what they mean.
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
    cdiv,
    next_power_of_2,
    uses_triton,
)
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_quantize import check_scales


class LatentScaling(NamedTuple):
    """How rows of a cache in e4m3 become numbers: the first part times the first scale, the second times the second.

    The product is made in fp32 and rounded once, to `dtype`.
    """

    scales_NP2: Tensor
    dtype: torch.dtype


def gather_paged(
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    token_starts_B: Tensor,
    row_starts_B1: Tensor,
    *,
    num_rows: int,
    latent: int,
    scaling: LatentScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """(latent_RL, rest_RX) of rows of L + X columns: row row_starts[b] + i is token token_starts[b] + i of sequence b.

    `latent` is L, and `gather_paged_reference` the definition. block_tables_BM, token_starts_B, row_starts_B1 int32;
    row_starts ascend from 0. R = num_rows >= row_starts[B]; rows past row_starts[B] are zero. Table entries are read
    only for the tokens copied. `scaling`: of a cache in e4m3.
    """
    gather = gather_paged_triton if uses_triton(cache_NPX) else gather_paged_reference
    rows = {"num_rows": num_rows, "latent": latent}
    return gather(cache_NPX, block_tables_BM, token_starts_B, row_starts_B1, **rows, scaling=scaling)


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


# (latent[r], rest[r]) = cache[tables[b, token // P], token % P], token = token_starts[b] + r - row_starts[b],
#   row_starts[b] <= r
#   cache_ptr [N, P, L + X], latent_ptr [R, L], rest_ptr [R, X] of one dtype; int32: tables_ptr [B, M],
#   token_starts_ptr [B], row_starts_ptr [B + 1]; scales_ptr None, or fp32 [N, P, 2] of a cache in e4m3: the latent is
#   multiplied with the first, the rest with the second, in fp32, and rounded to the dtype of the rows
#   grid (cdiv(R, BLOCK_R),): a program owns BLOCK_R rows; it finds each row's b by counting the sequences that end at
#   or before it. Rows past the last sequence are written as zeros. What lies beyond L, X or R is masked.


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_rows", "num_sequences", "stride_tb"])
def _gather_kernel(
    cache_ptr,
    tables_ptr,
    token_starts_ptr,
    row_starts_ptr,
    scales_ptr,
    latent_ptr,
    rest_ptr,
    num_rows,
    num_sequences,
    page_size,
    stride_cn,
    stride_cp,
    stride_sn,
    stride_sp,
    stride_tb,
    LATENT: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    sequence = tl.zeros((BLOCK_R,), tl.int32)
    for start in range(0, num_sequences, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        ends = tl.load(row_starts_ptr + 1 + b, mask=b < num_sequences, other=2147483647)
        sequence += tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    found = (sequence < num_sequences) & (row < num_rows)
    first_row = tl.load(row_starts_ptr + sequence, mask=found, other=0)
    token = tl.load(token_starts_ptr + sequence, mask=found, other=0) + row - first_row
    entry_ptr = tables_ptr + sequence.to(tl.int64) * stride_tb + token // page_size
    block, place = tl.load(entry_ptr, mask=found, other=0).to(tl.int64), (token % page_size).to(tl.int64)
    source_ptr = cache_ptr + (block * stride_cn + place * stride_cp)[:, None]
    column, rest_column = tl.arange(0, BLOCK_L)[None, :], tl.arange(0, BLOCK_X)[None, :]
    in_latent, in_rest = column < LATENT, rest_column < REST
    latent = tl.load(source_ptr + column, mask=found[:, None] & in_latent, other=0.0)
    rest = tl.load(source_ptr + LATENT + rest_column, mask=found[:, None] & in_rest, other=0.0)
    if scales_ptr is not None:
        scale_ptr = scales_ptr + block * stride_sn + place * stride_sp
        latent = latent.to(tl.float32) * tl.load(scale_ptr, mask=found, other=0.0)[:, None]
        rest = rest.to(tl.float32) * tl.load(scale_ptr + 1, mask=found, other=0.0)[:, None]
    there, wide_row = (row < num_rows)[:, None], row.to(tl.int64)[:, None]
    tl.store(latent_ptr + wide_row * LATENT + column, latent.to(latent_ptr.dtype.element_ty), mask=there & in_latent)
    tl.store(rest_ptr + wide_row * REST + rest_column, rest.to(rest_ptr.dtype.element_ty), mask=there & in_rest)


def gather_paged_triton(
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    token_starts_B: Tensor,
    row_starts_B1: Tensor,
    *,
    num_rows: int,
    latent: int,
    scaling: LatentScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """`gather_paged` as one launch."""
    _check_operands(cache_NPX, block_tables_BM, token_starts_B, row_starts_B1, scaling)
    rest = cache_NPX.shape[2] - latent
    scales_NP2, dtype = scaling or (None, cache_NPX.dtype)
    latent_RL, rest_RX = (cache_NPX.new_empty(num_rows, width, dtype=dtype) for width in (latent, rest))
    if num_rows == 0:
        return latent_RL, rest_RX
    block_l = next_power_of_2(latent)
    block_r = max(1, min(8, 2048 // block_l))
    _gather_kernel[(cdiv(num_rows, block_r),)](
        cache_NPX,
        block_tables_BM,
        token_starts_B,
        row_starts_B1,
        scales_NP2,
        latent_RL,
        rest_RX,
        num_rows,
        block_tables_BM.shape[0],
        cache_NPX.shape[1],
        *cache_NPX.stride()[:2],
        *((0, 0) if scales_NP2 is None else scales_NP2.stride()[:2]),
        block_tables_BM.stride(0),
        LATENT=latent,
        REST=rest,
        BLOCK_R=block_r,
        BLOCK_L=block_l,
        BLOCK_X=next_power_of_2(rest),
        BLOCK_B=64,
        num_warps=4,
        **dependent_launch(cache_NPX),
    )
    return latent_RL, rest_RX


def gather_paged_reference(
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    token_starts_B: Tensor,
    row_starts_B1: Tensor,
    *,
    num_rows: int,
    latent: int,
    scaling: LatentScaling | None = None,
) -> tuple[Tensor, Tensor]:
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
        widths = torch.tensor((latent, width - latent), device=rows_RX.device)
        scales_R2 = scaling.scales_NP2[block_R, token_R % page_size]
        copied_RX = copied_RX.float() * scales_R2.repeat_interleave(widths, 1)
    rows_RX[: sequence_R.shape[0]] = copied_RX
    latent_RL, rest_RX = rows_RX.split((latent, width - latent), dim=1)
    return latent_RL.contiguous(), rest_RX.contiguous()
