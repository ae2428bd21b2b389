"""Cosines and sines of every position a model may see, from its rope settings. Knows nothing of heads or kernels.

Computed on the CPU in fp32, in the order of operations of transformers, so values are the same on every device and
equal to transformers' own. The table is exactly as long as the longest sequence that the engine admits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe.model.config import RopeConfig


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the stretch of the context: 0.1 * mscale * ln(factor) + 1; without stretch 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by. DeepSeek's two mscales cancel where they are equal."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling != "yarn":
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """fp32 [R / 2], the angle per position of each rotated pair."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = rope.theta**exponents
    if rope.scaling == "default":
        return 1.0 / frequencies
    if rope.scaling == "linear":
        return 1.0 / frequencies / rope.factor
    keep = 1 - _yarn_ramp(rope)  # 1: a fast pair, left as trained; 0: a slow pair, stretched by the factor
    return (1.0 / (rope.factor * frequencies)) * (1 - keep) + (1.0 / frequencies) * keep


def _yarn_ramp(rope: RopeConfig) -> Tensor:
    """0 up to the pair that turns beta_fast times in the original context, 1 from the one with beta_slow turns."""

    def pair_that_turns(times: float) -> float:
        original = rope.original_max_positions
        return rope.dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    return ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def rope_table(rope: RopeConfig, num_positions: int, device: torch.device | str) -> Tensor:
    """cos_sin_PR, fp32 [num_positions, R]: the first half of a row its cosines, the last half its sines."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    factor = attention_factor(rope)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1).to(device)
