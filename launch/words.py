"""The key=value words of benches and planner: plain values, each checked with its name. Knows no key by itself."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from configs.checks import file_to_write
from launch.overrides import check_name


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether a command is to say what it is for, and nothing else."""
    return any(word in ("-h", "--help") for word in words)


def print_help(text: str | None, keys: Mapping[str, str]) -> None:
    """A command's docstring, and its keys with what they mean, if the docstring does not say."""
    print(text)
    if not keys:
        return
    width = max(map(len, keys)) + 3
    print("\n".join(f"  {name + '=':<{width}}{meaning}" for name, meaning in keys.items()))


def helped(words: Sequence[str], text: str | None, keys: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Whether help was asked for; then it was printed, and that is all of the command."""
    if asks_for_help(words):
        print_help(text, keys)
        return True
    return False


def refuse(error: Exception) -> int:
    """Say what is wrong with a command line; its exit code."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def own_words(words: Sequence[str], keys: Container[str]) -> tuple[dict[str, str], list[str]]:
    """(text by key of the key=value words with these keys, the other words). Of a key given twice the last counts."""
    own: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name in keys:
            own[name] = text
        else:
            rest.append(word)
    return own, rest


def check_rest(words: Sequence[str], keys: Iterable[str]) -> None:
    """ValueError for a key=value word of a key that neither the command has (`keys`) nor launch.generate, whose words
    these are; it names the nearest of both. Values of flags are not looked at."""
    for flag_before, word in zip(["", *words], words):
        name, equals, _ = word.partition("=")
        if equals and not word.startswith("-") and not (flag_before.startswith("--") and "=" not in flag_before):
            check_name(name, also=keys)


def unknown_word(word: str, keys: Iterable[str], of: str) -> ValueError:
    """Of a command that has no other keys."""
    guess = difflib.get_close_matches(word.partition("=")[0], keys, n=1)
    way_out = f"did you mean {guess[0]}=?" if guess else f"the keys are {', '.join(keys)}."
    return ValueError(f"{word} is no key of {of}; {way_out}")


def split_list(text: str) -> tuple[str, ...]:
    """Parts between commas; empty ones do not count."""
    return tuple(part for part in text.split(",") if part)


def positive(name: str, text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text} is no whole number above 0.")
    return int(text)


def positives(own: Mapping[str, str], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Several of them, with commas."""
    return tuple(positive(name, text) for text in split_list(own[name])) if name in own else default


def number_above_zero(own: Mapping[str, str], name: str, kind: Callable[[str], Any], default: Any) -> Any:
    """An int or a float, as `kind` reads it."""
    if name not in own:
        return default
    try:
        value = kind(own[name])
    except ValueError:
        value = 0
    if not value > 0:
        raise ValueError(f"{name}={own[name]} must be a number above 0.")
    return value


def flag(own: Mapping[str, str], name: str, default: bool) -> bool:
    """true or false."""
    text = own.get(name, str(default).lower())
    if text not in ("true", "false"):
        raise ValueError(f"{name}={text} must be true or false.")
    return text == "true"


def output_file(own: Mapping[str, str], name: str) -> Path | None:
    """A file to be written; checked before the measuring, not after it."""
    return file_to_write(name, own[name]) if name in own else None
