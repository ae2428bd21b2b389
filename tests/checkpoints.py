"""Loading a checkpoint in a test: into poisoned tensors, against the state of transformers' model, and damaging it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from moe.model.checkpoint import Checkpoint
from moe.model.config import ModelConfig
from moe.model.families.registry import read_config
from moe.model.parameter_shapes import parameter_shapes
from tests.compare import assert_same_bits
from tests.tiny_models import write_config

INDEX = "model.safetensors.index.json"


def open_folder(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, read_config(folder))


def poisoned_targets(
    config: ModelConfig, num_slots: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    """As the network allocates them, filled with NaN: whatever is not written stays NaN."""
    return {
        name: torch.full(spec.shape, torch.nan, dtype=spec.dtype(dtype), device=device)
        for name, spec in parameter_shapes(config, num_slots).items()
    }


def load(
    folder: Path,
    experts: Sequence[int | None] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Tensor]:
    config = read_config(folder)
    experts = range(config.moe.num_experts) if experts is None else experts
    targets = poisoned_targets(config, len(experts), dtype, device)
    Checkpoint.open(folder, config).load_into(targets, experts)
    return targets


def expected_from(model: PreTrainedModel, config: ModelConfig) -> dict[str, Tensor]:
    """Our parameters, put together by hand from transformers' own state."""
    state = model.state_dict()
    names = {
        "attn_norm.weight": ["input_layernorm.weight"],
        "mlp_norm.weight": ["post_attention_layernorm.weight"],
        "attn.qkv.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        "attn.qkv.bias": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
        "attn.q_norm.weight": ["self_attn.q_norm.weight"],
        "attn.k_norm.weight": ["self_attn.k_norm.weight"],
        "attn.q.weight": ["self_attn.q_proj.weight"],
        "attn.q_a.weight": ["self_attn.q_a_proj.weight"],
        "attn.q_a.bias": ["self_attn.q_a_proj.bias"],
        "attn.q_a_norm.weight": ["self_attn.q_a_layernorm.weight"],
        "attn.q_b.weight": ["self_attn.q_b_proj.weight"],
        "attn.kv_a.weight": ["self_attn.kv_a_proj_with_mqa.weight"],
        "attn.kv_a.bias": ["self_attn.kv_a_proj_with_mqa.bias"],
        "attn.kv_a_norm.weight": ["self_attn.kv_a_layernorm.weight"],
        "attn.kv_b.weight": ["self_attn.kv_b_proj.weight"],
        "attn.o.weight": ["self_attn.o_proj.weight"],
        "attn.o.bias": ["self_attn.o_proj.bias"],
        "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "mlp.down.weight": ["mlp.down_proj.weight"],
        "moe.gate.weight": ["mlp.gate.weight"],
        "moe.gate.bias": ["mlp.gate.e_score_correction_bias"],
        "moe.experts.w13": ["mlp.experts.gate_up_proj"],
        "moe.experts.w2": ["mlp.experts.down_proj"],
        "moe.shared.gate_up.weight": ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"],
        "moe.shared.down.weight": ["mlp.shared_experts.down_proj.weight"],
    }
    top = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    top["lm_head.weight"] = "lm_head.weight"
    expected: dict[str, Tensor] = {}
    for name in parameter_shapes(config, config.moe.num_experts):
        if name in top:
            expected[name] = state[top[name]]
        else:
            _, layer, part = name.split(".", 2)
            expected[name] = torch.cat([state[f"model.layers.{layer}.{source}"] for source in names[part]])
    return expected


def assert_loaded(targets: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert targets.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(targets[name].float(), tensor)


def edit_tensors(file: Path, **changes: Tensor | None) -> None:
    """Rewrites one safetensors file: None removes a tensor. Names come with `__` for dots."""
    tensors = load_file(file)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


def change_config(folder: Path, **fields: object) -> None:
    write_config(folder, json.loads((folder / "config.json").read_text()) | fields)
