"""Copies of quantised rows in the order of their slots: what a product that reads whole tiles of rows takes.

Knows rows and indices only; values and scales move together, and no bit changes.
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
from kernels.quantize import FP8, GROUP, Quantized, empty_quantized

_ROWS, _GROUPS = 16, 8  # of one program's copy


def pack_rows(x: Quantized, row_index_R: Tensor, offsets_S1: Tensor) -> Quantized:
    """Row r of the result is row row_index_R[r] of x, for r < offsets_S1[-1]; the rows from there on mean nothing: no
    index is read there and nothing written. x may be strided, as rows lie in records; the result lies together.

    row_index_R int32 [R], offsets_S1 int32 [S + 1]. `pack_rows_reference` is the definition.
    """
    return (pack_rows_triton if uses_triton(x.values) else pack_rows_reference)(x, row_index_R, offsets_S1)


# out[r] = x[index[r]], values and scales
#   x_ptr e4m3 [X, D], rows strided; scale_ptr fp32 [G, X], both strided; index_ptr int32 [R]; last_ptr int32 [1]: rows
#   from it on mean nothing; out_ptr e4m3 [R, D], out_scale_ptr fp32 [G, R], contiguous
#   grid (cdiv(R, ROWS) * cdiv(G, GROUPS),): a program owns GROUPS groups of ROWS rows


@triton.jit(do_not_specialize=["scale_stride_g", "num_rows"])
def _pack_rows_kernel(
    x_ptr,
    scale_ptr,
    index_ptr,
    last_ptr,
    out_ptr,
    out_scale_ptr,
    stride_x,
    scale_stride_g,
    scale_stride_x,
    num_rows,
    width,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    num_groups = tl.cdiv(width, 128)
    chunks = tl.cdiv(num_groups, GROUPS)
    first = (tl.program_id(0) % chunks) * GROUPS
    row = (tl.program_id(0) // chunks) * ROWS + tl.arange(0, ROWS)
    in_r = row < tl.load(last_ptr)
    x_row = tl.load(index_ptr + row, mask=in_r, other=0).to(tl.int64)
    d = first * 128 + tl.arange(0, GROUPS * 128)[None, :]
    mask = in_r[:, None] & (d < width)
    values = tl.load(x_ptr + x_row[:, None] * stride_x + d, mask=mask)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * width + d, values, mask=mask)
    group = (first + tl.arange(0, GROUPS)).to(tl.int64)[:, None]
    mask = (group < num_groups) & in_r[None, :]
    scales = tl.load(scale_ptr + group * scale_stride_g + x_row[None, :] * scale_stride_x, mask=mask)
    tl.store(out_scale_ptr + group * num_rows + row[None, :], scales, mask=mask)


def pack_rows_triton(x: Quantized, row_index_R: Tensor, offsets_S1: Tensor) -> Quantized:
    """`pack_rows` as one launch."""
    _check_operands(x, row_index_R, offsets_S1)
    width, num_rows = x.values.shape[1], row_index_R.shape[0]
    groups = x.scales.shape[0]
    out = empty_quantized(num_rows, width, x.values.device)
    if out.values.numel():
        _pack_rows_kernel[(cdiv(num_rows, _ROWS) * cdiv(groups, _GROUPS),)](
            x.values,
            x.scales,
            row_index_R,
            offsets_S1[-1:],
            out.values,
            out.scales,
            x.values.stride(0),
            *x.scales.stride(),
            num_rows,
            width,
            ROWS=_ROWS,
            GROUPS=_GROUPS,
            num_warps=4,
            **dependent_launch(x.values),
        )
    return out


def _check_operands(x: Quantized, row_index_R: Tensor, offsets_S1: Tensor) -> None:
    assert_shape("x.values", x.values, (None, None))
    assert_shape("x.scales", x.scales, (cdiv(x.values.shape[1], GROUP), x.values.shape[0]))
    assert_dtype("x.values", x.values, FP8)
    assert_last_contiguous("x.values", x.values)
    assert_shape("row_index_R", row_index_R, (None,))
    assert_dtype("row_index_R", row_index_R, torch.int32)
    assert_dtype("offsets_S1", offsets_S1, torch.int32)
    assert_same_device(x.values, x_scales=x.scales, row_index_R=row_index_R, offsets_S1=offsets_S1)


def pack_rows_reference(x: Quantized, row_index_R: Tensor, offsets_S1: Tensor) -> Quantized:
    """The definition."""
    _check_operands(x, row_index_R, offsets_S1)
    last, num_rows = int(offsets_S1[-1]), row_index_R.shape[0]
    rows = row_index_R[:last].long()
    out = empty_quantized(num_rows, x.values.shape[1], x.values.device)
    out.values[:last] = x.values.view(torch.uint8)[rows].view(FP8)
    out.scales[:, :last] = x.scales[:, rows]
    return out
