"""Read JSONL as bytes: records end at 0x0A and nowhere else. One bad line is one BadLine, never the end of the file.

Knows bytes, UTF-8 and JSON; knows nothing of what a record means. Memory holds one line at a time.

Nearly every line is without a fault, and msgspec reads such a one several times as fast as the standard library. So it
reads all, and a line that it refuses, or of which it does not tell enough, is read again with the library's decoder,
whose hooks name the fault: that one is the definition, and both give equal records.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

# A longer line is an error record: a file without line ends must not be read into memory as one record.
MAX_LINE_BYTES = 64 << 20
# Deeper objects and lists are refused: what walks or writes a record later is recursive and would fail at some depth.
MAX_NESTING = 100
BOM = b"\xef\xbb\xbf"
# Legal inside a JSON string, but other readers split lines there; and halves of surrogate pairs, which UTF-8 lacks.
_ESCAPED = re.compile("[\x7f\x85\u2028\u2029\ud800-\udfff]")
_ESCAPED_BYTES = ("\x85".encode(), "\u2028".encode(), "\u2029".encode())
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_COLON, _COMMA, _LIST, _OBJECT, _BACKSLASH, _DELETE = b":,[{\\\x7f"  # as numbers, for which bytes are searched fastest
_DECODE = msgspec.json.Decoder().decode
_ENCODE = msgspec.json.Encoder().encode
# For a text that is no UTF-8, in the same form.
_ENCODER_OF_HALVES = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# What an entry of a list or an object takes in memory beside its bytes in the file: a pointer and an object's head.
ENTRY_BYTES = 40


class InputFault(ValueError):
    """The input is damaged, so that nothing behind the lines read so far can be read. The text names file and place."""


@dataclass(slots=True)  # frozen ones take three times as long to make
class Line:
    """A JSON object and the number of its line, counted from 1 over all files of a job, blank lines included.

    `origin`: "file:line", where the job has several files. `num_bytes`: about what the record takes in memory.
    `checksum`: of the record as content_of writes it, where the reader had that at hand.
    """

    number: int
    record: dict[str, Any]
    origin: str | None = None
    num_bytes: int = field(default=0, compare=False)
    checksum: int | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class BadLine:
    """A line that holds no usable object, and why. `record`: what could be read of it all the same, for its id."""

    number: int
    reason: str
    record: dict[str, Any] | None = None
    origin: str | None = None
    num_bytes: int = field(default=0, compare=False)


class LineReader:
    """Every record of a file in order, blank lines left out; at most `limit` of them.

    A byte-order mark before the first line and a carriage return before 0x0A are accepted. `number`: of the last line
    read, blank ones included.
    """

    def __init__(self, file: BinaryIO, limit: int | None = None) -> None:
        self.number = 0
        self._file = file
        self._limit = limit
        self._parser = LineParser()

    def __iter__(self) -> Iterator[Line | BadLine]:
        given, read = 0, self._file.readline
        while (self._limit is None or given < self._limit) and (raw := read(MAX_LINE_BYTES + 1)):
            self.number += 1
            if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                while (rest := read(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                given += 1
                yield BadLine(self.number, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                continue
            if self.number == 1:
                raw = raw.removeprefix(BOM)
            if raw and not raw.isspace():
                given += 1
                yield self._parser.parse(self.number, raw.removesuffix(b"\n").removesuffix(b"\r"))


def read_lines(file: BinaryIO, limit: int | None = None) -> Iterator[Line | BadLine]:
    """The records of a LineReader, for who needs no numbers of blank lines at the end."""
    return iter(LineReader(file, limit))


class LineParser:
    """Turns lines without their ends into records. Strict JSON: NaN and Infinity are no numbers, a key stands once."""

    def __init__(self) -> None:
        self._faults: list[str] = []
        # Kept for all lines: making one takes longer than reading a short line.
        decoder = json.JSONDecoder(
            parse_constant=self._no_constant,
            parse_float=self._finite,
            parse_int=self._whole,
            object_pairs_hook=self._no_twins,
        )
        self._scan, self._decode = decoder.raw_decode, decoder.decode

    def parse(self, number: int, raw: bytes) -> Line | BadLine:
        """One line; what is wrong with it is the reason of a BadLine."""
        try:
            record = _DECODE(raw)
            again = _ENCODE(record)
        except (msgspec.DecodeError, RecursionError):
            return self.parse_strictly(number, raw)
        # Of a key that stands twice the decoder keeps the last. Then the record, written again, has fewer colons than
        # the line: those outside of texts follow keys, and those in texts are the same, unless one was escaped (003a).
        if raw != again and (raw.count(_COLON) != again.count(_COLON) or (_BACKSLASH in raw and b"\\u003" in raw)):
            return self.parse_strictly(number, raw)
        if type(record) is not dict or _is_deep(raw, record):
            return self.parse_strictly(number, raw)
        return Line(number, record, None, _num_bytes(raw, record), zlib.crc32(again))

    def parse_strictly(self, number: int, raw: bytes) -> Line | BadLine:
        """The same with hooks for all that can be wrong: the definition, and several times as slow."""
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return BadLine(number, f"byte {error.start + 1} is not UTF-8: {error.reason}")
        try:
            record = self._read(text)
        except json.JSONDecodeError as error:
            return BadLine(number, f"not JSON: {error.msg} at column {error.colno}")
        except ValueError as error:
            return BadLine(number, str(error))
        except RecursionError:
            return BadLine(number, "not usable JSON: nested too deeply")
        if not isinstance(record, dict):
            if self._faults:  # what stands for it is not what the line says
                return BadLine(number, self._faults[0])
            return BadLine(number, f"a JSON object is needed, this is {_kind(record)}")
        if _is_deep(raw, record):
            return BadLine(number, f"nested too deeply: more than {MAX_NESTING} lists and objects in each other")
        num_bytes = _num_bytes(raw, record)
        if self._faults:
            return BadLine(number, self._faults[0], record, None, num_bytes)
        if "\\u" in text and _HALF_PAIR.search(json.dumps(record, ensure_ascii=False)):
            half = r"a text holds half of a surrogate pair (\ud800 to \udfff alone), which is no character"
            return BadLine(number, half)
        return Line(number, record, None, num_bytes)

    def _read(self, text: str) -> Any:
        self._faults.clear()
        try:
            value, end = self._scan(text)
            if end == len(text):
                return value
        except json.JSONDecodeError:
            pass  # white space around the object, or a fault, which the slower way names
        self._faults.clear()
        return self._decode(text)

    def _no_constant(self, name: str) -> None:
        self._faults.append(f"not JSON: {name} is no number")

    def _finite(self, text: str) -> float | None:
        value = float(text)
        if abs(value) != math.inf:
            return value
        self._faults.append("a number is too large: beyond 1.8e308")  # as an id it could not be written back
        return None

    def _whole(self, text: str) -> int | None:
        try:
            return int(text)
        except ValueError:  # Python's own limit, which its message would have the reader of a record lift
            self._faults.append(f"a number is too large: {len(text):,} digits")
            return None

    def _no_twins(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            self._faults.append(f"key {twice!r} stands twice in one object")
        return record


def dump_line(record: dict[str, Any]) -> bytes:
    """The record as one line with its end. Reads back equal, here and where lines are split at other characters too."""
    content = content_of(record)
    if _DELETE in content or (not content.isascii() and any(escaped in content for escaped in _ESCAPED_BYTES)):
        content = _escaped(content.decode("utf-8"))
    return content + b"\n"


def content_of(value: Any) -> bytes:
    """A value as JSON without spaces, keys in its own order: equal bytes for equal values alone."""
    try:
        return _ENCODE(value)
    except UnicodeEncodeError:  # half of a surrogate pair, in the id of a line that could not be read
        return _escaped(_ENCODER_OF_HALVES.encode(value))


def _escaped(text: str) -> bytes:
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode("utf-8")


def _num_bytes(raw: bytes, record: dict[str, Any]) -> int:
    """About what a record takes in memory: each entry of a list, as of token ids, an object of its own."""
    return len(raw) + ENTRY_BYTES * (raw.count(_COMMA) if _LIST in raw else len(record))


def _is_deep(raw: bytes, record: dict[str, Any]) -> bool:
    """Whether lists and objects lie in each other beyond MAX_NESTING; level by level, so that no depth is too much."""
    if _LIST not in raw and raw.find(_OBJECT, 1) < 0:
        return False  # as most lines are; counting takes as long as decoding
    if raw.count(_LIST) + raw.count(_OBJECT) <= MAX_NESTING:
        return False
    level: list[Any] = [record]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds[type(value)]
