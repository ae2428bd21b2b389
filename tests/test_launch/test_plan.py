"""The planner's command line: tables of every shipped shape, bytes worked out by hand, refusals and ways out."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from launch import plan
from launch.figure import ROOT
from launch.plan import Ask, Outcome, changed, evaluate, read_ask
from launch.plan_table import amount
from launch.roofline import Ceilings
from launch.speed import Rates
from moe.engine.memory_plan import GIB
from moe.model.hub import resolve_model

SHAPES = ("qwen3-30b-a3b", "mixtral-8x7b", "dsv2-lite")
HOST = "host_gb=256"


def ask(*words: str) -> Ask:
    return read_ask([HOST, "gpu_gb=80", *words])


def with_memory(asked: Ask, gpu_gb: int) -> Outcome:
    return evaluate(replace(asked, gpu_bytes=gpu_gb * GIB))


def fitting(*words: str) -> Outcome:
    outcome = evaluate(ask(*words))
    assert outcome.problem is None and outcome.forecast is not None and outcome.speed is not None, outcome.problem
    return outcome


@pytest.mark.parametrize("name", [*SHAPES, "demo", "demo-deepseek"])
def test_every_shipped_shape_has_a_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model={name}", HOST, "gpu_gb=141"] + ([] if name in SHAPES else ["lengths=100+28"])
    assert plan.main(words) == 0
    out = capsys.readouterr().out
    for row in ("attention", "experts", "weights in all", "working space", "KV cache", "decode step", "tokens/s"):
        assert row in out, out
    assert "It fits: up to " in out and ("shared experts" in out) == ("ds" in name or "deep" in name)


def test_bytes_of_a_known_model() -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts of 3 x 2048 x 768 bf16 numbers are 54 GiB; a token's cache 48 x 2 x 4 x
    128 of them, 96 KiB. An H200 showed 56.871 GiB of weights and 3.885 of working space."""
    outcome = fitting("model=qwen3-30b-a3b", "engine.max_model_len=8192", "gpu_gb=139.801")
    planned = outcome.forecast
    assert planned is not None and planned.plan is not None
    assert planned.weights.bundle == 9 << 20 and planned.weights.experts == 54 * GIB
    assert planned.weight_bytes / GIB == pytest.approx(56.871, abs=5e-4)
    assert planned.workspace.num_bytes / GIB == pytest.approx(3.885, rel=0.005)
    assert outcome.subject.layout.bytes_per_token == 96 * 1024
    # That engine got 43,912 blocks; it was told of 0.741 GiB of others.
    assert planned.plan.num_blocks == pytest.approx(43_912, rel=0.002)


@pytest.mark.parametrize(
    ("name", "blocks", "weights"), [("mixtral-8x7b", 18_865, 86.991), ("dsv2-lite", 200_497, 29.256)]
)
def test_an_H200_had_as_many_blocks(name: str, blocks: int, weights: float) -> None:
    """Bench w1's plans, measured by the engine. DeepSeek's had 192 MiB of MLA's keys at a fixed place, since given up:
    one and a half thousandth of its cache."""
    words = ("engine.max_model_len=8192", "engine.max_batched_tokens=8192", "gpu_gb=139.801")
    planned = fitting(f"model={name}", *words).forecast
    assert planned is not None and planned.plan is not None
    assert planned.weight_bytes / GIB == pytest.approx(weights, abs=5e-4)
    assert planned.plan.num_blocks == pytest.approx(blocks, rel=0.005)


def test_streaming_by_hand() -> None:
    """24 GiB hold no cache of 1,024 sequences beside experts: all 54 GiB pass in every step, which takes 1.16 s at 50
    GB/s, beside products that take less; so many tokens come of it."""
    outcome = fitting("model=qwen3-30b-a3b", "gpu_gb=24", "offload.regime=auto", "link_gb_s=50")
    assert outcome.forecast is not None and outcome.forecast.offload is not None and outcome.speed is not None
    offload = outcome.forecast.offload
    assert (offload.num_held, offload.staging_slots, offload.host_bytes) == (0, 7, 54 * GIB)
    assert outcome.speed.decode.regime == "stream" and outcome.speed.decode.bound == "link"
    assert outcome.speed.decode.seconds == pytest.approx(54 * GIB / 50e9)
    assert outcome.speed.tokens_per_s == pytest.approx(outcome.seqs * 50e9 / (54 * GIB))
    assert outcome.told == ("offload.tokens_per_seq=640",)


def test_a_cache_of_experts_by_hand() -> None:
    """One row of Mixtral asks for 2 of 8 experts of 336 MiB in each of 32 layers; with 45 of 256 held, 211 of 256 of
    those asked for are missing on average. Nothing but these crosses the link, and the GPU waits for it."""
    words = ("model=mixtral-8x7b", "gpu_gb=24", "offload.regime=cache", "engine.max_num_seqs=1")
    words += ("engine.max_model_len=4096",)
    outcome = fitting(*words)
    assert outcome.forecast is not None and outcome.forecast.offload is not None and outcome.speed is not None
    assert outcome.forecast.offload.num_held == 45
    decode = outcome.speed.decode
    assert decode.regime == "cache" and decode.link_bytes == pytest.approx(32 * 2 * 211 / 256 * 336 * 2**20)
    assert decode.seconds == pytest.approx(decode.gpu_s + decode.link_bytes / 55.4e9)


