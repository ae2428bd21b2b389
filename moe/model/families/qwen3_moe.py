"""Qwen3-MoE: q/k norm, sparse layers chosen by `decoder_sparse_step` and `mlp_only_layers`, no shared expert."""

from __future__ import annotations

from kernels.routing import RoutingRule
from moe.model.config import GQAConfig, ModelConfig, MoEConfig
from moe.model.families.config_fields import ConfigFields, check_rule
from moe.model.families.weight_rule import ExpertNames

MODEL_TYPES = ("qwen3_moe",)
EXPERT_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def parse(fields: ConfigFields) -> ModelConfig:
    """`norm_topk_prob` is false where the file does not say, as in transformers; released files say true."""
    fields.only("hidden_act", ("silu",), "silu")
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_layers, num_experts = fields.integer("num_hidden_layers"), fields.integer("num_experts", "num_local_experts")
    max_positions = fields.integer("max_position_embeddings")
    bias = fields.flag("attention_bias", default=False)
    attention = GQAConfig(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_dim=fields.integer("head_dim", default=hidden_size // num_heads),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )
    sparse_layers = _sparse_layers(fields, num_layers)
    rule = RoutingRule(
        top_k=fields.integer("num_experts_per_tok"), renormalize=fields.flag("norm_topk_prob", default=False)
    )
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        dense_dim=0 if all(sparse_layers) else fields.integer("intermediate_size"),
        attention=attention,
        moe=MoEConfig(num_experts, fields.integer("moe_intermediate_size"), check_rule(rule, num_experts)),
        sparse_layers=sparse_layers,
        sliding_windows=_sliding_windows(fields, num_layers),
        rope=fields.rope(attention.head_dim, max_positions=max_positions),
        norm_eps=fields.number("rms_norm_eps", default=1e-6, positive=True),
        max_positions=max_positions,
        softmax_scale=attention.head_dim**-0.5,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        dtype=fields.dtype(),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=fields.first_token_id("bos_token_id"),
        fp8_block=fields.fp8_block(),
    )


def _sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.value("mlp_only_layers", default=[])
    if not isinstance(dense, list) or any(not isinstance(i, int) or not 0 <= i < num_layers for i in dense):
        raise ValueError(
            f"config.json: mlp_only_layers={dense!r} must be a list of layer indices from 0 to {num_layers - 1}; "
            "compare with the published config of this model."
        )
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _sliding_windows(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """The window of each layer: by `layer_types`, else from layer `max_window_layers` on, else in all layers.

    `use_sliding_window: false` means none. transformers 5.24 itself ignores both lists for this family and gives the
    window to all layers; released configs do not use it.
    """
    if not fields.flag("use_sliding_window", default=False):
        return (0,) * num_layers
    window = fields.integer("sliding_window", default=0, at_least=0)
    kinds = fields.value("layer_types", default=None)
    if kinds is None:
        first = fields.integer("max_window_layers", default=0, at_least=0)
        return tuple(window if i >= first else 0 for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _LAYER_TYPES for kind in kinds):
        raise ValueError(
            f"config.json: layer_types={kinds!r} must name one of {', '.join(_LAYER_TYPES)} for each of the "
            f"num_hidden_layers={num_layers} layers."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
