"""The weighted sum of a token's expert rows, in routing order; and, in one launch with it, the norm that follows.

Knows rows and weights; knows neither experts nor ranks. The order k = 0..K-1 is the router's, never the placement's, so
the sum has the same bits wherever the experts live.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_last_contiguous, cdiv, next_power_of_2, uses_triton
from kernels.combine_at_once import launch_at_once, serves_at_once
from kernels.dependent_launch import AHEAD_ROWS, dependent_launch, wait_for_inputs
from kernels.rmsnorm import add_residual, norm_tile, rms_apply, rms_scale, rmsnorm_residual_reference


def combine(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """out_TD[t] = sum over k of weights_TK[t, k] * y_RD[packed_row_TK[t, k]], in y's dtype.

    packed_row_TK int32, -1 adds nothing (not even a NaN weight); weights_TK fp32. The sum is fp32, k ascending, one
    cast. `combine_reference` is the definition.
    """
    return (combine_triton if uses_triton(y_RD) else combine_reference)(y_RD, packed_row_TK, weights_TK)


def combine_norm(
    y_RD: Tensor,
    packed_row_TK: Tensor,
    weights_TK: Tensor,
    residual_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    shared_TD: Tensor | None = None,
    *,
    in_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_residual` of `combine` (+ shared): (normalised rows, new residual), each in the model dtype.

    Every step rounds as it does alone: the sum, the sum with the shared rows, the new residual.
    `in_order`: the launch right before this one chose the experts, too, and laid row t * K + k for choice k of token t.
    `combine_norm_reference` is the definition.
    """
    operands = (y_RD, packed_row_TK, weights_TK, residual_TD, norm_D, eps, shared_TD)
    if not uses_triton(y_RD):
        return combine_norm_reference(*operands)
    return combine_norm_triton(*operands, in_order=in_order)


UNROLLED = tl.constexpr(16)
"""Up to so many experts a token, all its rows are asked for before the first arrives; beyond, one after another."""

# out_TD[t] = sum over k of weights_TK[t,k] * y_RD[packed_row_TK[t,k]]   (fp32, k ascending; row -1 adds nothing)
#   y_ptr [R, D], rows strided; row_ptr int32 [T, K]; weights_ptr fp32 [T, K]; out_ptr [T, D]
#   grid (T, cdiv(D, BLOCK_D)): a program owns BLOCK_D columns of one token; columns from D on are not touched


@triton.jit
def _choices(row_ptr, weights_ptr, first, in_batch, NUMBER: tl.constexpr):
    """(rows, weights) of NUMBER choices from `first` on (an index into [T, K], or a column of them), as tuples."""
    rows, weights = (), ()
    for k in tl.static_range(NUMBER):
        rows += (tl.load(row_ptr + first + k, mask=in_batch, other=-1),)
        weights += (tl.load(weights_ptr + first + k, mask=in_batch, other=0.0),)
    return rows, weights


@triton.jit
def _add_chosen(total, y_ptr, rows, weights, d, num_columns, stride_y, NUMBER: tl.constexpr):
    """total + the weighted columns d of these rows, in their order."""
    for k in tl.static_range(NUMBER):
        here = rows[k] >= 0
        y = tl.load(y_ptr + rows[k].to(tl.int64) * stride_y + d, mask=here & (d < num_columns), other=0.0)
        total += tl.where(here, weights[k], 0.0) * y.to(tl.float32)
    return total


@triton.jit
def add_experts(total, y_ptr, row_ptr, weights_ptr, token, in_batch, d, num_columns, stride_y, TOP_K: tl.constexpr):
    """total + the weighted columns d of all rows of a token, k ascending."""
    if TOP_K <= UNROLLED:
        rows, weights = _choices(row_ptr, weights_ptr, token * TOP_K, in_batch, TOP_K)
        total = _add_chosen(total, y_ptr, rows, weights, d, num_columns, stride_y, TOP_K)
    else:
        for k in range(TOP_K):
            rows, weights = _choices(row_ptr, weights_ptr, token * TOP_K + k, in_batch, 1)
            total = _add_chosen(total, y_ptr, rows, weights, d, num_columns, stride_y, 1)
    return total


@triton.jit
def add_rows(total, shared_ptr, shared_place, residual, used):
    """The new residual: the sum of a token's experts, plus its shared rows if any, plus its residual; each is cast."""
    x = total.to(residual.dtype)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + shared_place, mask=used, other=0.0)
        x = add_residual(x, shared)
    return add_residual(x, residual)


