"""The router in one stretch: logits of every expert in fp32, then the routing of routing.py.

    logits[t, e] = sum over parts p, ascending, of (sum over k in part p of x[t, k] * w[e, k])

Knows rows, gate weights and the rule; knows neither experts' weights nor where they live. Few tokens give a GPU little
to do at once, so K is cut into parts of PART columns, which programs multiply side by side. The parts follow from K
alone, and are summed in order whoever multiplies them, so a row's bits do not depend on how many rows there are.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

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
    empty_routing,
    route_parts_triton,
    route_reference,
    route_tile,
    tile_options,
)

PART = 256
"""Columns of K in one part: one step of the product."""

_TOKENS = 16
"""Rows of a program where K is cut: the least a tensor core takes."""


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


# parts[p, t, e] = sum over k in part p, ascending, of x[t, k] * w[e, k]; with one part in the output: their sum, p
# ascending.
#   x_ptr [T, K], w_ptr [E, K], rows strided; parts_ptr fp32 [P or 1, T, E] contiguous
#   grid (cdiv(T, BLOCK_T), cdiv(E, BLOCK_N), P or 1): a program owns a tile of [T, E] and one part, or all of them.
#   fp32 accumulation; rows, experts and columns beyond the last are read as zero.


@triton.jit
def _load_x(x_ptr, token, start, num_tokens, width, stride_x, PART: tl.constexpr):
    k = start + tl.arange(0, PART)[None, :]
    mask = (token < num_tokens)[:, None] & (k < width)
    return tl.load(x_ptr + token.to(tl.int64)[:, None] * stride_x + k, mask=mask, other=0.0)


@triton.jit
def _load_w(w_ptr, expert, start, num_experts, width, stride_w, PART: tl.constexpr):
    k = start + tl.arange(0, PART)[:, None]
    mask = (expert < num_experts)[None, :] & (k < width)
    return tl.load(w_ptr + expert.to(tl.int64)[None, :] * stride_w + k, mask=mask, other=0.0)


@triton.jit
def _product(x, w, WIDE: tl.constexpr):
    if WIDE:
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w, input_precision="ieee")


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_tokens"])
def _gate_parts_kernel(
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
    PART: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if CUT:
        # Weights are no work of this step: they are asked for while the kernels before this one still run.
        start = tl.program_id(2) * PART
        w = _load_w(w_ptr, expert, start, num_experts, width, stride_w, PART)
        wait_for_inputs(PDL)
        total = _product(_load_x(x_ptr, token, start, num_tokens, width, stride_x, PART), w, WIDE)
    else:
        wait_for_inputs(PDL)
        total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        # A part is added one step after it was multiplied: of `total += product` the compiler would make one long sum.
        last = total
        for start in range(0, width, PART):
            x = _load_x(x_ptr, token, start, num_tokens, width, stride_x, PART)
            w = _load_w(w_ptr, expert, start, num_experts, width, stride_w, PART)
            total += last
            last = _product(x, w, WIDE)
        total += last
    row = tl.program_id(2) * num_tokens.to(tl.int64) + token
    place_ptr = parts_ptr + row[:, None] * num_experts + expert[None, :]
    tl.store(place_ptr, total, mask=(token < num_tokens)[:, None] & (expert < num_experts)[None, :])


# The same and the routing in one launch, for few tokens.
#   counters_ptr int32 [cdiv(T, BLOCK_M) or more], zero before and after: programs of a block of tokens that are done.
#   The last of them finds all parts written, sums them in order and routes; who is last leaves no trace.


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_route_kernel(
    x_ptr,
    w_ptr,
    parts_ptr,
    counters_ptr,
    bias_ptr,
    real_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    num_experts,
    width,
    stride_x,
    stride_w,
    epsilon,
    scale,
    NUM_PARTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    w = _load_w(w_ptr, expert, part * PART, num_experts, width, stride_w, PART)
    wait_for_inputs(PDL)
    total = _product(_load_x(x_ptr, token, part * PART, num_tokens, width, stride_x, PART), w, WIDE)
    stride_p = num_tokens.to(tl.int64) * num_experts
    place_ptr = parts_ptr + part * stride_p + token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    tl.store(place_ptr, total, mask=(token < num_tokens)[:, None] & (expert < num_experts)[None, :])
    # All threads of this program have written before one of them says so.
    tl.debug_barrier()
    done = tl.atomic_add(counters_ptr + tl.program_id(0), 1, sem="acq_rel")
    if done == tl.num_programs(1) * tl.num_programs(2) - 1:
        tl.store(counters_ptr + tl.program_id(0), 0)
        for first in range(0, BLOCK_M, BLOCK_T):
            if tl.program_id(0) * BLOCK_M + first < num_tokens:
                route_tile(
                    parts_ptr, bias_ptr, real_ptr, ids_ptr, weights_ptr, tl.program_id(0) * BLOCK_M + first, num_tokens,
                    stride_p, num_experts, epsilon, scale, NUM_PARTS, NUM_EXPERTS, TOP_K, SIGMOID, NUM_GROUPS,
                    TOPK_GROUPS, TOP2_SUM, RENORMALIZE, BLOCK_T, BLOCK_G, BLOCK_S, BLOCK_K,
                )  # fmt: skip


def gate_triton(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    *,
    real_T: Tensor | None = None,
) -> Routing:
    """`gate` in two launches: the product, with K cut where tokens are few, and the routing."""
    few = x_TD.shape[0] <= 256
    return gate_parts_triton(x_TD, weight_ED, bias_E, rule, real_T=real_T, cut=few)


def gate_parts_triton(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    *,
    real_T: Tensor | None = None,
    cut: bool,
    tile: tuple[int, int, int, int] | None = None,
) -> Routing:
    """Two launches; `cut`: a program for each part of K, else one for all."""
    _check_operands(x_TD, weight_ED, bias_E, rule, real_T)
    (num_tokens, width), num_experts = x_TD.shape, weight_ED.shape[0]
    num_parts = cdiv(width, PART) if cut else 1
    parts_PTE = torch.empty(num_parts, num_tokens, num_experts, dtype=torch.float32, device=x_TD.device)
    if num_tokens > 0:
        wide = x_TD.dtype != weight_ED.dtype or x_TD.dtype == torch.float32
        # (tokens, experts, warps, stages)
        tile = tile or ((_TOKENS, 32, 4, 1) if cut or wide else (64, 128, 4, 2))
        block_t, block_n, num_warps, num_stages = tile
        block_n = max(16, min(block_n, next_power_of_2(num_experts)))
        grid = (cdiv(num_tokens, block_t), cdiv(num_experts, block_n), num_parts)
        _gate_parts_kernel[grid](
            x_TD,
            weight_ED,
            parts_PTE,
            num_tokens,
            num_experts,
            width,
            x_TD.stride(0),
            weight_ED.stride(0),
            CUT=cut,
            BLOCK_T=block_t,
            BLOCK_N=block_n,
            PART=PART,
            WIDE=x_TD.dtype != weight_ED.dtype,
            num_warps=num_warps,
            num_stages=num_stages,
            **dependent_launch(x_TD),
        )
    return route_parts_triton(parts_PTE, bias_E, rule, real_T)


def gate_counted_triton(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    counters_X: Tensor,
    *,
    real_T: Tensor | None = None,
    block_n: int = 32,
    num_warps: int = 4,
) -> Routing:
    """One launch. counters_X int32, zero, one for each 16 tokens; zero again afterwards."""
    _check_operands(x_TD, weight_ED, bias_E, rule, real_T)
    (num_tokens, width), num_experts = x_TD.shape, weight_ED.shape[0]
    routing = empty_routing(num_tokens, rule, x_TD.device)
    if num_tokens == 0:
        return routing
    num_parts = cdiv(width, PART)
    parts_PTE = torch.empty(num_parts, num_tokens, num_experts, dtype=torch.float32, device=x_TD.device)
    block_n = max(16, min(block_n, next_power_of_2(num_experts)))
    _gate_route_kernel[(cdiv(num_tokens, _TOKENS), cdiv(num_experts, block_n), num_parts)](
        x_TD,
        weight_ED,
        parts_PTE,
        counters_X,
        bias_E,
        real_T,
        *routing,
        num_tokens,
        num_experts,
        width,
        x_TD.stride(0),
        weight_ED.stride(0),
        float(rule.epsilon),
        float(rule.scale),
        NUM_PARTS=num_parts,
        **tile_options(rule, num_experts, num_warps),
        BLOCK_M=_TOKENS,
        BLOCK_N=block_n,
        PART=PART,
        WIDE=x_TD.dtype != weight_ED.dtype,
        num_warps=num_warps,
        num_stages=1,
        **dependent_launch(x_TD),
    )
    return routing


def _check_operands(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    real_T: Tensor | None,
) -> None:
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
    _check_operands(x_TD, weight_ED, bias_E, rule, real_T)
    logits_TE = linear_reference(x_TD, weight_ED, out_dtype=torch.float32)
    return route_reference(logits_TE, bias_E, rule, real_T=real_T)
