"""How far a job is, over all ranks, and how many lines there are in all: for the display, so cheap and about right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launch.crew import Crew
from moe.batch.report import Progress

SHARED_EVERY_S = 1.0
_CHUNK = 1 << 20
# Counting these means unpacking them, which costs as much as the reading itself.
_PACKED = (".gz", ".zst", ".parquet")


class LineCount:
    """Counts the lines of files while the job begins. `total` is None until it is known, and stays so where files are
    packed, tables or standard input."""

    def __init__(self, paths: Sequence[Path], limit: int | None) -> None:
        self.total: int | None = None
        self._paths, self._limit = list(paths), limit
        if paths and all(path.is_file() and path.suffix not in _PACKED for path in paths):
            threading.Thread(target=self._count, name="line count", daemon=True).start()

    def _count(self) -> None:
        try:
            total = sum(map(count_lines, self._paths))
        except OSError:
            return  # the job itself will say so
        self.total = total if self._limit is None else min(total, self._limit)


def count_lines(path: Path) -> int:
    """Line ends of a file, and a last line without one. Blank lines count as well."""
    number, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            number += chunk.count(b"\n")
            last = chunk[-1:]
    return number + (last != b"\n")


class CrewProgress:
    """Adds up what ranks say of themselves. With one rank it is that rank's own."""

    def __init__(self, crew: Crew) -> None:
        self._names: tuple[str, ...] = ("lines_done", "lines_failed", "output_tokens") if crew.size > 1 else ()
        self._counters: dict[str, Callable[[int], int]] = {name: crew.counter(f"shown {name}") for name in self._names}
        self._told: dict[str, int] = dict.fromkeys(self._names, 0)
        self._totals: dict[str, int] = dict.fromkeys(self._names, 0)
        self._next = 0.0

    def of_all(self, own: Progress) -> Progress:
        """The same record with lines and tokens of all ranks, as of a second ago at most. Called on every rank."""
        if self._names and time.monotonic() >= self._next:
            for name, add in self._counters.items():
                value = getattr(own, name)
                self._totals[name] = add(value - self._told[name])
                self._told[name] = value
            self._next = time.monotonic() + SHARED_EVERY_S
        return replace(own, **self._totals) if self._names else own
