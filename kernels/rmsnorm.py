"""Root-mean-square normalisation of rows, alone or after the residual is added.

Knows rows and a weight; knows nothing of layers. Statistics are fp32; the normalised row is cast to x's dtype and then
multiplied by the weight, as transformers does, so that checkpoints see the rounding they were trained with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import assert_last_contiguous, assert_same_device, assert_shape


def rmsnorm(x_C: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """y[..., c] = weight[c] * cast(x[..., c] / sqrt(mean of x^2 + eps)), contiguous, in x's dtype.

    x_C has any leading dimensions and may be a strided view in them. `rmsnorm_reference` is the definition.
    """
    return rmsnorm_reference(x_C, weight_C, eps)


def rmsnorm_residual(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, new residual): the new residual is x + residual, rounded to the model dtype; y is its `rmsnorm`."""
    return rmsnorm_residual_reference(x_TD, residual_TD, weight_D, eps)


def _check_operands(x_C: Tensor, weight_C: Tensor) -> None:
    assert_shape("weight_C", weight_C, (x_C.shape[-1],))
    assert x_C.dtype == weight_C.dtype, f"x_C is {x_C.dtype}, weight_C {weight_C.dtype}; a norm takes one dtype"
    assert_last_contiguous("x_C", x_C)
    assert_same_device(x_C, weight_C=weight_C)


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
    assert_shape("residual_TD", residual_TD, tuple(x_TD.shape))
    new_residual_TD = x_TD + residual_TD
    return rmsnorm_reference(new_residual_TD, weight_D, eps), new_residual_TD
