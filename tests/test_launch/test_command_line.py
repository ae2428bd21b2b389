"""From typed words to a config: C34, nearest keys, types, precedence, presets, files."""

from __future__ import annotations

import logging
import os
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from configs.schema import Config, known_keys
from launch.command_line import compose_config, help_text, parse, preset_names
from launch.overrides import check_argument, quote, set_raw

DOCS = Path(__file__).resolve().parents[2] / "docs" / "command_line.md"


def composed(*words: str) -> Config:
    return compose_config(parse(words))


def refused(*words: str) -> str:
    with pytest.raises(ValueError) as caught:
        composed(*words)
    return str(caught.value)


BROKEN_PATHS = [
    "/data/a=b/in.jsonl",
    "/d/run#3/in.jsonl",
    "/d/a(1).jsonl",
    "/d/a[1].jsonl",
    "/d/a{1}.jsonl",
    "/d/a,b/in.jsonl",
    "/d/it's.jsonl",
    '/d/"quoted".jsonl',
    "~/m",
    "/d/é.jsonl",
    "/d/中文.jsonl",
    "$(ls)",
    "a&b;c|d<e>f`g`!h",
]


@pytest.mark.parametrize("path", BROKEN_PATHS)
def test_c34_a_broken_argument_comes_back_as_the_words_to_type(path: str) -> None:
    message = refused(f"input={path}")
    assert message.startswith(f"cannot read input={path}: ")
    _, corrected, _, flag = message.splitlines()
    expected = str(Path(path).expanduser()) if path.startswith("~") else path
    for typed in (corrected, flag):  # each typed into a shell gives the path, without any further hand
        assert composed(*shlex.split(typed)).input == expected


@pytest.mark.parametrize("key", ["model", "tokenizer", "job.report", "job.chat_template"])
def test_c34_holds_for_every_text_key(key: str) -> None:
    _, corrected, _, flag = refused(f"{key}=a=b").splitlines()
    for typed in (corrected, flag):
        assert OmegaConf.select(OmegaConf.structured(composed(*shlex.split(typed))), key) == "a=b"


@pytest.mark.parametrize(
    ("raw", "stops"),
    [
        ("</s>", ["</s>"]),
        ("<|im_end|>", ["<|im_end|>"]),
        ("[</s>,<|im_end|>]", ["</s>", "<|im_end|>"]),
        ("end", ["end"]),  # a text where a list is wanted
        ("a,b", ["a", "b"]),
    ],
)
def test_c34_stop_texts(raw: str, stops: list[str]) -> None:
    _, corrected, _, flags = refused(f"sampling.stop={raw}").splitlines()
    assert composed(*shlex.split(corrected)).sampling.stop == stops
    assert composed(*shlex.split(flags)).sampling.stop == stops


@pytest.mark.parametrize(("key", "flag"), [("input", "--input NAME"), ("job.report", "--set job.report=NAME")])
def test_a_name_that_is_no_utf8_is_refused_in_words_and_a_flag_takes_it(key: str, flag: str) -> None:
    name = os.fsdecode(b"/d/b\xff.jsonl")
    text = refused(f"{key}={name}")
    assert "b\\udcff.jsonl" in text and "no UTF-8" in text and flag in text and "\n" not in text
    assert composed("--input", name).input == name


@pytest.mark.parametrize(
    "path", ["/d/a b.jsonl", "/d/100%.jsonl", "/d/a@b.jsonl", "/d/*.jsonl", "C:/x", "/d/back\\slash"]
)
def test_c34_these_work_as_typed(path: str) -> None:
    assert composed(f"input={path}").input == path


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r"), min_size=1))
def test_c34_any_text_survives_quoting_or_a_flag(text: str) -> None:
    assert check_argument(f"model={quote(text)}") == f"model={quote(text)}"
    config = OmegaConf.structured(Config)
    OmegaConf.update(config, "model", OverridesParser.create().parse_override(f"model={quote(text)}").value())
    set_raw(config, "tokenizer", text)
    assert (config.model, config.tokenizer) == (text, text)


