"""y = x w^T (+ bias) with the sum over K never split, so that a row's bits do not depend on how many rows there are.

Knows matrices; knows nothing of models. Serves where the vendor library may split K by the number of rows: router logits,
narrow projections, and, as `head_linear`, the per-head products of absorbed MLA. On CPU the products run in blocks of 32
rows, the last one filled up with zeros: torch's own rows change with the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.checks import assert_last_contiguous, assert_same_device, assert_shape

CPU_BLOCK = 32
"""Rows of one matrix product on CPU. Every product has exactly this many."""

_CPU_K_MULTIPLE = 4
"""On CPU, rows of products with N <= 8 and a K that 4 does not divide have bits that depend on their place in the block."""


def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """y_MN = x w^T (+ bias), fp32 accumulation, one cast to `out_dtype` (None: the operands' dtype).

    Operands of different dtypes are both read as the wider one. fp32 operands are multiplied in fp32, never in tf32. The
    bias is added before the cast. `linear_reference` is the definition.
    """
    return linear_reference(x_MK, w_NK, bias_N, out_dtype=out_dtype)


def head_linear(x_BHK: Tensor, w_HNK: Tensor) -> Tensor:
    """y_BHN[b, h] = w_HNK[h] x_BHK[b, h]: one product per head; x may be a strided view. `head_linear_reference` defines it."""
    return head_linear_reference(x_BHK, w_HNK)


def _check_linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> None:
    assert_shape("x_MK", x_MK, (None, None))
    assert_shape("w_NK", w_NK, (None, x_MK.shape[1]))
    assert_last_contiguous("x_MK", x_MK)
    assert_last_contiguous("w_NK", w_NK)
    if bias_N is not None:
        assert_shape("bias_N", bias_N, (w_NK.shape[0],))
    assert_same_device(x_MK, w_NK=w_NK, bias_N=bias_N)


def linear_reference(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The definition, and the CPU's product path: fixed 32-row blocks in the widest of operand and output dtype."""
    _check_linear(x_MK, w_NK, bias_N)
    operand_dtype = torch.promote_types(x_MK.dtype, w_NK.dtype)
    out_dtype = out_dtype or operand_dtype
    product_dtype = torch.promote_types(operand_dtype, out_dtype)
    y_MN = multiply_blocks(x_MK.to(product_dtype), w_NK.to(product_dtype), bias_N)
    return y_MN.to(out_dtype)


def multiply_blocks(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x w^T (+ bias) in blocks of CPU_BLOCK rows, all of one shape: a row's bits depend on that row and w alone."""
    num_rows, width = x_MK.shape
    bias_N = None if bias_N is None else bias_N.to(x_MK.dtype)
    if width % _CPU_K_MULTIPLE:
        fill = _CPU_K_MULTIPLE - width % _CPU_K_MULTIPLE
        x_MK, w_NK = functional.pad(x_MK, (0, fill)), functional.pad(w_NK, (0, fill))
    y_MN = x_MK.new_empty(num_rows, w_NK.shape[0])
    for start in range(0, num_rows, CPU_BLOCK):
        block_MK = x_MK[start : start + CPU_BLOCK]
        rows = block_MK.shape[0]
        if rows < CPU_BLOCK:
            block_MK = functional.pad(block_MK, (0, 0, 0, CPU_BLOCK - rows))
        y_MN[start : start + rows] = functional.linear(block_MK.contiguous(), w_NK, bias_N)[:rows]
    return y_MN


def head_linear_reference(x_BHK: Tensor, w_HNK: Tensor) -> Tensor:
    """The definition of `head_linear`: per head, `linear_reference`'s fixed blocks of rows."""
    _check_head_linear(x_BHK, w_HNK)
    num_rows, num_heads, _ = x_BHK.shape
    y_BHN = x_BHK.new_empty(num_rows, num_heads, w_HNK.shape[1])
    for head in range(num_heads):
        y_BHN[:, head] = multiply_blocks(x_BHK[:, head], w_HNK[head])
    return y_BHN


def _check_head_linear(x_BHK: Tensor, w_HNK: Tensor) -> None:
    assert_shape("x_BHK", x_BHK, (None, None, None))
    assert_shape("w_HNK", w_HNK, (x_BHK.shape[1], None, x_BHK.shape[2]))
    assert x_BHK.dtype == w_HNK.dtype, (
        f"x_BHK is {x_BHK.dtype}, w_HNK {w_HNK.dtype}; a per-head product takes one dtype"
    )
    assert_last_contiguous("x_BHK", x_BHK)
    assert_same_device(x_BHK, w_HNK=w_HNK)
