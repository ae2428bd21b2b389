"""What keys and a checkpoint come to together: the dtype, the longest sequence, the cache's layout.

Knows keys, a model's description and devices; reads no file. ValueError names the key that cannot be.
"""

from __future__ import annotations

import torch

from kernels.quantize import supports_fp8
from kv_cache.layout import KVLayout, LayerScales, Quantization
from moe.model.config import MLAConfig, ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's own on a GPU, float32 on the CPU."""
    if name == "auto":
        return DTYPES[checkpoint] if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not known; use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def resolve_max_model_len(requested: int | None, model: ModelConfig) -> int:
    """The longest sequence, prompt and answer together: the position table is exactly so long."""
    rope, limit = model.rope, model.max_positions
    if rope.scaling == "yarn":
        limit = max(limit, int(rope.factor * rope.original_max_positions))
    if requested is None:
        return model.max_positions
    if requested < 2:
        raise ValueError(f"engine.max_model_len={requested} leaves no room for a prompt and a token; use 2 or more.")
    if requested > limit:
        way_out = "use a checkpoint with rope scaling" if rope.scaling == "default" else "use one with a larger factor"
        source = "max_position_embeddings" if limit == model.max_positions else "yarn length (factor x original)"
        raise ValueError(
            f"engine.max_model_len={requested} exceeds this checkpoint's {source}={limit}; lower it, or {way_out}."
        )
    return requested


def kv_layout(
    model: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: str,
    device: torch.device,
    layer_scales: tuple[LayerScales, ...] = (),
) -> KVLayout:
    """The cache's layout: keys and values per head, or MLA's latent. ValueError where model or device forbid it."""
    quantization: Quantization = "none"
    if cache_dtype == "fp8" or cache_dtype == "fp8-layer" or cache_dtype == "int4":
        quantization = cache_dtype
    if quantization == "none" and cache_dtype != "auto" and DTYPES.get(cache_dtype) is not dtype:
        raise ValueError(
            f"cache.dtype={cache_dtype!r} differs from the model's {str(dtype).removeprefix('torch.')}, the only one "
            "that the cache can hold besides fp8, fp8-layer and int4; use cache.dtype=auto or fp8."
        )
    if quantization in ("fp8", "fp8-layer") and not supports_fp8(device):
        raise ValueError(
            f"cache.dtype={cache_dtype!r} needs a GPU of compute capability 8.9 or above, and "
            f"{torch.cuda.get_device_name(device)} is none; use cache.dtype=auto or int4."
        )
    attention = model.attention
    if isinstance(attention, MLAConfig):
        widths = (attention.kv_lora_rank, attention.qk_rope_head_dim)
        return KVLayout.mla(model.num_layers, block_size, *widths, dtype, quantization, layer_scales)
    heads = (attention.num_kv_heads, attention.head_dim)
    return KVLayout.gqa(model.num_layers, block_size, *heads, dtype, quantization, layer_scales)