@pytest.mark.parametrize("name", ["1e3", "010", "12", "true", "1.50"])
def test_a_name_that_looks_like_a_number_stays_as_typed(name: str) -> None:
    assert composed(f"model={name}").model == name


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("samplng.temperature=1", "unknown key 'samplng.temperature'; did you mean 'sampling.temperature'?"),
        ("temperature=1", "unknown key 'temperature'; did you mean 'sampling.temperature'?"),
        ("engine.max_num_seq=1", "unknown key 'engine.max_num_seq'; did you mean 'engine.max_num_seqs'?"),
        ("modle=x", "unknown key 'modle'; did you mean 'model'?"),
        ("zzz=x", "unknown key 'zzz'; --help lists the known ones."),
        ("hydra.run.dir=x", "unknown key 'hydra.run.dir'; --help lists the known ones."),
        ("sampling={temperature:0,nn:3}", "unknown key 'sampling.nn'; did you mean 'sampling.n'?"),
        ("sampling=3", "sampling is a group of keys; set one of them"),
        ("+sampling.n=1", "keys cannot be added or removed; write sampling.n=VALUE."),
        ("~sampling.n=1", "keys cannot be added or removed; write sampling.n=VALUE."),
        ("words", "argument 'words' is no key=value"),
        ("preset=thruput", "preset=thruput is unknown; did you mean 'throughput'?"),
        (
            "sampling.max_tokens=abc",
            "sampling.max_tokens='abc' is no value for this key; it takes a whole number or null.",
        ),
        ("sampling.max_tokens=1.5", "sampling.max_tokens=1.5 is no value for this key"),
        ("sampling.temperature=true", "sampling.temperature=True is no value for this key; it takes a number or null."),
        ("job.strict=maybe", "job.strict='maybe' is no value for this key; it takes true or false."),
        ("sampling.n=null", "sampling.n=None is no value for this key; it takes a whole number."),
        ("sampling.stop_token_ids=[a]", "it takes a list of whole numbers."),
        ("input=${nope}", "Interpolation key 'nope' not found"),
        ("sampling.top_p=2", "sampling.top_p=2.0 is out of range"),
        ("--inptu=x", "did you mean --input?"),
        ("--input", "expected one argument"),
        ("--cfg=hydra", "invalid choice: 'hydra'"),
    ],
)
def test_refusals(argument: str, message: str) -> None:
    assert message in refused(argument)


def test_flags_bypass_every_grammar() -> None:
    config = composed("--model", "/x=1", "--input", "${a}", "--output", "#o", "--stop", "</s>", "--stop", "a,b")
    assert (config.model, config.input, config.output, config.sampling.stop) == ("/x=1", "${a}", "#o", ["</s>", "a,b"])
    config = composed(
        "--set", "sampling.max_tokens=5", "--set", "sampling.stop_token_ids=7", "--set", "job.strict=true"
    )
    assert (config.sampling.max_tokens, config.sampling.stop_token_ids, config.job.strict) == (5, [7], True)
    assert composed("--set", "sampling.max_tokens=null").sampling.max_tokens is None
    assert "in --set is no value" in refused("--set", "sampling.max_tokens=x")
    assert "did you mean 'sampling.n'?" in refused("--set", "samplng.n=1")


def test_input_again_is_one_more_file() -> None:
    config = composed("--input", "/d/a=b", "--input", "~/c,d", "--input", "e[1]*.gz")
    assert config.input == "/d/a=b" and config.job.more_input == [str(Path("~/c,d").expanduser()), "e[1]*.gz"]
    assert composed("job.more_input=[a.jsonl,'b c/*.gz']", "input=x").job.more_input == ["a.jsonl", "b c/*.gz"]
    assert composed("job.columns=[prompt:question,id]").job.columns == ["prompt:question", "id"]
    assert composed("--input", "-").input == "-" and composed("input=a?/*.jsonl").input == "a?/*.jsonl"


def test_home_is_filled_in() -> None:
    assert composed("--input", "~/in.jsonl", "--model", "~/m").model == str(Path.home() / "m")


def test_later_wins(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "preset: throughput\nengine:\n  max_num_seqs: 7\nsampling: {stop: ['</s>', 'a=b'], temperature: 0.5}\n"
    )
    config = composed("--config", str(file))
    assert (config.engine.max_num_seqs, config.cache.memory_fraction) == (7, 0.94)  # file over preset
    assert config.sampling.stop == ["</s>", "a=b"]
    assert composed("--config", str(file), "engine.max_num_seqs=8").engine.max_num_seqs == 8
    assert composed("--config", str(file), "preset=none").cache.memory_fraction == 0.9
    assert composed("sampling.n=2", "--set", "sampling.n=3").sampling.n == 3
    assert composed().engine.max_num_seqs is None  # nothing stays behind from one composition to the next


