"""The router in one stretch: logits of every expert in fp32, then the routing of routing.py.

    logits[t, e] = sum over parts p, ascending, of (sum over k in part p of x[t, k] * w[e, k])

Knows rows, gate weights and the rule; knows neither experts' weights nor where they live. Few tokens give a GPU little
to do at once, so K is cut into parts of PART columns, which programs multiply side by side. The parts follow from K
alone, and are summed in order whoever multiplies them, so a row's bits do not depend on how many rows there are.
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
from kernels.linear import linear_reference
from kernels.routing import (
    Routing,
    RoutingRule,
    check_rows,
    route_parts_triton,
    route_reference,
)
from kernels.tiles import device_generation

PART = 256
"""Columns of K in one part. Fixed: it is part of what a row's bits are."""


def gate(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    *,
    real_T: Tensor | None = None,
) -> Routing:
    """`route` of the fp32 logits x w^T; `gate_reference` is the definition.

    Operands of different dtypes are both read as the wider one; fp32 is multiplied in fp32, never in tf32.
    """
    run = gate_triton if uses_triton(x_TD) else gate_reference
    return run(x_TD, weight_ED, bias_E, rule, real_T=real_T)


# parts[p, t, e] = sum over k in part p, ascending, of x[t, k] * w[e, k]; or, in the one part of an uncut product, the
# sum of those, p ascending.
#   x_ptr [T, K], w_ptr [E, K], rows strided; parts_ptr fp32 [P or 1, T, E] contiguous
#   grid (cdiv(T, BLOCK_T), cdiv(E, BLOCK_N), P or 1): a program owns a tile of [T, E] and one part (CUT), or all.
#   fp32 accumulation; columns beyond the last are read as zero, rows and experts as zero (CUT) or as the last one, and
#   not written. EVEN: K is whole steps of BLOCK_K.


@triton.jit
def load_x(x_ptr, token, start, num_tokens, width, stride_x, BLOCK_K: tl.constexpr):
    """Columns start .. start + BLOCK_K of rows, zero beyond the last."""
    k = start + tl.arange(0, BLOCK_K)[None, :]
    mask = (token < num_tokens)[:, None] & (k < width)
    return tl.load(x_ptr + token.to(tl.int64)[:, None] * stride_x + k, mask=mask, other=0.0)


@triton.jit
def load_w(w_ptr, expert, start, num_experts, width, stride_w, BLOCK_K: tl.constexpr):
    """The same columns of the gate, [BLOCK_K, experts]."""
    k = start + tl.arange(0, BLOCK_K)[:, None]
    mask = (expert < num_experts)[None, :] & (k < width)
    return tl.load(w_ptr + expert.to(tl.int64)[None, :] * stride_w + k, mask=mask, other=0.0)


