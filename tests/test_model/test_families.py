"""Configs in both spellings, the rules of each family by number, refusals, and the names a checkpoint must hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3Config

from kernels.routing import RoutingRule
from moe.model.config import GQAConfig, MLAConfig
from moe.model.families.registry import MODEL_TYPES, parse_config, read_config, weight_table
from moe.model.families.weight_rule import ExpertLayout
from moe.model.parameter_shapes import is_expert_parameter, parameter_shapes
from tests.tiny_models import VARIANTS, VOCAB_SIZE, to_v4, write_tiny, write_tokenizer, write_variant

# As published, shortened to the fields that count here.
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": None,
    "quantization_config": None,
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["original", "stacked"])
def test_C07_the_weight_table_names_exactly_what_transformers_saves(tmp_path: Path, variant: str, layout: str):
    """Names and shapes in both layouts, from the config in both spellings."""
    write_variant(tmp_path, variant, layout=layout)
    config = read_config(tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    our_layout: ExpertLayout = "stacked" if layout == "stacked" else "per_expert"
    table = weight_table(config, our_layout)
    assert {rule.source: rule.shape for rule in table} == saved
    assert len({rule.source for rule in table}) == len(table)
    assert parse_config(to_v4(json.loads((tmp_path / "config.json").read_text()))) == config


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_of_every_parameter_has_exactly_one_source(tmp_path: Path, variant: str):
    write_variant(tmp_path, variant)
    config = read_config(tmp_path)
    shapes = parameter_shapes(config, config.moe.num_experts)
    row_dims = {name: 2 if is_expert_parameter(name) else 1 for name in shapes}
    for layout in ("per_expert", "stacked"):
        filled = {name: torch.zeros(spec.shape[: row_dims[name]]) for name, spec in shapes.items()}
        for rule in weight_table(config, layout):
            rows = filled[rule.target] if rule.expert is None else filled[rule.target][rule.expert]
            rows[..., rule.row : rule.row + rule.rows] += 1
            columns = rule.shape[2:] if rule.stacked else rule.shape[1:]
            assert columns == shapes[rule.target].shape[row_dims[rule.target] :], rule
        assert [name for name, count in filled.items() if not bool((count == 1).all())] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tiny_models_keep_their_promises(tmp_path: Path, variant: str):
    """200 random tokens reach every expert of every sparse layer; no norm is 1; biases have both signs."""
    model = write_variant(tmp_path, variant)
    hit: dict[str, Tensor] = {}

    def watch(name: str):
        def hook(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            hit[name] = output[2].unique()

        return hook

    gates = [(name, module) for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for name, module in gates:
        module.register_forward_hook(watch(name))
    tokens = torch.randint(0, VOCAB_SIZE, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens)
    config = read_config(tmp_path)
    assert len(hit) == sum(config.sparse_layers) > 0
    assert all(len(experts) == config.moe.num_experts for experts in hit.values())
    for name, tensor in model.state_dict().items():
        assert float(tensor.std()) > 0, name
        if "norm" in name:
            assert bool((tensor != 1).all()) and 0.5 < float(tensor.mean()) < 1.5, name
        if name.endswith("e_score_correction_bias"):
            assert bool((tensor > 0).any()) and bool((tensor < 0).any())


def test_the_tiny_tokenizer_keeps_any_text_and_knows_every_id(tmp_path: Path):
    tokenizer = write_tokenizer(tmp_path)
    text = "In the beginning, ünï 漢字 \n\t\x00"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == VOCAB_SIZE
    assert all(isinstance(tokenizer.decode([i]), str) for i in range(VOCAB_SIZE))


def test_mixtral_by_number():
    config = parse_config(MIXTRAL)
    assert config.attention == GQAConfig(num_heads=32, num_kv_heads=8, head_dim=128)
    assert config.moe.rule == RoutingRule(top_k=2, score="softmax", renormalize=True)
    assert (config.moe.num_experts, config.moe.expert_dim, config.moe.shared_dim) == (8, 14336, 0)
    assert config.sparse_layers == (True,) * 32 and config.sliding_windows == (0,) * 32
    assert config.rope.theta == 1000000.0 and config.rope.dim == 128 and not config.rope.interleaved
    assert config.norm_eps == 1e-5 and config.softmax_scale == 128**-0.5 and config.dtype == "bfloat16"
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1
    assert parse_config(MIXTRAL | {"sliding_window": 4096}).sliding_windows == (4096,) * 32
    assert parse_config(MIXTRAL | {"head_dim": None}) == config  # transformers 4 wrote null or nothing
    assert parse_config(MIXTRAL | {"eos_token_id": [2, 5]}).eos_token_ids == (2, 5)


def test_qwen3_by_number():
    config = parse_config(QWEN3)
    assert config.attention == GQAConfig(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True)
    assert config.moe.rule == RoutingRule(top_k=8, score="softmax", renormalize=True)
    assert config.sparse_layers == (True,) * 48 and config.sliding_windows == (0,) * 48
    assert not parse_config(QWEN3 | {"norm_topk_prob": None}).moe.rule.renormalize
    biased = parse_config(QWEN3 | {"attention_bias": True}).attention
    assert isinstance(biased, GQAConfig) and biased.qkv_bias and biased.o_bias


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 64}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": None}, (64, 64, 64)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, (0, 0, 64)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (64, 0, 64),
        ),
    ],
)
def test_qwen3_windows(fields: dict[str, Any], windows: tuple[int, ...]):
    assert parse_config(QWEN3 | {"num_hidden_layers": 3} | fields).sliding_windows == windows


def test_C53_dense_and_sparse_layers_come_from_the_config():
    """As transformers chooses them; the weight tables of the tiny variants hold the same against its models."""
    qwen = QWEN3 | {"num_hidden_layers": 6, "mlp_only_layers": [0, 3], "decoder_sparse_step": 2}
    assert parse_config(qwen).sparse_layers == (False, True, False, False, False, True)
    deepseek = DEEPSEEK_V3 | {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    assert parse_config(deepseek).sparse_layers == (False, True, True, True)
    assert parse_config(deepseek | {"moe_layer_freq": 2}).sparse_layers == (False, False, True, False)


def test_deepseek_v3_by_number():
    config = parse_config(DEEPSEEK_V3)
    assert config.attention == MLAConfig(128, 512, 128, 64, 128, q_lora_rank=1536)
    assert config.moe.rule == RoutingRule(8, "sigmoid", 8, 4, "top2_sum", renormalize=True, epsilon=1e-20, scale=2.5)
    assert config.moe.correction_bias and config.moe.shared_dim == 2048
    assert config.sparse_layers == (False,) * 3 + (True,) * 58
    assert config.rope.interleaved and config.rope.attention_factor == 1.0
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.8738, rel=1e-4)
    assert config.num_mtp_layers == 1 and config.fp8_block == (128, 128)
    assert not parse_config(DEEPSEEK_V3 | {"rope_interleave": False}).rope.interleaved


def test_deepseek_v2_scales_or_renormalises_but_never_both():
    config = parse_config(DEEPSEEK_V2)
    assert config.moe.rule == RoutingRule(6, "softmax", 8, 3, "max", renormalize=False, scale=16.0)
    assert not config.moe.correction_bias and config.moe.shared_dim == 4096 and config.num_mtp_layers == 0
    renormalised = parse_config(DEEPSEEK_V2 | {"norm_topk_prob": True}).moe.rule
    assert renormalised.renormalize and renormalised.scale == 1.0
    one = parse_config(DEEPSEEK_V2 | {"norm_topk_prob": True, "num_experts_per_tok": 1}).moe.rule
    assert not one.renormalize and one.scale == 16.0
    lite = parse_config(DEEPSEEK_V2 | {"topk_method": "greedy", "q_lora_rank": None, "routed_scaling_factor": 1.0})
    assert isinstance(lite.attention, MLAConfig) and lite.attention.q_lora_rank is None
    assert lite.moe.rule == RoutingRule(6, "softmax", renormalize=False)


@pytest.mark.parametrize(
    ("scaling", "attention_factor", "scale_factor"),
    [
        # (both mscales: their ratio on cos and sin; mscale_all_dim squared on the softmax)
        ({"mscale": 0.9, "mscale_all_dim": 0.7}, (0.09 * math.log(4) + 1) / (0.07 * math.log(4) + 1), 0.07),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 0.0707),
        ({}, 0.1 * math.log(4) + 1, 0.0),
        ({"mscale_all_dim": 0.7}, 0.1 * math.log(4) + 1, 0.07),
        ({"attention_factor": 1.25}, 1.25, 0.0),
    ],
)
def test_yarn_factors(scaling: dict[str, float], attention_factor: float, scale_factor: float):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
    fields = {name: value for name, value in DEEPSEEK_V2.items() if name not in ("rope_scaling", "rope_theta")}
    config = parse_config(fields | {"rope_parameters": rope | scaling})
    assert config.rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert config.softmax_scale == pytest.approx(192**-0.5 * (scale_factor * math.log(4) + 1) ** 2, rel=1e-12)
    assert (config.rope.factor, config.rope.original_max_positions) == (4.0, 1024)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "yarn" in name])
def test_yarn_factors_equal_transformers(tmp_path: Path, variant: str):
    model = write_variant(tmp_path, variant)
    config = read_config(tmp_path)
    assert config.rope.attention_factor == pytest.approx(model.model.rotary_emb.attention_scaling, rel=1e-6)
    assert config.softmax_scale == pytest.approx(model.model.layers[0].self_attn.scaling, rel=1e-6)


def test_linear_rope_has_deepseeks_mscale_too(tmp_path: Path) -> None:
    """Whatever the kind of scaling, as DeepSeek's own code and transformers do."""
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0, "mscale_all_dim": 0.7}
    for family in ("deepseek_v2", "deepseek_v3"):
        model = write_tiny(tmp_path / family, family, rope_parameters=rope)
        config = read_config(tmp_path / family)
        assert config.softmax_scale == pytest.approx(48**-0.5 * (0.07 * math.log(3) + 1) ** 2, rel=1e-12)
        assert config.softmax_scale == pytest.approx(model.model.layers[0].self_attn.scaling, rel=1e-6)
        assert config.rope.attention_factor == model.model.rotary_emb.attention_scaling == 1.0


