"""Bytes and operations by the published rates; tables without overlap; each kind of call gives attention's numbers."""

from __future__ import annotations

import pytest
import torch

from launch.bench_attention import LAYOUTS, LISTED, PagedPool, attention_calls, attention_work, measure_attention
from launch.figure import load_baselines
from launch.roofline import Ceilings, Work

CPU = torch.device("cpu")


def test_work_of_a_decode() -> None:
    """2 x 40 positions of 2 heads of 16, keys and values in bf16; 4 query heads, two products of 16."""
    assert attention_work(LAYOUTS["tiny-gqa"], 2, 40) == Work(2 * 40 * 2 * 2 * 16 * 2, 2 * 4 * 2 * 16 * 2 * 40)
    # Latent 16 and rotary 8: 24 numbers a position; scores over 24, values over 16.
    assert attention_work(LAYOUTS["tiny-mla"], 2, 40) == Work(2 * 40 * 24 * 2, 2 * 4 * (24 + 16) * 2 * 40)
    # Causal: 40 x 41 / 2 pairs a sequence.
    assert attention_work(LAYOUTS["tiny-prefill"], 2, 40).flops == 2 * 4 * 2 * 16 * 2 * 820


@pytest.mark.parametrize(
    ("layout", "point", "tb_s", "tflop_s"),
    [
        ("gqa-qwen3", (64, 4096), 3.75, None),
        ("gqa-qwen3", (256, 1024), 3.41, None),
        ("gqa-mixtral", (256, 4096), 4.34, None),
        ("mla-16", (64, 4096), 3.18, None),
        ("mla-128", (64, 4096), None, 519),
        ("mla-128", (128, 4096), None, 510),
    ],
)
def test_published_rates(layout: str, point: tuple[int, int], tb_s: float | None, tflop_s: float | None) -> None:
    """The published times and rates agree with how this file counts."""
    published_us = load_baselines()["w5"][layout]["x".join(map(str, point))]["vllm"]
    work = attention_work(LAYOUTS[layout], *point)
    if tb_s is not None:
        assert work.bytes / published_us / 1e6 == pytest.approx(tb_s, rel=0.01)
    if tflop_s is not None:
        assert work.flops / published_us / 1e6 == pytest.approx(tflop_s, rel=0.01)


def test_every_listed_point_has_a_baseline() -> None:
    recorded = load_baselines()["w5"]
    assert set(recorded) == set(LISTED)
    for name in LISTED:
        assert list(recorded[name]) == [f"{b}x{length}" for b, length in LAYOUTS[name].points]


def test_blocks_of_a_rotation_do_not_overlap() -> None:
    pool = PagedPool(LAYOUTS["tiny-gqa"], 3, 40, CPU)
    assert pool.tables_XBM.shape == (2, 3, 3)  # two calls; 40 positions take three blocks of 16
    assert sorted(pool.tables_XBM.flatten().tolist()) == list(range(18)) and pool.cache.shape[0] == 18


@pytest.mark.parametrize("name", ["tiny-gqa", "tiny-mla", "tiny-prefill"])
def test_calls_give_averages_of_random_values(name: str) -> None:
    """The result is finite, of the right shape, and smaller than one value: an average over positions."""
    for call in attention_calls(LAYOUTS[name], 2, 40, CPU):
        out = call()
        assert isinstance(out, torch.Tensor) and out.isfinite().all()
        assert out.shape == ((80 if name == "tiny-prefill" else 2), 4, 16)
        assert out[-1].float().std() < 0.9


def test_figures() -> None:
    ceilings = Ceilings(1e9, 1e12, "test")
    baselines = {"w5": {"tiny-gqa": {"1x16": {"vllm": 5.0, "target": 4.0}}}}
    (decode,) = measure_attention(LAYOUTS["tiny-gqa"], CPU, ceilings, baselines, seconds=0.001, points=((1, 16),))
    assert decode.unit == "us" and decode.floor == pytest.approx(16 * 128 / 1e9 * 1e6)
    assert decode.peers == {"vllm": 5.0} and decode.target == 4.0
    (prefill,) = measure_attention(LAYOUTS["tiny-prefill"], CPU, ceilings, {}, seconds=0.001)
    assert prefill.unit == "TFLOP/s" and prefill.higher_is_better
    assert prefill.seconds is not None and prefill.flops is not None
    assert prefill.value == pytest.approx(prefill.flops / prefill.seconds / 1e12)
