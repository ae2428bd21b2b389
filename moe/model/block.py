"""One decoder layer: attention, norm, MLP or experts, and the norm that follows; the residual is kept beside the rows.

The first norm of a layer belongs to the layer before it, whose last launch takes it along. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from expert_parallel.choice import Dispatchers
from kernels.rmsnorm import Norm, rmsnorm_residual
from kv_cache.layout import LayerCache
from moe.model.attention import GQAttention
from moe.model.config import MLAConfig, ModelConfig
from moe.model.experts import DenseMLP
from moe.model.layer import MoELayer
from moe.model.linear import Parameters
from moe.model.mla import MLAttention
from moe.model.offloaded_experts import Offload
from moe.model.step_plan import StepPlan


class Block:
    """Layer `index` of a network. What it is made of is read from the config, never from a family's name."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        parameters: Parameters,
        dispatchers: Dispatchers | None,
        cos_sin_PR: Tensor,
        offload: Offload | None = None,
    ) -> None:
        name = f"layers.{index}"
        self.index = index
        self.attn_norm = Norm(parameters[f"{name}.attn_norm.weight"], config.norm_eps)
        self.mlp_norm = Norm(parameters[f"{name}.mlp_norm.weight"], config.norm_eps)
        self.attention: GQAttention | MLAttention
        if isinstance(config.attention, MLAConfig):
            self.attention = MLAttention(config, index, parameters, cos_sin_PR)
        else:
            self.attention = GQAttention(config, index, parameters, cos_sin_PR)
        self.mlp: MoELayer | DenseMLP
        if config.sparse_layers[index]:
            assert dispatchers is not None, f"layer {index} has experts and no dispatchers"
            self.mlp = MoELayer(config.moe, index, parameters, dispatchers, offload)
        else:
            self.mlp = DenseMLP(parameters[f"{name}.mlp.gate_up.weight"], parameters.linear(f"{name}.mlp.down"))

    def stages(
        self, y_TD: Tensor, residual_TD: Tensor, plan: StepPlan, kv_cache: LayerCache, next_norm: Norm
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """(rows normalised by `attn_norm`, residual) in, (rows normalised by `next_norm`, residual) out.

        Four stages (see overlap.py), with or without rows; where there are no experts, two of them are empty.
        """
        num_tokens = y_TD.shape[0]
        if num_tokens:
            y_TD = self.attention(y_TD, plan, kv_cache)
        if isinstance(self.mlp, MoELayer):
            stages = self.mlp.stages(y_TD, residual_TD, next_norm, plan, self.mlp_norm)
            del y_TD, residual_TD  # the layer lets them go once it has normalised rows
            y_TD, residual_TD = yield from stages
        else:
            yield
            yield
            if num_tokens:
                y_TD, residual_TD = rmsnorm_residual(y_TD, residual_TD, *self.mlp_norm)
                y_TD, residual_TD = rmsnorm_residual(self.mlp(y_TD, plan.all_rows_2), residual_TD, *next_norm)
            yield
        yield
        return y_TD, residual_TD
