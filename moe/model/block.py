"""One decoder layer: norm, attention, norm, MLP or experts, with the residual kept beside the rows. Knows no tokens."""

from __future__ import annotations

from torch import Tensor

from expert_parallel.dispatcher import Dispatcher
from kernels.rmsnorm import rmsnorm, rmsnorm_residual
from moe.model.attention import GQAttention
from moe.model.config import ModelConfig
from moe.model.experts import DenseMLP
from moe.model.layer import MoELayer
from moe.model.linear import Parameters
from moe.model.mla import MLAttention, MLAWorkspace
from moe.model.step_plan import StepPlan


class Block:
    """Layer `index` of a network. What it is made of is read from the config, never from a family's name."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        parameters: Parameters,
        dispatcher: Dispatcher,
        cos_sin_PR: Tensor,
        workspace: MLAWorkspace | None,
    ) -> None:
        name = f"layers.{index}"
        self.norm_eps = config.norm_eps
        self.attn_norm_D = parameters[f"{name}.attn_norm.weight"]
        self.mlp_norm_D = parameters[f"{name}.mlp_norm.weight"]
        self.attention: GQAttention | MLAttention
        if workspace is None:
            self.attention = GQAttention(config, index, parameters, cos_sin_PR)
        else:
            self.attention = MLAttention(config, index, parameters, cos_sin_PR, workspace)
        self.mlp: MoELayer | DenseMLP
        if config.sparse_layers[index]:
            self.mlp = MoELayer(config.moe, index, parameters, dispatcher)
        else:
            self.mlp = DenseMLP(parameters[f"{name}.mlp.gate_up.weight"], parameters.linear(f"{name}.mlp.down"))

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor | None, plan: StepPlan, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(rows, residual): the layer's output is their sum, which the next norm takes. The first gets no residual."""
        if residual_TD is None:
            y_TD, residual_TD = rmsnorm(x_TD, self.attn_norm_D, self.norm_eps), x_TD
        else:
            y_TD, residual_TD = rmsnorm_residual(x_TD, residual_TD, self.attn_norm_D, self.norm_eps)
        y_TD = self.attention(y_TD, plan, kv_cache)
        y_TD, residual_TD = rmsnorm_residual(y_TD, residual_TD, self.mlp_norm_D, self.norm_eps)
        if isinstance(self.mlp, MoELayer):
            return self.mlp(y_TD, plan.all_rows_2, plan.load, plan.step.real_T), residual_TD
        return self.mlp(y_TD, plan.all_rows_2), residual_TD
