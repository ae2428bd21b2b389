"""Gating top-k: from router logits to the experts of each token and their weights, for every router variant.

Knows scores, groups and ties; knows neither where experts live nor what they compute. `route_reference` is the
definition: every kernel that routes is tested against it.

Order of steps, all in fp32: score (softmax or sigmoid) -> add the bias, for selection only -> mask the experts of the
losing groups with -inf -> top-k of what is left -> gather the scores without bias -> renormalise -> scale, once.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import (
    assert_dtype,
    assert_last_contiguous,
    assert_shape,
    cdiv,
    next_power_of_2,
    uses_triton,
)
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.expert_choice import Choice, choose_experts, expert_places
from kernels.tiles import num_multiprocessors


@dataclass(frozen=True)
class RoutingRule:
    """How one router turns logits into expert ids and weights.

    `epsilon` is added to the sum that renormalisation divides by. `scale` multiplies the final weights, once.
    `num_groups` and `topk_groups` limit a token to experts of its best groups; a group is worth its best biased score
    ("max") or the sum of its two best ("top2_sum").
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    renormalize: bool = True
    epsilon: float = 0.0
    scale: float = 1.0

    def check(self, num_experts: int) -> None:
        """Raises ValueError if no router of `num_experts` experts can follow this rule."""
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={self.score!r} is not a known scoring; use 'softmax' or 'sigmoid'.")
        if self.group_score not in ("max", "top2_sum"):
            raise ValueError(f"group_score={self.group_score!r} is not a known group score; use 'max' or 'top2_sum'.")
        if not 1 <= self.top_k <= num_experts:
            raise ValueError(
                f"top_k={self.top_k} does not fit num_experts={num_experts}; "
                f"a token can choose 1 to {num_experts} experts."
            )
        if self.num_groups < 1 or num_experts % self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} (n_group) does not divide num_experts={num_experts}; "
                "every group must hold the same number of experts."
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"topk_groups={self.topk_groups} (topk_group) does not fit num_groups={self.num_groups} (n_group); "
                f"a token can keep 1 to {self.num_groups} groups."
            )
        experts_per_group = num_experts // self.num_groups
        if self.top_k > self.topk_groups * experts_per_group:
            raise ValueError(
                f"top_k={self.top_k} exceeds the {self.topk_groups * experts_per_group} experts left by "
                f"topk_groups={self.topk_groups} groups of {experts_per_group}; lower top_k or keep more groups."
            )
        if self.group_score == "top2_sum" and self.num_groups > 1 and experts_per_group < 2:
            raise ValueError(
                f"group_score='top2_sum' needs groups of at least two experts, but num_groups={self.num_groups} "
                f"of num_experts={num_experts} leaves one each; use group_score='max' or fewer groups."
            )


class Routing(NamedTuple):
    """The experts of each token, best first, and what their outputs are multiplied by."""

    expert_ids_TK: Tensor
    """int32 [T, K], distinct in each row, 0 <= id < E whatever the logits were; -1 in a row of padding."""
    weights_TK: Tensor
    """fp32 [T, K]."""


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    *,
    real_T: Tensor | None = None,
) -> Routing:
    """Chooses `rule.top_k` experts for each token; `route_reference` is the definition.

    logits_TE fp32 [T, E]; bias_E fp32 [E] or None. Ids come in descending order of the score they were selected by; of
    equal scores the lower index comes first. A NaN score is selected as -inf. A row that holds NaN or +inf gets NaN for
    every weight (softmax does so by itself, sigmoid is made to), so that its result is NaN and the fault is seen.

    Where real_T (bool [T]) is False, a row is padding: its ids are -1, it goes to no expert.
    """
    run = route_triton if uses_triton(logits_TE) else route_reference
    return run(logits_TE, bias_E, rule, real_T=real_T)


_TILE_ELEMENTS = 128
"""Scores per warp, at least one token: several share it where experts are few. A row that lies in one warp needs no
shared memory to find its best: 1.3 us against 4.5 for 128 experts, top 8."""

