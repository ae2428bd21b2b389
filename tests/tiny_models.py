"""Tiny random checkpoints of every family, written as released ones are, and the transformers model to compare with.

Knows transformers' model classes and names on disk; knows nothing of our own network. Every tensor is random: norms
are near 1 but not 1, selection biases have both signs, head widths differ from each other, and 200 random tokens reach
every expert (tests/test_model/test_families.py holds these promises).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

VOCAB_SIZE = 288  # 256 bytes, four special tokens, 28 merges
BOS_ID, EOS_ID, USER_ID, END_ID = 256, 257, 258, 259

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")

# Every variant the parity tests want by name: family and what differs from its defaults.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 12}),
    "mixtral-tied": ("mixtral", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-sparse-step": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen3_moe-biased": ("qwen3_moe", {"attention_bias": True, "norm_topk_prob": False}),
    "qwen3_moe-yarn": ("qwen3_moe", {"yarn": True}),
    "deepseek_v2-lite": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0},
    ),
    "deepseek_v2-yarn": ("deepseek_v2", {"yarn": True}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-yarn": ("deepseek_v3", {"yarn": True}),
    "deepseek_v3-biased": ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
}

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": [EOS_ID, END_ID],
    "tie_word_embeddings": False,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 32}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 56,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": _GQA
    | {"num_hidden_layers": 3, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": _GQA
    | {
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "deepseek_v2": _MLA | {"topk_method": "greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": _MLA
    | {
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "n_shared_experts": 1,
    },
}
_CLASSES: dict[str, tuple[type, type]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_BLOCK = 128


def write_variant(folder: Path, variant: str, **options: Any) -> PreTrainedModel:
    """`write_tiny` for a name of `VARIANTS`; `options` go on top."""
    family, overrides = VARIANTS[variant]
    return write_tiny(folder, family, **(overrides | options))


def write_tiny(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    layout: str = "original",
    shards: int = 1,
    dtype: str = "float32",
    config_style: str = "v5",
    fp8: bool = False,
    mtp: bool = False,
    yarn: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Writes config.json and safetensors into `folder`; returns the fp32 eval model with exactly the stored values.

    `layout`: "original" (one tensor per expert, the released names) or "stacked" (transformers 5's own names).
    `shards` > 1 writes that many files and an index. `dtype`: float32, bfloat16, float16. `config_style`: "v5" as
    transformers 5 saves it, "v4" with the keys of transformers 4 (rope_theta, rope_scaling, num_experts, torch_dtype).
    `fp8` stores the linear weights in 128x128 blocks; the returned model holds their dequantised values. `mtp` adds a
    multi-token-prediction layer behind the last one. `yarn` scales the rope by 4, with DeepSeek's mscale in its
    families. `overrides` are fields of the transformers config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config_class, model_class = _CLASSES[family]
    fields = _COMMON | _DEFAULTS[family] | {"rope_parameters": _rope(family, yarn)} | overrides
    torch_state = torch.get_rng_state()  # the model classes draw initial weights: leave the caller's stream alone
    model = model_class(config_class(**fields)).float().eval()
    torch.set_rng_state(torch_state)
    _randomise(model, seed)

    model.save_pretrained(folder, save_original_format=layout == "original")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors = {name: _cast(name, tensor, _DTYPES[dtype]) for name, tensor in tensors.items()}
    stored = _quantise(tensors) if fp8 else dict(tensors)
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        _assign(state, name, dequantise(stored, name, tensor))
    if mtp:
        stored |= _mtp_layer(stored, model.config.num_hidden_layers, seed)
    write_shards(folder, stored, shards)

    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = dtype
    if mtp:
        config["num_nextn_predict_layers"] = 1
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    write_config(folder, to_v4(config) if config_style == "v4" else config)
    return model


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def to_v4(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json with the keys transformers 4 wrote."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    rope_type = rope.pop("rope_type")
    config["rope_scaling"] = None if rope_type == "default" else {"type": rope_type, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.57.1"
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
        config.setdefault("max_window_layers", config["num_hidden_layers"])
    if config["model_type"] == "deepseek_v3":
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1}
    if config["model_type"] == "deepseek_v2":
        config |= {"scoring_func": "softmax", "moe_layer_freq": 1, "ep_size": 1}
    return config


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """model.safetensors, or `shards` files of about equally many tensors with their index."""
    if shards == 1:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without training: any text encodes, any id below `vocab_size` decodes.

    Ids 0..255 are the bytes, then bos, eos, user and end-of-turn, then merges. With a chat template.
    """
    if vocab_size < 260:
        raise ValueError(f"vocab_size={vocab_size} is too small for 256 bytes and 4 special tokens; use 260 or more")
    byte_chars = list(_byte_characters().values())
    specials = ["<s>", "</s>", "<|user|>", "<|end|>"]
    vocab = {token: i for i, token in enumerate(byte_chars + specials)}
    merges: list[tuple[str, str]] = []
    for left, right in _merge_pairs(byte_chars):
        if len(vocab) == vocab_size:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{{ bos_token }}{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return fast


def dequantise(stored: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    """The fp32 value of one stored tensor: block times scale where it is fp8, else `tensor` itself."""
    scale = stored.get(scale_name(name))
    if scale is None:
        return tensor.float()
    rows = torch.arange(tensor.shape[-2]) // FP8_BLOCK
    columns = torch.arange(tensor.shape[-1]) // FP8_BLOCK
    return stored[name].float() * scale.float()[..., rows, :][..., columns]


def scale_name(name: str) -> str:
    """The name on disk of a weight's block scales: transformers' stacked experts have no `.weight` suffix."""
    return f"{name}_scale_inv"


def _rope(family: str, yarn: bool) -> dict[str, Any]:
    if not yarn:
        return {"rope_type": "default", "rope_theta": 10000.0}
    mscale = {"mscale": 0.9, "mscale_all_dim": 0.7} if family.startswith("deepseek") else {}
    return {"rope_theta": 10000.0} | _YARN | mscale


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Draws every parameter and persistent buffer, in name order, from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.25 * noise
        elif name.endswith("e_score_correction_bias"):
            signs = torch.where(torch.arange(tensor.shape[0]) % 2 == 0, 1.0, -1.0)
            value = signs * (0.05 + 0.1 * noise.abs())
        elif name.endswith(".bias"):
            value = 0.3 * noise
        elif "embed_tokens" in name:
            value = noise
        elif name.endswith("gate.weight"):
            value = noise * 1.5 / math.sqrt(tensor.shape[-1])
        else:
            value = noise / math.sqrt(tensor.shape[-1])
        tensor.copy_(value)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As released checkpoints are: everything in the model dtype but the selection bias."""
    return tensor.float() if name.endswith("e_score_correction_bias") else tensor.to(dtype)


def _is_quantised(name: str, tensor: Tensor) -> bool:
    """Linear weights only: no embedding, head, norm, gate or bias."""
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "block_sparse_moe.gate.")
    return tensor.ndim >= 2 and not any(part in name for part in kept)


def _quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """fp8 e4m3 with one fp32 scale per 128x128 block (edge blocks are smaller): scale = amax / 448."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not _is_quantised(name, tensor):
            stored[name] = tensor
            continue
        rows, columns = tensor.shape[-2:]
        grid = (math.ceil(rows / FP8_BLOCK), math.ceil(columns / FP8_BLOCK))
        padded = torch.zeros(*tensor.shape[:-2], grid[0] * FP8_BLOCK, grid[1] * FP8_BLOCK)
        padded[..., :rows, :columns] = tensor.float()
        blocks = padded.unflatten(-1, (grid[1], FP8_BLOCK)).unflatten(-3, (grid[0], FP8_BLOCK))
        scale = blocks.abs().amax(dim=(-3, -1)) / 448
        quantised = (blocks / scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2, -1)
        stored[name] = quantised[..., :rows, :columns].to(torch.float8_e4m3fn)
        stored[scale_name(name)] = scale
    return stored


_PER_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")


@torch.no_grad()
def _assign(state: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Puts a tensor under its name on disk into the model's parameter."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    match = _PER_EXPERT.fullmatch(name)
    if match is None:
        state[name].copy_(value)
        return
    experts, expert, projection = match[1], int(match[2]), match[3]
    if projection in ("down_proj", "w2"):
        state[f"{experts}.down_proj"][expert].copy_(value)
        return
    half = 0 if projection in ("gate_proj", "w1") else 1
    state[f"{experts}.gate_up_proj"][expert].chunk(2)[half].copy_(value)


def _mtp_layer(stored: dict[str, Tensor], num_layers: int, seed: int) -> dict[str, Tensor]:
    """DeepSeek-V3's extra layer at index `num_layers`: a copy of the last layer and its own projections."""
    last, extra = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    layer = {extra + name.removeprefix(last): tensor.clone() for name, tensor in stored.items() if last in name}
    hidden = stored["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(seed + 1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{extra}{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    layer[f"{extra}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator)
    layer[f"{extra}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    layer[f"{extra}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    return layer


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return dict(sorted(table.items()))


def _merge_pairs(byte_chars: list[str]) -> list[tuple[str, str]]:
    """Merges in order of rank: some of English first, then letter pairs until any vocabulary is full."""
    space = _byte_characters()[ord(" ")]
    common = ["th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is"]
    pairs = [(pair[0], pair[1]) for pair in common] + [(space, "th"), (space, "a"), (space + "th", "e"), ("in", "g")]
    return pairs + [(left, right) for left in byte_chars[32:] for right in byte_chars[32:]]
