"""Where a job's lines come from: files, patterns of names, folders of datasets, or standard input, read as one.

Knows names and formats; knows nothing of what a record means or of engines. All that can be told without reading
everything is told by `open`, before any model; what is read holds a few lines at a time.

    input=prompts.jsonl                  JSONL, also packed as gzip or zstd; Parquet; a folder of a saved dataset
    input='parts/*.jsonl.gz'             a pattern: all that match, by name
    job.more_input=[b.jsonl,'c/*.zst']   further ones, after the first
    input=-                              standard input
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from configs.schema import Config
from moe.batch.lines import BadLine, InputFault, Line, LineReader
from moe.batch.openai import LINE_FIELDS
from moe.batch.order import in_job_order
from moe.batch.plain import PLAIN_FIELDS
from moe.batch.streams import PARQUET, DamagedStream, unpacked
from moe.batch.tables import Table, open_dataset, open_parquet

DEMO_PROMPTS = Path(__file__).resolve().parent.parent / "demo" / "prompts.jsonl"
STANDARD_INPUT = "-"
SHOWN_NAMES = 5
# For the fingerprint, of a file that is larger: so many pieces of it, evenly spread, ends included.
WHOLE_BYTES, NUM_PIECES, PIECE_BYTES = 64 << 20, 64, 64 << 10


@dataclass(frozen=True)
class _Input:
    """One file, or a dataset's folder; `path` None is standard input. `table` None: lines of JSON."""

    path: Path | None
    table: Table | None = None

    @property
    def name(self) -> str:
        return "standard input" if self.path is None else str(self.path)


@dataclass
class _Counter:
    """Lines of an input that were read, blank ones included."""

    number: int = 0


