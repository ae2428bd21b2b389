"""A command line becomes pieces of work, and a tiny run of each fills every field. What the numbers are is no test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import bench, bench_engine, result_file
from launch.figure import Figure, load_baselines
from launch.roofline import Ceilings
from moe.model.families.registry import parse_config

MODELS = Path(__file__).resolve().parents[2] / "benchmarks" / "models"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe of a slow processor, and no change of pytest's logging."""
    monkeypatch.setattr(bench, "set_up_logging", lambda console: None)
    monkeypatch.setattr(result_file, "measure_ceilings", lambda device: Ceilings(1e9, 2e9, "a test"))


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
    monkeypatch.setattr(bench_engine, "DECODE_BATCHES", (2,))
    monkeypatch.setattr(bench_engine, "even_prompts", lambda vocab, n, *_: [bench_engine.Prompt([5, 6, 7], 4)] * n)
    result, picture = tmp_path / "result.json", tmp_path / "roofline.png"
    words = ["workload=w2,w4,w5", "model=demo", "device=cpu", "shapes=tiny", "tokens=3", "attention=tiny-gqa"]
    words += [f"result={result}", f"picture={picture}", "seconds=0.001", "parts=false", "commit=abc"]
    assert bench.main([*words, "cache.num_blocks=64", "engine.max_model_len=128"]) == 0
    record = json.loads(result.read_text())
    assert record["complete"]
    assert [(each["workload"], each["subject"], each["name"]) for each in record["figures"]] == [
        ("w5", "tiny-gqa", "2x40"),
        ("w4", "tiny", "T=3"),
        ("w2", "demo", "batch 2"),
    ]
    decode = record["figures"][-1]
    assert len(decode["samples"]) == 3  # the first of four tokens comes from the prefill
    # A batch of two hits at least its two experts a layer, at most four.
    assert 2 <= decode["extra"]["hit/layer"] <= 4
    assert all(each["floor"] > 0 and each["value"] > 0 for each in record["figures"])
    assert record["ceilings"] == {"tb_s": 0.001, "tflop_s": 0.002, "source": "a test"}
    assert record["engines"]["demo"]["kv_blocks"] == 64
    assert {"commit", "device", "clocks", "command", "software", "date"} <= set(record)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.stat().st_size < 200_000


def test_a_run_that_is_cut_leaves_what_it_had(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Batch by batch, in a file that is never half written; it says that it is not complete."""
    result = tmp_path / "result.json"
    found: list[tuple[int, dict[str, Any] | None]] = []

    def decode(self: bench_engine.EngineBench, batches: Sequence[int], rounds: int) -> list[Figure]:
        (batch,) = batches
        found.append((batch, json.loads(result.read_text()) if result.exists() else None))
        if batch == 64:
            raise KeyboardInterrupt
        return [Figure("w2", self.model, f"batch {batch}", 1.0, "ms")]

    monkeypatch.setattr(bench_engine.EngineBench, "decode", decode)
    words = ["workload=w2,w1", "model=demo", "device=cpu", "cache.num_blocks=64", "engine.max_model_len=128"]
    with caplog.at_level("INFO", logger="launch.bench"), pytest.raises(KeyboardInterrupt):
        bench.main([*words, f"result={result}"])
    (_, nothing), (_, first), (batch, second) = found
    assert nothing is None and first is not None and second is not None and batch == 64
    assert [each["name"] for each in first["figures"]] == ["batch 1"] and "stats" in first["engines"]["demo"]
    assert [each["name"] for each in second["figures"]] == ["batch 1", "batch 8"] and second["complete"] is False
    assert json.loads(result.read_text()) == second and list(tmp_path.iterdir()) == [result]
    assert "batch 8" in capsys.readouterr().out and "measuring w2 batch 64 of demo" in caplog.text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "workload= is missing; give some of ep,serving,w1,"),
        (["workload=w9"], "workload=w9 is unknown"),
        (["workload=w1", "modle=x"], "unknown key 'modle'; did you mean 'model'?"),
        (["workload=w1", "round=2"], "unknown key 'round'; did you mean 'rounds'?"),
        (["workload=w1", "engine.max_num_seq=2"], "did you mean 'engine.max_num_seqs'?"),
        (["workload=w4", "shape=qwen3"], "did you mean shapes=?"),
        (["workload=w4", "shapes=qwen4"], "use mixtral, qwen3, dsv3-ep8"),
        (["workload=w4", "shapes=E4-k5-D8-F8"], "k must lie in 1 to E"),
        (["workload=w4", "tokens=8,x"], "tokens=x is no whole number"),
        (["workload=w5", "attention=gqa"], "attention=gqa is unknown"),
        (["workload=w5", "points=64"], "points= is no whole number"),
        (["workload=w5", "seconds=0"], "seconds=0 must be a number above 0"),
        (["workload=w5", "result=/nowhere/at/all.json"], "there is no folder /nowhere/at; make it first"),
        (["workload=w5", "device=tpu"], "engine.device='tpu' is not known"),
        (["workload=w2", "device=cpu", "model=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_wrong_words(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and text in error


def test_a_known_card_has_one_bandwidth_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floors of two runs compare; the rate of products is the run's own, as the baselines' percentages are."""
    monkeypatch.setattr("launch.machine.device_name", lambda device: "NVIDIA H200")
    record, ceilings = result_file.begin_record(torch.device("cpu"), load_baselines(), ["x"], None)
    assert (ceilings.bytes_per_s, ceilings.flops_per_s) == (4.42e12, 2e9)
    assert record["probe"]["tb_s"] == 0.001


def test_workloads_of_kernels_come_before_an_engine_fills_the_memory() -> None:
    """The engine's as they are asked for: what matters most may come first."""
    assert bench.read_choice(["workload=w3,w1,w4,w5,w3"]).workloads == ("w5", "w4", "w3", "w1")


def test_a_model_shape_becomes_its_folder() -> None:
    choice = bench.read_choice(["workload=w2", "model=qwen3-30b-a3b,demo", "cache.block_size=32"])
    words = [bench._engine_words(choice, model) for model in choice.models]
    assert words[0][3] == f"--model={MODELS / 'qwen3-30b-a3b'}" and words[1][3] == "--model=demo"
    assert words[0][-1] == "cache.block_size=32"
