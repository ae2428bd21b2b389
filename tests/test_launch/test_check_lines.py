"""Reading everything before a model is loaded: what is found, what a dry run counts, what it prints."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from configs.checks import freeze
from configs.schema import CacheConfig, Config, EngineConfig, JobConfig, SamplingConfig
from launch.check_lines import SHOWN_BAD_LINES, check_lines, dry_run, forecast_of
from moe.batch.lines import InputFault
from moe.batch.sources import Source
from moe.engine import parts
from moe.engine.engine import Engine
from moe.engine.parts import outline_parts, resolve_device
from moe.engine.request import Request, SamplingParams


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(parts, "load_model", refuse)


def make(folder: Path, *records: Any, sampling: SamplingConfig | None = None, **job: Any) -> tuple[Config, Source]:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    config = Config(input=str(path), sampling=sampling or SamplingConfig(), job=JobConfig(**job))
    config.engine = EngineConfig(device="cpu", max_model_len=256)
    config.cache = CacheConfig(num_blocks=32)
    freeze(config)
    return config, Source.open(config)


def test_a_strict_check_names_every_bad_line_up_to_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, source = make(tmp_path, {"prompt": "x"}, *({"prompt": at} for at in range(12)), strict=True)
    assert not check_lines(config, source, silent=False)
    shown = capsys.readouterr()
    assert f"{source.name}:2: prompt=0 must be a text.\n" in shown.err
    assert f"... and {12 - SHOWN_BAD_LINES} more" in shown.err and "13 lines read, 12 of them" in shown.out
    assert not check_lines(config, source, silent=True)
    assert capsys.readouterr() == ("", "")
    few, source = make(tmp_path, {"prompt": "x"}, {"prompt": 5}, strict=True, limit=1)
    assert check_lines(few, source, silent=False)


def test_a_dry_run_counts_tokens_by_the_models_own_tokenizer_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": "Read Psalms 23:1"}]
    config, source = make(
        tmp_path,
        {"prompt_token_ids": [300] * 10, "max_tokens": 5},
        {"prompt_token_ids": [300] * 30, "max_tokens": 7, "n": 2},
        {"prompt_token_ids": [300] * 300, "truncate_prompt_tokens": 20},  # 256 - 20 new ones
        {"messages": chat, "max_tokens": 1},
        {"prompt": "word " * 300},
        {"prompt_token_ids": [10**6]},
        {"prompt": "x", "top_p": 7},
        dry_run=True,
    )
    assert not dry_run(config, source)
    shown = capsys.readouterr()
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.out.splitlines()]
    table = {row[0]: row[1] for row in rows if len(row) == 2}
    assert table["lines read / cannot be run"] == "7 / 3"
    outline = outline_parts(config, resolve_device("cpu"))
    assert outline.tokenizer is not None
    num_chat = len(outline.tokenizer.render_chat(chat))
    assert table["prompt tokens"] == str(60 + num_chat)
    lengths = sorted([10, 30, 20, num_chat])
    assert table["prompt tokens, min / median / max"] == f"{lengths[0]} / {lengths[1]} / {lengths[-1]}"
    assert table["output tokens, at most"] == str(5 + 2 * 7 + 236 + 1)
    positions = sorted([14, 30 + 2 * 6, 255, num_chat])
    assert table["cache positions, median / max"] == f"{positions[1]} / 255"
    assert table["cache, by cache.num_blocks"].startswith("512 positions, ")
    assert table["median lines that it holds"] == str(512 // positions[1])
    assert table["order"] == "by prefix (job.order=auto)"
    for number, words in ((5, "engine.max_model_len=256"), (6, "outside the model's vocabulary"), (7, "top_p=7")):
        assert any(f"in.jsonl:{number}: " in line and words in line for line in shown.err.splitlines())


def test_the_sampling_keys_bound_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, source = make(tmp_path, {"prompt_token_ids": [300]}, sampling=SamplingConfig(max_tokens=9, n=3))
    assert dry_run(config, source)
    assert "27" in capsys.readouterr().out


def test_quiet_says_faults_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, source = make(tmp_path, {"prompt": "x"}, {"prompt": 5}, quiet=True)
    assert not dry_run(config, source) and not check_lines(config, source, silent=False)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("prompt=5 must be a text") == 2


def test_a_damaged_input_is_a_fault_of_the_input(tmp_path: Path) -> None:
    config, source = make(tmp_path, {"prompt": "x"})
    whole = gzip.compress(b'{"prompt":"x"}\n' * 5)
    Path(str(config.input)).write_bytes(whole[:-4])
    with pytest.raises(InputFault, match="cut off before its end, after 5 records"):
        dry_run(config, source)


def test_an_engine_and_a_dry_run_refuse_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are one function; here it is held against a real engine, with its own cache."""
    monkeypatch.undo()
    config, _ = make(tmp_path, {"prompt": "x"})
    engine = Engine(config)
    forecast = forecast_of(config, outline_parts(config, resolve_device("cpu")))
    assert forecast.plan is not None and forecast.plan.num_blocks == engine.plan.num_blocks
    assert forecast.bytes_per_token == engine.plan.bytes_per_block / engine.plan.block_size
    for length in (255, 256):
        request = Request("r", [300] * length, SamplingParams(max_tokens=1))
        try:
            engine.intake.max_tokens(request, list(request.prompt_token_ids))
            refused = False
        except ValueError:
            refused = True
        record = {"prompt_token_ids": [300] * length, "max_tokens": 1}
        (tmp_path / "in.jsonl").write_text(json.dumps(record))
        line = next(Source.open(config).lines())
        if refused:
            with pytest.raises(ValueError, match="max_model_len"):
                forecast.add(line)
        else:
            forecast.add(line)
    assert list(forecast.prompts) == [255]
    engine.close()