class Source:
    """All inputs of a job, opened and closed as they are read."""

    def __init__(self, inputs: tuple[_Input, ...], columns: Mapping[str, str] | None) -> None:
        self._inputs = inputs
        self._columns = columns  # field of a record -> column; None: the fields themselves
        self._stdin_used = False

    @classmethod
    def open(cls, config: Config) -> Source:
        """Find and check what `config` names. ValueError: which input, what is wrong with it, the way out."""
        columns = column_mapping(config.job.columns)
        if config.input == STANDARD_INPUT:
            if sys.stdin is None:  # as Python says that the process was given none
                raise ValueError("input=- is standard input, which is closed; pipe lines into it, or give a file.")
            return cls((_Input(None),), columns)
        if config.input is None:
            return cls((_Input(DEMO_PROMPTS),), columns)
        named = [("input", config.input), *(("job.more_input", name) for name in config.job.more_input)]
        inputs: list[_Input] = []
        seen: dict[str, str] = {}
        for key, name in named:
            for path in _matching(key, name):
                real = os.path.realpath(path)
                if real in seen:
                    raise ValueError(f"{key}={name} names {path}, which {seen[real]} names already; leave one out.")
                seen[real] = f"{key}={name}"
                try:
                    inputs.append(_checked(path, columns))
                except ValueError as error:
                    raise ValueError(f"{key}={path} {error}") from error
        return cls(tuple(inputs), columns)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files and folders in the order in which they are read; none of standard input."""
        return tuple(each.path for each in self._inputs if each.path is not None)

    @property
    def rereadable(self) -> bool:
        """Whether `lines` can be called again. Standard input is read once, by one rank."""
        return all(each.path is not None for each in self._inputs)

    @property
    def name(self) -> str:
        """For messages: the one input, or the first and how many more."""
        more = len(self._inputs) - 1
        return self._inputs[0].name + (f" and {more} more" if more else "")

    def lines(self, limit: int | None = None) -> Iterator[Line | BadLine]:
        """Every record in the order of the inputs, at most `limit`. InputFault where one turns out to be damaged."""
        number = given = 0  # lines before this input; records so far
        for each in self._inputs:
            before, counter = given, _Counter()
            try:
                left = None if limit is None else limit - given
                for line in self._numbered(each, left, counter):
                    if len(self._inputs) > 1:
                        line.origin = f"{each.name}:{line.number}"
                        line.number += number
                    given += 1
                    yield line
            except (InputFault, DamagedStream, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                rest = f", or answer the {given} records up to there alone with job.limit={given}" if given else ""
                raise InputFault(
                    f"{each.name} cannot be read on: {reason.rstrip('.')}, after {given - before} records of it; "
                    f"fetch or write it again{rest}."
                ) from error
            if limit is not None and given >= limit:
                return
            number += counter.number

    def identity(self) -> dict[str, str]:
        """What tells one input from another, for a job's fingerprint: names without folders, sizes, contents.

        Of a file beyond WHOLE_BYTES some pieces are looked at, so a change of a few bytes that keeps its size may
        stay unseen. Nothing is known of standard input.
        """
        found: dict[str, str] = {}
        share = max(1, NUM_PIECES * 4 // max(1, len(self._inputs)))
        for index, each in enumerate(self._inputs):
            if each.path is None:
                found[f"input.{index}"] = each.name
                continue
            files = sorted(each.path.iterdir()) if each.path.is_dir() else [each.path]
            size = sum(file.stat().st_size for file in files)
            content = hashlib.blake2b(digest_size=16)
            for file in files:
                content.update(file.name.encode("utf-8", "surrogateescape") + b"\0")
                _add_content(content, file, min(NUM_PIECES, share))
            found[f"input.{index}"] = f"{each.path.name}, {size} bytes, {content.hexdigest()}"
        return found

    def _numbered(self, each: _Input, limit: int | None, counter: _Counter) -> Iterator[Line | BadLine]:
        """Lines of one input, numbered from 1, and the number of the last one read, blank ones included."""
        if each.table is not None:
            wanted = self._columns or {name: name for name in each.table.columns}
            for line in islice(each.table.rows(wanted), limit):
                counter.number = line.number
                yield line
            return
        with self._opened(each) as file:
            reader = LineReader(file, limit)
            columns = self._columns
            yield from reader if columns is None else (_renamed(line, columns) for line in reader)
            counter.number = reader.number

    @contextmanager
    def _opened(self, each: _Input) -> Iterator[BinaryIO]:
        if each.path is not None:
            with each.path.open("rb") as file:
                yield unpacked(file)
            return
        if self._stdin_used:
            raise InputFault("it was read once and is gone")
        self._stdin_used = True
        try:
            # typed as any stream of bytes, but a BufferedReader
            stream = unpacked(sys.stdin.buffer)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise InputFault(f"it {error}") from error
        yield stream


def job_lines(config: Config, source: Source) -> Iterator[Line | BadLine]:
    """The lines of a job in the order in which they are answered: job.limit, job.order and job.look_ahead applied.

    The same sequence on every rank, and again when the job is resumed.
    """
    job = config.job
    return in_job_order(
        source.lines(job.limit),
        order=resolve_order(config, source),
        window=job.look_ahead,
        window_bytes=int(job.look_ahead_mb * 2**20),
    )


def resolve_order(config: Config, source: Source) -> str:
    """auto: by prefix, where beginnings are cached and all lines are there to be looked at."""
    if config.job.order != "auto":
        return config.job.order
    return "prefix" if config.cache.prefix_caching and source.rereadable else "file"


def column_mapping(entries: list[str]) -> dict[str, str] | None:
    """job.columns as field -> column; None where it is empty. ValueError for an entry without a field or a column."""
    mapping: dict[str, str] = {}
    for entry in entries:
        field, colon, column = entry.partition(":")
        if not field or (colon and not column):
            raise ValueError(f"job.columns has {entry!r}; write FIELD:COLUMN, or FIELD where both have one name.")
        if field in mapping:
            raise ValueError(f"job.columns sets {field!r} twice; leave one out.")
        mapping[field] = column or field
    return mapping or None


def _matching(key: str, name: str) -> list[Path]:
    """The file of that name, or all that match it as a pattern, by name."""
    # Not Path's methods: they raise where the system refuses the very question (a name too long, a closed folder).
    if os.path.lexists(name) or not glob.has_magic(name):
        return [Path(name)]
    matches = sorted(glob.glob(name, recursive=True))
    if not matches:
        raise ValueError(f"{key}={name} matches no file; check the pattern (variables are not filled in).")
    return [Path(match) for match in matches]


def _checked(path: Path, columns: Mapping[str, str] | None) -> _Input:
    """The input at `path`; ValueError, without its name, where it cannot be read."""
    if os.path.isdir(path):
        table = open_dataset(path)
    else:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("is a pipe or a device, but it may be read twice; give a file, or pipe it into input=-.")
        try:
            with path.open("rb") as file:
                is_parquet = file.peek(len(PARQUET)).startswith(PARQUET)
                if not is_parquet:
                    _check_beginning(path, file)
        except FileNotFoundError:
            raise ValueError("does not exist; give a file of prompts.") from None
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}; give a file of prompts.") from error
        if not is_parquet:
            return _Input(path)
        table = open_parquet(path)
    _check_columns(table, columns or {name: name for name in table.columns})
    return _Input(path, table)


def _check_beginning(path: Path, file: Any) -> None:
    if path.suffix == ".parquet":
        raise ValueError("is no Parquet file (it does not begin with PAR1); was it written or fetched whole?")
    try:
        unpacked(file).read(1)
    except DamagedStream as error:
        raise ValueError(f"cannot be read: {error}; fetch or write it again.") from error


def _check_columns(table: Table, wanted: Mapping[str, str]) -> None:
    """Every column that is asked for is there and holds what JSON can; its field is one that a line has."""
    names = list(table.columns)
    shown = ", ".join(names[:SHOWN_NAMES]) + (f" and {len(names) - SHOWN_NAMES} more" if names[SHOWN_NAMES:] else "")
    for field, column in wanted.items():
        if column not in table.columns:
            raise ValueError(f"has no column {column!r}, which job.columns names; it has {shown}.")
        if field not in PLAIN_FIELDS | LINE_FIELDS:
            raise ValueError(
                f"has a column {column!r}, and {field!r} is no field of a line; name the columns to be read, as in "
                f"'job.columns=[prompt:{column}]' (field:column). It has {shown}."
            )
        if (wrong := table.columns[column]) is not None:
            raise ValueError(f"has {wrong} in column {column!r}, which no line holds; name others in job.columns.")


def _renamed(line: Line | BadLine, columns: Mapping[str, str]) -> Line | BadLine:
    """The line with the fields that job.columns makes of its record."""
    record = line.record
    if record is not None:
        line.record = {field: record[column] for field, column in columns.items() if column in record}
    if isinstance(line, Line):
        line.checksum = None  # of what it held before
    return line


def _add_content(content: Any, file: Path, num_pieces: int) -> None:
    """Add the file's bytes, or pieces of them, to a hash."""
    size = file.stat().st_size
    content.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES and num_pieces == NUM_PIECES:
            while block := stream.read(1 << 20):
                content.update(block)
            return
        for piece in range(num_pieces + 1):
            stream.seek(max(0, size - PIECE_BYTES) * piece // num_pieces)
            content.update(stream.read(PIECE_BYTES))