def test_a_files_keys_may_have_their_whole_names(tmp_path: Path) -> None:
    """As the docs, --help and every message write them."""
    file = tmp_path / "job.yaml"
    file.write_text("sampling.n: 3\nsampling: {temperature: 0.5}\nmodel: m\nsampling.stop: [a]\nengine: null\n")
    config = composed("--config", str(file))
    assert (config.sampling.n, config.sampling.temperature, config.sampling.stop, config.model) == (3, 0.5, ["a"], "m")
    file.write_text("sampling.n: 3\nsampling: {n: 2}\n")
    assert f"sampling.n stands twice in {file}" in refused("--config", str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("samplng: {n: 1}", "unknown key 'samplng' in "),
        ("sampling: {m: 1}", "unknown key 'sampling.m' in "),
        ("sampling: {n: x}", "sampling.n='x' in "),
        ("sampling: 3", "sampling is a group of keys"),
        ("- a\n- b\n", "holds no mapping of keys"),
        ("a: [", "--config "),
    ],
)
def test_a_wrong_file_names_key_and_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    found = refused("--config", str(file))
    assert message in found and str(file) in found


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    none = tmp_path / "none.yaml"
    assert f"--config {none} cannot be read: No such file or directory; give a YAML" in refused("--config", str(none))


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("none", {}),
        ("greedy", {"sampling.temperature": 0.0, "sampling.n": 1}),
        (
            "throughput",
            {
                "engine.max_num_seqs": 1024,
                "engine.max_batched_tokens": 16384,
                "cache.memory_fraction": 0.94,
            },
        ),
        (
            "small_memory",
            {
                "engine.max_num_seqs": 16,
                "engine.max_batched_tokens": 1024,
                "engine.prefill_chunk": 256,
                "engine.mla_workspace_tokens": 4096,
                "cache.memory_fraction": 0.6,
                "cache.cpu_gb": 0.25,
                "job.look_ahead_mb": 4.0,
            },
        ),
    ],
)
def test_presets_change_what_they_say_and_nothing_else(preset: str, expected: dict[str, Any]) -> None:
    config = OmegaConf.structured(composed(f"preset={preset}"))
    for key in known_keys():
        assert OmegaConf.select(config, key.name) == expected.get(key.name, key.default), key.name


def test_every_preset_is_tested_and_documented() -> None:
    assert preset_names() == ["greedy", "none", "small_memory", "throughput"]
    assert all(f"`{name}`" in DOCS.read_text("utf-8") for name in preset_names())


def test_help_and_docs_say_the_same_of_every_key() -> None:
    """Each row of the docs has the default, the type and the meaning that --help prints."""
    text = help_text("launch.generate")
    cells = [line.strip().strip("|").split(" | ") for line in DOCS.read_text("utf-8").splitlines()]
    rows = {row[0].strip(" `"): tuple(cell.strip() for cell in row[1:]) for row in cells if len(row) == 4}
    for key in known_keys():
        assert f"{key.name}=" in text, key.name
        is_word = key.default is None or isinstance(key.default, bool)
        default = {"None": "null"}.get(str(key.default), str(key.default).lower()) if is_word else str(key.default)
        assert rows.get(key.name) == (default, key.words, key.help), f"{key.name} in docs/command_line.md"


def test_composing_leaves_folder_and_loggers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handlers = list(logging.getLogger().handlers)
    composed("sampling.n=2")
    assert list(tmp_path.iterdir()) == [] and Path.cwd() == tmp_path
    assert logging.getLogger().handlers == handlers


def test_a_tilde_is_filled_in_for_the_jobs_files_and_left_in_a_template_text() -> None:
    config = compose_config(parse(["--set", "job.report=~/r.json", "--set", "job.chat_template=~/t.jinja"]))
    assert config.job.report == str(Path("~/r.json").expanduser())
    assert config.job.chat_template == str(Path("~/t.jinja").expanduser())
    for name in ("cache.scales", "balance.plan", "balance.profile", "balance.load_file"):
        config = compose_config(parse(["cache.dtype=fp8-layer", "--set", f"{name}=~/x.json"]))
        assert attrgetter(name)(config) == str(Path("~/x.json").expanduser())
    text = "{{ messages[0].content }} ~"
    assert compose_config(parse(["--set", f"job.chat_template={text}"])).job.chat_template == text
