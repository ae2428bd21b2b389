"""What of a checkpoint's headers does not fit a network: names, shapes, dtypes and scales, each fault in words.

Knows weight tables and headers; reads no weights. `checkpoint.py` asks before anything is allocated.
"""

from __future__ import annotations

import difflib
import re

from moe.model.cache_scales import is_cache_scale
from moe.model.config import ModelConfig
from moe.model.families.weight_rule import WeightRule
from moe.model.fp8_blocks import EXPONENT_SCALE_DTYPES, PLAIN_SCALE_DTYPES, scale_grid
from moe.model.weight_files import WeightFiles, listed

FP8_DTYPE = "F8_E4M3"
WEIGHT_DTYPES = ("F32", "BF16", "F16")
SCALE_DTYPES = PLAIN_SCALE_DTYPES + EXPONENT_SCALE_DTYPES
MAX_NEAR_SEARCH = 2000  # unused names beyond which near names are not looked for: it takes quadratic time
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def name_faults(config: ModelConfig, files: WeightFiles, rules: tuple[WeightRule, ...]) -> list[str]:
    """Parameters without a tensor, tensors without a parameter."""
    wanted = {rule.source: rule.target for rule in rules}
    scales = {
        rule.scale_source
        for rule in rules
        if rule.source in files.tensors and files.tensors[rule.source].entry.dtype == FP8_DTYPE
    }
    missing = {name: target for name, target in wanted.items() if name not in files.tensors}
    unused = [
        name for name in files.tensors if name not in wanted and name not in scales and not _may_be_unused(name, config)
    ]
    near = unused if len(unused) <= MAX_NEAR_SEARCH else []
    faults: list[str] = []
    if missing:
        lines = [f"{name} -> {target}" for name, target in missing.items()]
        faults.append(f"parameters not filled ({len(missing)}): {listed(lines)}")
    if unused:
        faults.append(f"tensors not used ({len(unused)}): {listed(sorted(unused))}")
    for name in list(missing)[:5]:
        for candidate in difflib.get_close_matches(name, near, n=1, cutoff=0.85):
            faults.append(f"is {candidate} meant to be {name}?")
    if "lm_head.weight" in missing:
        faults.append(
            "lm_head.weight is missing while tie_word_embeddings is false: if this model's head is its embedding, "
            "set tie_word_embeddings to true in config.json; else fetch the missing tensor."
        )
    return faults


def _may_be_unused(name: str, config: ModelConfig) -> bool:
    """The allow-list: rope tables of old files, the cache's scales, declared MTP layers, the head of a tied model."""
    if name.endswith("rotary_emb.inv_freq") or is_cache_scale(name):
        return True
    if name == "lm_head.weight" and config.tie_embeddings:
        return True
    layer = _LAYER.match(name)
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_mtp_layers


def tensor_faults(config: ModelConfig, files: WeightFiles, rules: tuple[WeightRule, ...]) -> list[str]:
    """Wrong shapes, dtypes that cannot be read, and fp8 weights whose scales are missing or do not fit."""
    shapes: list[str] = []
    dtypes: list[str] = []
    scales: list[str] = []
    for rule in rules:
        stored = files.tensors.get(rule.source)
        if stored is None:
            continue
        entry = stored.entry
        if entry.shape != rule.shape:
            shapes.append(f"{rule.source} in {stored.file.name} is {list(entry.shape)}, expected {list(rule.shape)}")
        elif entry.dtype == FP8_DTYPE and config.fp8_block is not None and len(rule.shape) > 1:
            scales.extend(_scale_faults(rule, files, config.fp8_block))
        elif entry.dtype not in WEIGHT_DTYPES:
            dtypes.append(f"{rule.source} in {stored.file.name} is {entry.dtype}")
    faults: list[str] = []
    if shapes:
        faults.append(f"wrong shapes ({len(shapes)}): {listed(shapes)}")
    if dtypes:
        known = f"{', '.join(WEIGHT_DTYPES)}, and {FP8_DTYPE} where quantization_config declares fp8 blocks"
        faults.append(f"dtypes that cannot be loaded ({len(dtypes)}): {listed(dtypes)}; known: {known}")
    if scales:
        faults.append(f"fp8 scales ({len(scales)}): {listed(scales)}")
    return faults


def _scale_faults(rule: WeightRule, files: WeightFiles, block: tuple[int, int]) -> list[str]:
    stored, grid = files.tensors.get(rule.scale_source), scale_grid(rule.shape, block)
    if stored is None:
        return [f"{rule.scale_source} is missing"]
    if stored.entry.shape != grid:
        shape = list(stored.entry.shape)
        return [f"{rule.scale_source} is {shape}, expected {list(grid)} for blocks of {list(block)}"]
    if stored.entry.dtype not in SCALE_DTYPES:
        return [f"{rule.scale_source} is {stored.entry.dtype}, known: {', '.join(SCALE_DTYPES)}"]
    return []
