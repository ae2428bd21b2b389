"""Copies of rows in the order of their slots: what a product that reads whole tiles of rows takes.

Knows rows and indices only; no bit changes. Rows that were quantised have a copy of their own (pack_fp8.py).
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape, cdiv, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs

_ROWS, _COLUMNS = 8, 1024  # of one program's copy


def copy_rows(x_XD: Tensor, row_index_R: Tensor, offsets_S1: Tensor) -> Tensor:
    """Row r of the result is row row_index_R[r] of x, for r < offsets_S1[-1]; the rows from there on mean nothing: no
    index is read there and nothing written. x's rows may be strided; the result lies together.

    row_index_R int32 [R], offsets_S1 int32 [S + 1]. `copy_rows_reference` is the definition.
    """
    return (copy_rows_triton if uses_triton(x_XD) else copy_rows_reference)(x_XD, row_index_R, offsets_S1)


# out[r] = x[index[r]]
#   x_ptr [X, D], rows strided; index_ptr int32 [R]; last_ptr int32 [1]: rows from it on mean nothing; out_ptr [R, D]
#   grid (cdiv(R, ROWS) * cdiv(D, COLUMNS),): a program owns COLUMNS columns of ROWS rows


@triton.jit
def _copy_rows_kernel(
    x_ptr, index_ptr, last_ptr, out_ptr, stride_x, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    chunks = tl.cdiv(width, COLUMNS)
    d = (tl.program_id(0) % chunks) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(0) // chunks) * ROWS + tl.arange(0, ROWS)
    in_r = row < tl.load(last_ptr)
    x_row = tl.load(index_ptr + row, mask=in_r, other=0).to(tl.int64)
    mask = in_r[:, None] & (d < width)[None, :]
    values = tl.load(x_ptr + x_row[:, None] * stride_x + d[None, :], mask=mask)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * width + d[None, :], values, mask=mask)


def copy_rows_triton(x_XD: Tensor, row_index_R: Tensor, offsets_S1: Tensor) -> Tensor:
    """`copy_rows` as one launch."""
    _check_operands(x_XD, row_index_R, offsets_S1)
    width, num_rows = x_XD.shape[1], row_index_R.shape[0]
    out_RD = x_XD.new_empty(num_rows, width)
    if out_RD.numel():
        _copy_rows_kernel[(cdiv(num_rows, _ROWS) * cdiv(width, _COLUMNS),)](
            x_XD,
            row_index_R,
            offsets_S1[-1:],
            out_RD,
            x_XD.stride(0),
            width,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
            **dependent_launch(x_XD),
        )
    return out_RD


def _check_operands(x_XD: Tensor, row_index_R: Tensor, offsets_S1: Tensor) -> None:
    assert_shape("x_XD", x_XD, (None, None))
    assert_last_contiguous("x_XD", x_XD)
    assert_shape("row_index_R", row_index_R, (None,))
    assert_dtype("row_index_R", row_index_R, torch.int32)
    assert_shape("offsets_S1", offsets_S1, (None,))
    assert_dtype("offsets_S1", offsets_S1, torch.int32)
    assert_same_device(x_XD, row_index_R=row_index_R, offsets_S1=offsets_S1)


def copy_rows_reference(x_XD: Tensor, row_index_R: Tensor, offsets_S1: Tensor) -> Tensor:
    """The definition."""
    _check_operands(x_XD, row_index_R, offsets_S1)
    last, out_RD = int(offsets_S1[-1]), x_XD.new_empty(row_index_R.shape[0], x_XD.shape[1])
    out_RD[:last] = x_XD[row_index_R[:last].long()]
    return out_RD
