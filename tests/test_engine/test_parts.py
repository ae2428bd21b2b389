"""What is said and refused while an engine's parts are put together, before any weight is read."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.schema import BalanceConfig, CacheConfig, Config, EngineConfig, JobConfig
from expert_parallel.dispatcher import LocalDispatcher
from expert_parallel.host_memory import HostMemory
from kv_cache.layout import LayerScales
from moe.engine import machine, parts
from moe.engine.engine import Engine
from moe.model.families.registry import read_config
from moe.model.hub import resolve_model
from moe.model.load_model import Opened
from tests.test_engine.fake_network import make_parts


@pytest.fixture()
def no_weights(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Loads nothing; the list holds one entry for each time that weights would have been read."""
    read: list[object] = []

    def load(folder: Path, **_: object) -> SimpleNamespace:
        read.append(folder)
        return SimpleNamespace(config=read_config(folder))

    monkeypatch.setattr(parts, "load_model", load)
    monkeypatch.setattr(parts, "open_model", lambda folder, *_: Opened(read_config(folder), None))
    return read


def test_c41_a_missing_chat_template_is_said_at_the_start(
    tmp_path: Path, no_weights: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    copied_demo(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    described.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    engine = EngineConfig(device="cpu")
    with caplog.at_level(logging.WARNING):
        for config in (
            Config(engine=engine),
            Config(model=str(tmp_path), engine=engine, job=JobConfig(chat_template="{{ 1 }}")),
        ):
            parts.load_parts(config)
        assert "chat template" not in caplog.text
        parts.load_parts(Config(model=str(tmp_path), engine=engine))
    assert f"{tmp_path} holds no chat template: messages need one as job.chat_template=" in caplog.text
    assert len(no_weights) == 3


def test_a_cache_dtype_that_cannot_be_is_refused_before_the_weights(no_weights: list[object]) -> None:
    config = Config(dtype="float32", cache=CacheConfig(dtype="float16"), engine=EngineConfig(device="cpu"))
    with pytest.raises(ValueError, match=r"cache\.dtype='float16' differs from the model's float32"):
        parts.load_parts(config)
    assert not no_weights


def test_weights_that_the_hosts_memory_cannot_hold_are_refused_on_the_cpu(
    no_weights: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that the kernel kills the process while it loads, and says nothing."""
    host = HostMemory(8 << 20, "MemAvailable of /proc/meminfo")
    monkeypatch.setattr(machine, "read_host_memory", lambda: host)
    text = r"the weights take 0\.010 GiB, and MemAvailable of /proc/meminfo leaves 0\.008 GiB; use a machine with a GPU"
    with pytest.raises(ValueError, match=text):
        parts.load_parts(Config(dtype="float32", engine=EngineConfig(device="cpu")))
    assert not no_weights
    parts.load_parts(Config(dtype="bfloat16", engine=EngineConfig(device="cpu")))  # half of it has room
    assert no_weights


def copied_demo(folder: Path, **changes: dict[str, object]) -> Path:
    """The demo model's files without weights, some fields of them changed: `generation_config={...}`."""
    for file in resolve_model("demo", None).iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    for name, fields in changes.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | fields), encoding="utf-8")
    return folder


@pytest.mark.parametrize("beyond", [-1, 2048, 99999])
def test_an_end_that_the_vocabulary_lacks_is_said_and_left_out(
    beyond: int, tmp_path: Path, no_weights: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    """Fine-tuned checkpoints name such ids. Masked for min_tokens, one ended the whole engine, or masked another id."""
    folder = copied_demo(tmp_path, generation_config={"eos_token_id": [5, beyond]})
    config = Config(model=str(folder), engine=EngineConfig(device="cpu"))
    with caplog.at_level(logging.WARNING):
        made = parts.load_parts(config)
    assert 5 in made.eos_ids and beyond not in made.eos_ids and no_weights
    assert f"id {beyond} is said to end a text, but the model's vocabulary has 2048 ids" in caplog.text


def test_sampling_defaults_that_chats_will_fail_by_are_said_at_the_start(
    tmp_path: Path, no_weights: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied_demo(tmp_path, generation_config={"top_p": 0, "temperature": 0.5})
    with caplog.at_level(logging.WARNING):
        parts.load_parts(Config(model=str(folder), engine=EngineConfig(device="cpu")))
    text = f"generation_config.json of {folder} fails chats that do not give top_p: top_p=0 is out of range"
    assert [each.startswith(text) for each in caplog.messages] == [True] and no_weights


def test_what_chats_do_not_get_of_a_generation_config_is_said_at_the_start(
    tmp_path: Path, no_weights: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    """transformers would follow these; values that ask for nothing are no news."""
    asked = {"no_repeat_ngram_size": 3, "bad_words_ids": [[7]], "typical_p": 0.9, "min_new_tokens": 4}
    neutral = {"num_beams": 1, "guidance_scale": 1.0, "suppress_tokens": [], "stop_strings": None, "top_h": None}
    folder = copied_demo(tmp_path, generation_config=asked | neutral | {"temperature": 0.5})
    with caplog.at_level(logging.WARNING):
        parts.load_parts(Config(model=str(folder), engine=EngineConfig(device="cpu")))
    said = "min_new_tokens=4, bad_words_ids=[[7]], no_repeat_ngram_size=3, typical_p=0.9"
    text = f"generation_config.json of {folder} asks chats for {said}, which is not offered here"
    assert caplog.messages == [f"{text}: they are answered without"] and no_weights


@pytest.mark.parametrize("key", ["profile", "load_file"])
def test_files_that_cannot_be_written_later_are_refused_before_the_weights(
    key: str, no_weights: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path) -> None:
        parts.load_parts(Config(balance=BalanceConfig(**{key: str(path)}), engine=EngineConfig(device="cpu")))

    with pytest.raises(
        ValueError, match=rf"balance\.{key}=.*/none/x\.json cannot be written: there is no folder .*none; m"
    ):
        load(tmp_path / "none" / "x.json")
    with pytest.raises(ValueError, match=rf"balance\.{key}=.* is a folder; give the name of a file"):
        load(tmp_path)
    (tmp_path / "old.json").touch()
    for closed, name, what in ((tmp_path, "x.json", tmp_path), (tmp_path / "old.json", "old.json", "it")):
        monkeypatch.setattr(os, "access", lambda path, *_, closed=closed: Path(path) != closed)
        with pytest.raises(
            ValueError, match=rf"balance\.{key}=.*/{name} cannot be written: {what} is closed to this user"
        ):
            load(tmp_path / name)
        monkeypatch.undo()
    assert not no_weights


def test_a_plan_of_ranks_is_told_of_where_there_is_one(
    no_weights: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        parts.load_parts(Config(balance=BalanceConfig(plan="p.json"), engine=EngineConfig(device="cpu")))
    assert caplog.messages == ["balance.plan=p.json is not loaded: one rank holds every expert."] and no_weights


def test_texts_of_single_tokens_are_decoded_once(no_weights: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts.load_parts(Config(engine=EngineConfig(device="cpu")))
    assert made.tokenizer is not None
    ids = [*made.tokenizer.encode_prompt("In the beginning"), *made.eos_ids]
    texts = [made.decode_one(token_id) for token_id in ids]
    assert texts == [made.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids] and all(texts)
    monkeypatch.setattr(made.tokenizer, "decode", None)
    assert [made.decode_one(token_id) for token_id in ids] == texts


def test_a_long_load_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        quiet, talking = parts.LoadProgress(every_s=60.0), parts.LoadProgress(every_s=0.0)
        quiet(1, 2)
        assert not caplog.messages
        talking(3 * 10**9, 60 * 10**9)
    assert caplog.messages[0].startswith("read 3.0 of 60.0 GB of weights, ")


def test_answers_in_progress_by_device_and_budget() -> None:
    made = make_parts(None)
    assert made.max_num_seqs(EngineConfig()) == 256
    assert replace(made, device=torch.device("cuda")).max_num_seqs(EngineConfig()) == 1024
    assert made.max_num_seqs(EngineConfig(max_num_seqs=7)) == 7
    assert made.max_num_seqs(EngineConfig(max_num_seqs=7, max_batched_tokens=2)) == 2


def test_a_dispatcher_that_waits_for_the_host_forbids_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts.load_parts(Config(engine=EngineConfig(device="cpu")))
    assert made.graph_safe
    monkeypatch.setattr(LocalDispatcher, "graph_safe", False)
    assert not made.graph_safe and make_parts(None).graph_safe


def test_C49_the_dtype_of_the_cache_is_part_of_every_blocks_key() -> None:
    """A cache of other numbers must not serve: the first key of a chain differs, so all do."""
    roots = {
        dtype: Engine(Config(cache=CacheConfig(num_blocks=64, dtype=dtype)), parts=make_parts(None)).cache.root
        for dtype in ("auto", "float32", "fp8")
    }
    assert roots["auto"] == roots["float32"] and len(set(roots.values())) == 2
    config = Config(cache=CacheConfig(num_blocks=64, dtype="fp8-layer"))
    of_scales = {
        Engine(config, parts=replace(make_parts(None), cache_scales=(LayerScales(scale, 0.04),))).cache.root
        for scale in (0.04, 0.05)
    }
    assert len(of_scales) == 2 and not of_scales & set(roots.values())
