"""Root-mean-square normalisation of rows, alone or after the residual is added.

Knows rows and a weight; knows nothing of layers. Statistics are fp32; the normalised row is cast to x's dtype and then
multiplied by the weight, as transformers does, so that checkpoints see the rounding they were trained with.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_last_contiguous, cdiv, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs


class Norm(NamedTuple):
    """What one norm is made of."""

    weight_C: Tensor
    eps: float


def rmsnorm(x_C: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """y[..., c] = weight[c] * cast(x[..., c] / sqrt(mean of x^2 + eps)), contiguous, in x's dtype.

    x_C has any leading dimensions and may be a strided view in them. `rmsnorm_reference` is the definition.
    """
    return (rmsnorm_triton if uses_triton(x_C) else rmsnorm_reference)(x_C, weight_C, eps)


def rmsnorm_residual(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, new residual): the new residual is x + residual, rounded to the model dtype; y is its `rmsnorm`.

    `rmsnorm_residual_reference` is the definition. Neither operand is changed.
    """
    run = rmsnorm_residual_triton if uses_triton(x_TD) else rmsnorm_residual_reference
    return run(x_TD, residual_TD, weight_D, eps)


@triton.jit
def add_residual(x, residual):
    """The new residual, rounded to x's dtype."""
    return (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)


@triton.jit
def rms_scale(x, num_columns, eps):
    """1 / sqrt(mean of x^2 + eps) of each row, fp32 [rows, 1]. Columns beyond the row must hold zero."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1)[:, None] / num_columns
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def rms_apply(x, scale, weight):
    """weight * cast(x * scale), in x's dtype."""
    normalised = (x.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
    return (normalised * weight.to(tl.float32)).to(x.dtype)


def norm_tile(num_columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of the tile whose rows are summed at once. It follows from C alone, and every kernel that
    normalises takes it: the order of a row's sum, and so its bits, depend on the tile."""
    block_c = next_power_of_2(num_columns)
    return max(1, min(8, 1024 // block_c)), block_c, 8 if block_c > 2048 else 4


_MANY, _PROGRAMS = 4, 8
"""A program takes this many times the rows where so many programs are left for each multiprocessor."""


def tile_of_many(num_rows: int, num_columns: int, multiprocessors: int) -> tuple[int, int, int]:
    """`norm_tile`, of more rows where there are many: more bytes of a program are on their way from memory at once.

    Only where norm_tile already gives each thread as many entries as it loads at once (16 bytes): then more rows leave
    a row's entries in the same threads, and its sum its bits.
    """
    rows, block_c, num_warps = norm_tile(num_columns)
    whole_loads = rows * block_c >= num_warps * 32 * 8
    enough = num_rows >= _MANY * rows * _PROGRAMS * multiprocessors
    return (_MANY if whole_loads and enough else 1) * rows, block_c, num_warps


# y[r, c] = weight[c] * cast(x[r, c] / sqrt(mean over c of x[r]^2 + eps)), x[r] being cast(x[r] + residual[r]) if given
#   row r = (outer, inner): x_ptr [A, B, C] strided in A and B; residual_ptr [A, C] strided or None, where B is 1;
#   sum_ptr (the new residual) and y_ptr [A, B, C] contiguous. grid (cdiv(A*B, BLOCK_R),): a program owns BLOCK_R rows.
#   fp32 statistics. Columns from C on count as zero; BLOCK_R depends on C alone, so the number of rows changes no bits.


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_rows"])
def _rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    num_rows,
    num_inner,
    num_columns,
    stride_outer,
    stride_inner,
    stride_residual,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    used = (row < num_rows) & (c < num_columns)
    outer, inner = row // num_inner, row % num_inner
    x = tl.load(x_ptr + outer * stride_outer + inner * stride_inner + c, mask=used, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * stride_residual + c, mask=used, other=0.0)
        x = add_residual(x, residual)
        tl.store(sum_ptr + row * num_columns + c, x, mask=used)
    weight = tl.load(weight_ptr + c, mask=c < num_columns, other=0.0)
    y = rms_apply(x, rms_scale(x, num_columns, eps), weight)
    tl.store(y_ptr + row * num_columns + c, y, mask=used)


def rmsnorm_triton(x_C: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """`rmsnorm` as one launch. With more than two leading dimensions, x is first made contiguous."""
    _check_operands(x_C, weight_C)
    y_C = x_C.new_empty(x_C.shape)
    if x_C.dim() == 3:
        x_ABC = x_C
    elif x_C.dim() == 2:
        x_ABC = x_C.unsqueeze(1)
    else:
        x_ABC = x_C.contiguous().view(-1, 1, x_C.shape[-1])
    _launch(x_ABC, None, weight_C, y_C, y_C, eps)
    return y_C


def rmsnorm_residual_triton(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rmsnorm_residual` as one launch."""
    _check_operands(x_TD, weight_D)
    check_residual(x_TD, residual_TD)
    y_TD, sum_TD = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    _launch(x_TD.unsqueeze(1), residual_TD, weight_D, y_TD, sum_TD, eps)
    return y_TD, sum_TD


def _launch(
    x_ABC: Tensor, residual_TD: Tensor | None, weight_C: Tensor, y: Tensor, new_residual: Tensor, eps: float
) -> None:
    num_outer, num_inner, num_columns = x_ABC.shape
    num_rows = num_outer * num_inner
    if x_ABC.numel() == 0:
        return
    block_r, block_c, num_warps = norm_tile(num_columns)
    _rmsnorm_kernel[(cdiv(num_rows, block_r),)](
        x_ABC,
        residual_TD,
        weight_C,
        y,
        new_residual,
        num_rows,
        num_inner,
        num_columns,
        x_ABC.stride(0),
        x_ABC.stride(1),
        0 if residual_TD is None else residual_TD.stride(0),
        eps,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=num_warps,
        **dependent_launch(x_ABC),
    )


def _check_operands(x_C: Tensor, weight_C: Tensor) -> None:
    """Few comparisons: this runs before every launch of a layer, and the device waits for it."""
    given, wanted = (weight_C.shape, weight_C.dtype, weight_C.device), (x_C.shape[-1:], x_C.dtype, x_C.device)
    assert given == wanted, f"weight_C is {given}, the rows {wanted}; a norm takes one width, dtype and device"
    assert_last_contiguous("x_C", x_C)


def check_residual(x_TD: Tensor, residual_TD: Tensor) -> None:
    """Rows [T, D] and a residual that fits them."""
    assert x_TD.dim() == 2, f"x_TD has shape {tuple(x_TD.shape)}; a residual goes with rows [T, D]"
    given, wanted = (residual_TD.shape, residual_TD.dtype, residual_TD.device), (x_TD.shape, x_TD.dtype, x_TD.device)
    assert given == wanted, f"residual_TD is {given}, the rows {wanted}; they share shape, dtype and device"
    assert_last_contiguous("residual_TD", residual_TD)


def rmsnorm_reference(x_C: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """The definition of `rmsnorm`, in plain torch."""
    _check_operands(x_C, weight_C)
    wide_C = x_C.float()
    scale_1 = torch.rsqrt(wide_C.square().mean(dim=-1, keepdim=True) + eps)
    return (weight_C * (wide_C * scale_1).to(x_C.dtype)).contiguous()


def rmsnorm_residual_reference(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The definition of `rmsnorm_residual`."""
    check_residual(x_TD, residual_TD)
    new_residual_TD = x_TD + residual_TD
    return rmsnorm_reference(new_residual_TD, weight_D, eps), new_residual_TD
