"""The weighted sum behind few tokens' experts, with all its rows on their way at once (kernels/combine.py, IN_ORDER).
Predicted: qwen3 -0.6 to -1.0 us a layer at one row (-30 to -50 us a step), dsv2-lite -0.4 to -0.8 (-10 to -20).

Today's chain from the wait to the store, in sm_90 machine code, D = 2048, K = 8: ptxas holds to 82 registers and issues
the loads in three rounds, each behind the first use of the one before it: 16 choices with the left halves of four rows;
four left halves and one right one; seven right halves. Then 560 instructions a warp to the norm's shuffles: each half
of a row is selected element by element, in case no expert has written it. Here a branch stands between loads and sums
(are all choices here?), which they cannot cross: one round, in 168 registers, and 350 instructions on the usual side.
Two rounds of L2 less are 0.5 to 1.3 us; a program's 32 KB then come at some 64 bytes a cycle, 0.28 us, which were
partly hidden; 200 instructions are 0.1 us. With dsv2-lite's K = 6 and its shared row there are three rounds, too.

The sum is as it was: k ascending, fp32, one fma each, the norm in the same tile, so the same bits. Rows are contiguous
and widths known when it is compiled, so that no address is computed behind the wait.

To land it: `_sum_rows_kernel` into kernels/combine.py in place of IN_ORDER (`_add_in_order` goes; what `fits` refuses
takes the plain form). Test: bits against the plain form with some choices elsewhere (-1) and NaN in their rows, D =
2048, 2880, 4096, K = 1, 2, 6, 8, with shared rows and without; ahead-of-time compilation without spills.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.drafts.case import Case
from kernels import combine as in_use
from kernels.dependent_launch import AHEAD_ROWS, dependent_launch, wait_for_inputs
from kernels.rmsnorm import add_residual, norm_tile, rms_apply, rms_scale
from launch.replay import rotation_length

_combine_norm_triton = in_use.combine_norm_triton  # what it falls back to, also when installed

_MOST_ENTRIES = 192
"""Of expert rows that a thread holds at once, two a register: beyond, registers run out."""

# sum[t] = cast(cast(sum over k of weights[t, k] * y[t * K + k]) + shared[t]) + residual[t]; out[t] = norm(sum[t])
#   y_ptr [T * K, D] contiguous, row t * K + k that of choice k; row_ptr int32 [T, K]: -1 where no expert has written
#   it; weights_ptr fp32 [T, K]; shared_ptr [T, D] or None, residual_ptr [T, D], rows strided; norm_ptr [D]; out_ptr,
#   sum_ptr [T, D]
#   grid (T,): a program owns a row, in the tile of rmsnorm.py. fp32 sums, k ascending. Columns from D on are masked.


@triton.jit
def _sum_rows_kernel(
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
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    used = d < WIDTH
    residual = tl.load(residual_ptr + token * stride_residual + d, mask=used, other=0.0)
    norm = tl.load(norm_ptr + d, mask=used, other=0.0)
    y_ptrs = y_ptr + token * (TOP_K * WIDTH) + d
    wait_for_inputs(PDL)
    rows, weights, ys = (), (), ()
    for k in tl.static_range(TOP_K):
        rows += (tl.load(row_ptr + token * TOP_K + k),)
        weights += (tl.load(weights_ptr + token * TOP_K + k),)
    for k in tl.static_range(TOP_K):
        ys += (tl.load(y_ptrs + k * WIDTH, mask=used, other=0.0),)
    shared = 0.0
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * stride_shared + d, mask=used, other=0.0)
    least = rows[0]
    for k in tl.static_range(1, TOP_K):
        least = tl.minimum(least, rows[k])
    total = tl.zeros((1, BLOCK_D), tl.float32)
    # A branch, so that the compiler asks for all rows ahead of it: it moves loads behind sums, but not behind a branch.
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


def fits(y_RD: Tensor, packed_row_TK: Tensor) -> bool:
    """Whether a thread has registers for all rows of a token, and a program one token, as the norm's tile has it. Of a
    width that is no multiple of 16 the compiler knows more than in use, and may lay the tile out otherwise."""
    block_r, block_d, num_warps = norm_tile(y_RD.shape[1])
    return (
        y_RD.is_contiguous()
        and y_RD.element_size() == 2
        and y_RD.shape[1] % 16 == 0
        and block_r == 1
        and packed_row_TK.shape[1] * block_d <= _MOST_ENTRIES * 32 * num_warps
    )


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
    """As in kernels/combine.py."""
    operands = (y_RD, packed_row_TK, weights_TK, residual_TD, norm_D, eps, shared_TD)
    (num_tokens, top_k), width = packed_row_TK.shape, y_RD.shape[1]
    if not in_order or num_tokens == 0 or not fits(y_RD, packed_row_TK):
        return _combine_norm_triton(*operands, in_order=in_order)
    in_use._check_operands(y_RD, packed_row_TK, weights_TK)
    in_use._check_norm(y_RD, packed_row_TK, residual_TD, norm_D, shared_TD)
    out_TD, sum_TD = y_RD.new_empty(num_tokens, width), y_RD.new_empty(num_tokens, width)
    _, block_d, num_warps = norm_tile(width)
    _sum_rows_kernel[(num_tokens,)](
        y_RD,
        packed_row_TK.contiguous(),
        weights_TK.contiguous(),
        shared_TD,
        residual_TD,
        norm_D,
        out_TD,
        sum_TD,
        width,
        0 if shared_TD is None else shared_TD.stride(0),
        residual_TD.stride(0),
        eps,
        TOP_K=top_k,
        WIDTH=width,
        BLOCK_D=block_d,
        num_warps=num_warps,
        **dependent_launch(y_RD, ahead=num_tokens <= AHEAD_ROWS),
    )
    return out_TD, sum_TD


def cases(device: torch.device) -> Iterator[Case]:
    """One row of three models; four of which some choices are elsewhere, their rows NaN; an odd width."""
    shapes = [
        ("qwen3 1 row", 1, 8, 2048, False, False),
        ("dsv2-lite 1 row", 1, 6, 2048, True, False),
        ("mixtral 1 row", 1, 2, 4096, False, False),
        ("qwen3 4 rows, some elsewhere", 4, 8, 2048, False, True),
        ("3 rows of 2880, some elsewhere", 3, 4, 2880, True, True),
    ]
    runs = device.type == "cuda" or not isinstance(_sum_rows_kernel, triton.JITFunction)  # or is interpreted
    before, after = (_combine_norm_triton, combine_norm_triton) if runs else (in_use.combine_norm, in_use.combine_norm)
    for name, *shape in shapes:
        rotation = rotation_length(2 * shape[0] * shape[1] * shape[2]) if device.type == "cuda" else 1
        operands = [_draw(*shape, device, seed) for seed in range(rotation)]
        forms = {
            form: [partial(run, *each, in_order=True) for each in operands]
            for form, run in (("in use", before), ("at once", after))
        }
        yield Case(name, forms)


def _draw(
    num_tokens: int, top_k: int, width: int, shared: bool, elsewhere: bool, device: torch.device, seed: int
) -> tuple[Tensor | float | None, ...]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    rows_TK = torch.arange(num_tokens * top_k, dtype=torch.int32).view(num_tokens, top_k)
    weights_TK, y_RD = torch.rand(num_tokens, top_k, generator=generator), draw(num_tokens * top_k, width)
    if elsewhere:
        gone_TK = rows_TK % 3 == 1
        y_RD[gone_TK.flatten().to(device)], weights_TK[gone_TK] = torch.nan, torch.nan
        rows_TK = rows_TK.masked_fill(gone_TK, -1)
    shared_TD = draw(num_tokens, width) if shared else None
    choices = (rows_TK.to(device), weights_TK.to(device))
    return y_RD, *choices, draw(num_tokens, width), draw(width), 1e-6, shared_TD


def install() -> None:
    in_use.combine_norm_triton = combine_norm_triton
