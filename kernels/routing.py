"""Gating top-k: from router logits to the experts of each token and their weights, for every router variant.

Knows scores, groups and ties; knows neither where experts live nor what they compute. `route_reference` is the
definition: every kernel that routes is tested against it.

Order of steps, all in fp32: score (softmax or sigmoid) -> add the bias, for selection only -> mask the experts of the losing
groups with -inf -> top-k of what is left -> gather the scores without bias -> renormalise -> scale, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_same_device, assert_shape


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
                f"top_k={self.top_k} does not fit num_experts={num_experts}; a token can choose 1 to {num_experts} experts."
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
    """int32 [T, K], distinct in each row, 0 <= id < E whatever the logits were."""
    weights_TK: Tensor
    """fp32 [T, K]."""


def route(logits_TE: Tensor, bias_E: Tensor | None, rule: RoutingRule) -> Routing:
    """Chooses `rule.top_k` experts for each token; `route_reference` is the definition.

    logits_TE fp32 [T, E]; bias_E fp32 [E] or None. Ids come in descending order of the score they were selected by; of equal
    scores the lower index comes first. A NaN score is selected as -inf. A row that holds NaN or +inf gets NaN for every
    weight (softmax does so by itself, sigmoid is made to), so that its result is NaN and the fault is seen at the logits.
    """
    return route_reference(logits_TE, bias_E, rule)


def _check_operands(logits_TE: Tensor, bias_E: Tensor | None, rule: RoutingRule) -> None:
    assert_shape("logits_TE", logits_TE, (None, None))
    assert_dtype("logits_TE", logits_TE, torch.float32)
    rule.check(logits_TE.shape[1])
    if bias_E is not None:
        assert_shape("bias_E", bias_E, (logits_TE.shape[1],))
        assert_dtype("bias_E", bias_E, torch.float32)
        assert_same_device(logits_TE, bias_E=bias_E)


def route_reference(logits_TE: Tensor, bias_E: Tensor | None, rule: RoutingRule) -> Routing:
    """The definition of routing, in plain torch. A row's bits do not depend on the other rows."""
    _check_operands(logits_TE, bias_E, rule)
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
    return Routing(expert_ids_TK.to(torch.int32), weights_TK * rule.scale)


def _top_indices(scores_TN: Tensor, k: int) -> Tensor:
    """The k best columns of each row, best first; of equal scores the lower index first, which torch.topk does not promise."""
    return scores_TN.sort(dim=-1, descending=True, stable=True).indices[:, :k]