def test_room_kept_for_longer_sequences_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """One sequence of up to 32,768 tokens keeps 4 GiB from experts, which would serve one of 640 more; 128 sequences of
    640 want more than the longest one, and nothing is to be won."""
    words = ["model=mixtral-8x7b", "gpu_gb=24", HOST, "offload.regime=auto", "engine.max_num_seqs=1"]
    assert plan.main(words) == 0
    out = capsys.readouterr().out
    assert "34 in all" in out and "decoding, at most              2.79 tokens/s" in out
    assert "With engine.max_model_len=640 the cache keeps no room for longer ones, and experts take it: at most" in out
    rate = float(out.split("experts take it: at most ")[1].split()[0])
    assert plan.main([*words, "engine.max_model_len=640"]) == 0
    out = capsys.readouterr().out
    assert f"decoding, at most              {rate:.2f} tokens/s" in out and "experts take it" not in out and rate > 2.9
    assert plan.main(["model=qwen3-30b-a3b", *words[1:-1], "engine.max_num_seqs=128"]) == 0
    assert "experts take it" not in capsys.readouterr().out


def test_what_does_not_fit_has_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=qwen3-30b-a3b", "gpu_gb=24"]
    assert plan.main([*words, HOST]) == 1
    out = capsys.readouterr().out
    assert "It does not fit: cache.memory_fraction=0.9 leaves no room for a KV block on a GPU of 24.0 GiB" in out
    assert "It fits with offload.regime=auto: up to 269 sequences at a time, at most 257 tokens/s." in out
    assert plan.main([*words, "host_gb=32"]) == 1  # neither does the host hold 54 GiB
    assert "It fits with offload.regime=auto quantization=fp8: " in capsys.readouterr().out
    assert plan.main([*words, "host_gb=8"]) == 1
    assert "It fits with gpus=4: " in capsys.readouterr().out
    assert plan.main(["model=qwen3-30b-a3b", "gpu_gb=80", HOST, "cache.num_blocks=9"]) == 1
    out = capsys.readouterr().out
    assert "the cache holds 144 tokens, fewer than one sequence of 640 takes." in out
    assert "Neither experts in host memory nor fp8, fewer sequences or up to 64 GPUs make it fit." in out
    assert plan.main([*words, HOST, "offload.regime=auto", "offload.slots_per_layer=60"]) == 1
    assert "It fits with offload.slots_per_layer=null offload.gpu_gb=null" in capsys.readouterr().out


def test_more_gpus_share_the_experts() -> None:
    """Four GPUs: 32 slots each, all else replicated; experts of a host lie there once, a quarter for each."""
    one, four = fitting("model=qwen3-30b-a3b"), fitting("model=qwen3-30b-a3b", "gpus=4")
    assert one.forecast is not None and four.forecast is not None and four.forecast.plan is not None
    assert four.forecast.weights.num_slots == 32 and four.forecast.weights.rest == one.forecast.weights.rest
    assert four.forecast.plan.buffer_bytes > 0 and four.seqs > one.seqs
    words = ("model=qwen3-30b-a3b", "gpus=4", "offload.regime=stream", "offload.slots_per_layer=8")
    streamed = fitting(*words).forecast
    assert streamed is not None and streamed.offload is not None and streamed.offload.host_bytes == 54 * GIB // 4
    two_hosts = fitting(*words, "gpus_per_host=2").forecast  # then each holds its own slots
    assert two_hosts is not None and two_hosts.offload is not None and two_hosts.offload.host_bytes == 54 * GIB // 4
    assert evaluate(ask(*words, "host_gb=54")).problem is not None
    assert evaluate(ask(*words, "gpus_per_host=2", "host_gb=54")).problem is None  # half of them on each host


def test_memory_for_experts_that_move_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["model=qwen3-30b-a3b", "gpus=4", "gpu_gb=80", "balance.interval=64"]) == 0
    out, parts = capsys.readouterr().out, ("weights in all", "working space", "rows between ranks", "others on the GPU")
    sizes = {name: float(size) for name, size in re.findall(r"^ ([a-zA-Z, ]+?) +(\d+\.\d{3})\b", out, re.MULTILINE)}
    assert sizes["experts between ranks"] == 0.237
    assert sum(sizes[name] for name in (*parts, "experts between ranks", "KV cache", "left free")) == pytest.approx(
        80.0, abs=0.01
    )


@pytest.mark.parametrize("words", [(), ("offload.regime=stream", "offload.slots_per_layer=3")])
@pytest.mark.parametrize("name", SHAPES)
def test_more_memory_never_holds_less(name: str, words: tuple[str, ...]) -> None:
    tokens, asked = [], ask(f"model={name}", *words)
    for gpu_gb in (16, 24, 40, 64, 80, 141, 192):
        planned = with_memory(asked, gpu_gb).forecast
        tokens.append(0 if planned is None or planned.plan is None else planned.plan.capacity_tokens)
    assert tokens == sorted(tokens) and tokens[-1] > 0


