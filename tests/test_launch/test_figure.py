"""Figures beside their floors and targets, what is stored of them, and the published table itself."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from launch.bench_engine import DECODE_BATCHES
from launch.bench_layer import SHAPES, TOKENS
from launch.figure import Figure, baseline, load_baselines, number, print_figures, short, thin


def test_ratios_point_the_right_way() -> None:
    time = Figure("w2", "m", "batch 1", 4.0, "ms", floor=2.0, target=3.0)
    assert time.over_floor == 2.0 and time.meets_target is False
    rate = Figure("w1", "m", "tokens", 90.0, "tokens/s", floor=100.0, target=80.0)
    assert rate.over_floor == 0.9 and rate.meets_target is True
    assert Figure("w1", "m", "tokens", 1.0, "ms").meets_target is None


def test_rates() -> None:
    assert Figure("w4", "m", "x", 1.0, "ms", seconds=2.0, bytes=4e12, flops=6e12).rates() == (2.0, 3.0)
    assert Figure("w4", "m", "x", 1.0, "ms").rates() == (None, None)


def test_the_record_is_small_and_complete() -> None:
    samples = tuple(1 / 3 + i for i in range(1000))
    figure = Figure("w2", "m", "x", 1 / 3, "ms", floor=0.1, peers={"vllm": 2 / 3}, samples=samples)
    record = figure.as_dict()
    assert record["value"] == 0.333333 and record["value_over_floor"] == 3.33333
    assert record["num_samples"] == 1000 and len(record["samples"]) == 100
    assert record["samples"][:2] == [0.333333, 10.3333]
    assert "target" not in record and "meets_target" not in record
    assert len(json.dumps(record)) < 2500


def test_the_table_shows_who_is_faster() -> None:
    out = io.StringIO()
    figures = [Figure("w2", "m", "x", 2.0, "ms", peers={"vllm": 3.0}), Figure("w1", "m", "y", 2.0, "tokens/s")]
    print_figures(figures, Console(file=out, width=200))
    text = out.getvalue()
    assert "w2 (ms)" in text and "w1 (tokens/s)" in text and "1.5" in text  # 1.5 times as fast as vLLM


def test_small_helpers() -> None:
    assert short(1234567.0) == 1234570.0 and short(0.0) == 0.0
    assert thin([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 3.0]
    assert (number(12345.6), number(0.041534), number(3.0)) == ("12,346", "0.04153", "3")
    assert baseline({"a": {"b": {"vllm": 1, "target": 2}}}, "a", "b") == ({"vllm": 1.0}, 2)
    assert baseline({}, "a", "b") == ({}, None)


def test_the_published_table_covers_every_point() -> None:
    table = load_baselines()
    models = {"qwen3-30b-a3b", "dsv2-lite", "mixtral-8x7b"}
    assert set(table["w1"]) == set(table["w2"]) == set(table["w3"]) == models
    for model in models:
        assert list(table["w2"][model]) == [str(batch) for batch in DECODE_BATCHES]
    shapes = set(SHAPES) - {"tiny"}
    assert set(table["w4"]) == shapes | {f"{shape}-fp8" for shape in shapes}
    for shape, points in table["w4"].items():
        assert list(points) == [str(tokens) for tokens in TOKENS], shape
        for point in points.values():
            peers = [point[name] for name in ("vllm", "grouped_mm") if name in point]  # of the same dtype
            assert peers and point["target"] <= min(peers), shape  # never slower than the best


@pytest.mark.parametrize(("shape", "share"), [("mixtral", 0.88), ("dsv3-ep8", 0.88), ("qwen3", 0.82)])
def test_the_largest_layer_target_is_a_share_of_the_product(shape: str, share: float) -> None:
    """16384 tokens: 6 x rows x D x F operations at so much of 709 TFLOP/s."""
    sizes = SHAPES[shape]
    flops = 6 * 16384 * sizes.top_k * sizes.hidden * sizes.width
    target_ms = load_baselines()["w4"][shape]["16384"]["target"]
    assert target_ms == pytest.approx(flops / (share * 709e12) * 1e3, rel=0.01)