@triton.jit
def _multiply(x, w, acc, WIDE: tl.constexpr):
    if WIDE:
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w, acc, input_precision="ieee")


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_tokens"])
def _gate_kernel(
    x_ptr,
    w_ptr,
    parts_ptr,
    num_tokens,
    num_experts,
    width,
    stride_x,
    stride_w,
    CUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    if CUT:
        # Weights are no work of this step: they are asked for while the kernels before this one still run.
        first = tl.program_id(2) * PART
        w = load_w(w_ptr, expert, first, num_experts, width, stride_w, PART)
        wait_for_inputs(PDL)
        total = _multiply(load_x(x_ptr, token, first, num_tokens, width, stride_x, PART), w, acc, WIDE)
    else:
        wait_for_inputs(PDL)
        total = acc
        # Beyond the last row and expert the last is read again: masks would cost as much as the rest of the loop.
        x_row_ptr = x_ptr + tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * stride_x
        w_row_ptr = w_ptr + tl.minimum(expert, num_experts - 1).to(tl.int64)[None, :] * stride_w
        for start in range(0, width, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            if EVEN:
                x, w = tl.load(x_row_ptr + k[None, :]), tl.load(w_row_ptr + k[:, None])
            else:
                x = tl.load(x_row_ptr + k[None, :], mask=k[None, :] < width, other=0.0)
                w = tl.load(w_row_ptr + k[:, None], mask=k[:, None] < width, other=0.0)
            acc = _multiply(x, w, acc, WIDE)
            if (start + BLOCK_K) % PART == 0:
                total += acc
                acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        if width % PART != 0:
            total += acc
    row = tl.program_id(2) * num_tokens.to(tl.int64) + token
    place_ptr = parts_ptr + row[:, None] * num_experts + expert[None, :]
    tl.store(place_ptr, total, mask=(token < num_tokens)[:, None] & (expert < num_experts)[None, :])


class GateTile(NamedTuple):
    """Rows x experts of a program, the step along K, warps, pipeline stages; `cut`: a program (of one step, block_k is
    PART) for each part of K."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    cut: bool


def gate_tile(num_tokens: int, generation: int, *, wide: bool) -> GateTile:
    """The tile for so many rows; none changes a bit. `wide`: fp32 operands, which take no tensor core.

    On an H200, 128 experts of width 2048, routing included: 3.2 us for one row, 3.6 for 64 (with tiles of 64 rows 4.2),
    4.6 for 256 (5.4 with the first tile), 8.5 for 1024 uncut 11.9; 26.1 for 8192 (30.0 with 4 warps and masks, 28.6
    with 128 rows a program).
    """
    if wide or num_tokens <= 64:
        few = num_tokens <= 64
        return GateTile(16, 32, PART if few else 64, 4, 1, cut=few)
    # Triton's passes for tensor memory (from compute capability 10) refuse the uncut loop.
    if num_tokens <= 1024 or generation >= 10:
        return GateTile(64, 64, PART, 4, 1, cut=True)
    return GateTile(64, 128, 64, 8, 4, cut=False)


def gate_triton(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    *,
    real_T: Tensor | None = None,
    tile: GateTile | None = None,
) -> Routing:
    """`gate` in two launches, the product and the routing; `tile` is `gate_tile`'s unless given."""
    check_operands(x_TD, weight_ED, bias_E, rule, real_T)
    (num_tokens, width), num_experts = x_TD.shape, weight_ED.shape[0]
    wide = torch.float32 in (x_TD.dtype, weight_ED.dtype)
    tile = tile or gate_tile(num_tokens, device_generation(x_TD), wide=wide)
    num_parts = cdiv(width, PART) if tile.cut else 1
    parts_PTE = torch.empty((num_parts, num_tokens, num_experts), dtype=torch.float32, device=x_TD.device)
    if num_tokens > 0:
        block_n = max(16, min(tile.block_n, next_power_of_2(num_experts)))
        _gate_kernel[(cdiv(num_tokens, tile.block_t), cdiv(num_experts, block_n), num_parts)](
            x_TD,
            weight_ED,
            parts_PTE,
            num_tokens,
            num_experts,
            width,
            x_TD.stride(0),
            weight_ED.stride(0),
            CUT=tile.cut,
            BLOCK_T=tile.block_t,
            BLOCK_N=block_n,
            BLOCK_K=tile.block_k,
            PART=PART,
            EVEN=width % tile.block_k == 0,
            WIDE=x_TD.dtype != weight_ED.dtype,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **dependent_launch(x_TD),
        )
    return route_parts_triton(parts_PTE, bias_E, rule, real_T)


def check_operands(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    real_T: Tensor | None,
) -> None:
    """Rows and gate have one width and lie together; bias, rule and marks of rows fit them."""
    (num_tokens, width), num_experts = x_TD.shape, weight_ED.shape[0]
    assert weight_ED.shape == (num_experts, width), f"rows of {x_TD.shape}, gate of {weight_ED.shape}"
    assert_last_contiguous("x_TD", x_TD)
    assert_last_contiguous("weight_ED", weight_ED)
    check_rows(num_tokens, num_experts, bias_E, rule, real_T)


def gate_reference(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    *,
    real_T: Tensor | None = None,
) -> Routing:
    """The definition, and the CPU's product path."""
    check_operands(x_TD, weight_ED, bias_E, rule, real_T)
    logits_TE = linear_reference(x_TD, weight_ED, out_dtype=torch.float32)
    return route_reference(logits_TE, bias_E, rule, real_T=real_T)
