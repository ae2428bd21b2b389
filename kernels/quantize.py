"""fp8 (e4m3) with scales: rows by 128 columns as they are computed, weights by blocks of 128 x 128 as they are loaded.

Knows tensors only. value = q * scale, scale = largest magnitude / 448 in fp32, so that the largest becomes e4m3's
largest. A row's values depend on that row alone. A NaN stays NaN; where there is an infinity the values are NaN or 0
and the scale is infinite, so that every product with them is NaN.
"""

# Launch options such as num_warps are no parameters of a kernel.
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
    uses_triton,
)
from kernels.dependent_launch import dependent_launch, wait_for_inputs

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128
"""Columns of a row, and rows and columns of a weight, that share one scale: as DeepSeek-V3 ships its weights."""

TINIEST = 1e-30
"""Stands for the largest magnitude of a group that has none above it: a scale is never 0 nor subnormal."""

_MOST_AT_ONCE = 1 << 23  # elements of a weight that are quantised at a time


class Quantized(NamedTuple):
    """Rows in fp8 [X, D] and their scales [ceil(D / 128), X]: columns 128g to 128g + 127 of row x are values times
    scales[g, x]. Scales of neighbouring rows lie together: a product reads those of a tile of rows at each step."""

    values: Tensor
    scales: Tensor


class QuantizedBlocks(NamedTuple):
    """A weight [..., N, D] in fp8 and the scales [..., ceil(N / 128), ceil(D / 128)] of its blocks."""

    values: Tensor
    scales: Tensor


def supports_fp8(device: torch.device) -> bool:
    """Whether fp8 products run there: on the CPU (the reference does them), and from compute capability 8.9 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_rows(
    x_XD: Tensor, *, row_index_R: Tensor | None = None, offsets_S1: Tensor | None = None, num_rows: int | None = None
) -> Quantized:
    """Each row of x by itself, 128 columns to a scale; the last group may be narrower.

    With `row_index_R` int32 the rows are gathered: row r is x_XD[row_index_R[r]], `num_rows` of them, of which those
    from offsets_S1[-1] on mean nothing: they are neither read nor written. `quantize_rows_reference` is the definition.
    """
    run = quantize_rows_triton if uses_triton(x_XD) else quantize_rows_reference
    return run(x_XD, row_index_R=row_index_R, offsets_S1=offsets_S1, num_rows=num_rows)


# q[r, d] = e4m3(x[index[r], d] * (1 / s[g, r])), s[g, r] = max(TINIEST, max over d of group g of |x[index[r], d]|) / 448
#   x_ptr [X, D], rows strided; index_ptr int32 [R] | None; last_ptr int32 [1] | None: rows from it on mean nothing;
#   q_ptr e4m3 [R, D]; scale_ptr fp32 [G, R]. grid (cdiv(R, ROWS) * G,): a program owns one group of ROWS rows. fp32.
#   Columns from D on are read as zero and not written.


@triton.jit
def fp8_group(x, TINIEST: tl.constexpr):
    """(x / scale in fp32, not yet cast; scale): one scale for each row of the tile x, whose columns are one group."""
    # tl.max passes over NaN, which stays in x; an infinity makes the scale infinite and itself a NaN.
    largest = tl.max(tl.abs(x), axis=1)
    largest = tl.where(largest > TINIEST, largest, TINIEST)
    scale = tl.div_rn(largest, 448.0)
    return x * tl.div_rn(1.0, scale)[:, None], scale


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    x_ptr,
    index_ptr,
    last_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    width,
    stride_x,
    ROWS: tl.constexpr,
    TINIEST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    num_groups = tl.cdiv(width, 128)
    group = tl.program_id(0) % num_groups
    row = (tl.program_id(0) // num_groups) * ROWS + tl.arange(0, ROWS)
    in_r = row < (num_rows if last_ptr is None else tl.load(last_ptr))
    x_row = row if index_ptr is None else tl.load(index_ptr + row, mask=in_r, other=0)
    d = group * 128 + tl.arange(0, 128)[None, :]
    mask = in_r[:, None] & (d < width)
    x = tl.load(x_ptr + x_row.to(tl.int64)[:, None] * stride_x + d, mask=mask, other=0.0).to(tl.float32)
    q, scale = fp8_group(x, TINIEST)
    tl.store(q_ptr + row.to(tl.int64)[:, None] * width + d, q.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + group.to(tl.int64) * num_rows + row, scale, mask=in_r)


def quantize_rows_triton(
    x_XD: Tensor, *, row_index_R: Tensor | None = None, offsets_S1: Tensor | None = None, num_rows: int | None = None
) -> Quantized:
    """`quantize_rows` as one launch. Needs a GPU with fp8: compute capability 8.9 or above."""
    rows = _check_operands(x_XD, row_index_R, offsets_S1, num_rows)
    width = x_XD.shape[1]
    groups = cdiv(width, GROUP)
    values_RD = torch.empty(rows, width, dtype=FP8, device=x_XD.device)
    scales_GR = torch.empty(groups, rows, dtype=torch.float32, device=x_XD.device)
    if values_RD.numel():
        rows_per_program = 4 if rows <= 64 else 32
        _quantize_rows_kernel[(cdiv(rows, rows_per_program) * groups,)](
            x_XD,
            row_index_R,
            None if offsets_S1 is None else offsets_S1[-1:],
            values_RD,
            scales_GR,
            rows,
            width,
            x_XD.stride(0),
            ROWS=rows_per_program,
            TINIEST=TINIEST,
            num_warps=1 if rows <= 64 else 4,
            **dependent_launch(x_XD),
        )
    return Quantized(values_RD, scales_GR)


def _check_operands(x_XD: Tensor, row_index_R: Tensor | None, offsets_S1: Tensor | None, num_rows: int | None) -> int:
    """The number of rows of the result."""
    assert_shape("x_XD", x_XD, (None, None))
    assert_last_contiguous("x_XD", x_XD)
    assert_dtype("x_XD", x_XD, torch.bfloat16, torch.float16, torch.float32)
    assert_same_device(x_XD, row_index_R=row_index_R, offsets_S1=offsets_S1)
    rows = x_XD.shape[0] if num_rows is None else num_rows
    if row_index_R is None:
        assert rows <= x_XD.shape[0], f"x_XD has {x_XD.shape[0]} rows, num_rows={rows}, and there is no row index"
    else:
        assert_shape("row_index_R", row_index_R, (rows,))
        assert_dtype("row_index_R", row_index_R, torch.int32)
    if offsets_S1 is not None:
        assert_dtype("offsets_S1", offsets_S1, torch.int32)
    return rows


def quantize_rows_reference(
    x_XD: Tensor, *, row_index_R: Tensor | None = None, offsets_S1: Tensor | None = None, num_rows: int | None = None
) -> Quantized:
    """The definition, and the CPU's product path."""
    rows = _check_operands(x_XD, row_index_R, offsets_S1, num_rows)
    width, last = x_XD.shape[1], rows if offsets_S1 is None else int(offsets_S1[-1])
    x_RD = x_XD[:last] if row_index_R is None else x_XD[row_index_R[:last].long()]
    fill = cdiv(width, GROUP) * GROUP - width
    x_RGJ = torch.nn.functional.pad(x_RD.float(), (0, fill)).unflatten(1, (-1, GROUP))
    scales_RG = _scale_of(x_RGJ.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1))
    values_RD = _to_fp8(x_RGJ, scales_RG[..., None]).flatten(1)[:, :width]
    quantized = Quantized(values_RD.new_empty(rows, width), scales_RG.new_empty(scales_RG.shape[1], rows))
    quantized.values[:last], quantized.scales[:, :last] = values_RD, scales_RG.T
    return quantized


