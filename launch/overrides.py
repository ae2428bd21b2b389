"""Arguments of the form key=value: read by Hydra's grammar, checked against the schema, and corrected in words.

Ordinary paths and texts break that grammar (`=`, `#`, brackets, commas, non-ASCII letters), and the shell removes the
quotes that would save them. So a refused argument comes back as the exact text to type, with both layers of quotes.
Knows keys and types; knows nothing of files, models or presets' contents.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import Config, Key, known_keys

KEYS = {key.name: key for key in known_keys()}
GROUPS = sorted({name.rsplit(".", 1)[0] for name in KEYS if "." in name})
PRESET = "preset"
# Flags that hand a value over untouched, by the key they set.
FLAG_OF_KEY = {"model": "--model", "input": "--input", "output": "--output", "sampling.stop": "--stop"}


def check_argument(argument: str) -> str:
    """The argument, ready for Hydra; ValueError with the way out where the grammar, the key or the type refuses it.

    A text key takes a value that looks like a number as the text it is: `model=1e3` is a folder called 1e3.
    """
    name, equals, raw = argument.partition("=")
    if not equals:
        raise ValueError(f"argument {argument!r} is no key=value; --help lists keys and flags.")
    if not _is_text(argument):  # Python's stand-ins for such bytes, which Hydra would show with a trace
        untouched = f"{FLAG_OF_KEY[name]} NAME" if name in FLAG_OF_KEY else f"--set {name}=NAME"
        raise ValueError(
            f"argument {argument!r} has bytes that are no UTF-8; rename the file, or hand its name over untouched: "
            f"{untouched}."
        )
    if name.startswith(("+", "~")) or "@" in name:
        raise ValueError(f"argument {argument!r}: keys cannot be added or removed; write {name.lstrip('+~')}=VALUE.")
    known = check_name(name)
    override = _parse(argument, name, raw)
    if name == PRESET:
        return argument
    value = override.value()
    if known is None:  # a whole group: {temperature:0,n:2}
        if not isinstance(value, Mapping):
            raise ValueError(f"{argument}: {name} is a group of keys; set one of them, as {name}.KEY=VALUE.")
        for inner, inner_value in flatten(value, name):
            check_value(inner, inner_value)
        return argument
    if known.base == "str" and isinstance(value, int | float):
        return f"{name}={quote(raw)}"
    if known.base.startswith("list") and not isinstance(value, list) and value is not None:
        raise ValueError(_correction(argument, name, raw, f"{name} takes {known.words}"))
    check_value(name, value)
    return argument


def check_name(name: str, where: str = "", also: Iterable[str] = ()) -> Key | None:
    """The key of that name, None for a group or `preset`; ValueError that names the nearest known key. `also`: keys
    beside these that it may have been meant for."""
    if name in KEYS:
        return KEYS[name]
    if name in GROUPS or name == PRESET:
        return None
    raise ValueError(f"unknown key {name!r}{where}; {_nearest(name, also)}")


def check_value(name: str, value: object, where: str = "") -> None:
    """Raise ValueError where `value` cannot be held by the key, naming key, value and the type expected."""
    key = check_name(name, where)
    if key is None:
        raise ValueError(f"{name}={value!r}{where}: {name} is a group of keys; set one of them, as {name}.KEY.")
    scratch = OmegaConf.structured(Config)
    try:
        if isinstance(value, bool) and key.base in {"int", "float"}:
            raise TypeError("a truth value is no number")
        OmegaConf.update(scratch, name, value)
        OmegaConf.select(scratch, name)  # resolves ${...}
    except (OmegaConfBaseException, TypeError) as error:
        if isinstance(value, str) and "${" in value:
            raise ValueError(f"{name}={value!r}{where}: {str(error).splitlines()[0]}") from error
        raise ValueError(f"{name}={value!r}{where} is no value for this key; it takes {key.words}.") from error


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings. A mapping below something that is no group comes out as a value."""
    for name, value in tree.items():
        dotted = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and dotted in GROUPS:
            yield from flatten(value, dotted)
        else:
            yield dotted, value


