"""DeepSeek-V2 (softmax router, greedy or group-limited) and DeepSeek-V3 (sigmoid router with a selection bias)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.routing import RoutingRule
from moe.model.config import MLAConfig, ModelConfig, MoEConfig
from moe.model.families.config_fields import ConfigFields, check_rule
from moe.model.families.weight_rule import ExpertNames
from moe.model.rope_table import yarn_mscale

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
EXPERT_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
_EPSILON = 1e-20  # added to the sum that the chosen weights are divided by


def parse(fields: ConfigFields) -> ModelConfig:
    """The softmax scale is (nope + rope)^-0.5 times the rope's squared mscale_all_dim, where it scales and has one."""
    family = fields.value("model_type")
    fields.only("hidden_act", ("silu",), "silu")
    fields.only("mlp_bias", (False,), False)
    num_layers, num_experts = fields.integer("num_hidden_layers"), fields.integer("n_routed_experts", "num_experts")
    max_positions = fields.integer("max_position_embeddings")
    attention = _attention(fields)
    rope = fields.rope(
        attention.qk_rope_head_dim,
        max_positions=max_positions,
        interleaved=fields.flag("rope_interleave", default=True) if family == "deepseek_v3" else True,
    )
    mscale = yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    router = _v3_router(fields) if family == "deepseek_v3" else _v2_router(fields)
    expert_dim = fields.integer("moe_intermediate_size")
    sparse_layers = _sparse_layers(fields, num_layers)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=num_layers,
        dense_dim=0 if all(sparse_layers) else fields.integer("intermediate_size"),
        attention=attention,
        moe=MoEConfig(
            num_experts=num_experts,
            expert_dim=expert_dim,
            rule=check_rule(router.rule, num_experts),
            correction_bias=router.correction_bias,
            shared_dim=expert_dim * fields.integer("n_shared_experts", default=0, at_least=0),
        ),
        sparse_layers=sparse_layers,
        sliding_windows=(0,) * num_layers,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", default=1e-6, positive=True),
        max_positions=max_positions,
        softmax_scale=attention.qk_head_dim**-0.5 * mscale**2,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        dtype=fields.dtype(),
        num_mtp_layers=fields.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, at_least=0),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=fields.first_token_id("bos_token_id"),
        fp8_block=fields.fp8_block(),
    )


@dataclass(frozen=True)
class _Router:
    rule: RoutingRule
    correction_bias: bool


def _attention(fields: ConfigFields) -> MLAConfig:
    bias = fields.flag("attention_bias", default=False)
    rank = fields.integer("q_lora_rank", default=0, at_least=0)
    return MLAConfig(
        num_heads=fields.integer("num_attention_heads"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        q_lora_rank=rank or None,
        qkv_bias=bias,
        o_bias=bias,
    )


def _sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Sparse from `first_k_dense_replace` on, every `moe_layer_freq`-th layer by its index."""
    first, every = (
        fields.integer("first_k_dense_replace", default=0, at_least=0),
        fields.integer("moe_layer_freq", default=1),
    )
    return tuple(i >= first and i % every == 0 for i in range(num_layers))


def _v2_router(fields: ConfigFields) -> _Router:
    """Weights are renormalised or scaled, never both (transformers ignores norm_topk_prob here and always scales)."""
    fields.only("scoring_func", ("softmax",), "softmax")
    method = fields.only("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    grouped = method == "group_limited_greedy"
    top_k = fields.integer("num_experts_per_tok")
    renormalize = top_k > 1 and fields.flag("norm_topk_prob", default=False)
    rule = RoutingRule(
        top_k=top_k,
        num_groups=fields.integer("n_group") if grouped else 1,
        topk_groups=fields.integer("topk_group") if grouped else 1,
        group_score="max",
        renormalize=renormalize,
        epsilon=_EPSILON if renormalize else 0.0,
        scale=1.0 if renormalize else fields.number("routed_scaling_factor", default=1.0),
    )
    return _Router(rule, correction_bias=False)


def _v3_router(fields: ConfigFields) -> _Router:
    """What the file does not say is DeepSeek-V3's own, as in transformers."""
    fields.only("scoring_func", ("sigmoid",), "sigmoid")
    fields.only("topk_method", ("noaux_tc",), "noaux_tc")
    rule = RoutingRule(
        top_k=fields.integer("num_experts_per_tok"),
        score="sigmoid",
        num_groups=fields.integer("n_group", default=8),
        topk_groups=fields.integer("topk_group", default=4),
        group_score="top2_sum",
        renormalize=fields.flag("norm_topk_prob", default=True),
        epsilon=_EPSILON,
        scale=fields.number("routed_scaling_factor", default=2.5),
    )
    return _Router(rule, correction_bias=True)
