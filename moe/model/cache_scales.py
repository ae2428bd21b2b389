"""Scales of an fp8 KV cache that hold for whole layers (cache.dtype=fp8-layer): where they come from, and whether they
are good.

Knows names on disk and numbers; knows neither kernels nor blocks. A number is code * scale. From a file of its own,
else from the checkpoint, else 1 for every layer, which a warning says. A layer without its scales, two for one place,
and a scale that is no usable number are errors.

    k_scale, v_scale        in a checkpoint: model.layers.3.self_attn.k_scale, also self_attn.attn.k_scale or
                            self_attn.k_proj.k_scale, each a tensor of one number
    kv_scale                in a checkpoint: one for both
    a file                  JSON, either the same names with numbers, or what vLLM and SGLang read:
                            {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.04, "1": 0.05}}}}
                            (tensor-parallel rank, then layer), one scale for keys and values

Latents of MLA are keys and values at once: the scale of keys holds for them, one of values may be there and is unused.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.quantize import FP8_MAX
from kv_cache.layout import LayerScales
from moe.model.config import MLAConfig, ModelConfig
from moe.model.safetensors_header import read_header
from moe.model.weight_files import INDEX_NAME, SINGLE_NAME, listed

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?:model\.)?layers\.(\d+)\.self_attn\.(?:attn\.)?(?:k_proj\.(k)|v_proj\.(v)|(kv|k|v))_scale")
_FP8_NAMES = ("float8_e4m3fn", "fp8_e4m3", "fp8")


def is_cache_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale of the KV cache."""
    return _NAME.fullmatch(name) is not None


def find_cache_scales(
    cache_dtype: str, file: str | None, folder: Path | None, config: ModelConfig, dtype: torch.dtype
) -> tuple[LayerScales, ...]:
    """One for each layer where cache_dtype is fp8-layer, else none. `file`: cache.scales; `folder`: the checkpoint,
    None where its weights are not read; `dtype`: the model's.

    Logged: scales of a checkpoint that are not used, and the lack of any.
    """
    stored = {} if folder is None else _stored_scales(folder)
    if cache_dtype != "fp8-layer":
        if stored:
            logger.warning(
                "%s: %d calibrated scales of the KV cache are not used (%s, ...): cache.dtype=fp8-layer takes them, "
                "cache.dtype=fp8 gives each position and head a scale of its own, other caches have none.",
                *(folder, len(stored), next(iter(stored))),
            )
        return ()
    named = _scales_of_file(Path(file)) if file is not None else stored
    source = f"cache.scales={file}" if file is not None else f"checkpoint {folder}"
    if not named:
        logger.warning(
            "cache.dtype=fp8-layer, but neither cache.scales nor the checkpoint gives scales of the KV cache: every "
            "layer takes 1.0, and entries beyond %g are cut to it; cache.dtype=fp8 needs no scales.",
            FP8_MAX,
        )
        return (LayerScales(1.0, 1.0),) * config.num_layers
    scales = _by_layer(named, source, config)
    for name, number in named.items():
        _check_number(name, number, source, dtype)
    logger.info("scales of the KV cache: %d layers, from %s", len(scales), source)
    return scales


