"""Routing with a requested skew, for tests and benchmarks. Knows nothing of logits or models.

Each token draws K distinct experts one after another without replacement, expert of popularity rank i with odds
1 / (i + 1) ** exponent: 0 is uniform, 1 is Zipf's law. Drawn by the Gumbel trick, so a seed gives the same routing on
every machine.
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
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Routing:
    """ids int32 [T, K], distinct per row, and positive fp32 weights that sum to 1 per row. Which experts are popular is
    drawn from the seed too."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must lie in 1..num_experts={num_experts}.")
    if exponent < 0:
        raise ValueError(f"exponent={exponent} must not be negative: 0 is uniform, larger is more skewed.")
    generator = torch.Generator().manual_seed(seed)
    rank_of_E = torch.randperm(num_experts, generator=generator)
    log_odds_E = -exponent * torch.log(rank_of_E.double() + 1)
    uniform_TE = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    gumbel_TE = -torch.log(-torch.log(uniform_TE))
    expert_ids_TK = (log_odds_E + gumbel_TE).topk(top_k, dim=1).indices
    weights_TK = torch.rand(num_tokens, top_k, generator=generator) + 0.1
    weights_TK /= weights_TK.sum(dim=1, keepdim=True)
    return Routing(expert_ids_TK.to(torch.int32).to(device), weights_TK.to(device))


def one_expert_routing(num_tokens: int, expert: int, *, device: torch.device | str = "cpu") -> Routing:
    """The worst case: every token goes to one expert, with weight 1."""
    ids_TK: Tensor = torch.full((num_tokens, 1), expert, dtype=torch.int32, device=device)
    return Routing(ids_TK, torch.ones(num_tokens, 1, device=device))
