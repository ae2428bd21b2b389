"""What the offload bench counts is what crossed the link in the steps that it says; routers are as skewed as asked.

Times are not looked at: a CPU copies at once.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from launch.bench_engine import Prompt, even_prompts
from launch.bench_offload import (
    Decoding,
    HostPeak,
    byte_figures,
    cache_figure,
    demand_only,
    measure_link,
    offload_of,
    regime_figures,
    set_regime,
    stream_figure,
)
from launch.command_line import compose_config, parse
from launch.zipf_gates import ZipfGates, shares, zipf_bias
from moe.engine.engine import Engine
from moe.engine.parts import load_parts
from moe.model.causal_lm import CausalLM
from router.synthetic import skewed_routing
from tests.tiny_models import write_variant

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HELD, EXPERTS = 2, 8


def load_script(name: str) -> ModuleType:
    """benchmarks/ is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtral")
    write_variant(path, "mixtral")
    return path


@pytest.fixture(scope="module")
def engine(folder: Path):
    words = [f"--model={folder}", "load_format=dummy", "engine.device=cpu", "engine.max_model_len=512"]
    words += ["engine.max_num_seqs=8", "cache.num_blocks=128", "cache.prefix_caching=false"]
    words += ["offload.regime=auto", f"offload.slots_per_layer={HELD}"]
    config = compose_config(parse(words))
    parts = load_parts(config)
    assert isinstance(parts.network, CausalLM)
    ZipfGates(parts.network).skew(1.0)
    engine = Engine(config, parts=parts)
    yield engine
    engine.close()


def test_a_streamed_step_brings_what_is_not_held(engine: Engine) -> None:
    figure = stream_figure(engine, "tiny", even_prompts(engine.vocab_size, 3, 4, 60), 3)
    plan = offload_of(engine).plan
    assert plan.streamed_bytes == (EXPERTS - HELD) * plan.num_layers * plan.bundle_bytes
    assert figure.extra["GB/step"] == pytest.approx(plan.streamed_bytes / 1e9)
    assert len(figure.samples) == 3
    assert figure.floor is not None and figure.target == pytest.approx(0.85 * figure.floor)
    assert not engine.has_unfinished


def test_a_step_of_one_sequence_asks_for_k_experts_a_layer(engine: Engine) -> None:
    offload = offload_of(engine)
    set_regime(engine, "cache")
    decoding = Decoding(engine, [Prompt([3, 4, 5], 60)], "one")
    steps = decoding.run(4, skip=1)
    assert steps.tokens == 4 and len(steps.times) == 4
    top_k = engine.parts.model.moe.rule.top_k
    assert steps.each("hits") + steps.each("misses") == top_k * offload.plan.num_layers
    decoding.end()
    assert not engine.has_unfinished


def test_guesses_are_made_or_not(engine: Engine) -> None:
    """Without them nothing is fetched ahead, and afterwards they are made again."""
    found = {
        guesses: cache_figure(
            engine, "tiny", Prompt([3, 4, 5], 60), guesses=guesses, num_steps=5, warm=2, what="test"
        ).extra
        for guesses in (True, False)
    }
    assert "right %" in found[True] and "right %" not in found[False]
    assert 0 < found[False]["hit %"] < 100
    offload = offload_of(engine)
    with demand_only(engine):
        assert all(each.following is None for each in offload.experts.values())
    assert any(each.following is not None for each in offload.experts.values())


def test_regimes_take_the_same_sequences_both_ways(engine: Engine) -> None:
    """The most first, each figure before the next is measured; on demand alone."""
    prompts = even_prompts(engine.vocab_size, 4, 3, 120)
    figures = regime_figures(engine, "tiny", prompts, (1, 4), 2, "even")
    four = next(figures)
    assert engine.num_unfinished == 4 and offload_of(engine).plan.regime == "cache"
    assert all(each.following is None for each in offload_of(engine).experts.values())
    (one,) = figures
    assert [one.name, four.name] == ["cache, 1 sequences, even", "cache, 4 sequences, even"]
    top_k = engine.parts.model.moe.rule.top_k
    assert (one.extra["rows/slot"], four.extra["rows/slot"]) == (top_k / EXPERTS, 4 * top_k / EXPERTS)
    assert one.extra["asked/layer"] == top_k < four.extra["asked/layer"] <= EXPERTS
    assert len(one.samples) == 2 and one.value == pytest.approx(statistics.mean(one.samples))
    assert not engine.has_unfinished


def test_figures_that_nobody_waits_for_end_their_sequences(engine: Engine) -> None:
    figures = regime_figures(engine, "tiny", even_prompts(engine.vocab_size, 2, 3, 120), (1, 2), 2, "even")
    next(figures)
    assert engine.has_unfinished
    figures.close()
    assert not engine.has_unfinished
    assert any(each.following is not None for each in offload_of(engine).experts.values())


def test_planned_bytes_stand_beside_those_there_are(engine: Engine) -> None:
    figures = {figure.name: figure for figure in byte_figures(engine, "tiny", 5 << 30)}
    plan = offload_of(engine).plan
    assert figures["host, pinned"].floor == plan.host_bytes / 2**30
    assert figures["host, most at a time"].value == 5.0
    assert figures["weights"].over_floor == pytest.approx(1.0, abs=0.05)
    assert measure_link(engine) > 0


def test_the_most_memory_at_a_time_is_seen() -> None:
    """Also once it is given back. Pages of the system's own: an allocator may hand out what the process has already."""
    with HostPeak() as host:
        held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held.write(bytes([1]) * (64 << 20))
        for _ in range(1000):
            if host.num_bytes > 48 << 20:  # of 64 MiB: others' pages may go meanwhile
                break
            time.sleep(0.01)
        held.close()
    assert host.num_bytes > 48 << 20