def quantize_blocks(w_ND: Tensor) -> QuantizedBlocks:
    """A weight [..., N, D] by blocks of 128 x 128, those at the lower and right edge smaller; plain torch, any device.

    Works on some rows at a time, so that what it takes for a moment does not grow with the weight.
    """
    N, D = w_ND.shape[-2:]
    G = cdiv(D, GROUP)
    values_ND = torch.empty(w_ND.shape, dtype=FP8, device=w_ND.device)
    scales_MG = torch.empty(*w_ND.shape[:-2], cdiv(N, GROUP), G, dtype=torch.float32, device=w_ND.device)
    blocks = max(1, _MOST_AT_ONCE // (w_ND[..., :GROUP, :].numel() or 1))
    for first in range(0, scales_MG.shape[-2], blocks):
        rows = slice(first * GROUP, min((first + blocks) * GROUP, N))
        part_ND = w_ND[..., rows, :].float()
        height = part_ND.shape[-2]
        fill = (0, G * GROUP - D, 0, cdiv(height, GROUP) * GROUP - height)
        part_MIGJ = torch.nn.functional.pad(part_ND, fill).unflatten(-1, (G, GROUP)).unflatten(-3, (-1, GROUP))
        part_MG = _scale_of(part_MIGJ.abs().amax((-3, -1)))
        part_ND = _to_fp8(part_MIGJ, part_MG[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
        values_ND[..., rows, :] = part_ND[..., :height, :D]
        scales_MG[..., first : first + blocks, :] = part_MG
    return QuantizedBlocks(values_ND, scales_MG)


def dequantize_rows(x: Quantized) -> Tensor:
    """fp32 [X, D]."""
    return x.values.float() * x.scales.T.repeat_interleave(GROUP, 1)[:, : x.values.shape[1]]


def dequantize_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., N, D] of fp8 [..., N, D] and scales [..., ceil(N / 128), ceil(D / 128)]."""
    rows = scales.repeat_interleave(GROUP, -2)[..., : values.shape[-2], :]
    return values.float() * rows.repeat_interleave(GROUP, -1)[..., : values.shape[-1]]


def _scale_of(largest: Tensor) -> Tensor:
    # Divided by a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds twice.
    return largest.clamp_min(TINIEST) / torch.full_like(largest, FP8_MAX)


def _to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """torch's cast turns what is beyond 448 into NaN; rounding may lift the largest a little above it."""
    return (x * (torch.ones_like(scale) / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
