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


def empty_quantized(num_rows: int, width: int, device: torch.device) -> Quantized:
    """Room for so many rows and their scales."""
    values_XD = torch.empty(num_rows, width, dtype=FP8, device=device)
    return Quantized(values_XD, torch.empty(cdiv(width, GROUP), num_rows, dtype=torch.float32, device=device))


def quantized_bytes(num_rows: int, width: int) -> int:
    """Of so many rows in fp8 with their scales."""
    return num_rows * (width + 4 * cdiv(width, GROUP))


def supports_fp8(device: torch.device) -> bool:
    """Whether fp8 products run there: on the CPU (the reference does them), and from compute capability 8.9 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_rows(x_XD: Tensor) -> Quantized:
    """Each row of x by itself, 128 columns to a scale; the last group may be narrower.

    `quantize_rows_reference` is the definition.
    """
    return (quantize_rows_triton if uses_triton(x_XD) else quantize_rows_reference)(x_XD)


# q[x, d] = e4m3(x[x, d] * (1 / s[g, x])), s[g, x] = max(TINIEST, max over d of group g of |x[x, d]|) / 448
#   x_ptr [X, D], rows strided; q_ptr e4m3 [X, D]; scale_ptr fp32 [G, X]. grid (cdiv(X, ROWS) * G,): a program owns one
#   group of ROWS rows. fp32. Columns from D on are read as zero and not written.


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    x_ptr,
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
    in_r = row < num_rows
    d = group * 128 + tl.arange(0, 128)[None, :]
    mask = in_r[:, None] & (d < width)
    long_row = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + long_row * stride_x + d, mask=mask, other=0.0).to(tl.float32)
    # tl.max passes over NaN, which stays in x; an infinity makes the scale infinite and itself a NaN.
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.div_rn(tl.where(largest > TINIEST, largest, TINIEST), 448.0)
    q = x * tl.div_rn(1.0, scale)[:, None]
    tl.store(q_ptr + long_row * width + d, q.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + group.to(tl.int64) * num_rows + row, scale, mask=in_r)


def quantize_rows_triton(x_XD: Tensor) -> Quantized:
    """`quantize_rows` as one launch. Needs a GPU with fp8: compute capability 8.9 or above."""
    _check_rows(x_XD)
    rows, width = x_XD.shape
    out = empty_quantized(rows, width, x_XD.device)
    if out.values.numel():
        few = rows <= 64
        rows_per_program = 4 if few else 32
        _quantize_rows_kernel[(cdiv(rows, rows_per_program) * cdiv(width, GROUP),)](
            x_XD,
            *out,
            rows,
            width,
            x_XD.stride(0),
            ROWS=rows_per_program,
            TINIEST=TINIEST,
            num_warps=1 if few else 4,
            **dependent_launch(x_XD),
        )
    return out


def _check_rows(x_XD: Tensor) -> None:
    assert_shape("x_XD", x_XD, (None, None))
    assert_last_contiguous("x_XD", x_XD)
    assert_dtype("x_XD", x_XD, torch.bfloat16, torch.float16, torch.float32)


def quantize_rows_reference(x_XD: Tensor) -> Quantized:
    """The definition, and the CPU's product path."""
    _check_rows(x_XD)
    width = x_XD.shape[1]
    x_XGJ = torch.nn.functional.pad(x_XD.float(), (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    scales_XG = fp8_scale(x_XGJ.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1))
    values_XD = to_fp8(x_XGJ, scales_XG[..., None]).flatten(1)[:, :width]
    return Quantized(values_XD.contiguous(), scales_XG.T.contiguous())


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
        part_MG = fp8_scale(part_MIGJ.abs().amax((-3, -1)))
        part_ND = to_fp8(part_MIGJ, part_MG[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
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


def fp8_scale(largest: Tensor) -> Tensor:
    """The scale of rows or blocks with these largest magnitudes."""
    # Divided by a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds twice.
    return largest.clamp_min(TINIEST) / torch.full_like(largest, FP8_MAX)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """torch's cast turns what is beyond 448 into NaN; rounding may lift the largest a little above it."""
    return (x * (torch.ones_like(scale) / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
