"""The configs of released checkpoints, as published: what is derived from them, and how many tensors and bytes follow.

Values as transformers 4 wrote them on the hub. Derived numbers are held against transformers' own config, rope and
attention classes. Tensor counts and bytes are those of each release's model.safetensors.index.json (of DeepSeek-V3: of
all its file headers), so a weight table that lacks, adds or misshapes one tensor of a real checkpoint is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRotaryEmbedding

from moe.engine.resolve import resolve_max_model_len
from moe.model.config import MLAConfig, ModelConfig
from moe.model.families.registry import parse_config, weight_table
from moe.model.families.weight_rule import WeightRule
from moe.model.fp8_blocks import scale_grid
from moe.model.rope_table import attention_factor, inverse_frequencies

_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
_QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
_V2 = _DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "scoring_func": "softmax",
    "seq_aux": True,
    "vocab_size": 102400,
}
_V3 = _DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


@dataclass(frozen=True)
class Release:
    """A config, and what is known of its checkpoint: tensors, their bytes, dense layers, YaRN's squared mscale."""

    config: dict[str, Any]
    num_tensors: int
    num_bytes: int
    dense_layers: int = 0
    mscale_squared: float = 1.0

    @property
    def parsed(self) -> ModelConfig:
        return parse_config(self.config)


_MIXTRAL_8X7B = Release(
    _MIXTRAL
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "router_aux_loss_coef": 0.02,
    },
    num_tensors=995,
    num_bytes=93_405_585_408,
)
_DEEPSEEK_V2 = Release(
    _V2
    | {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "rope_scaling": _yarn(1.0),
        "routed_scaling_factor": 16.0,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    num_tensors=29_102,
    num_bytes=471_482_869_760,
    dense_layers=1,
    mscale_squared=(0.1 * math.log(40) + 1) ** 2,
)
_DEEPSEEK_V3 = Release(
    _V3 | {"rope_scaling": _yarn(1.0), "quantization_config": _FP8},
    num_tensors=91_991,
    num_bytes=688_574_839_360,
    dense_layers=3,
    mscale_squared=(0.1 * math.log(40) + 1) ** 2,
)
RELEASES = {
    "Mixtral-8x7B": _MIXTRAL_8X7B,
    "Mixtral-8x7B-Instruct": _MIXTRAL_8X7B,
    "Mixtral-8x22B": Release(
        _MIXTRAL
        | {
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "max_position_embeddings": 65536,
            "num_attention_heads": 48,
            "num_hidden_layers": 56,
            "rope_theta": 1000000,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
        },
        num_tensors=1_739,
        num_bytes=281_241_268_224,
    ),
    "Qwen3-30B-A3B": Release(
        _QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 48,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
        },
        num_tensors=18_867,
        num_bytes=61_064_245_248,
    ),
    "Qwen3-235B-A22B": Release(
        _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 94,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
        num_tensors=36_945,
        num_bytes=470_187_269_120,
    ),
    "DeepSeek-V2": _DEEPSEEK_V2,
    "DeepSeek-V2-Chat": _DEEPSEEK_V2,
    "DeepSeek-V2-Lite": Release(
        _V2
        | {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "rope_scaling": _yarn(0.707),
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "greedy",
        },
        num_tensors=5_291,
        num_bytes=31_412_968_448,
        dense_layers=1,
        mscale_squared=(0.0707 * math.log(40) + 1) ** 2,
    ),
    "DeepSeek-V3": _DEEPSEEK_V3,
    "DeepSeek-V3-0324": _DEEPSEEK_V3,
    "DeepSeek-R1": _DEEPSEEK_V3,
    # The scales stay float32 numbers, all powers of two.
    "DeepSeek-V3.1": replace(
        _DEEPSEEK_V3, config=_DEEPSEEK_V3.config | {"quantization_config": _FP8 | {"scale_fmt": "ue8m0"}}
    ),
}
_THEIRS: dict[str, tuple[type, type]] = {
    "mixtral": (MixtralRotaryEmbedding, MixtralAttention),
    "qwen3_moe": (Qwen3MoeRotaryEmbedding, Qwen3MoeAttention),
    "deepseek_v2": (DeepseekV2RotaryEmbedding, DeepseekV2Attention),
    "deepseek_v3": (DeepseekV3RotaryEmbedding, DeepseekV3Attention),
}
every_release = pytest.mark.parametrize("name", RELEASES)


