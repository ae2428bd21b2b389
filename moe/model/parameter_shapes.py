"""Our parameters by name: shape and precision of every tensor a network of this config is made of.

The one list that allocation (`causal_lm.py`), loading (`checkpoint.py`) and dummy weights (`dummy.py`) agree on. Knows
nothing of names on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kernels.checks import cdiv
from kernels.quantize import FP8, GROUP
from moe.model.config import GQAConfig, MLAConfig, ModelConfig


@dataclass(frozen=True)
class ParameterSpec:
    """Shape of one parameter, and its dtype where that is not the model's."""

    shape: tuple[int, ...]
    fixed_dtype: torch.dtype | None = None

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype if self.fixed_dtype is None else self.fixed_dtype


def parameter_shapes(config: ModelConfig, num_slots: int) -> dict[str, ParameterSpec]:
    """Every parameter of a rank that holds `num_slots` expert slots per sparse layer, in the network's order.

    A tied head has no entry: it is `embed.weight` again.
    """
    V, D = config.vocab_size, config.hidden_size
    shapes = {"embed.weight": ParameterSpec((V, D))}
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        shapes[f"{layer}attn_norm.weight"] = ParameterSpec((D,))
        attention = config.attention
        parts = _gqa_shapes(attention, D) if isinstance(attention, GQAConfig) else _mla_shapes(attention, D)
        shapes |= {f"{layer}attn.{name}": ParameterSpec(shape) for name, shape in parts.items()}
        shapes[f"{layer}mlp_norm.weight"] = ParameterSpec((D,))
        if config.sparse_layers[i]:
            shapes |= {f"{layer}moe.{name}": spec for name, spec in _moe_shapes(config, num_slots).items()}
        else:
            shapes[f"{layer}mlp.gate_up.weight"] = ParameterSpec((2 * config.dense_dim, D))
            shapes[f"{layer}mlp.down.weight"] = ParameterSpec((D, config.dense_dim))
    shapes["norm.weight"] = ParameterSpec((D,))
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = ParameterSpec((V, D))
    return shapes


def _gqa_shapes(attention: GQAConfig, D: int) -> dict[str, tuple[int, ...]]:
    H, G, C = attention.num_heads, attention.num_kv_heads, attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {"qkv.weight": ((H + 2 * G) * C, D)}
    if attention.qkv_bias:
        shapes["qkv.bias"] = ((H + 2 * G) * C,)
    if attention.qk_norm:
        shapes |= {"q_norm.weight": (C,), "k_norm.weight": (C,)}
    shapes["o.weight"] = (D, H * C)
    if attention.o_bias:
        shapes["o.bias"] = (D,)
    return shapes


def _mla_shapes(attention: MLAConfig, D: int) -> dict[str, tuple[int, ...]]:
    H, L, rank = attention.num_heads, attention.kv_lora_rank, attention.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {}
    if rank is None:
        shapes["q.weight"] = (H * attention.qk_head_dim, D)
    else:
        shapes["q_a.weight"] = (rank, D)
        if attention.qkv_bias:
            shapes["q_a.bias"] = (rank,)
        shapes["q_a_norm.weight"] = (rank,)
        shapes["q_b.weight"] = (H * attention.qk_head_dim, rank)
    shapes["kv_a.weight"] = (L + attention.qk_rope_head_dim, D)
    if attention.qkv_bias:
        shapes["kv_a.bias"] = (L + attention.qk_rope_head_dim,)
    shapes["kv_a_norm.weight"] = (L,)
    shapes["kv_b.weight"] = (H * (attention.qk_nope_head_dim + attention.v_head_dim), L)
    shapes["o.weight"] = (D, H * attention.v_head_dim)
    if attention.o_bias:
        shapes["o.bias"] = (D,)
    return shapes


def _moe_shapes(config: ModelConfig, num_slots: int) -> dict[str, ParameterSpec]:
    moe, D = config.moe, config.hidden_size
    shapes = {"gate.weight": ParameterSpec((moe.num_experts, D))}
    if moe.correction_bias:
        shapes["gate.bias"] = ParameterSpec((moe.num_experts,), torch.float32)
    F, dtype = moe.expert_dim, FP8 if config.fp8_experts else None
    shapes["experts.w13"] = ParameterSpec((num_slots, 2 * F, D), dtype)
    shapes["experts.w2"] = ParameterSpec((num_slots, D, F), dtype)
    if config.fp8_experts:  # gate and up have blocks of their own, also where 128 does not divide F
        shapes["experts.w13_scale"] = ParameterSpec((num_slots, 2, cdiv(F, GROUP), cdiv(D, GROUP)), torch.float32)
        shapes["experts.w2_scale"] = ParameterSpec((num_slots, 1, cdiv(D, GROUP), cdiv(F, GROUP)), torch.float32)
    if moe.shared_dim:
        shapes["shared.gate_up.weight"] = ParameterSpec((2 * moe.shared_dim, D))
        shapes["shared.down.weight"] = ParameterSpec((D, moe.shared_dim))
    return shapes


def is_expert_parameter(name: str) -> bool:
    """Whether the first dimension of this parameter counts expert slots. All of a slot's make one bundle."""
    return ".moe.experts." in name


def bundle_names(layer: int, names: Iterable[str]) -> list[str]:
    """Of `names` those of all that belongs to the expert slots of a layer: what an expert takes along."""
    return [name for name in names if is_expert_parameter(name) and int(name.split(".")[1]) == layer]


def scale_name(name: str) -> str:
    """The block scales of an expert weight that is held in fp8."""
    return f"{name}_scale"
