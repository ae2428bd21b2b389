"""One run at a time towards one output: a lock that the first rank holds from its first look until all is in place.

Journals are locked too, but each only while it is written: a run that puts the output together writes none. Knows a
file beside the output; where the file system knows no locks, nobody waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from moe.batch.run_files import RunFiles

PATIENCE_S = 20.0
"""How long a run waits for the one before it to be gone: a killed process may take so long to give its memory back."""
POLL_S = 0.1
# Where nothing can be made no run can write either, and the journal says so in better words.
_NO_PLACE = (errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EPERM)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def output_lock(files: RunFiles, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the output's lock. ValueError where another run keeps it; the file goes with the lock, and what a killed
    process leaves of it is in nobody's way."""
    file = _take(files, patience_s)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                files.lock_path.unlink()  # first: who waits for this file looks whether it is still the one there
            os.close(file)


def _take(files: RunFiles, patience_s: float) -> int | None:
    """The locked file; None where there can be none."""
    deadline, told = time.monotonic() + patience_s, False
    while True:
        try:
            file = os.open(files.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in _NO_PLACE:
                return None
            raise ValueError(f"output={files.output} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return None
        else:
            if _is_there(file, files.lock_path):
                return file
            os.close(file)  # of a run that ended in between
            continue
        if time.monotonic() > deadline:
            raise ValueError(
                f"output={files.output}: another run towards it is still alive and holds {files.lock_path.name}; stop "
                "it first, or give another output."
            )
        if not told:
            logger.warning("waiting up to %g s for another run towards %s", patience_s, files.output)
            told = True
        time.sleep(POLL_S)


def _is_there(file: int, path: Path) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