@every_release
def test_derived_numbers_are_those_of_transformers(name: str) -> None:
    """Through transformers' own reading of the same file: lengths, ids, rope and the scale of the scores."""
    release = RELEASES[name]
    ours = release.parsed
    fields = {key: value for key, value in release.config.items() if key not in ("model_type", "auto_map")}
    theirs = AutoConfig.for_model(ours.family, **fields)
    rotary_class, attention_class = _THEIRS[ours.family]
    rotary = rotary_class(theirs)
    with torch.device("meta"):
        attention = attention_class(theirs, 0)
    torch.testing.assert_close(inverse_frequencies(ours.rope), rotary.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor(ours.rope) == pytest.approx(rotary.attention_scaling, rel=1e-6)
    assert ours.softmax_scale == pytest.approx(attention.scaling, rel=1e-6)
    assert (ours.max_positions, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert (ours.tie_embeddings, ours.dtype) == (theirs.tie_word_embeddings, "bfloat16")
    assert set(ours.sliding_windows) == {getattr(theirs, "sliding_window", None) or 0}


@every_release
def test_derived_numbers_by_hand(name: str) -> None:
    release = RELEASES[name]
    ours, fields = release.parsed, release.config
    width = 192 if isinstance(ours.attention, MLAConfig) else 128
    assert ours.softmax_scale == pytest.approx(width**-0.5 * release.mscale_squared, rel=1e-12)
    assert attention_factor(ours.rope) == 1.0, "no release stretches cos and sin: DeepSeek's two mscales cancel"
    assert ours.rope.interleaved == name.startswith("DeepSeek")
    dense = release.dense_layers
    assert ours.sparse_layers == (False,) * dense + (True,) * (fields["num_hidden_layers"] - dense)
    assert not any(ours.sliding_windows)
    assert ours.fp8_block == ((128, 128) if "quantization_config" in fields else None)
    assert ours.num_mtp_layers == fields.get("num_nextn_predict_layers", 0)
    assert resolve_max_model_len(None, ours) == fields["max_position_embeddings"]
    rule = ours.moe.rule
    assert rule.renormalize == fields.get("norm_topk_prob", True)
    assert rule.scale == fields.get("routed_scaling_factor", 1.0)
    assert (rule.num_groups, rule.topk_groups) == (fields.get("n_group", 1), fields.get("topk_group", 1))


def _stored(rule: WeightRule, fp8_block: tuple[int, int] | None) -> list[int]:
    """Bytes of the tensors a release stores for one entry of our table: the weight, and its scales where it is fp8."""
    numel = math.prod(rule.shape)
    if rule.source.endswith("e_score_correction_bias"):
        return [numel * 4]
    plain = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "mlp.gate.weight")
    if fp8_block is None or rule.source.endswith(plain):
        return [numel * 2]
    return [numel, math.prod(scale_grid(rule.shape, fp8_block)) * 4]


@every_release
def test_the_weight_table_has_the_tensors_and_bytes_of_the_release(name: str) -> None:
    release = RELEASES[name]
    ours = release.parsed
    # The MTP layers are no part of our table; they are shaped like the last layer and bring six tensors more.
    more = ours.num_mtp_layers
    whole = replace(
        ours,
        num_layers=ours.num_layers + more,
        sparse_layers=ours.sparse_layers + (True,) * more,
        sliding_windows=ours.sliding_windows + (0,) * more,
    )
    sizes = [size for rule in weight_table(whole) for size in _stored(rule, ours.fp8_block)]
    V, D = ours.vocab_size, ours.hidden_size
    sizes += [2 * V * D, 2 * V * D, 2 * D * 2 * D, 2 * D, 2 * D, 2 * D] * more  # embedding, head, eh_proj, three norms
    assert (len(sizes), sum(sizes)) == (release.num_tensors, release.num_bytes)


# Names as they stand in the releases' index files.
NAMES = {
    "Mixtral-8x22B": (
        "model.layers.10.block_sparse_moe.experts.7.w3.weight",
        "model.layers.10.block_sparse_moe.gate.weight",
        "model.layers.55.self_attn.o_proj.weight",
    ),
    "Qwen3-30B-A3B": (
        "model.layers.47.mlp.experts.127.down_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ),
    "DeepSeek-V2-Lite": (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.26.self_attn.q_proj.weight",
        "model.layers.26.mlp.shared_experts.up_proj.weight",
        "model.layers.26.mlp.experts.63.down_proj.weight",
    ),
    "DeepSeek-V3": (
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.60.mlp.experts.255.up_proj.weight",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_release_are_in_the_table(name: str) -> None:
    names = {rule.source for rule in weight_table(RELEASES[name].parsed)}
    assert names.issuperset(NAMES[name])


def test_shapes_and_scale_grids_of_deepseek_v3() -> None:
    """As its file headers hold them; kv_a has 576 rows, so its last block is half a block."""
    rules = {rule.source: rule for rule in weight_table(RELEASES["DeepSeek-V3"].parsed)}
    attn = "model.layers.0.self_attn."
    for name, shape, grid in (
        (f"{attn}q_a_proj.weight", (1536, 7168), (12, 56)),
        (f"{attn}q_b_proj.weight", (24576, 1536), (192, 12)),
        (f"{attn}kv_a_proj_with_mqa.weight", (576, 7168), (5, 56)),
        (f"{attn}kv_b_proj.weight", (32768, 512), (256, 4)),
        (f"{attn}o_proj.weight", (7168, 16384), (56, 128)),
        ("model.layers.0.mlp.down_proj.weight", (7168, 18432), (56, 144)),
    ):
        assert (rules[name].shape, scale_grid(rules[name].shape, (128, 128))) == (shape, grid), name
        assert rules[name].scale_source == f"{name}_scale_inv"
