"""What a rank's parameters weigh, by kind. Knows shapes; allocates nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moe.model.config import ModelConfig
from moe.model.parameter_shapes import is_expert_parameter, parameter_shapes

# Parts of our parameter names, the first that fits; what none fits is a norm.
_KINDS = (("embed.", "embeddings"), ("lm_head.", "embeddings"), (".attn.", "attention"), (".mlp.", "dense"))
_KINDS += ((".moe.gate.", "routers"), (".moe.shared.", "shared"))


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of one rank that holds `num_slots` experts of each of `num_layers` layers with experts."""

    embeddings: int  # and the head, where it is another matrix
    attention: int
    dense: int  # MLPs of layers without experts
    routers: int
    shared: int  # experts that every row goes to
    norms: int
    bundle: int  # one routed expert of one layer: weights and scales
    num_slots: int
    num_layers: int

    @property
    def rest(self) -> int:
        """All but routed experts."""
        return self.embeddings + self.attention + self.dense + self.routers + self.shared + self.norms

    @property
    def experts(self) -> int:
        return self.bundle * self.num_slots * self.num_layers

    @property
    def total(self) -> int:
        return self.rest + self.experts


def weight_sizes(config: ModelConfig, num_slots: int, dtype: torch.dtype) -> WeightSizes:
    """As `parameter_shapes` lists them."""
    sizes: dict[str, int] = dict.fromkeys(("embeddings", "attention", "dense", "routers", "shared", "norms"), 0)
    bundles = 0
    for name, spec in parameter_shapes(config, 1).items():
        num_bytes = math.prod(spec.shape) * spec.dtype(dtype).itemsize
        if is_expert_parameter(name):
            bundles += num_bytes
        else:
            sizes[next((kind for part, kind in _KINDS if part in name), "norms")] += num_bytes
    num_layers = len(config.layers_with_experts)
    bundle = bundles // max(num_layers, 1)
    return WeightSizes(**sizes, bundle=bundle, num_slots=num_slots, num_layers=num_layers)
