"""The network: token ids of a step in, fp32 logits of the wanted rows out. Driven by `ModelConfig`; knows no family.

Owns every parameter (`targets()`), the rope table and MLA's workspace; the KV cache belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expert_parallel.choice import Dispatchers
from expert_parallel.placement import Placement
from kernels.rmsnorm import Norm
from kv_cache.layout import LayerCache
from moe.model.block import Block
from moe.model.config import MLAConfig, ModelConfig
from moe.model.embedding import Embedding, Head
from moe.model.layer import MoELayer
from moe.model.linear import Parameters
from moe.model.mla import MLAttention, MLAWorkspace
from moe.model.parameter_shapes import parameter_shapes
from moe.model.rope_table import rope_table
from moe.model.step_input import StepInput
from moe.model.step_plan import StepPlan, plan_step
from router.load import LoadCounter


class CausalLM:
    """A decoder with its parameters allocated but not filled: load into `targets()`, then call `finalize()`.

    `placement` and `rank` say which experts are held here, `dispatchers` how rows reach the others; left out, all are
    here. `max_model_len` is the longest sequence the engine admits: the rope table is exactly that long. `load` counts
    the rows of each expert once it is set: LoadCounter(config.num_layers, config.moe.num_experts, device, experts).
    `products` says after `finalize` which implementation each linear shape uses.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        mla_workspace_tokens: int,
        placement: Placement | None = None,
        rank: int = 0,
        dispatchers: Dispatchers | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self.placement = placement or Placement.contiguous(config.moe.num_experts, num_ranks=1)
        self.experts = self.placement.experts_of(rank)
        self.load: LoadCounter | None = None
        self.products: dict[str, str] = {}
        self.mla_workspace_tokens: int | None = None
        workspace: MLAWorkspace | None = None
        if isinstance(config.attention, MLAConfig):
            self.mla_workspace_tokens = mla_workspace_tokens
            workspace = MLAWorkspace(config.attention, mla_workspace_tokens, dtype, device)
        self.cos_sin_PR = rope_table(config.rope, max_model_len, device)
        self.parameters = Parameters(
            {
                name: torch.empty(spec.shape, dtype=spec.dtype(dtype), device=device)
                for name, spec in parameter_shapes(config, len(self.experts)).items()
            }
        )
        self.dispatchers = dispatchers or Dispatchers.local(self.placement, rank, device)
        self.embedding = Embedding(self.parameters["embed.weight"])
        self.blocks = [
            Block(config, index, self.parameters, self.dispatchers, self.cos_sin_PR, workspace)
            for index in range(config.num_layers)
        ]
        self.norm = Norm(self.parameters["norm.weight"], config.norm_eps)
        self.head = Head(self.parameters["embed.weight" if config.tie_embeddings else "lm_head.weight"])

    def targets(self) -> dict[str, Tensor]:
        """Every tensor to fill, by our name, each once. Expert tensors hold the experts `self.experts`, in order."""
        return self.parameters.tensors

    def finalize(self) -> None:
        """After loading: split MLA's kv_b and choose the product of each linear shape."""
        for block in self.blocks:
            if isinstance(block.attention, MLAttention):
                block.attention.finalize()
        self.products = self.parameters.choose_products()

    @torch.no_grad()
    def forward(self, step: StepInput, kv_caches: Sequence[LayerCache]) -> Tensor:
        """fp32 logits [B', V] of the rows `step.logits_rows_B`. Writes the cache where slot_mapping says."""
        x_TD = self.hidden(step, kv_caches)
        if not x_TD.shape[0]:
            return x_TD.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        rows = step.logits_rows_B
        # Rows of decode alone that are all wanted come in their order: nothing to gather.
        every_row = step.prefill is None and rows.shape[0] == x_TD.shape[0]
        return self.head(x_TD if every_row else x_TD[rows])

    @torch.no_grad()
    def hidden(self, step: StepInput, kv_caches: Sequence[LayerCache]) -> Tensor:
        """x_TD after the last norm, every row."""
        plan = self._plan(step, kv_caches)
        if plan.load is not None:
            plan.load.start_step()
        next_norms = [*(block.attn_norm for block in self.blocks[1:]), self.norm]
        if step.token_ids_T.shape[0]:
            y_TD = self._all_layers(step, plan, kv_caches, next_norms)
        else:
            y_TD = self._sparse_layers(plan, next_norms)
        if plan.load is not None:
            plan.load.end_step()
        return y_TD

    def _all_layers(
        self, step: StepInput, plan: StepPlan, kv_caches: Sequence[LayerCache], next_norms: Sequence[Norm]
    ) -> Tensor:
        y_TD, residual_TD = self.embedding(step.token_ids_T, self.blocks[0].attn_norm)
        for block, kv_cache, next_norm in zip(self.blocks, kv_caches, next_norms, strict=True):
            y_TD, residual_TD = block(y_TD, residual_TD, plan, kv_cache, next_norm)
        return y_TD

    def _sparse_layers(self, plan: StepPlan, next_norms: Sequence[Norm]) -> Tensor:
        """A rank without rows: its experts work for the rows of others, which need nothing else of it."""
        x_0D = torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=self.device)
        for block, next_norm in zip(self.blocks, next_norms, strict=True):
            if isinstance(block.mlp, MoELayer):
                block.mlp(x_0D, x_0D, next_norm, plan)
        return x_0D

    def _plan(self, step: StepInput, kv_caches: Sequence[LayerCache]) -> StepPlan:
        """Checks on the host what a kernel could only read out of bounds, then plans the step."""
        longest = max(
            step.decode.max_kv_len if step.decode is not None else 0,
            max(step.prefill.kv_lens_host) if step.prefill is not None else 0,
        )
        assert longest <= self.max_model_len, (
            f"a sequence of {longest} positions was scheduled, the position table holds {self.max_model_len}"
        )
        wanted = (self.config.num_layers, self.config.moe.num_experts)
        assert self.load is None or (self.load.num_layers, self.load.num_experts) == wanted, (
            f"the load counter is for {self.load.num_layers} layers of {self.load.num_experts} experts, not {wanted}"
        )
        page_size = kv_caches[0].values.shape[-2 if self.mla_workspace_tokens is not None else -3]
        return plan_step(step, page_size, self.mla_workspace_tokens, self.load)