@pytest.mark.parametrize("name", SHAPES)
def test_more_memory_is_never_slower_with_auto(name: str) -> None:
    """Also where it becomes enough for all experts: fewer sequences go on then, and each step is far shorter."""
    rates, asked = [], ask(f"model={name}", "offload.regime=auto")
    for gpu_gb in (16, 20, 24, 30, 34, 38, 46, 60, 64, 70, 76, 94, 97, 100, 103, 106, 110, 130, 160):
        speed = with_memory(asked, gpu_gb).speed
        rates.append(0.0 if speed is None else speed.tokens_per_s)
    assert all(after >= 0.98 * before for before, after in pairwise(rates)), rates
    assert rates[-1] > 10 * next(rate for rate in rates if rate)


def test_fp8_and_the_cache_s_dtype_take_less() -> None:
    base = fitting("model=qwen3-30b-a3b").forecast
    fp8 = fitting("model=qwen3-30b-a3b", "quantization=fp8").forecast
    assert base is not None and fp8 is not None and base.plan is not None and fp8.plan is not None
    # Codes of one byte, a scale of four for each 128 x 128 of them.
    assert fp8.weights.experts == base.weights.experts // 2 + base.weights.experts // 2 // (128 * 128) * 4
    small = fitting("model=qwen3-30b-a3b", "cache.dtype=fp8").forecast
    assert small is not None and small.plan is not None
    assert small.plan.capacity_tokens > 1.9 * base.plan.capacity_tokens
    layer = fitting("model=qwen3-30b-a3b", "cache.dtype=fp8-layer")
    assert layer.subject.layout.bytes_per_token == 48 * 1024


def test_a_checkpoint_s_headers_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without weights is planned as its config says; weights that do not fit it are refused."""
    demo = resolve_model("demo")
    for file in demo.glob("*.json"):
        shutil.copy(file, tmp_path)
    words = [f"model={tmp_path}", HOST, "gpu_gb=8", "lengths=64+64"]
    assert read_ask(words).config.load_format == "dummy"
    assert plan.main(words) == 0
    for file in demo.glob("*.safetensors"):
        shutil.copy(file, tmp_path)
    assert read_ask(words).config.load_format == "auto"
    assert plan.main(words) == 0
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}), encoding="utf-8")
    capsys.readouterr()
    assert plan.main(words) == 2
    assert "the weights do not fit config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lengths=512"], "lengths=512 is no PROMPT+ANSWER, such as 512+128."),
        (["lengths=0+5"], "lengths=0 is no whole number above 0."),
        (["lengths=50000+128"], "lengths=50000+128 exceeds engine.max_model_len=40960; shorten them"),
        (["gpus=none"], "gpus=none is no whole number above 0."),
        (["gpu_gbs=24"], "unknown key 'gpu_gbs'; did you mean 'gpu_gb'?"),
        (["gpu_gb=-1"], "gpu_gb=-1 must be a number above 0."),
        (["capability=8.0", "quantization=fp8"], "quantization=fp8, but capability=8 has no fp8"),
        (["capability=8.0", "cache.dtype=fp8"], "cache.dtype=fp8, but capability=8 has no fp8"),
        (["offload.regim=auto"], "offload.regim"),
        (["model=no-such-model-anywhere/"], "no-such-model-anywhere/"),
        (["offload.slots_per_layer=3"], "offload.slots_per_layer=3 has no effect with offload.regime=off"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["model=qwen3-30b-a3b", HOST, *words]) == 2
    assert message in capsys.readouterr().err


def test_cards_without_fp8_get_the_bytes_of_numbers(tmp_path: Path) -> None:
    """A checkpoint in fp8 is held in bf16 there."""
    config = json.loads((ROOT / "benchmarks/models/qwen3-30b-a3b/config.json").read_text("utf-8"))
    stored = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}), encoding="utf-8")
    ampere, hopper = (evaluate(replace(ask(f"model={tmp_path}"), capability=each)).forecast for each in (8.0, 9.0))
    assert ampere is not None and hopper is not None
    assert ampere.weights.experts == 54 * GIB and hopper.weights.experts == 27 * GIB + 27 * GIB // (128 * 128) * 4


def test_amounts_and_rates() -> None:
    assert (amount(0.04567), amount(11156.7), amount(99.94)) == ("0.0457", "11,157", "99.9")
    assert ask("memory_tb_s=2", "tflops=100", "link_gb_s=25").rates == Rates(Ceilings(2e12, 1e14, "given"), 25e9)
    config = changed(ask().config, {"offload.regime": "stream", "quantization": "none"})
    assert config.offload.regime == "stream" and config.quantization == "none"
    with pytest.raises(ValueError, match=r"has no effect with offload\.regime=off"):
        changed(ask().config, {"offload.gpu_gb": 3.0})


def test_help_names_every_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"{key}=" in out for key in plan.KEYS)