@pytest.mark.gpu
def test_captured_steps_are_dropped_and_made_anew() -> None:
    """With guesses, without, streamed, and with guesses again: each after graphs of another kind."""
    words = ["model=demo", "dtype=bfloat16", "engine.device=cuda", "engine.max_num_seqs=4", "engine.capture_seconds=0"]
    words += ["cache.num_blocks=128", "cache.prefix_caching=false", "offload.regime=auto", "offload.slots_per_layer=3"]
    engine = Engine(compose_config(parse(words)))
    try:
        for turn, guesses in enumerate((True, False, True)):
            figure = cache_figure(
                engine, "demo", Prompt([3, 4, 5], 60), guesses=guesses, num_steps=6, warm=3, what=f"turn {turn}"
            )
            assert ("right %" in figure.extra) == guesses and figure.extra["copies"] > 0
            assert engine.graphs is not None
            stream_figure(engine, "demo", even_prompts(engine.vocab_size, 3, 4, 60), 2)
    finally:
        engine.close()


@pytest.mark.parametrize(("num_experts", "top_k", "exponent"), [(8, 2, 1.0), (16, 4, 1.5)])
def test_biases_make_experts_as_popular_as_zipf_says(num_experts: int, top_k: int, exponent: float) -> None:
    spread = 0.5
    bias_E = zipf_bias(num_experts, top_k, exponent, spread)
    logits_TE = torch.randn(20_000, num_experts, generator=torch.Generator().manual_seed(7)) * spread
    found_E = shares((logits_TE.sigmoid() + bias_E).topk(top_k, dim=1).indices, num_experts)
    drawn = skewed_routing(20_000, num_experts, top_k, exponent=exponent, seed=5).expert_ids_TK
    wanted_E = shares(drawn, num_experts).sort(descending=True).values
    torch.testing.assert_close(found_E, wanted_E, rtol=0.15, atol=0.01)
    assert not zipf_bias(num_experts, top_k, 0.0, spread).any()


def test_the_command_writes_its_figures(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, result = load_script("offload"), tmp_path / "r.json"
    words = ["workload=stream,bytes", f"model={folder}", "sequences=2", "prompt=4", "steps=1", "device=cpu"]
    words += ["engine.max_model_len=512", "cache.num_blocks=128"]
    assert script.main([*words, f"result={result}"]) == 0
    record = json.loads(result.read_text())
    assert {figure["workload"] for figure in record["figures"]} == {"offload", "bytes"}
    assert str(tmp_path) not in record["command"] and record["complete"]
    assert record["engines"][folder.name]["link_gb_s"] > 0
    assert "planned" in capsys.readouterr().out


def test_a_limit_that_has_passed_leaves_the_rest_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the middle of a piece: what was found by then is printed and written."""
    script, result = load_script("offload"), tmp_path / "r.json"
    words = ["workload=regimes,stream", f"model={folder}", "sequences=4", "prompt=4", "steps=2", "device=cpu", "zipf=1"]
    choice = script.read_choice([*words, "batches=1,2,4", "engine.max_model_len=512", f"result={result}"])

    class Late(script.Bench):
        @property
        def seconds(self) -> float:
            return len(self.figures) - 1.5  # two figures come in time

    Late(replace(choice, limit=0.1), "x").run()
    record, said = json.loads(result.read_text()), capsys.readouterr().out
    assert [each["workload"] for each in record["figures"]] == ["offload", "regimes"] and not record["complete"]
    assert "cache, 4 sequences, zipf 1, ms" in said and "stream ms" in said
    assert "regimes, zipf 1: left out" in said and "stream: left out" not in said


def test_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("offload")
    wrong = {
        ("workload=w1",): "workload=w1 is unknown",
        ("workload=stream", "held=2"): "held=2",
        ("workload=stream", "held=1"): "nothing crosses the link",
        ("workload=cache", "zipf=-1"): "zipf=-1",
        ("workload=cache", "model=nowhere"): "holds no config.json",
    }
    for words, text in wrong.items():
        assert script.main(words) == 2
        assert text in capsys.readouterr().err


def test_the_peer_decodes_what_transformers_does(folder: Path) -> None:
    """Every weight is filled, and a limit in seconds leaves one token."""
    pytest.importorskip("accelerate")
    script = load_script("offload_peers")
    network, hidden = script.offloaded_network(folder, 1 << 40, torch.device("cpu"))
    assert sum(each.nbytes for each in hidden.values()) == sum(each.numel() * 2 for each in network.parameters())
    with torch.inference_mode():
        logits = network(torch.tensor([[3, 4, 5]])).logits
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0
    times = script.decode_seconds(network, torch.tensor([[3, 4, 5]]), 4, 1e-9)
    assert len(times) == 1


def test_figures_of_both_sides() -> None:
    script = load_script("offload_peers")
    both = {"ready_seconds": 1.0, "gpu_bytes": 2**30, "host_bytes": 2**31}
    found = {
        "ours": both | {"token_seconds": [0.5, 0.25, 0.25], "link_bytes": 2**30, "held": 0.25},
        "accelerate": both | {"token_seconds": [2.0]},
    }
    ours, theirs = script.figures(found, "tiny", 24.0)
    assert (ours.value, theirs.value, ours.target) == (4.0, 0.5, 3.0)
    assert ours.meets_target and ours.extra["x accelerate"] == 8.0 and ours.extra["host GiB"] == 2.0
