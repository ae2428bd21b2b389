"""The weighted sum behind the experts, with the norm that follows: all rows of a token on their way at once.

Knows rows and weights as kernels/combine.py does, which holds the definition and the launcher. The sum is the same, k
ascending, one fma each, and so is the norm's tile: the same bits.

Where sums follow loads in one stretch of code, ptxas holds to few registers and asks for eight rows in three rounds,
for two of 4096 in two, each behind the first use of the one before. A branch stands between them here, which loads do
not cross: one round.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import AHEAD_ROWS, dependent_launch, wait_for_inputs
from kernels.rmsnorm import add_residual, norm_tile, rms_apply, rms_scale

_MOST_ENTRIES = 192
"""Of expert rows that a thread holds at once, two a register: beyond, registers run out."""

# sum[t] = cast(cast(sum over k of weights[t, k] * y[row[t, k]]) + shared[t]) + residual[t]; out[t] = norm(sum[t])
#   y_ptr [R, D] contiguous; row_ptr int32 [T, K], -1 where no expert has written it; weights_ptr fp32 [T, K];
#   shared_ptr [T, D] or None, residual_ptr [T, D], rows strided; norm_ptr [D]; out_ptr, sum_ptr [T, D]
#   IN_ORDER: rows and weights are of the launch right before this one, and row t * K + k of y is choice k's
#   grid (T,): a program owns a row, in the tile of rmsnorm.py. fp32 sums, k ascending. Columns from D on are masked.


@triton.jit
def _combine_at_once_kernel(
    y_ptr,
    row_ptr,
    weights_ptr,
    shared_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    sum_ptr,
    num_columns,
    stride_shared,
    stride_residual,
    eps,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    used = d < WIDTH
    residual = tl.load(residual_ptr + token * stride_residual + d, mask=used, other=0.0)
    norm = tl.load(norm_ptr + d, mask=used, other=0.0)
    if IN_ORDER:
        wait_for_inputs(PDL)
    rows, weights, ys = (), (), ()
    for k in tl.static_range(TOP_K):
        rows += (tl.load(row_ptr + token * TOP_K + k),)
        weights += (tl.load(weights_ptr + token * TOP_K + k),)
    least = rows[0]
    for k in tl.static_range(1, TOP_K):
        least = tl.minimum(least, rows[k])
    if not IN_ORDER:
        wait_for_inputs(PDL)
    for k in tl.static_range(TOP_K):
        if IN_ORDER:  # asked for together with the choices, also where no expert has written
            ys += (tl.load(y_ptr + (token * TOP_K + k) * WIDTH + d, mask=used, other=0.0),)
        else:
            ys += (tl.load(y_ptr + rows[k].to(tl.int64) * WIDTH + d, mask=used & (rows[k] >= 0), other=0.0),)
    shared = 0.0
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * stride_shared + d, mask=used, other=0.0)
    total = tl.zeros((1, BLOCK_D), tl.float32)
    # The branch that loads do not cross.
    if least >= 0:
        for k in tl.static_range(TOP_K):
            total += weights[k] * ys[k].to(tl.float32)
    else:
        for k in tl.static_range(TOP_K):
            # What no expert has written may be anything.
            y = tl.where(rows[k] >= 0, ys[k], 0.0)
            total += tl.where(rows[k] >= 0, weights[k], 0.0) * y.to(tl.float32)
    x = total.to(residual.dtype)
    if shared_ptr is not None:
        x = add_residual(x, shared)
    x = add_residual(x, residual)
    place = token * WIDTH + d
    tl.store(sum_ptr + place, x, mask=used)
    tl.store(out_ptr + place, rms_apply(x, rms_scale(x, num_columns, eps), norm), mask=used)


def serves_at_once(y_RD: Tensor, packed_row_TK: Tensor) -> bool:
    """Whether a thread has registers for all rows of a token, and a program one token, as the norm's tile has it. Of a
    width that is no multiple of 16 the compiler knows more here than elsewhere, and may lay the tile out otherwise.

    Measured on one H200, microseconds, combine.py / here. Rows in order: 1 row of K = 8, D = 2048 1.92 / 1.49, K = 6
    with a shared row 2.04 / 1.44, K = 2, D = 4096 1.71 / 1.45. Anywhere, some elsewhere, K = 8, D = 2048: 1 row 1.79 /
    1.62, 8 rows 1.83 / 1.74, 64 rows 2.40 / 1.93, 256 rows 4.23 / 4.10, 4096 rows 45.5 / 44.6; K = 6 with shared rows:
    64 rows 1.99 / 1.77; K = 2, D = 4096: 256 rows 3.45 / 3.35. Steps of one row, ms: qwen3 2.262 / 2.235, dsv2-lite
    1.815 / 1.804."""
    top_k = packed_row_TK.shape[1]
    block_r, block_d, num_warps = norm_tile(y_RD.shape[1])
    return (
        y_RD.is_contiguous()
        and y_RD.element_size() == 2
        and y_RD.shape[1] % 16 == 0
        and block_r == 1
        and 0 < top_k * block_d <= _MOST_ENTRIES * 32 * num_warps
    )


def launch_at_once(
    y_RD: Tensor,
    packed_row_TK: Tensor,
    weights_TK: Tensor,
    shared_TD: Tensor | None,
    residual_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    results: tuple[Tensor, Tensor],
    *,
    in_order: bool,
) -> None:
    """Fills (normalised rows, new residual), where `serves_at_once`. Operands are checked already."""
    (num_tokens, top_k), width = packed_row_TK.shape, y_RD.shape[1]
    _, block_d, num_warps = norm_tile(width)
    _combine_at_once_kernel[(num_tokens,)](
        y_RD,
        packed_row_TK.contiguous(),
        weights_TK.contiguous(),
        shared_TD,
        residual_TD,
        norm_D,
        *results,
        width,
        0 if shared_TD is None else shared_TD.stride(0),
        residual_TD.stride(0),
        eps,
        TOP_K=top_k,
        WIDTH=width,
        BLOCK_D=block_d,
        IN_ORDER=in_order,
        num_warps=num_warps,
        **dependent_launch(y_RD, ahead=num_tokens <= AHEAD_ROWS),
    )
