"""The files of a run, all beside the output and recognisable by their names. Knows names, sizes and moves; no records.

    answers.jsonl.journal-1-rank-0     what rank 0 of the first run finished, as it finished (journal.py)
    answers.jsonl.journal-2-rank-0     the same of the run that went on after it
    answers.jsonl.partial              the output while it is put together
    answers.jsonl.lock                 held by the run that is alive (output_lock.py)
    answers.jsonl.job.json             the mark of a whole output: its size, and what it was made from
    answers.jsonl                      the output, moved here when it is whole; then the journals go

With `job.shards=4` the output is answers-00001-of-00004.jsonl and so on; journals and mark keep the plain name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from moe.engine.whole_file import write_whole


class JournalFile(NamedTuple):
    """A journal on disk; sorts by run, then rank."""

    run: int
    rank: int
    path: Path


@dataclass(frozen=True)
class Mark:
    """What a whole output says of itself. `sizes`: bytes of each of its files, by name."""

    fingerprint: dict[str, str]
    lines: int
    failed: int
    sizes: dict[str, int]


class RunFiles:
    """The files of the runs towards one output, which itself may be a link to another place."""

    def __init__(self, output: Path, shards: int = 1) -> None:
        self.output = output
        self.base = Path(os.path.realpath(output))
        self.finals = [self.base]
        if shards > 1:
            stem, suffix = self.base.stem, self.base.suffix
            self.finals = [
                self.base.with_name(f"{stem}-{index:05}-of-{shards:05}{suffix}") for index in range(1, shards + 1)
            ]
        self.mark_path = self.base.with_name(f"{self.base.name}.job.json")
        self.lock_path = self.base.with_name(f"{self.base.name}.lock")
        self._journal_name = re.compile(re.escape(self.base.name) + r"\.journal-(\d+)-rank-(\d+)")

    def partial_of(self, final: Path) -> Path:
        """Where a file of the output is put together."""
        return final.with_name(f"{final.name}.partial")

    def journal_path(self, run: int, rank: int) -> Path:
        return self.base.with_name(f"{self.base.name}.journal-{run}-rank-{rank}")

    def journals(self) -> list[JournalFile]:
        """What runs have left, from the earliest to the latest."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.base.parent) as entries:
            named = [(self._journal_name.fullmatch(entry.name), entry.path) for entry in entries]
            return sorted(JournalFile(int(name[1]), int(name[2]), Path(path)) for name, path in named if name)
        return []

    def shown(self, final: Path) -> Path:
        """A file of the output as the user's own name for it."""
        return self.output.with_name(final.name) if len(self.finals) > 1 else self.output

    def existing(self) -> list[Path]:
        """The files of the output that are there: by the names of now, and by those of the mark (other shards)."""
        mark = self.promised()
        marked = [] if mark is None else [self.base.with_name(name) for name in mark.sizes]
        return [final for final in dict.fromkeys((*self.finals, *marked)) if os.path.lexists(final)]

    def mark(self) -> Mark | None:
        """What the output was made from, where a run made all of it and nobody touched it since. A part that was not
        moved yet says that what stands in its place is older, though it may have the same size."""
        mark = self.promised()
        if any(os.path.lexists(self.partial_of(final)) for final in self.finals):
            return None
        try:
            sizes = {final.name: final.stat().st_size for final in self.finals}
        except OSError:
            return None
        return mark if mark is not None and mark.sizes == sizes else None

    def promised(self) -> Mark | None:
        """The mark by itself, whether or not the output is there: it is written first."""
        try:
            return Mark(**json.loads(self.mark_path.read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def publish(self, fingerprint: dict[str, str], *, lines: int, failed: int) -> None:
        """Move the parts, all written and synced, to their places, and drop the journals. A crash in between is
        repaired by the next run: journals go last."""
        sizes = {final.name: self.partial_of(final).stat().st_size for final in self.finals}
        content = json.dumps(asdict(Mark(fingerprint, lines, failed, sizes)), indent=1) + "\n"
        write_whole(self.mark_path, content, part=self.partial_of(self.mark_path), sync=True)
        for final in self.finals:
            os.replace(self.partial_of(final), final)
        sync_folder(self.base.parent)
        self.drop_journals()

    def drop_mark(self) -> None:
        """What is there, if anything, is to be replaced: from now on a mark is that of the run that begins."""
        if os.path.lexists(self.mark_path):
            self.remove(self.mark_path)
            sync_folder(self.base.parent)

    def drop_journals(self) -> None:
        """Remove what unfinished runs left, and parts of an output."""
        for journal in self.journals():
            self.remove(journal.path)
        self.drop_partials()

    def drop_partials(self) -> None:
        """Remove parts of an output."""
        for final in (*self.finals, self.mark_path):
            self.remove(self.partial_of(final))

    def remove(self, path: Path) -> None:
        """A file beside the output, where there is one: a file system that is only read refuses the very question.
        ValueError where it cannot go."""
        if os.path.lexists(path):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ValueError(
                    f"output={self.output}: {path} is in the way and cannot be removed ({error.strerror}); move it "
                    "away."
                ) from error


def sync_folder(folder: Path) -> None:
    """Names in it outlive a loss of power."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
