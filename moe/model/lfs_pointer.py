"""Git LFS pointers: the small text files that stand for large ones where a repository was cloned without them.

Knows the first bytes of a file; knows nothing of what the true file would hold.
"""

from __future__ import annotations

from pathlib import Path

_PREFIX = b"version https://git-lfs"


def refuse_lfs_pointer(file: Path, start: bytes) -> None:
    """ValueError if `file`, which begins with the bytes `start`, is a pointer: names it, its size and the way out."""
    if start.startswith(_PREFIX):
        raise ValueError(
            f"{file}: this is a Git LFS pointer of {file.stat().st_size} bytes, not the file itself"
            f"{_pointed_size(start)}; fetch it with `git lfs pull`."
        )


def _pointed_size(pointer: bytes) -> str:
    """The true size, which a pointer holds in a line `size N`."""
    for line in pointer.decode("ascii", "replace").splitlines():
        if line.startswith("size "):
            return f" (expected {line.removeprefix('size ')} bytes)"
    return ""
