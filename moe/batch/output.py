"""Puts the output together from the journals: one record per line of the input, in its order. In bounded memory.

Knows journals, places of records and files; knows nothing of what a record means. Each file is written beside its final
name, synced, and moved into place when all of them are whole (run_files.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

from moe.batch.journal import RecordReader
from moe.batch.ledger import Ledger
from moe.batch.parquet_output import ParquetOutput
from moe.batch.run_files import RunFiles


class OutputWriter(Protocol):
    """One file of the output being written."""

    def write(self, number: int, record: bytes) -> None:
        """The record of the line with that number."""
        ...

    def close(self) -> None: ...


class LineOutput:
    """JSONL: the records as they are."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1 << 20)

    def write(self, number: int, record: bytes) -> None:
        self._file.write(record)

    def close(self) -> None:
        """Write the rest and sync it; the file is closed even where that fails."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def is_parquet(output: Path) -> bool:
    """Whether the output's name asks for Parquet."""
    return output.suffix.lower() == ".parquet"


def put_together(files: RunFiles, fingerprint: dict[str, str], seen: Ledger) -> int:
    """Write and place the output of the lines that `seen` has met in the input; the journals go. Returns how many of
    its records are errors. OSError: the disk said no; the journals are intact. ValueError: a journal is out of sight.
    """
    journals = [journal.path for journal in files.journals()]
    whole = Ledger()
    whole.read(journals)
    places = whole.places(seen)
    num_records = 0
    shards = len(files.finals)
    with RecordReader(journals) as reader:
        for index, final in enumerate(files.finals):
            size = seen.seen * (index + 1) // shards - seen.seen * index // shards
            try:
                num_records += _write(_writer_of(files, final), reader.at(islice(places, size)))
            except OSError as error:
                with contextlib.suppress(OSError, ValueError):
                    files.drop_partials()  # all can be made again, and others may need the space
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                reason = "the disk is full" if is_full else error.strerror or str(error)
                raise OSError(
                    error.errno,
                    f"{reason} while the output is put together from journals, which stay"
                    + ("; free some space" if is_full else ""),
                    str(final),
                ) from error
    if num_records != seen.seen:
        raise ValueError(
            f"output={files.output}: {num_records:,} records of {seen.seen:,} lines can be seen here; all ranks need "
            "one folder that shows at once what another rank writes."
        )
    failed = whole.failed_of(seen)
    files.publish(fingerprint, lines=num_records, failed=failed)
    return failed


def _writer_of(files: RunFiles, final: Path) -> OutputWriter:
    """Of the form that the user's own name asks for, whatever it is a link to."""
    path = files.partial_of(final)
    return ParquetOutput(path) if is_parquet(files.output) else LineOutput(path)


def _write(writer: OutputWriter, records: Iterable[tuple[int, bytes]]) -> int:
    count = 0
    try:
        for number, record in records:
            writer.write(number, record)
            count += 1
    finally:
        writer.close()
    return count