_MANY_ELEMENTS, _PROGRAMS = 256, 8
"""Scores per warp where so many programs are left for each multiprocessor: two searches fill each other's gaps. On an
H200 8192 rows of 128 experts take 8.2 us, with 128 scores a warp 10.9, with 512 11.4. Sums along a row have an order of
their own (row_sum.py), so no bit changes."""

# expert_ids_TK, weights_TK = the top_k of each row of logits_TE, as the header says
#   logits_TE is the sum of parts_ptr fp32 [P, T, E] over p, ascending, strides stride_p and stride_t (P = 1: as it is)
#   bias_ptr fp32 [E] or None; real_ptr bool [T] or None; ids_ptr int32 [T, K]; weights_ptr fp32 [T, K]
#   grid (cdiv(T, block_t),): a program owns block_t tokens and all their experts, as CHOICE (expert_choice.py) has them
#   fp32 throughout


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_tokens", "stride_p"])
def _route_kernel(
    parts_ptr,
    bias_ptr,
    real_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    stride_p,
    stride_t,
    epsilon,
    scale,
    NUM_PARTS: tl.constexpr,
    CHOICE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    BLOCK_T: tl.constexpr = CHOICE.block_t
    TOP_K: tl.constexpr = CHOICE.top_k
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = (token < num_tokens)[:, None]
    _, expert, is_expert = expert_places(CHOICE)
    logits = tl.zeros((BLOCK_T, CHOICE.block_g * CHOICE.block_s), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        part_ptr = parts_ptr + part * stride_p + token.to(tl.int64)[:, None] * stride_t + expert
        logits += tl.load(part_ptr, mask=in_batch & is_expert, other=0.0)
    ids, weights, _ = choose_experts(logits, in_batch, bias_ptr, None, epsilon, scale, CHOICE)
    choice = tl.arange(0, CHOICE.block_k)[None, :]
    if real_ptr is not None:
        real = tl.load(real_ptr + token, mask=token < num_tokens, other=0)
        ids = tl.where(real[:, None] != 0, ids, -1)
    out = token.to(tl.int64)[:, None] * TOP_K + choice
    wanted = in_batch & (choice < TOP_K)
    tl.store(ids_ptr + out, ids, mask=wanted)
    tl.store(weights_ptr + out, weights, mask=wanted)


def route_triton(
    logits_TE: Tensor, bias_E: Tensor | None, rule: RoutingRule, *, real_T: Tensor | None = None
) -> Routing:
    """`route` as one launch."""
    _check_operands(logits_TE, bias_E, rule, real_T)
    return route_parts_triton(logits_TE[None], bias_E, rule, real_T)


def route_parts_triton(parts_PTE: Tensor, bias_E: Tensor | None, rule: RoutingRule, real_T: Tensor | None) -> Routing:
    """`route` of the sum of P parts of the logits, p ascending."""
    num_parts, num_tokens, num_experts = parts_PTE.shape
    routing = Routing(
        torch.empty((num_tokens, rule.top_k), dtype=torch.int32, device=parts_PTE.device),
        torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=parts_PTE.device),
    )
    if num_tokens == 0:
        return routing
    choice = choice_of(rule, num_experts, _MANY_ELEMENTS)
    if num_tokens < _PROGRAMS * num_multiprocessors(parts_PTE.device) * choice.block_t:
        choice = choice_of(rule, num_experts)
    _route_kernel[(cdiv(num_tokens, choice.block_t),)](
        parts_PTE,
        bias_E,
        real_T,
        *routing,
        num_tokens,
        parts_PTE.stride(0),
        parts_PTE.stride(1),
        float(rule.epsilon),
        float(rule.scale),
        NUM_PARTS=num_parts,
        CHOICE=choice,
        num_warps=1,
        **dependent_launch(parts_PTE),
    )
    return routing


@cache
def choice_of(rule: RoutingRule, num_experts: int, elements: int = _TILE_ELEMENTS) -> Choice:
    """What the kernel is compiled for: this rule among E experts, in blocks of so many scores a warp."""
    block_g, block_s = next_power_of_2(rule.num_groups), next_power_of_2(num_experts // rule.num_groups)
    return Choice(
        num_experts,
        rule.top_k,
        rule.score == "sigmoid",
        rule.num_groups,
        rule.topk_groups,
        rule.group_score == "top2_sum",
        rule.renormalize,
        block_t=max(1, elements // (block_g * block_s)),
        block_g=block_g,
        block_s=block_s,
        block_k=next_power_of_2(rule.top_k),
    )


def _check_operands(logits_TE: Tensor, bias_E: Tensor | None, rule: RoutingRule, real_T: Tensor | None) -> None:
    assert_shape("logits_TE", logits_TE, (None, None))
    assert_dtype("logits_TE", logits_TE, torch.float32)
    assert_last_contiguous("logits_TE", logits_TE)
    check_rows(*logits_TE.shape, bias_E, rule, real_T)


def check_rows(
    num_tokens: int,
    num_experts: int,
    bias_E: Tensor | None,
    rule: RoutingRule,
    real_T: Tensor | None,
) -> None:
    """The rule fits the experts; what shifts their selection and what marks rows has its shape and dtype."""
    rule.check(num_experts)
    for name, x, kind in (
        ("bias_E", bias_E, ((num_experts,), torch.float32)),
        ("real_T", real_T, ((num_tokens,), torch.bool)),
    ):
        if x is not None:
            assert (x.shape, x.dtype) == kind, f"{name} is {tuple(x.shape)} {x.dtype}, wanted {kind}"
            assert_last_contiguous(name, x)


def route_reference(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    *,
    real_T: Tensor | None = None,
) -> Routing:
    """The definition of routing, in plain torch. A row's bits do not depend on the other rows."""
    _check_operands(logits_TE, bias_E, rule, real_T)
    num_tokens, num_experts = logits_TE.shape
    if rule.score == "softmax":
        scores_TE = torch.softmax(logits_TE, dim=-1)
    else:
        # Spelt out: torch.sigmoid on CPU rounds the last few elements of a tensor differently from the others.
        scores_TE = 1.0 / (1.0 + torch.exp(-logits_TE))
    bad_T1 = (torch.isnan(logits_TE) | (logits_TE == torch.inf)).any(dim=-1, keepdim=True)
    scores_TE = scores_TE.masked_fill(bad_T1, torch.nan)

    selection_TE = scores_TE if bias_E is None else scores_TE + bias_E
    selection_TE = selection_TE.masked_fill(torch.isnan(selection_TE), -torch.inf)
    if rule.num_groups > 1:
        grouped_TgE = selection_TE.view(num_tokens, rule.num_groups, num_experts // rule.num_groups)
        if rule.group_score == "max":
            group_scores_Tg = grouped_TgE.amax(dim=-1)
        else:
            best_Tg2 = grouped_TgE.topk(2, dim=-1).values
            group_scores_Tg = best_Tg2[..., 0] + best_Tg2[..., 1]
        kept_Tg = _top_indices(group_scores_Tg, rule.topk_groups)
        loses_Tg = torch.ones_like(group_scores_Tg, dtype=torch.bool).scatter_(1, kept_Tg, False)
        selection_TE = grouped_TgE.masked_fill(loses_Tg.unsqueeze(-1), -torch.inf).view(num_tokens, num_experts)

    expert_ids_TK = _top_indices(selection_TE, rule.top_k)
    weights_TK = scores_TE.gather(1, expert_ids_TK)
    if rule.renormalize:
        total_T = torch.zeros_like(weights_TK[:, 0])
        for k in range(rule.top_k):
            total_T = total_T + weights_TK[:, k]
        weights_TK = weights_TK / (total_T + rule.epsilon).unsqueeze(1)
    if real_T is not None:
        expert_ids_TK = expert_ids_TK.where(real_T[:, None], -1)
    return Routing(expert_ids_TK.to(torch.int32), weights_TK * rule.scale)


def _top_indices(scores_TN: Tensor, k: int) -> Tensor:
    """The k best columns of each row, best first; of equals the lower index, which torch.topk does not promise."""
    return scores_TN.sort(dim=-1, descending=True, stable=True).indices[:, :k]
