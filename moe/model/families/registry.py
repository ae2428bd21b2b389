"""The families this runtime knows: from a config.json to a ModelConfig, and from that to the names of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from moe.model.checkpoint_file import is_named, read_small
from moe.model.config import GQAConfig, ModelConfig
from moe.model.families import deepseek, mixtral, qwen3_moe
from moe.model.families.config_fields import ConfigFields
from moe.model.families.weight_rule import ExpertLayout, WeightRule, decoder_table

_FAMILIES: dict[str, ModuleType] = {
    model_type: family for family in (mixtral, qwen3_moe, deepseek) for model_type in family.MODEL_TYPES
}
MODEL_TYPES = tuple(_FAMILIES)


def read_config(folder: Path) -> ModelConfig:
    """The network that the folder's config.json describes; ValueError names the file where it cannot be read."""
    file = folder / "config.json"
    if not is_named(file):
        raise ValueError(f"model: {folder} holds no config.json; give the folder of a checkpoint.")
    text = read_small(file)
    try:
        config = json.loads(text)
    except ValueError as error:  # both bad JSON and bad UTF-8
        raise ValueError(f"{file} of {len(text)} bytes is not JSON ({error}); fetch it again.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {type(config).__name__}, not an object of fields; fetch it again.")
    return parse_config(config)


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """The network a config.json describes, written by transformers 4 or 5.

    ValueError for an unknown model_type, a missing field or a value this runtime cannot honour.
    """
    fields = ConfigFields.of(config)
    model_type = fields.value("model_type", default=None)
    if model_type not in _FAMILIES:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}."
        )
    parsed = _FAMILIES[model_type].parse(fields)
    attention = parsed.attention
    if isinstance(attention, GQAConfig) and attention.num_heads % attention.num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads={attention.num_heads} is not a multiple of "
            f"num_key_value_heads={attention.num_kv_heads}; every key head serves the same number of query heads."
        )
    if parsed.rope.dim % 2:
        raise ValueError(f"config.json: rotary width {parsed.rope.dim} is odd; rope rotates pairs, so it must be even.")
    return parsed


def weight_table(config: ModelConfig, layout: ExpertLayout = "per_expert") -> tuple[WeightRule, ...]:
    """Every tensor a checkpoint of this config holds, in the given layout of its experts."""
    return decoder_table(config, layout, _FAMILIES[config.family].EXPERT_NAMES)
