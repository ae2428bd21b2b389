"""Routing with a requested skew, for tests and benchmarks. Knows nothing of logits or models.

Each token draws K distinct experts one after another without replacement, expert of popularity rank i with odds
1 / (i + 1) ** exponent: 0 is uniform, 1 is Zipf's law. Drawn by the Gumbel trick, so a seed gives the same routing on
every machine. With groups a token may use the experts of few of them only: those whose two best draws sum to most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.routing import Routing


def skewed_routing(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    exponent: float = 0.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Routing:
    """ids int32 [T, K], distinct per row, and positive fp32 weights that sum to 1 per row. Which experts are popular is
    drawn from the seed too."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must lie in 1..num_experts={num_experts}.")
    if exponent < 0:
        raise ValueError(f"exponent={exponent} must not be negative: 0 is uniform, larger is more skewed.")
    if num_groups < 1 or num_experts % num_groups or not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"num_groups={num_groups} must divide num_experts={num_experts}, "
            f"and topk_groups={topk_groups} lie in 1..num_groups."
        )
    if top_k > topk_groups * (num_experts // num_groups):
        raise ValueError(f"top_k={top_k} exceeds the experts of topk_groups={topk_groups} groups.")
    generator = torch.Generator().manual_seed(seed)
    rank_of_E = torch.randperm(num_experts, generator=generator)
    log_odds_E = -exponent * torch.log(rank_of_E.double() + 1)
    uniform_TE = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    gumbel_TE = -torch.log(-torch.log(uniform_TE))
    draws_TE = log_odds_E + gumbel_TE
    if num_groups > topk_groups:
        draws_TE = _in_best_groups(draws_TE, num_groups, topk_groups)
    expert_ids_TK = draws_TE.topk(top_k, dim=1).indices
    weights_TK = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float32) + 0.1
    weights_TK /= weights_TK.sum(dim=1, keepdim=True)
    return Routing(expert_ids_TK.to(torch.int32).to(device), weights_TK.to(device))


def _in_best_groups(draws_TE: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """-inf for the experts of all but the best groups."""
    by_group_TGX = draws_TE.view(len(draws_TE), num_groups, -1)
    score_TG = by_group_TGX.topk(min(2, by_group_TGX.shape[2]), dim=2).values.sum(dim=2)
    lost_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter_(1, score_TG.topk(topk_groups, dim=1).indices, False)
    return by_group_TGX.masked_fill(lost_TG[:, :, None], -torch.inf).view_as(draws_TE)


def one_expert_routing(num_tokens: int, expert: int, *, device: torch.device | str = "cpu") -> Routing:
    """The worst case: every token goes to one expert, with weight 1."""
    ids_TK: Tensor = torch.full((num_tokens, 1), expert, dtype=torch.int32, device=device)
    return Routing(ids_TK, torch.ones(num_tokens, 1, dtype=torch.float32, device=device))