def set_raw(config: Any, name: str, raw: str) -> None:
    """Set a key from text that no grammar reads: a text key takes it whole, a list gets it as one more entry."""
    key = check_name(name, " in --set")
    if key is None:
        raise ValueError(f"--set {name}={raw}: {name} is no single key; --help lists them.")
    if key.base.startswith("list"):
        entry: object = literal(raw)
        if key.base == "list[int]":
            check_value(name, [raw], " in --set")
            entry = int(raw)
        OmegaConf.update(config, name, [*OmegaConf.select(config, name), entry])
        return
    value = None if raw == "null" and key.nullable and key.base != "str" else literal(raw)
    check_value(name, value, " in --set")
    OmegaConf.update(config, name, value)


def quote(text: str) -> str:
    """`text` as one quoted value of Hydra's grammar, which reads back as the same text."""
    return QuotedString(text=literal(text), quote=Quote.double).with_quotes()


def literal(text: str) -> str:
    """`text` with every `${` escaped, which would otherwise be filled in with another key's value."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(argument: str, name: str, raw: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise ValueError(
            _correction(argument, name, raw, "the value has characters with a meaning of their own")
        ) from error
    if override.is_sweep_override():
        raise ValueError(_correction(argument, name, raw, "a comma or a range asks for several runs; there is one job"))
    return override


def _correction(argument: str, name: str, raw: str, why: str) -> str:
    """What was wrong, and the argument to type instead, as the shell takes it."""
    key = KEYS.get(name)
    text = f"cannot read {argument}: {why}."
    if key is not None and key.base.startswith("list"):
        items = _items(raw)
        fixed = f"{name}=[{','.join(quote(item) if key.base == 'list[str]' else item for item in items)}]"
    else:
        items, fixed = [raw], f"{name}={quote(raw)}"
    if _reads_back(fixed, items, is_list=bool(key and key.base.startswith("list"))):
        text += f" Write:\n  {shlex.quote(fixed)}\n(the outer quotes are the shell's, the inner ones Hydra's)"
        text += ", or hand it over untouched:"
    else:
        text += " Hand it over untouched:"
    flag = FLAG_OF_KEY.get(name)
    untouched = [f"{flag} {shlex.quote(item)}" if flag else f"--set {shlex.quote(f'{name}={item}')}" for item in items]
    return f"{text}\n  {' '.join(untouched)}"


def _reads_back(fixed: str, items: list[str], *, is_list: bool) -> bool:
    """Whether the proposed argument means what was typed: nothing is proposed that does not work."""
    try:
        value = OverridesParser.create().parse_override(fixed).value()
    except HydraException:
        return False
    values = value if is_list else [value]
    if not isinstance(values, list):
        return False
    read = OmegaConf.create(values)  # fills in ${...}, as the composed config would
    return [str(item) for item in read] == items


def _items(raw: str) -> list[str]:
    """The entries of a list as typed, with or without brackets and quotes."""
    inner = raw[1:-1] if raw.startswith("[") and raw.endswith("]") else raw
    return [item.strip().strip("'\"") for item in inner.split(",")]


def _nearest(name: str, also: Iterable[str]) -> str:
    """The known key most like `name`; a bare last part finds its group, as `temperature` does."""
    last = {key.rsplit(".", 1)[-1]: key for key in reversed(KEYS)}
    candidates = [*also, *KEYS, *GROUPS, PRESET]
    if found := difflib.get_close_matches(name, candidates, n=1, cutoff=0.6):
        return f"did you mean {found[0]!r}?"
    if found := difflib.get_close_matches(name.rsplit(".", 1)[-1], list(last), n=1, cutoff=0.6):
        return f"did you mean {last[found[0]]!r}?"
    return "--help lists the known ones."
