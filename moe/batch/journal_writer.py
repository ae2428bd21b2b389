"""Appends records to a journal: a thread writes what has gathered after 50 ms at most, and syncs it every second.

Knows a file and a clock; what a record is, `journal.py` says. The file is made new, held by a lock while this process
lives, and removed again by `close` where no record was written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from types import TracebackType

from moe.batch.journal import ANSWERED, Header, frame, header_frame
from moe.batch.run_files import sync_folder

GATHER_S = 0.05
SYNC_S = 1.0
MAX_GATHERED_BYTES = 16 << 20
"""A disk that is slower than the answers holds them up here: memory stays bounded."""


class JournalWriter:
    """A journal being written. `append` may be called by one thread; it raises what went wrong in the writing since.

    What was gathered passes to the writing thread without a lock: one appends at the list's end, the other takes from
    its beginning, and each counts its own bytes.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.num_records = 0
        self._gathered: list[bytes] = []
        self._given = self._written = 0  # bytes
        self._error: Exception | None = None
        self._closing = False
        self._hurry = threading.Event()
        self._progress = threading.Condition()
        self._file = _create(path)
        self._write(header_frame(header))
        os.fsync(self._file)
        sync_folder(path.parent)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(self, number: int, digest: int, record: bytes, kind: str = ANSWERED) -> None:
        """Hand over one finished record (one line with its end). OSError: an earlier one could not be written."""
        framed = frame(number, digest, kind, record)
        self._gathered.append(framed)
        self._given += len(framed)
        if self._given - self._written > MAX_GATHERED_BYTES or self._error is not None:
            self._wait_for_room()
        self.num_records += 1

    def close(self) -> None:
        """Write and sync the rest. OSError where that fails, now or before; closing twice is fine."""
        if self._closing:
            return
        self._closing = True
        self._hurry.set()
        self._thread.join()
        os.close(self._file)
        if self.num_records == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
        if self._error is not None:
            raise self._error

    def _wait_for_room(self) -> None:
        self._hurry.set()
        with self._progress:
            self._progress.wait_for(
                lambda: self._given - self._written <= MAX_GATHERED_BYTES or self._error is not None
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """The thread: gather, write, sync, until closed or the disk says no."""
        synced_at, unsynced, closing = time.monotonic(), False, False
        try:
            while not closing:
                self._hurry.wait(GATHER_S)
                self._hurry.clear()
                closing = self._closing  # before the last ones are taken
                if number := len(self._gathered):
                    content = b"".join(self._gathered[:number])
                    del self._gathered[:number]
                    self._write(content)
                    unsynced = True
                    with self._progress:
                        self._written += len(content)
                        self._progress.notify_all()
                if unsynced and (closing or time.monotonic() >= synced_at + SYNC_S):
                    os.fsync(self._file)
                    synced_at, unsynced = time.monotonic(), False
        except Exception as error:  # whatever it is: `append` would wait for this thread for ever
            with self._progress:
                self._error = _write_error(error, self.path) if isinstance(error, OSError) else error
                self._progress.notify_all()

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:  # writes may be short
            view = view[os.write(self._file, view) :]

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(OSError):  # the first fault is the one to tell
                self.close()


def is_being_written(path: Path) -> bool:
    """Whether a living process holds the journal. Where the file system knows no locks, nobody does."""
    with contextlib.suppress(OSError), path.open("rb") as file:  # one that cannot be read is for its reader to tell
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EAGAIN, errno.EACCES)
    return False


def _create(path: Path) -> int:
    """A new file, locked. OSError where it cannot be made."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError):  # where the file system knows no locks
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for who only looks whether somebody holds it
    return file


def _write_error(error: OSError, path: Path) -> OSError:
    reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return OSError(error.errno, f"{reason}; what was written before is whole", str(path))
