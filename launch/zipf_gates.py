"""Routers of a dummy model after Zipf's law: its own gates, with selection biases that make few experts popular.

Dummy weights route evenly, which no trained model does. A gate with the score sigmoid(logit) chooses by score + bias,
and a bias for each expert is found so that expert of popularity rank i is chosen as often as odds 1 / (i + 1) **
exponent give it, K drawn without replacement. A row's choice is a function of its bits alone, so that the next layer's
router says as much of this layer's rows as a trained one's would. Each layer has ranks of its own. Knows gates and
odds; changes a network before its first step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe.model.causal_lm import CausalLM
from moe.model.layer import MoELayer
from router.gate import Gate
from router.synthetic import skewed_routing

_ROWS = 4096  # that shares are counted in
_ROUNDS = 50
_LEAST = 0.25 / _ROWS  # of a share that was never drawn


class ZipfGates:
    """The gates of all sparse layers; even until `skew` is called. Their tensors stay where they are."""

    def __init__(self, network: CausalLM) -> None:
        layers = [block.mlp for block in network.blocks if isinstance(block.mlp, MoELayer)]
        self.gates = [layer.gate for layer in layers if isinstance(layer.gate, Gate)]
        for gate in self.gates:
            gate.rule = replace(gate.rule, score="sigmoid", num_groups=1, topk_groups=1)
            gate.bias_E = torch.zeros(gate.weight_ED.shape[0], dtype=torch.float32, device=gate.weight_ED.device)
        weight_ED = self.gates[0].weight_ED
        self.num_experts = weight_ED.shape[0]
        self.top_k = self.gates[0].rule.top_k
        # Of logits: rows are normalised to a root mean square of 1.
        self.spread = float(weight_ED.float().norm(dim=1).mean())

    def skew(self, exponent: float) -> None:
        """0: every expert as often as any other."""
        by_rank_E = zipf_bias(self.num_experts, self.top_k, exponent, self.spread)
        for index, gate in enumerate(self.gates):
            assert gate.bias_E is not None, "every gate got a bias"
            rank_E = torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(index))
            gate.bias_E.copy_(by_rank_E[rank_E])


def zipf_bias(num_experts: int, top_k: int, exponent: float, spread: float) -> Tensor:
    """fp32 [E] by popularity rank, for logits that are normal with std `spread`."""
    if not exponent:
        return torch.zeros(num_experts)
    wanted_E = _sorted_shares(skewed_routing(_ROWS, num_experts, top_k, exponent=exponent).expert_ids_TK, num_experts)
    noise_TE = torch.randn(_ROWS, num_experts, generator=torch.Generator().manual_seed(0)).mul_(spread).sigmoid_()
    bias_E = torch.zeros(num_experts)
    step = 0.25 * float(noise_TE.std())
    for _ in range(_ROUNDS):
        found_E = shares((noise_TE + bias_E).topk(top_k, dim=1).indices, num_experts)
        bias_E += step * (wanted_E.log() - found_E.log())
    return bias_E


def shares(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """fp32 [E]: of the rows, those that chose each expert."""
    counts_E = torch.bincount(expert_ids_TK.flatten().long(), minlength=num_experts).float()
    return (counts_E / expert_ids_TK.shape[0]).clamp_min(_LEAST)


def _sorted_shares(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    return shares(expert_ids_TK, num_experts).sort(descending=True).values
