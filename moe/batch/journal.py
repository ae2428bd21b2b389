"""The journal of a run: each finished record as one checked line, in whatever order lines finish. Format and reader.

    f05dc0de 17 0a1b2c3d - {"id": "a", ...}        of an answered line; parts are divided by tabs
    |        |  |        |  the record, as it stands in the output
    |        |  |        "-", or the kind of an error record
    |        |  digest of the line, so that an answer is never taken for that of another line
    |        number of the line
    crc-32 of all that follows

The first line has number 0 and the kind "header": it says whose run this is. A run of a rank writes one file and no
later run appends to it. So what a crash leaves is a torn or damaged end, and reading drops just that. Knows bytes and
checksums; knows nothing of what a record means. `journal_writer.py` writes it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

FORMAT = 2  # 1: digests of lines were made otherwise
ANSWERED = "-"
HEADER_KIND = "header"
MAX_NUMBER = 1 << 48
OPEN_JOURNALS = 64


class JournalError(ValueError):
    """A journal that cannot be used, with the way out."""


@dataclass(frozen=True)
class Header:
    """Whose journal: run (1 for the first of a job) and rank that wrote it, and what its answers follow from."""

    run: int
    rank: int
    fingerprint: dict[str, str]


Place = tuple[int, int, int, int]
"""Number of a line; where its record's line is: in which journal, from which byte on, how many bytes."""


class Entry(msgspec.Struct, frozen=True, gc=False):  # made for each line of a job
    """One whole record of a journal. `offset`, `size`: of its line in the file."""

    number: int
    digest: int
    kind: str
    record: bytes  # with its line end, as in the output
    offset: int
    size: int

    @property
    def failed(self) -> bool:
        return self.kind != ANSWERED


def frame(number: int, digest: int, kind: str, record: bytes) -> bytes:
    """The journal's line of a record, which ends with the only 0x0A it holds.

    >>> frame(17, 10, ANSWERED, b'{}\\n')
    b'f4eac29f\\t17\\t0000000a\\t-\\t{}\\n'
    """
    content = b"%d\t%08x\t%s\t%s" % (number, digest, kind.encode(), record)
    return b"%08x\t%s" % (zlib.crc32(content[:-1]), content)


def header_frame(header: Header) -> bytes:
    """The first line of a journal."""
    content = {"journal": FORMAT, **asdict(header)}
    return frame(0, 0, HEADER_KIND, json.dumps(content).encode() + b"\n")


def parse_frame(raw: bytes, offset: int = 0) -> Entry | None:
    """A line of a journal, with or without its end; None where it is not whole."""
    try:
        _, number, digest, kind, record = _parts(raw)
        entry = Entry(int(number), int(digest, 16), kind.decode(), record, offset, len(raw))
    except ValueError:
        return None
    return entry if 0 <= entry.number < MAX_NUMBER and 0 <= entry.digest < 1 << 32 else None


def _parts(raw: bytes) -> list[bytes]:
    """The five parts of a line of a journal, the last with its end. ValueError where the checksum is not theirs."""
    if not raw.endswith(b"\n"):
        raw += b"\n"
    parts = raw.split(b"\t", 4)
    if len(parts) != 5 or len(parts[0]) != 8 or int(parts[0], 16) != zlib.crc32(raw[9:-1]):
        raise ValueError("torn or damaged")
    return parts


class JournalReader:
    """The records of one journal. `damaged` counts, once they are read, the lines that are not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0

    def header(self) -> Header | None:
        """Whose journal it is; None for one that was killed before it held anything. JournalError: not one of ours, or
        not to be read."""
        try:
            with self.path.open("rb") as file:
                raw = file.readline()
            if not raw.endswith(b"\n"):
                return None
            entry = parse_frame(raw)
            if entry is None or entry.kind != HEADER_KIND:
                raise ValueError("its first line is damaged")
            content = json.loads(entry.record)
            if not isinstance(content, dict) or content.pop("journal", None) != FORMAT:
                raise ValueError(f"this version reads and writes format {FORMAT} alone")
            return Header(**content)
        except (ValueError, TypeError, RecursionError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise JournalError(
                f"{self.path} is no journal that can be used: {reason}; move it away, or give job.overwrite=true "
                "job.resume=never to drop what unfinished runs left."
            ) from error

    def __iter__(self) -> Iterator[Entry]:
        """Every whole record, in the order of the file. What is not whole is left out, wherever it stands."""
        self.damaged = 0
        with self.path.open("rb", buffering=1 << 18) as file:
            yield from self._entries(file)

    def _entries(self, file: BinaryIO) -> Iterator[Entry]:
        offset = 0
        for raw in file:
            entry = parse_frame(raw, offset)
            offset += len(raw)
            if entry is None:
                self.damaged += 1
            elif entry.number > 0:
                yield entry


class RecordReader:
    """Reads records at places (index of a journal, offset in it), holding a bounded number of journals open."""

    def __init__(self, journals: Sequence[Path]) -> None:
        self._journals = journals
        self._open: dict[int, int] = {}

    def at(self, places: Iterable[Place]) -> Iterator[tuple[int, bytes]]:
        """(number, record) at these places, in the same order. Each is read by itself: neighbours in the output lie
        apart where lines finish in another order than theirs."""
        for number, index, offset, size in places:
            if (file := self._open.get(index)) is None:
                file = self._opened(index)
            try:
                record = _parts(os.pread(file, size, offset))[4]
            except ValueError as error:
                raise AssertionError(f"{self._journals[index]} changed at byte {offset} while it was read") from error
            yield number, record

    def _opened(self, index: int) -> int:
        if len(self._open) >= OPEN_JOURNALS:
            os.close(self._open.pop(next(iter(self._open))))
        file = self._open[index] = os.open(self._journals[index], os.O_RDONLY | os.O_CLOEXEC)
        return file

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            os.close(file)
