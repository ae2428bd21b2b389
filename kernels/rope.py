"""Rotary position embedding, in place, in both layouts on disk.

Knows a table of angles and rows; how the angles follow from a configuration (scaling, YaRN) is the model's affair.

    half layout:        (x[i], x[i + R/2]) is turned by angle i
    interleaved layout: (x[2i], x[2i + 1]) is turned by angle i, and stays interleaved
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape


def rope_(x_THC: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, interleaved: bool) -> None:
    """Turns the first R entries of each head by the angles of the token's position, in place, in fp32 with one cast.

    x_THC may be a strided view; positions_T int64, 0 <= position < P; cos_sin_PR fp32 [P, R]: R/2 cosines, then R/2 sines.
    `rope_reference_` is the definition.
    """
    rope_reference_(x_THC, positions_T, cos_sin_PR, interleaved=interleaved)


def _check_operands(x_THC: Tensor, positions_T: Tensor, cos_sin_PR: Tensor) -> None:
    assert_shape("x_THC", x_THC, (None, None, None))
    assert_shape("positions_T", positions_T, (x_THC.shape[0],))
    assert_dtype("positions_T", positions_T, torch.int64)
    assert_shape("cos_sin_PR", cos_sin_PR, (None, None))
    assert_dtype("cos_sin_PR", cos_sin_PR, torch.float32)
    rotated, width = cos_sin_PR.shape[1], x_THC.shape[2]
    assert rotated % 2 == 0 and rotated <= width, f"cannot turn {rotated} of {width} entries: pairs, at most the head"
    assert cos_sin_PR.is_contiguous(), f"cos_sin_PR has strides {cos_sin_PR.stride()}; the table must be contiguous"
    assert_last_contiguous("x_THC", x_THC)
    assert_same_device(x_THC, positions_T=positions_T, cos_sin_PR=cos_sin_PR)


def rope_reference_(x_THC: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, interleaved: bool) -> None:
    """The definition, and the CPU's product path; here a position out of the table raises IndexError."""
    _check_operands(x_THC, positions_T, cos_sin_PR)
    half = cos_sin_PR.shape[1] // 2
    cos_T1h, sin_T1h = cos_sin_PR[positions_T].unsqueeze(1).split(half, dim=-1)
    if interleaved:
        first_THh, second_THh = x_THC[..., 0 : 2 * half : 2], x_THC[..., 1 : 2 * half : 2]
    else:
        first_THh, second_THh = x_THC[..., :half], x_THC[..., half : 2 * half]
    a_THh, b_THh = first_THh.float(), second_THh.float()
    first_THh.copy_(a_THh * cos_T1h - b_THh * sin_T1h)
    second_THh.copy_(b_THh * cos_T1h + a_THh * sin_T1h)
