"""The weighted sum of a token's expert rows, in routing order.

Knows rows and weights; knows neither experts nor ranks. The order k = 0..K-1 is the router's, never the placement's, so
the sum has the same bits wherever the experts live.
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


def combine(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """out_TD[t] = sum over k of weights_TK[t, k] * y_RD[packed_row_TK[t, k]], in y's dtype.

    packed_row_TK int32, -1 adds nothing (not even a NaN weight); weights_TK fp32. The sum is fp32, k ascending, one
    cast. `combine_reference` is the definition.
    """
    return (combine_triton if uses_triton(y_RD) else combine_reference)(y_RD, packed_row_TK, weights_TK)


# out_TD[t] = sum over k of weights_TK[t,k] * y_RD[packed_row_TK[t,k]]   (fp32, k ascending; row -1 adds nothing)
#   y_ptr [R, D], rows strided; row_ptr int32 [T, K]; weights_ptr fp32 [T, K]; out_ptr [T, D]
#   grid (T, cdiv(D, BLOCK_D)): a program owns BLOCK_D columns of one token; columns from D on are not touched


@triton.jit
def _combine_kernel(
    y_ptr, row_ptr, weights_ptr, out_ptr, num_columns, stride_y, TOP_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in range(TOP_K):
        row = tl.load(row_ptr + token * TOP_K + k)
        here = row >= 0
        weight = tl.load(weights_ptr + token * TOP_K + k, mask=here, other=0.0)
        y = tl.load(y_ptr + row.to(tl.int64) * stride_y + d, mask=here & (d < num_columns), other=0.0)
        total += weight * y.to(tl.float32)
    tl.store(out_ptr + token * num_columns + d, total.to(out_ptr.dtype.element_ty), mask=d < num_columns)


def combine_triton(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """`combine` as one launch."""
    _check_operands(y_RD, packed_row_TK, weights_TK)
    (num_tokens, top_k), num_columns = packed_row_TK.shape, y_RD.shape[1]
    out_TD = y_RD.new_empty(num_tokens, num_columns)
    if out_TD.numel() == 0:
        return out_TD
    block_d = min(1024, next_power_of_2(num_columns))
    _combine_kernel[(num_tokens, cdiv(num_columns, block_d))](
        y_RD,
        packed_row_TK.contiguous(),
        weights_TK.contiguous(),
        out_TD,
        num_columns,
        y_RD.stride(0),
        TOP_K=top_k,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out_TD


def _check_operands(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> None:
    assert_shape("y_RD", y_RD, (None, None))
    assert_last_contiguous("y_RD", y_RD)
    assert_shape("packed_row_TK", packed_row_TK, (None, None))
    assert_dtype("packed_row_TK", packed_row_TK, torch.int32)
    assert_shape("weights_TK", weights_TK, tuple(packed_row_TK.shape))
    assert_dtype("weights_TK", weights_TK, torch.float32)
    assert_same_device(y_RD, packed_row_TK=packed_row_TK, weights_TK=weights_TK)


def combine_reference(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The definition of the combine, in plain torch."""
    _check_operands(y_RD, packed_row_TK, weights_TK)
    num_tokens, top_k = packed_row_TK.shape
    sum_TD = torch.zeros(num_tokens, y_RD.shape[1], dtype=torch.float32, device=y_RD.device)
    if y_RD.shape[0] == 0:
        return sum_TD.to(y_RD.dtype)
    for k in range(top_k):
        row_T = packed_row_TK[:, k].long()
        term_TD = weights_TK[:, k : k + 1] * y_RD[row_T.clamp_min(0)].float()
        sum_TD += term_TD.masked_fill((row_T < 0).unsqueeze(1), 0.0)
    return sum_TD.to(y_RD.dtype)