def _stored_scales(folder: Path) -> dict[str, float]:
    """Of the checkpoint, by name. What is wrong with its files is left to `Checkpoint.open`, which reads them all."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    try:
        if index.is_file():
            weight_map = json.loads(index.read_bytes())["weight_map"]
            files = {name: folder / weight_map[name] for name in weight_map if is_cache_scale(name)}
        else:
            files = {name: single for name in read_header(single) if is_cache_scale(name)} if single.is_file() else {}
        return {name: _read_number(file, name) for name, file in sorted(files.items(), key=_in_order)}
    except (OSError, KeyError, TypeError, json.JSONDecodeError, SafetensorError):
        return {}


def _in_order(item: tuple[str, Any]) -> tuple[int, str]:
    found = _NAME.fullmatch(item[0])
    return (int(found[1]) if found else -1, item[0])


def _read_number(file: Path, name: str) -> float:
    with safe_open(file, framework="pt", device="cpu") as handle:
        value = handle.get_tensor(name)
    if value.numel() != 1:
        raise ValueError(
            f"{name} in {file} has shape {list(value.shape)}; a scale of the KV cache is one number for a layer: use "
            "cache.dtype=fp8, which gives each position and head a scale of its own."
        )
    return float(value.float())


def _scales_of_file(file: Path) -> dict[str, float]:
    """By the names that a checkpoint would give them."""
    if not file.is_file():
        raise ValueError(f"cache.scales={file} does not exist; give a JSON file of scales, or leave the key out.")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"cache.scales={file} is no JSON: {error}") from None
    if isinstance(content, dict) and isinstance(content.get("kv_cache"), dict):
        content = _scales_by_rank(content["kv_cache"], file)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"cache.scales={file} holds no scales; {_forms()}")
    unknown = [name for name in content if not is_cache_scale(name)]
    if unknown:
        raise ValueError(f"cache.scales={file} names what is no scale: {listed(unknown)}; {_forms()}")
    wrong = [name for name, value in content.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong:
        raise ValueError(f"cache.scales={file}: {wrong[0]} is {content[wrong[0]]!r}; a scale is a number.")
    return {name: float(value) for name, value in content.items()}


def _scales_by_rank(kv_cache: Mapping[str, Any], file: Path) -> dict[str, Any]:
    if kv_cache.get("dtype") not in _FP8_NAMES:
        raise ValueError(
            f"cache.scales={file}: kv_cache.dtype={kv_cache.get('dtype')!r} is not {' or '.join(_FP8_NAMES)}; make the "
            "scales for e4m3."
        )
    ranks = kv_cache.get("scaling_factor")
    if not isinstance(ranks, dict) or not ranks or not all(isinstance(layers, dict) for layers in ranks.values()):
        raise ValueError(f"cache.scales={file}: kv_cache.scaling_factor holds no scales; {_forms()}")
    layers, *others = ranks.values()
    if any(other != layers for other in others):
        raise ValueError(
            f"cache.scales={file} has other scales for each of {len(ranks)} tensor-parallel ranks, and attention is "
            "not split over ranks here; make the file with one rank."
        )
    return {f"model.layers.{layer}.self_attn.kv_scale": value for layer, value in layers.items()}


def _by_layer(named: Mapping[str, float], source: str, config: ModelConfig) -> tuple[LayerScales, ...]:
    found: dict[tuple[int, str], str] = {}
    for name in named:
        match = _NAME.fullmatch(name)
        assert match is not None, f"{name} was taken for a scale"
        layer = int(match[1])
        if layer >= config.num_layers + config.num_mtp_layers:
            raise ValueError(
                f"{source}: {name} is of no layer, this model has {config.num_layers}; use its own scales."
            )
        for part in match[2] or match[3] or match[4]:
            if (layer, part) in found:
                raise ValueError(f"{source}: {found[layer, part]} and {name} are two scales for one place; keep one.")
            found[layer, part] = name
    parts = "k" if isinstance(config.attention, MLAConfig) else "kv"
    missing = [
        f"{part}_scale of layer {i}" for i in range(config.num_layers) for part in parts if (i, part) not in found
    ]
    if missing:
        raise ValueError(
            f"{source} has scales of the KV cache, but none for {len(missing)} places: {listed(missing)}; give all, or "
            "use cache.dtype=fp8, which needs none."
        )
    return tuple(
        LayerScales(named[found[i, "k"]], named[found[i, parts[-1]]])
        for i in range(config.num_layers)
    )  # fmt: skip


def _check_number(name: str, number: float, source: str, dtype: torch.dtype) -> None:
    """Beyond these bounds a scale stands for numbers that `dtype` does not have, or has no reciprocal in fp32."""
    least, largest = torch.finfo(torch.float32).tiny, torch.finfo(dtype).max / FP8_MAX
    if not (math.isfinite(number) and least <= number <= largest):
        raise ValueError(
            f"{source}: {name} is {number}, and a scale must be above 0 and at most {largest:.6g}; calibrate again, or "
            "use cache.dtype=fp8, which needs no scales."
        )


def _forms() -> str:
    return (
        'it must be {"model.layers.0.self_attn.k_scale": 0.04, ...} or {"kv_cache": {"dtype": "float8_e4m3fn", '
        '"scaling_factor": {"0": {"0": 0.04, ...}}}}.'
    )
