"""A job on several ranks: each claims lines as it has room, writes a file of its own, and the first merges them.

Knows claims, parts and their merging; what becomes of a line is `job.py`'s. One counter, which all ranks add to, is
the queue: the n-th claim is the n-th record of the input, whoever makes it. So no rank is dry while another holds a
backlog.

    OUTPUT.rank-0   OUTPUT.rank-1   ...      "number of the line, tab, record", ascending, each flushed
    OUTPUT                                   all records in input order, moved into place whole at the end
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from configs.schema import Config
from moe.batch.answers import AnswerFile
from moe.batch.job import BatchEngine, BatchTokenizer, Job
from moe.batch.lines import BadLine, Line, read_claimed
from moe.batch.protocol import LineRequest
from moe.batch.report import Progress

FIRST_CLAIMS = 8
"""Lines that a rank may claim in its first step; after that as many as it has running. All ranks claim in turns, step
by step, so that a short file is dealt out and a long one fills every rank within a few steps."""

BACKLOG_PARTS = 16
"""A rank claims while less than this part of its places is claimed and waits: some, since prompts are admitted
together (scheduler.py)."""


class RankEngine(BatchEngine, Protocol):
    """What a job asks of an engine that is in step with others."""

    expects_more: bool

    @property
    def has_unfinished(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    def join(self) -> None: ...


class RankJob(Job):
    """This rank's part of a job. `claim` adds one to the counter of all ranks and returns what it was."""

    def __init__(
        self, config: Config, engine: RankEngine, tokenizer: BatchTokenizer | None, model: str, claim: Callable[[], int]
    ) -> None:
        super().__init__(config, engine, tokenizer, model)
        self._rank_engine = engine
        self._claim = claim
        self._claims_left = 0
        self._tokens_left = 0  # of prompts, so that long ones are dealt out as well

    def run(self, source: Path, answers: AnswerFile, on_step: Callable[[Progress], None] | None = None) -> None:
        """Answer lines until no rank has any left. `answers` is this rank's part."""
        begin = time.monotonic()
        engine = self._rank_engine
        answers.begin()
        engine.expects_more = True
        engine.join()
        with source.open("rb") as file:
            lines = self._ended(read_claimed(file, self._config.job.limit, self._claim))
            while engine.has_unfinished or self._slots:
                self._claims_left = max(FIRST_CLAIMS, len(self._running))
                self._tokens_left = self._config.engine.max_batched_tokens
                self._fill(lines)
                self._step()
                self._write(answers)
                self.seconds = time.monotonic() - begin
                if on_step is not None:
                    on_step(self._progress())

    def _ended(self, lines: Iterator[Line | BadLine]) -> Iterator[Line | BadLine]:
        """The same lines; at their end no more is expected here."""
        yield from lines
        self._rank_engine.expects_more = False

    def _has_room(self) -> bool:
        engine = self._rank_engine
        if engine.num_waiting >= max(1, engine.max_num_seqs // BACKLOG_PARTS):
            return False
        if self._claims_left <= 0 or self._tokens_left <= 0:
            return False
        self._claims_left -= 1
        return True

    def _encode(self, line: LineRequest) -> list[int]:
        prompt_ids = super()._encode(line)
        self._tokens_left -= len(prompt_ids)
        return prompt_ids

    def _append(self, answers: AnswerFile, number: int, record: bytes) -> None:
        answers.append(b"%d\t%s" % (number, record))


def part_of(output: Path, rank: int) -> Path:
    """The file of one rank."""
    return output.with_name(f"{output.name}.rank-{rank}")


def refuse_old_parts(output: Path, *, overwrite: bool) -> None:
    """ValueError where a run that did not end left records; with `overwrite` they are dropped by who opens them."""
    old = sorted(output.parent.glob(f"{output.name}.rank-*")) if output.parent.is_dir() else []
    if old and not overwrite:
        names = ", ".join(path.name for path in old[:4])
        raise ValueError(
            f"output={output}: {names} hold records of a run that did not end; move them away, give another output, or "
            "job.overwrite=true to drop them."
        )
    for path in old:
        path.unlink(missing_ok=True)


def merge_parts(parts: Sequence[Path], output: Path) -> int:
    """All records in input order to `output`, which is replaced by the whole at once; the parts go. Their number."""
    missing = [str(path) for path in parts if not path.is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)} cannot be seen here; all ranks need one folder for output={output}.")
    whole = output.with_name(f"{output.name}.whole")
    target = whole if output.is_file() or not os.path.exists(output) else output  # a pipe cannot be replaced
    num_records = 0
    with target.open("wb") as file:
        for _, record in heapq.merge(*(_numbered(path) for path in parts), key=lambda numbered: numbered[0]):
            file.write(record)
            num_records += 1
        file.flush()
        if target is whole:
            os.fsync(file.fileno())
    if target is whole:
        os.replace(whole, output)
    for path in parts:
        path.unlink()
    return num_records


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for line in file:
            number, _, record = line.partition(b"\t")
            yield int(number), record
