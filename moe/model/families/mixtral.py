"""Mixtral: every layer sparse, top-k of a softmax over all experts, always renormalised, no shared expert."""

from __future__ import annotations

from kernels.routing import RoutingRule
from moe.model.config import GQAConfig, ModelConfig, MoEConfig
from moe.model.families.config_fields import ConfigFields, check_rule
from moe.model.families.weight_rule import ExpertNames

MODEL_TYPES = ("mixtral",)
# Released: block_sparse_moe.experts.N.w1 (gate), w3 (up), w2 (down); stacked by transformers 5 under mlp.
EXPERT_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def parse(fields: ConfigFields) -> ModelConfig:
    """`intermediate_size` is the width of one expert; there is no dense layer."""
    fields.only("hidden_act", ("silu",), "silu")
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_layers, num_experts = fields.integer("num_hidden_layers"), fields.integer("num_local_experts", "num_experts")
    max_positions = fields.integer("max_position_embeddings")
    attention = GQAConfig(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_dim=fields.integer("head_dim", default=hidden_size // num_heads),
    )
    expert_dim = fields.integer("intermediate_size")
    rule = RoutingRule(top_k=fields.integer("num_experts_per_tok"))
    return ModelConfig(
        family="mixtral",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        dense_dim=expert_dim,
        attention=attention,
        moe=MoEConfig(num_experts, expert_dim, check_rule(rule, num_experts)),
        sparse_layers=(True,) * num_layers,
        sliding_windows=(fields.integer("sliding_window", default=0, at_least=0),) * num_layers,
        rope=fields.rope(attention.head_dim, max_positions=max_positions, theta=1000000.0),
        norm_eps=fields.number("rms_norm_eps", default=1e-5, positive=True),
        max_positions=max_positions,
        softmax_scale=attention.head_dim**-0.5,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        dtype=fields.dtype(),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=fields.first_token_id("bos_token_id"),
        fp8_block=fields.fp8_block(),
    )
