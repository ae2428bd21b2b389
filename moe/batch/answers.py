"""The output file: proved writable before any model loads, one flushed record at a time, never another file's end.

Knows paths and bytes; knows nothing of what a record means.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO


class AnswerFile:
    """An open output file. One that `open` made and `begin` never emptied is removed again by `close`."""

    def __init__(self, path: Path, file: BinaryIO, *, is_new: bool) -> None:
        self.path = path
        self.num_records = 0
        self._file = file
        self._is_new = is_new
        self._begun = False

    @classmethod
    def open(cls, path: Path, *, overwrite: bool) -> AnswerFile:
        """Open for writing, old content untouched until `begin`. ValueError where that cannot work."""
        is_new = not os.path.exists(path)  # Path's own method raises where a name is too long
        if not is_new and not overwrite and path.stat().st_size > 0:
            raise ValueError(f"output={path} exists; give another name, or job.overwrite=true to replace it.")
        try:
            file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            reason = error.strerror or str(error)
            hint = f"; make the folder {path.parent} first" if isinstance(error, FileNotFoundError) else ""
            raise ValueError(f"output={path} cannot be written: {reason}{hint}.") from error
        return cls(path, file, is_new=is_new)

    def begin(self) -> None:
        """Drop what the file held before: from here on it belongs to this run."""
        self._begun = True
        if self.path.is_file():
            self._file.truncate(0)

    def append(self, record: bytes) -> None:
        """Write one whole record through to the operating system. OSError names the file and what is safe."""
        assert self._begun, "a record before begin() would stand behind another run's"
        try:
            view = memoryview(record)
            while view:  # unbuffered writes may be short
                view = view[self._file.write(view) :]
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            raise OSError(
                error.errno,
                f"{reason}; the first {self.num_records} records are whole, free some space",
                str(self.path),
            ) from error
        self.num_records += 1

    def close(self) -> None:
        """Close; closing twice is fine."""
        if self._file.closed:
            return
        self._file.close()
        if self._is_new and not self._begun:
            with contextlib.suppress(OSError):
                if self.path.is_file() and self.path.stat().st_size == 0:
                    self.path.unlink()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
