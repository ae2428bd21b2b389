"""The workloads are the published ones, and a tiny run fills every field. What the numbers are is no test of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import bench
from moe.model.families.registry import parse_config

MODELS = Path(__file__).resolve().parents[2] / "benchmarks" / "models"


def test_w1_has_the_published_totals() -> None:
    prompts = bench.throughput_prompts(1000)
    assert len(prompts) == 512
    assert sum(len(prompt.token_ids) for prompt in prompts) == 288_251
    assert sum(prompt.num_outputs for prompt in prompts) == 136_648
    assert prompts[0].token_ids == bench.throughput_prompts(1000)[0].token_ids


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "vocab", "experts", "top_k", "width"),
    [
        ("qwen3-30b-a3b", 48, 2048, 151936, 128, 8, 768),
        ("mixtral-8x7b", 32, 4096, 32000, 8, 2, 14336),
        ("dsv2-lite", 27, 2048, 102400, 64, 6, 1408),
    ],
)
def test_shapes(name: str, layers: int, hidden: int, vocab: int, experts: int, top_k: int, width: int) -> None:
    config = parse_config(json.loads((MODELS / name / "config.json").read_text()))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (layers, hidden, vocab)
    assert (config.moe.num_experts, config.moe.rule.top_k, config.moe.expert_dim) == (experts, top_k, width)
    assert config.moe.rule.renormalize == (name != "dsv2-lite")


def test_a_tiny_run_writes_a_whole_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "set_up_logging", lambda console: None)
    monkeypatch.setattr(bench, "DECODE_BATCHES", (2,))
    monkeypatch.setattr(bench, "even_prompts", lambda vocab, n, *_: [bench.Prompt([5, 6, 7], 4)] * n)
    result = tmp_path / "result.json"
    words = ["workload=w2", "model=demo", f"result={result}", "engine.device=cpu", "cache.num_blocks=64"]
    assert bench.main([*words, "engine.max_model_len=128"]) == 0
    record = json.loads(result.read_text())
    assert record["figures"][0]["name"] == "decode step at batch 2, ms"
    assert len(record["figures"][0]["samples"]["step_ms"]) == 3  # the first of four tokens comes from the prefill
    assert {"commit", "device", "clocks", "command", "software", "date"} <= set(record)


@pytest.mark.parametrize("words", [[], ["workload=w9"], ["workload=w1", "modle=x"]])
def test_wrong_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(words) == 2
    assert "error: " in capsys.readouterr().err
