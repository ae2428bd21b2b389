"""Rotary position embedding, in place, in both layouts on disk.

Knows a table of angles and rows; how the angles follow from a configuration (scaling, YaRN) is the model's affair.

    half layout:        (x[i], x[i + R/2]) is turned by angle i
    interleaved layout: (x[2i], x[2i + 1]) is turned by angle i, and stays interleaved
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

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


def rope_(x_THC: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, interleaved: bool) -> None:
    """Turns the first R entries of each head by the angles of the token's position, in place, in fp32 with one cast.

    x_THC may be a strided view; positions_T int64, 0 <= position < P; cos_sin_PR fp32 [P, R]: R/2 cosines, then R/2
    sines. `rope_reference_` is the definition.
    """
    run = rope_triton_ if uses_triton(x_THC) else rope_reference_
    run(x_THC, positions_T, cos_sin_PR, interleaved=interleaved)


@triton.jit
def rotate(first, second, cos, sin):
    """Both entries of each pair after the turn, in their dtype."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    # Spelt out which product is rounded: left to the compiler, it differs from kernel to kernel.
    return tl.fma(a, cos, -(b * sin)).to(first.dtype), tl.fma(b, cos, a * sin).to(first.dtype)


# (a, b) = (a cos - b sin, b cos + a sin) for pair i of each head, a and b R/2 apart or side by side
#   x_ptr [T, H, C], T and H strided; positions_ptr int64 [T]; table_ptr fp32 [P, R]
#   grid (T, cdiv(H, BLOCK_H)): a program owns BLOCK_H heads of one token, reads both of a pair and then writes both
#   fp32, one cast. Pairs from R/2 on and heads from H on are not touched.


@triton.jit
def _rope_kernel(
    x_ptr,
    positions_ptr,
    table_ptr,
    num_heads,
    half,
    stride_t,
    stride_h,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    angle_ptr = table_ptr + tl.load(positions_ptr + token) * (2 * half) + pair
    cos = tl.load(angle_ptr, mask=pair < half, other=0.0)
    sin = tl.load(angle_ptr + half, mask=pair < half, other=0.0)
    first_ptr = x_ptr + token * stride_t + head.to(tl.int64) * stride_h + (2 * pair if INTERLEAVED else pair)
    second_ptr = first_ptr + (1 if INTERLEAVED else half)
    used = (head < num_heads) & (pair < half)
    first, second = tl.load(first_ptr, mask=used, other=0.0), tl.load(second_ptr, mask=used, other=0.0)
    a, b = rotate(first, second, cos, sin)
    # A small tile is held by several threads at once: all must have read before one writes.
    tl.debug_barrier()
    tl.store(first_ptr, a, mask=used)
    tl.store(second_ptr, b, mask=used)


def rope_triton_(x_THC: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, interleaved: bool) -> None:
    """`rope_` as one launch."""
    _check_operands(x_THC, positions_T, cos_sin_PR)
    num_tokens, num_heads, _ = x_THC.shape
    half = cos_sin_PR.shape[1] // 2
    if num_tokens == 0 or num_heads == 0 or half == 0:
        return
    block_p = next_power_of_2(half)
    block_h = min(next_power_of_2(num_heads), max(1, 1024 // block_p))
    _rope_kernel[(num_tokens, cdiv(num_heads, block_h))](
        x_THC,
        positions_T,
        cos_sin_PR,
        num_heads,
        half,
        x_THC.stride(0),
        x_THC.stride(1),
        INTERLEAVED=interleaved,
        BLOCK_H=block_h,
        BLOCK_P=block_p,
        num_warps=4,
        **dependent_launch(x_THC),
    )


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
    # Both before either is written: in fp32, a and b are x itself.
    turned_a_THh, turned_b_THh = a_THh * cos_T1h - b_THh * sin_T1h, b_THh * cos_T1h + a_THh * sin_T1h
    first_THh.copy_(turned_a_THh)
    second_THh.copy_(turned_b_THh)
