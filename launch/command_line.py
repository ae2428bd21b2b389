"""From the words of a command line to one frozen config: flags, key=value arguments, a preset, a YAML file.

Later wins: schema, preset, --config FILE, key=value, flags. Nothing is written, the working directory stays, and no
logger is touched. Knows Hydra; knows nothing of jobs or models.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from configs.checks import freeze
from configs.schema import Config, known_keys, owner_of
from launch.overrides import PRESET, check_argument, check_name, check_value, flatten, set_raw

# A chat template may be the template's own text, which no "~" begins.
PATH_KEYS = ("model", "tokenizer", "input", "output", "cache.scales", "job.report", "job.chat_template")
PATH_KEYS += ("balance.plan", "balance.profile", "balance.load_file")
FLAGS = (
    ("--input PATH", "input, as typed: no character has a meaning of its own; again: one more in job.more_input"),
    ("--output PATH", "output, the same way"),
    ("--model NAME", "model, the same way"),
    ("--stop TEXT", "one more text in sampling.stop; may be repeated"),
    ("--set KEY=VALUE", "any key, the value as typed; on a list key it adds one entry; may be repeated"),
    ("--config FILE", "a YAML file of keys, applied after the preset and before the arguments"),
    ("--cfg job", "print the config that results, and stop"),
    ("--help", "this text"),
)


@dataclass(frozen=True)
class CommandLine:
    """What was typed, taken apart. `raw` holds (key, text) pairs that no grammar may touch."""

    overrides: tuple[str, ...] = ()
    raw: tuple[tuple[str, str], ...] = ()
    config_file: Path | None = None
    show_config: bool = False
    show_help: bool = False


class _Parser(argparse.ArgumentParser):
    """argparse whose refusals are ValueError, with the nearest flag."""

    def error(self, message: str) -> NoReturn:
        for word in message.split():
            flags = [flag.split()[0] for flag, _ in FLAGS]
            if word.startswith("--") and word.rstrip(":") not in flags:
                if found := difflib.get_close_matches(word.split("=")[0], flags, n=1):
                    message += f"; did you mean {found[0]}?"
                break
        raise ValueError(f"{message} (--help lists flags and keys)")


def parse(argv: Sequence[str]) -> CommandLine:
    """Take the words apart. ValueError for an unknown flag or an argument that cannot be read."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config", type=Path)
    for flag in ("--output", "--model"):
        parser.add_argument(flag)
    parser.add_argument("--input", action="append", default=[])
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("arguments", nargs="*")
    words = parser.parse_intermixed_args(list(argv))
    raw = [(name, getattr(words, name)) for name in ("output", "model") if getattr(words, name) is not None]
    raw += [("job.more_input" if index else "input", path) for index, path in enumerate(words.input)]
    raw += [("sampling.stop", text) for text in words.stop]
    for item in words.set:
        name, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item!r} is no KEY=VALUE.")
        raw.append((name, text))
    return CommandLine(tuple(words.arguments), tuple(raw), words.config, words.cfg is not None, words.help)


def compose_config(line: CommandLine) -> Config:
    """The frozen config, every key and cross-field check passed. ValueError with the way out otherwise."""
    overrides = [check_argument(argument) for argument in line.overrides]
    file_keys = _load_file(line.config_file) if line.config_file else {}
    preset = file_keys.pop(PRESET, None)
    if preset is not None and not any(argument.startswith(f"{PRESET}=") for argument in overrides):
        overrides.insert(0, f"{PRESET}={preset}")
    for argument in overrides:
        if argument.startswith(f"{PRESET}="):
            _check_preset(argument.partition("=")[2])

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    store.store(group="file", name="none", node=file_keys, package="_global_")
    GlobalHydra.instance().clear()
    with initialize_config_module("configs", job_name="generate", version_base="1.3"):
        composed = compose("job", overrides=overrides)
    for name, text in line.raw:
        set_raw(composed, name, text)
    return _to_config(composed)


def preset_names() -> list[str]:
    """The presets that ship in configs/preset/."""
    return sorted(
        entry.name[:-5] for entry in (resources.files("configs") / "preset").iterdir() if entry.name.endswith(".yaml")
    )


def help_text(program: str) -> str:
    """The whole --help: usage, flags, presets, every key with type, default and meaning."""
    rows = ["Answer a JSONL file of prompts with a Mixture-of-Experts model.", "", "usage:"]
    rows += [
        f"  python -m {program}                                  the demo: its model, its prompts, demo.answers.jsonl",
        f"  python -m {program} model=FOLDER input=prompts.jsonl output=answers.jsonl sampling.max_tokens=64",
        f"  torchrun --nproc-per-node N -m {program} ...         the same on N ranks, one GPU each",
        "",
        "flags:",
    ]
    rows += [f"  {flag:<18}{text}" for flag, text in FLAGS]
    rows += ["", f"preset=NAME: {', '.join(preset_names())}", "", "keys (KEY=VALUE):"]
    group = ""
    for key in known_keys():
        if (prefix := key.name.rpartition(".")[0]) != group:
            rows, group = [*rows, ""], prefix
        text = f"{key.name}={_as_typed(key.default)}"
        rows.append(f"  {text:<40}{key.help} ({key.words})")
    rows += [
        "",
        "exit codes: 0 every line answered; 1 the job failed; 2 a wrong command line, config or file; 3 some lines",
        "failed; 130 and 143 stopped by Ctrl-C and SIGTERM. After 1, 130 and 143 the same command goes on.",
    ]
    return "\n".join(rows)


def _as_typed(value: object) -> str:
    """A default as it would be typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _load_file(path: Path) -> dict[str, Any]:
    """The keys of a user's YAML file, checked one by one."""
    path = path.expanduser()
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}; give a YAML file of keys.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"--config {path} holds no mapping of keys; write it as `sampling:` / `  temperature: 0`.")
    keys = {str(name): value for name, value in loaded.items()}
    where = f" in {path}"
    nested: dict[str, Any] = {PRESET: keys.pop(PRESET)} if PRESET in keys else {}
    seen: set[str] = set()
    for name, value in flatten(keys):
        key = check_name(name, where)
        if key is not None or value is not None:
            check_value(name, value, where)
        if name in seen:
            raise ValueError(f"{name} stands twice{where}: by its whole name and in its group; leave one out.")
        seen.add(name)
        if key is not None:  # by its whole name (`sampling.n: 2`) or in its group, as one likes
            group, _, last = name.rpartition(".")
            (nested.setdefault(group, {}) if group else nested)[last] = value
    return nested


def _check_preset(name: str) -> None:
    known = preset_names()
    if name not in known:
        found = difflib.get_close_matches(name, known, n=1)
        guess = f"did you mean {found[0]!r}?" if found else f"there are {', '.join(known)}."
        raise ValueError(f"preset={name} is unknown; {guess}")


def _to_config(composed: DictConfig) -> Config:
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0]) from error
    assert isinstance(config, Config), f"the schema composed to {type(config).__name__}"
    for key in PATH_KEYS:
        owner, name = owner_of(config, key)
        if (value := getattr(owner, name)) is not None:
            setattr(owner, name, os.path.expanduser(value))
    config.job.more_input = [os.path.expanduser(name) for name in config.job.more_input]
    return freeze(config)
