"""Floors by hand-computed numbers: bytes and operations of layers, steps and networks, and the published floors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.roofline import (
    Ceilings,
    NetworkCost,
    StepWork,
    Work,
    _windowed_pairs,
    causal_pairs,
    distinct_experts,
    expert_layer_work,
    mean_work,
    measure_ceilings,
)
from moe.model.families.registry import parse_config

MODELS = Path(__file__).resolve().parents[2] / "benchmarks" / "models"
H200 = Ceilings(4.42e12, 709e12, "published")


def cost(name: str) -> NetworkCost:
    return NetworkCost(parse_config(json.loads((MODELS / name / "config.json").read_text())))


def test_the_larger_of_both_times_is_the_floor() -> None:
    ceilings = Ceilings(100.0, 1000.0, "test")
    assert ceilings.seconds(Work(200.0, 1000.0)) == 2.0
    assert ceilings.seconds(Work(200.0, 5000.0)) == 5.0
    assert mean_work([Work(1.0, 4.0), Work(3.0, 0.0)]) == Work(2.0, 2.0)


def test_distinct_experts() -> None:
    assert distinct_experts(8, 2, 1) == 2
    assert distinct_experts(4, 2, 2) == 3  # each of four is missed by both tokens with 1/4
    assert distinct_experts(128, 8, 8) == pytest.approx(51.6, abs=0.1)


def test_pairs_against_a_count() -> None:
    for start, length in ((0, 5), (7, 3), (2, 9)):
        assert causal_pairs(start, length) == sum(start + i + 1 for i in range(length))
        for window in (0, 1, 4, 8, 100):
            seen = sum(min(start + i + 1, window or 10**9) for i in range(length))
            assert _windowed_pairs(start, length, window) == seen, (start, length, window)


def test_one_expert_layer() -> None:
    """Two experts of 3 matrices of 4 x 8 in bf16: 384 bytes; x and the result of 3 tokens: 48. 6 rows x 3 x 32 x 2."""
    assert expert_layer_work(3, 6, 2, 4, 8) == Work(384 + 48, 6 * 6 * 32)
    assert expert_layer_work(3, 6, 2, 4, 8, weight_bytes=1) == Work(192 + 48, 6 * 6 * 32)


@pytest.mark.parametrize(
    ("name", "batch", "published_ms"),
    [
        *[("qwen3-30b-a3b", batch, ms) for batch, ms in ((1, 1.39), (8, 5.95), (64, 14.3), (256, 16.9))],
        *[("dsv2-lite", batch, ms) for batch, ms in ((1, 1.11), (8, 4.08), (64, 7.26), (256, 8.05))],
        *[("mixtral-8x7b", batch, ms) for batch, ms in ((1, 5.79), (8, 19.2), (64, 22.2), (256, 25.5))],
    ],
)
def test_published_floors_of_w2(name: str, batch: int, published_ms: float) -> None:
    """512-token prompts and 128 outputs: 576 positions on average. Within two percent of the published table."""
    work = cost(name).decode_step(batch, 576)
    assert work.bytes / H200.bytes_per_s * 1e3 == pytest.approx(published_ms, rel=0.02)


def test_operations_of_qwen3() -> None:
    """By hand: 48 layers of (8 x 3 x 2048 x 768 + 18.87 M of attention + 128 x 2048 of router) weights, then the head.

    q and o are 4096 wide, k and v 512 each: 2048 x (4096 + 1024 + 4096) = 18,874,368.
    """
    qwen3 = cost("qwen3-30b-a3b")
    per_layer = 8 * 3 * 2048 * 768 + 18_874_368 + 128 * 2048
    assert qwen3.flops_per_row == 2 * 48 * per_layer
    assert qwen3.flops_per_logits == 2 * 151936 * 2048
    step = StepWork((100,), ((0, 4),), 2, 10.0)
    attention = 48 * 4 * 32 * 128 * (100 + 10)  # one query over 100 keys; 1 + 2 + 3 + 4 pairs
    assert qwen3.step(step).flops == 5 * qwen3.flops_per_row + 2 * qwen3.flops_per_logits + attention
    # Positions read: 100 of the decoding sequence, 4 of the chunk; 4 heads of 128, keys and values, bf16.
    wanted = qwen3.other_weight_bytes + 10 * 3 * 2048 * 768 * 2 + 48 * 104 * 2048
    assert qwen3.step(step).bytes == wanted


def test_latent_attention_counts_the_latent() -> None:
    """dsv2-lite: a pair takes 2 x 16 x (512 + 64 + 512) in decode, 2 x 16 x (192 + 128) in prefill; 1152 bytes kept."""
    lite = cost("dsv2-lite")
    none = lite.step(StepWork((), (), 0, 0.0))
    decode = lite.step(StepWork((50,), (), 0, 0.0))
    assert decode.flops - none.flops - lite.flops_per_row == 27 * 50 * 2 * 16 * 1088
    assert decode.bytes - none.bytes == 27 * 50 * 1152
    chunk = lite.step(StepWork((), ((3, 2),), 0, 0.0))
    assert chunk.flops - none.flops - 2 * lite.flops_per_row == 27 * (4 + 5) * 2 * 16 * 320


def test_a_window_bounds_what_is_read() -> None:
    config = parse_config(json.loads((MODELS / "mixtral-8x7b" / "config.json").read_text()) | {"sliding_window": 16})
    windowed, plain = NetworkCost(config), cost("mixtral-8x7b")
    step = StepWork((100,), ((40, 4),), 0, 0.0)
    # The chunk's first query, at position 40, sees 25 to 40; its last ends at 43: 19 positions. Without: 44.
    position = 32 * 2 * 8 * 128 * 2
    assert plain.step(step).bytes - windowed.step(step).bytes == (84 + 25) * position
    pairs = (100 - 16) + (41 + 42 + 43 + 44 - 4 * 16)
    assert plain.step(step).flops - windowed.step(step).flops == 32 * 4 * 32 * 128 * pairs


def test_steps_add_up() -> None:
    lite = cost("dsv2-lite")
    steps = [StepWork((576,) * 8, (), 8, 700.0), StepWork((), ((0, 8192),), 2, 1664.0)]
    apart = [H200.seconds(lite.step(step)) for step in steps]
    assert lite.seconds(steps, H200) == sum(apart)
    assert H200.seconds(lite.step(steps[1])) == lite.step(steps[1]).flops / 709e12  # a large chunk is compute-bound


def test_the_probe_gives_rates() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    assert ceilings.bytes_per_s > 1e6 and ceilings.flops_per_s > 1e6


def test_experts_in_fp8_are_counted_with_their_scales():
    """Mixtral: 3 x 4096 x 14336 bytes, and a scale of 4 bytes for each 128 x 128 of them."""
    config = cost("mixtral-8x7b").model
    assert cost("mixtral-8x7b").expert_bytes == 3 * 4096 * 14336 * 2
    fp8 = NetworkCost(replace(config, fp8_experts=True))
    assert fp8.expert_bytes == 3 * 4096 * 14336 * (1 + 4 / 128**2)
    assert fp8.other_weight_bytes == cost("mixtral-8x7b").other_weight_bytes
