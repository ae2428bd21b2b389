"""A file of a checkpoint, and what may stand in its place: a link to nowhere, a closed file, a Git LFS pointer.

Knows files and their first bytes; knows nothing of what they should hold. All of it is the user's to mend, and so a
ValueError that names the file and the way out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LFS_PREFIX = b"version https://git-lfs"


def is_named(file: Path) -> bool:
    """Whether its folder has the name, whatever is behind it: what is not there at all may be left out, this not."""
    return os.path.lexists(file)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Inside, it is read; ValueError where it cannot be."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {_reason(file, error)}") from error


def read_small(file: Path) -> bytes:
    """All of it. ValueError where it cannot be read, or is a Git LFS pointer."""
    with readable(file):
        content = file.read_bytes()
    refuse_lfs_pointer(file, content)
    return content


def refuse_lfs_pointer(file: Path, start: bytes) -> None:
    """ValueError if `file`, which begins with the bytes `start`, is a pointer: the small text file that stands for a
    large one where a repository was cloned without those. Names it, its size and the way out."""
    if start.startswith(_LFS_PREFIX):
        raise ValueError(
            f"{file}: this is a Git LFS pointer of {file.stat().st_size} bytes, not the file itself"
            f"{_pointed_size(start)}; fetch it with `git lfs pull`."
        )


def _reason(file: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and os.path.islink(file):
        return f"it is a link to {os.readlink(file)}, which is not there; fetch it again."
    if isinstance(error, IsADirectoryError):
        return "it is a folder; fetch the checkpoint again."
    if isinstance(error, PermissionError):
        return "it is closed to this user; change its rights, or give a copy of the checkpoint."
    return f"{error.strerror or error}; fetch it again, or look at its disk."


def _pointed_size(pointer: bytes) -> str:
    """The true size, which a pointer holds in a line `size N`."""
    for line in pointer.decode("ascii", "replace").splitlines():
        if line.startswith("size "):
            return f" (expected {line.removeprefix('size ')} bytes)"
    return ""
