"""The rope table: transformers' values bit for bit, for every scaling, over the whole length that the engine admits."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DeepseekV3Config, MixtralConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

from moe.model.config import RopeConfig
from moe.model.rope_table import attention_factor, rope_table
from tests.compare import assert_same_bits

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def theirs(parameters: dict[str, object], dim: int, num_positions: int) -> torch.Tensor:
    """transformers' cos and sin, in the layout of our table."""
    config = MixtralConfig(
        hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=64, rope_parameters=parameters
    )
    cos, sin = MixtralRotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    return torch.cat((cos[0, :, : dim // 2], sin[0, :, : dim // 2]), dim=1)


@pytest.mark.parametrize("num_positions", [1, 64, 4096])  # 64 is the checkpoint's own length; 4096 an override
@pytest.mark.parametrize(
    ("ours", "parameters"),
    [
        (RopeConfig(theta=10000.0, dim=32), {"rope_type": "default", "rope_theta": 10000.0}),
        (RopeConfig(theta=1e6, dim=128), {"rope_type": "default", "rope_theta": 1e6}),
        (
            RopeConfig(theta=10000.0, dim=32, scaling="linear", factor=3.0),
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        ),
        (
            RopeConfig(theta=10000.0, dim=64, scaling="yarn", factor=40.0, original_max_positions=64),
            {"rope_theta": 10000.0, **YARN},
        ),
        (  # a ramp that is not cut to whole pairs
            RopeConfig(theta=5e4, dim=64, scaling="yarn", factor=40.0, original_max_positions=64, truncate=False),
            {"rope_theta": 5e4, **YARN, "truncate": False},
        ),
        (  # mscale and mscale_all_dim differ: cos and sin carry their quotient
            RopeConfig(
                theta=10000.0,
                dim=64,
                scaling="yarn",
                factor=40.0,
                original_max_positions=64,
                mscale=1.0,
                mscale_all_dim=0.707,
            ),
            {"rope_theta": 10000.0, **YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
        ),
        (  # both ends of the ramp in one place: a step
            RopeConfig(
                theta=5e4,
                dim=64,
                scaling="yarn",
                factor=32.0,
                original_max_positions=4096,
                beta_fast=1.0,
                beta_slow=1.0,
            ),
            {
                "rope_type": "yarn",
                "rope_theta": 5e4,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
            },
        ),
        (
            RopeConfig(theta=1e4, dim=32, scaling="yarn", factor=4.0, original_max_positions=64, attention_factor=1.25),
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.25,
            },
        ),
    ],
)
def test_C40_table_is_as_long_as_asked_and_has_transformers_values(
    ours: RopeConfig, parameters: dict[str, object], num_positions: int
) -> None:
    table_PR = rope_table(ours, num_positions, "cpu")
    assert table_PR.dtype == torch.float32
    assert_same_bits(table_PR, theirs(parameters, ours.dim, num_positions))


def test_deepseek_v3_values() -> None:
    """Equal mscales cancel: cos and sin are plain, and the softmax scale carries m squared instead."""
    parameters = {"rope_theta": 10000.0, **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = DeepseekV3Config(
        qk_rope_head_dim=64, max_position_embeddings=2560, rope_parameters=parameters, num_attention_heads=4
    )
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), torch.arange(2560)[None])
    rope = RopeConfig(
        theta=10000.0,
        dim=64,
        scaling="yarn",
        factor=40.0,
        original_max_positions=64,
        mscale=1.0,
        mscale_all_dim=1.0,
        interleaved=True,
    )
    assert attention_factor(rope) == 1.0
    assert_same_bits(rope_table(rope, 2560, "cpu"), torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1))


def test_attention_factor_by_hand() -> None:
    yarn = RopeConfig(theta=1e4, dim=64, scaling="yarn", factor=40.0, original_max_positions=4096)
    assert attention_factor(yarn) == pytest.approx(0.1 * math.log(40) + 1)
    assert attention_factor(RopeConfig(theta=1e4, dim=64)) == 1.0
    assert attention_factor(RopeConfig(theta=1e4, dim=64, scaling="linear", factor=8.0)) == 1.0
