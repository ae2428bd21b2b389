"""A small text file, written whole: who reads it sees the old text or the new one, never half. Knows paths and texts.

Every such file of ours goes through here: plans and loads of experts, reports, results of benches, tables of tiles, the
mark of a whole output. Files that grow (journals, outputs) have writers of their own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str, *, part: Path | None = None, sync: bool = False) -> None:
    """Put `text` in the place of the file at once, as UTF-8; what UTF-8 lacks is escaped. OSError: what was there
    stays, and nothing lies beside it.

    It is written as `part` first, which nobody else may write, so that what a killed process left of it is written over
    by the next; None: a name beside the file that is this process's own. Of a link, the file that it leads to is
    replaced; a pipe or a device is no file to replace, and gets the text as it is.
    `sync`: the text is on the disk before it is in its place.
    """
    path = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    if part is None:
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