@triton.jit
def _combine_kernel(
    y_ptr,
    row_ptr,
    weights_ptr,
    out_ptr,
    num_columns,
    stride_y,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    total = add_experts(total, y_ptr, row_ptr, weights_ptr, token, True, d, num_columns, stride_y, TOP_K)
    tl.store(out_ptr + token * num_columns + d, total.to(out_ptr.dtype.element_ty), mask=d < num_columns)


# sum[t] = cast(cast(combined[t] + shared[t]) + residual[t]); out[t] = norm(sum[t]); combined as above, cast
#   as above, and shared_ptr [T, D] or None, residual_ptr [T, D], rows strided; norm_ptr [D]; out_ptr, sum_ptr [T, D]
#   grid (cdiv(T, BLOCK_R),): a program owns BLOCK_R whole rows, in the tile of rmsnorm.py; the rest is masked


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_tokens"])
def _combine_norm_kernel(
    y_ptr,
    row_ptr,
    weights_ptr,
    shared_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    sum_ptr,
    num_tokens,
    num_columns,
    stride_y,
    stride_shared,
    stride_residual,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    token = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    in_batch = token < num_tokens
    used = in_batch & (d < num_columns)
    residual = tl.load(residual_ptr + token * stride_residual + d, mask=used, other=0.0)
    norm = tl.load(norm_ptr + d, mask=d < num_columns, other=0.0)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    if TOP_K <= UNROLLED and not IN_ORDER:
        # The router's choices and the residual are older than the launch before this one, whose rows are waited for.
        rows, weights = _choices(row_ptr, weights_ptr, token * TOP_K, in_batch, TOP_K)
        wait_for_inputs(PDL)
        total = _add_chosen(total, y_ptr, rows, weights, d, num_columns, stride_y, TOP_K)
    else:
        wait_for_inputs(PDL)
        total = add_experts(total, y_ptr, row_ptr, weights_ptr, token, in_batch, d, num_columns, stride_y, TOP_K)
    x = add_rows(total, shared_ptr, token * stride_shared + d, residual, used)
    place = token * num_columns + d
    tl.store(sum_ptr + place, x, mask=used)
    tl.store(out_ptr + place, rms_apply(x, rms_scale(x, num_columns, eps), norm), mask=used)


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
        **dependent_launch(y_RD),
    )
    return out_TD


def combine_norm_triton(
    y_RD: Tensor,
    packed_row_TK: Tensor,
    weights_TK: Tensor,
    residual_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    shared_TD: Tensor | None = None,
    *,
    in_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """`combine_norm` as one launch, where it can that of combine_at_once.py."""
    _check_operands(y_RD, packed_row_TK, weights_TK)
    _check_norm(y_RD, packed_row_TK, residual_TD, norm_D, shared_TD)
    (num_tokens, top_k), num_columns = packed_row_TK.shape, y_RD.shape[1]
    out_TD, sum_TD = y_RD.new_empty(num_tokens, num_columns), y_RD.new_empty(num_tokens, num_columns)
    if out_TD.numel() == 0:
        return out_TD, sum_TD
    if serves_at_once(y_RD, packed_row_TK):
        choices, results = (packed_row_TK, weights_TK), (out_TD, sum_TD)
        launch_at_once(y_RD, *choices, shared_TD, residual_TD, norm_D, eps, results, in_order=in_order)
        return results
    block_r, block_d, num_warps = norm_tile(num_columns)
    _combine_norm_kernel[(cdiv(num_tokens, block_r),)](
        y_RD,
        packed_row_TK.contiguous(),
        weights_TK.contiguous(),
        shared_TD,
        residual_TD,
        norm_D,
        out_TD,
        sum_TD,
        num_tokens,
        num_columns,
        y_RD.stride(0),
        0 if shared_TD is None else shared_TD.stride(0),
        residual_TD.stride(0),
        eps,
        TOP_K=top_k,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        IN_ORDER=in_order,
        num_warps=num_warps,
        **dependent_launch(y_RD, ahead=num_tokens <= AHEAD_ROWS),
    )
    return out_TD, sum_TD


def _check_operands(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> None:
    """Few comparisons: this runs before every launch of a layer, and the device waits for it."""
    assert y_RD.dim() == packed_row_TK.dim() == 2, f"y_RD {y_RD.shape}, packed_row_TK {packed_row_TK.shape}"
    assert_last_contiguous("y_RD", y_RD)
    given = (packed_row_TK.dtype, weights_TK.dtype, weights_TK.shape, packed_row_TK.device, weights_TK.device)
    wanted = (torch.int32, torch.float32, packed_row_TK.shape, y_RD.device, y_RD.device)
    assert given == wanted, f"rows and weights of the choices are {given}, wanted {wanted}"


def _check_norm(
    y_RD: Tensor, packed_row_TK: Tensor, residual_TD: Tensor, norm_D: Tensor, shared_TD: Tensor | None
) -> None:
    shape = (packed_row_TK.shape[0], y_RD.shape[1])
    given = (residual_TD.shape, norm_D.shape, residual_TD.dtype, norm_D.dtype, residual_TD.device, norm_D.device)
    wanted = (shape, shape[1:], y_RD.dtype, y_RD.dtype, y_RD.device, y_RD.device)
    assert given == wanted, f"residual and norm are {given}, wanted {wanted}"
    assert_last_contiguous("residual_TD", residual_TD)
    if shared_TD is not None:
        given, wanted = (shared_TD.shape, shared_TD.dtype, shared_TD.device), (shape, y_RD.dtype, y_RD.device)
        assert given == wanted, f"the shared rows are {given}, wanted {wanted}"
        assert_last_contiguous("shared_TD", shared_TD)


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


def combine_norm_reference(
    y_RD: Tensor,
    packed_row_TK: Tensor,
    weights_TK: Tensor,
    residual_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    shared_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, and the CPU's product path: the references of sum and norm, one after another."""
    _check_norm(y_RD, packed_row_TK, residual_TD, norm_D, shared_TD)
    out_TD = combine_reference(y_RD, packed_row_TK, weights_TK)
    if shared_TD is not None:
        out_TD += shared_TD
    return rmsnorm_residual_reference(out_TD, residual_TD, norm_D, eps)