def test_rope_scaling_counts_beside_an_empty_rope_parameters_and_must_not_differ_from_a_full_one() -> None:
    """A model card says "add rope_scaling", and the file has transformers 5's field already."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    alone = parse_config(QWEN3 | {"rope_scaling": yarn})
    assert alone.rope.scaling == "yarn" and alone.rope.theta == 1e6
    for empty in ({}, None):
        assert parse_config(QWEN3 | {"rope_scaling": yarn, "rope_parameters": empty}) == alone
    whole = {name: value for name, value in yarn.items() if name != "type"} | {"rope_type": "yarn", "rope_theta": 1e6}
    assert parse_config(QWEN3 | {"rope_scaling": yarn, "rope_parameters": whole}) == alone
    for fields, differing in (
        ({"rope_type": "default", "rope_theta": 1e6}, "rope_type, factor, original_max_position_embeddings"),
        (whole | {"factor": 2.0}, "factor"),
    ):
        with pytest.raises(
            ValueError, match=f"has rope_parameters and rope_scaling, and they differ in {differing}; keep"
        ):
            parse_config(QWEN3 | {"rope_scaling": yarn, "rope_parameters": fields})


def test_what_a_deepseek_v3_leaves_out_is_as_in_transformers() -> None:
    names = ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")
    ours = parse_config({name: value for name, value in DEEPSEEK_V3.items() if name not in names}).moe.rule
    theirs = DeepseekV3Config()
    assert (ours.num_groups, ours.topk_groups) == (theirs.n_group, theirs.topk_group) == (8, 4)
    assert (ours.scale, ours.renormalize) == (theirs.routed_scaling_factor, theirs.norm_topk_prob) == (2.5, True)


def test_C32_the_tie_flag_may_sit_in_text_config():
    inner = parse_config({"model_type": "outer", "text_config": MIXTRAL | {"tie_word_embeddings": True}})
    assert inner.tie_embeddings and inner.vocab_size == 32000
    outer = parse_config({"model_type": "outer", "tie_word_embeddings": True, "text_config": MIXTRAL})
    assert outer.tie_embeddings
    both = {"tie_word_embeddings": False, "text_config": MIXTRAL | {"tie_word_embeddings": True}}
    assert parse_config(both).tie_embeddings  # the nearer one counts
    assert not parse_config(MIXTRAL).tie_embeddings


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n_routed_experts": 250}, "n_group.*does not divide num_experts=250"),
        ({"topk_group": 9}, r"topk_group.*does not fit num_groups=8"),
        ({"num_experts_per_tok": 129}, "top_k=129 exceeds the 128 experts"),
        ({"n_routed_experts": 8}, "groups of at least two experts|exceeds the"),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2}, "groups of at least two experts"),
        ({"num_experts_per_tok": 300}, "top_k=300"),
    ],
)
def test_C05_a_router_that_cannot_be_is_refused_when_the_config_is_read(fields: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=f"(?s)config.json: the router's fields do not fit together: .*({said})"):
        parse_config(DEEPSEEK_V3 | fields)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MIXTRAL | {"model_type": "gpt_oss"}, "model_type='gpt_oss' is not supported; supported: mixtral, qwen3_moe, "),
        ({}, "model_type=None is not supported"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported.*supported: 'silu'"),
        (
            MIXTRAL | {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_scaling.rope_type='dynamic' is not.*'yarn'",
        ),
        (QWEN3 | {"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type='llama3' is not supported"),
        (MIXTRAL | {"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling has no factor"),
        (
            QWEN3 | {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            "rope_parameters.full_attention is an object of its own; one rope for all layers is supported",
        ),
        (MIXTRAL | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (MIXTRAL | {"rope_theta": 0}, "rope_theta=0 must be a finite number above 0"),
        (MIXTRAL | {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor=0 must be .* above 0"),
        (MIXTRAL | {"rope_scaling": {"type": "yarn", "factor": -4}}, "rope_scaling: factor=-4 must be .* above 0"),
        (MIXTRAL | {"rope_scaling": [8]}, r"rope_scaling=\[8\] must be an object of fields"),
        (MIXTRAL | {"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be a finite number above 0"),
        (MIXTRAL | {"quantization_config": "fp8"}, "quantization_config='fp8' must be an object of fields"),
        ({**QWEN3, "num_experts": None}, "has no num_experts or num_local_experts"),
        ({**DEEPSEEK_V3, "kv_lora_rank": None}, "has no kv_lora_rank"),
        (MIXTRAL | {"hidden_size": "4096"}, "hidden_size='4096' must be an integer"),
        (MIXTRAL | {"num_key_value_heads": 5}, "num_attention_heads=32 is not a multiple of num_key_value_heads=5"),
        (MIXTRAL | {"torch_dtype": "int8"}, "torch_dtype='int8' is not supported; supported: bfloat16"),
        (MIXTRAL | {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        (MIXTRAL | {"eos_token_id": "</s>"}, "eos_token_id='</s>' must be a token id"),
        (MIXTRAL | {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq' is not supported"),
        (MIXTRAL | {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size=None is not supported"),
        (
            MIXTRAL | {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [1, 1]}},
            "fmt='e5m2' is not supported",
        ),
        (QWEN3 | {"mlp_only_layers": [48]}, r"mlp_only_layers=\[48\] must be a list of layer indices from 0 to 47"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types="),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method='greedy' is not supported.*'noaux_tc'"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        (DEEPSEEK_V2 | {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported"),
        (DEEPSEEK_V2 | {"n_group": None}, "has no n_group"),
        (DEEPSEEK_V2 | {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ],
)
def test_a_config_that_cannot_be_honoured_names_field_value_and_way_out(config: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        parse_config(config)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "config.json of 0 bytes is not JSON"),
        (b'{"model_type": "mixtral",', r"config.json of 25 bytes is not JSON \(Expecting property name"),
        (b'{"a": "\xff"}', "config.json of 10 bytes is not JSON"),
        (b"[1]", "config.json holds list, not an object of fields"),
        (None, "holds no config.json; give the folder of a checkpoint"),
    ],
)
def test_a_config_that_cannot_be_read_names_its_file(tmp_path: Path, content: bytes | None, said: str):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_every_supported_type_is_listed():
    assert MODEL_TYPES == ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def test_absent_dtype_is_bfloat16_and_both_spellings_count(tmp_path: Path):
    fields = {name: value for name, value in MIXTRAL.items() if name != "torch_dtype"}
    assert parse_config(fields).dtype == "bfloat16"
    assert parse_config(fields | {"dtype": "float16"}).dtype == "float16"
    assert parse_config(fields | {"torch_dtype": "torch.float32"}).dtype == "float32"
    write_tiny(tmp_path, "mixtral", dtype="bfloat16", config_style="v4")
    assert read_config(tmp_path).dtype == "bfloat16"
