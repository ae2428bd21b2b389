"""The network: token ids of a step in, fp32 logits of the wanted rows out. Driven by `ModelConfig`; knows no family.

Owns every parameter (`targets()`) and the rope table; the KV cache belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expert_parallel.layout import ExpertLayout
from kernels.rmsnorm import Norm
from kv_cache.layout import LayerCache
from moe.model.block import Block
from moe.model.config import MLAConfig, ModelConfig
from moe.model.embedding import Embedding, Head
from moe.model.half_steps import split_step
from moe.model.layer import MoELayer
from moe.model.linear import Parameters
from moe.model.mla import MLAttention
from moe.model.offloaded_experts import Offload
from moe.model.overlap import NO_OVERLAP, Overlap, SideStream, Stages, run_halves, run_through
from moe.model.parameter_shapes import is_expert_parameter, parameter_shapes
from moe.model.rope_table import rope_table
from moe.model.step_input import StepInput
from moe.model.step_plan import HalfLoads, LayerLoads, StepPlan, plan_step
from router.load import LoadCounter


class LayerError(RuntimeError):
    """A layer failed, say for lack of memory: the text says which, and how."""

    def __init__(self, index: int, cause: Exception) -> None:
        super().__init__(f"layer {index}: {type(cause).__name__}: {cause}")


class CausalLM:
    """A decoder with its parameters allocated but not filled: load into `targets()`, then call `finalize()`.

    `layout` says which experts of each layer are held here and how rows reach the others; left out, all are here.
    `offload`: their weights are in host memory, where `targets` has them.
    `overlap`: what runs meanwhile. `max_model_len` is the longest sequence the engine admits: the rope table is exactly
    that long. `load` counts the rows of each expert once it is set: LoadCounter(config.num_layers,
    config.moe.num_experts, device, experts).
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
        layout: ExpertLayout | None = None,
        overlap: Overlap = NO_OVERLAP,
        offload: Offload | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        layout = layout or ExpertLayout.whole(config.layers_with_experts, config.moe.num_experts, device)
        self.layout = layout
        self.offload = offload
        self.load: LoadCounter | None = None
        self.products: dict[str, str] = {}
        self.mla_workspace_tokens: int | None = None
        if isinstance(config.attention, MLAConfig):
            self.mla_workspace_tokens = mla_workspace_tokens
        self.cos_sin_PR = rope_table(config.rope, max_model_len, device)
        self.parameters = Parameters(
            {
                name: torch.empty(spec.shape, dtype=spec.dtype(dtype), device=device)
                for name, spec in parameter_shapes(config, layout.num_slots).items()
                if offload is None or not is_expert_parameter(name)
            }
            | ({} if offload is None else dict(offload.host.tensors))
        )
        self.dispatchers = next(iter(layout.dispatchers.values()))  # of one layer for all: they share their buffers
        self.overlap = overlap
        self.side = SideStream(device)
        self.embedding = Embedding(self.parameters["embed.weight"])
        self.blocks = [
            Block(config, index, self.parameters, layout.dispatchers.get(index), self.cos_sin_PR, offload)
            for index in range(config.num_layers)
        ]
        if offload is not None:
            layers = [block.mlp for block in self.blocks if isinstance(block.mlp, MoELayer)]
            offload.connect({layer.index: layer.gate for layer in layers}, layout.experts)
        self.norm = Norm(self.parameters["norm.weight"], config.norm_eps)
        self.head = Head(self.parameters["embed.weight" if config.tie_embeddings else "lm_head.weight"])

    def targets(self) -> dict[str, Tensor]:
        """Every tensor to fill, by our name, each once. Those of experts hold the experts `self.layout.experts`."""
        return self.parameters.tensors

    def finalize(self) -> None:
        """After loading: split MLA's kv_b, choose the product of each linear shape, bring the first experts here."""
        for block in self.blocks:
            if isinstance(block.attention, MLAttention):
                block.attention.finalize()
        self.products = self.parameters.choose_products() | {"head": self.head.choose_product()}
        if self.offload is not None:
            self.offload.fill()

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
        self._check(step)
        if self.load is not None:
            self.load.start_step()
        if self._splits(step):
            y_TD = self._in_halves(step, kv_caches)
        else:
            beside = self.side if self.overlap.shared_in(prompts=step.prefill is not None) else None
            plan = self._plan(step, kv_caches[0], self.load, beside)
            y_TD = run_through(self._stages(plan, kv_caches))
        if self.load is not None:
            self.load.end_step()
        return y_TD

    def _splits(self, step: StepInput) -> bool:
        """The same on all ranks: it decides in which order they dispatch."""
        halves_from = self.overlap.halves_from
        dispatcher = self.dispatchers.prefill if step.any_prefill else self.dispatchers.decode
        return halves_from is not None and step.most_rows >= halves_from and dispatcher.two_open

    def _in_halves(self, step: StepInput, kv_caches: Sequence[LayerCache]) -> Tensor:
        loads = HalfLoads()
        first, second = (self._stages(self._plan(half, kv_caches[0], loads), kv_caches) for half in split_step(step))
        y_TD = torch.cat(run_halves(first, second, len(self.blocks), self.side))
        if self.load is not None:
            loads.tell(self.load)
        return y_TD

    def _plan(
        self, step: StepInput, kv_cache: LayerCache, load: LayerLoads | None, beside: SideStream | None = None
    ) -> StepPlan:
        """`kv_cache`: of any layer; they differ in nothing that is planned by."""
        page_size = kv_cache.values.shape[-2 if self.mla_workspace_tokens is not None else -3]
        attention = self.blocks[0].attention
        listed = None if step.prefill is None else attention.piece_queries(kv_cache)
        cut = None if step.decode is None else attention.decode_rule(kv_cache)
        return plan_step(step, page_size, self.mla_workspace_tokens, load, beside, listed, cut)

    def _stages(self, plan: StepPlan, kv_caches: Sequence[LayerCache]) -> Stages:
        """All layers. Of a rank without rows the experts alone work, for the rows of others."""
        if plan.step.token_ids_T.shape[0]:
            y_TD, residual_TD = self.embedding(plan.step.token_ids_T, self.blocks[0].attn_norm)
        else:
            y_TD = torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=self.device)
            residual_TD = y_TD
        next_norms = [*(block.attn_norm for block in self.blocks[1:]), self.norm]
        for block, kv_cache, next_norm in zip(self.blocks, kv_caches, next_norms, strict=True):
            try:
                y_TD, residual_TD = yield from block.stages(y_TD, residual_TD, plan, kv_cache, next_norm)
            except Exception as error:
                raise LayerError(block.index, error) from error
        return y_TD

    def _check(self, step: StepInput) -> None:
        """On the host, what a kernel could only read out of bounds."""
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
