"""A job on one rank: lines through the engine, a record of each to the journal as soon as it is finished.

Knows lines, records and a few calls of an engine; knows nothing of command lines, models or where the output lies. What
is in memory is what runs and a little that waits, however old the oldest unfinished line is. A line that cannot be run
is one error record.

Of several ranks each has a job of its own, and all take steps together until none has a line left: see agreement.py
of the engine. `stop` ends them in the same step.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import msgspec

from configs.schema import Config
from moe.batch.ledger import line_digest
from moe.batch.lines import BadLine, InputFault, Line, dump_line
from moe.batch.monitor import ErrorNote
from moe.batch.prompts import BatchTokenizer, prompt_ids
from moe.batch.protocol import LineError, LineParams, LineRequest, num_tokens
from moe.batch.records import (
    BAD_REQUEST,
    FAILED,
    INVALID,
    SERVER_FAULT,
    TIMED_OUT,
    TIMEOUT,
    answer_record,
    error_record,
    fault_of,
    line_id,
    parse,
)
from moe.batch.report import Progress
from moe.engine.request import Request, RequestOutput
from moe.engine.stats import EngineStats

FIRST_LINES = 1
"""Of several ranks: lines that one may take in its first step; in each further one twice as many. All ranks take in
turns, step by step, so that a file of a few lines for each rank is dealt out evenly, and a long one fills every rank
within ten steps however short its answers are."""

BACKLOG_PARTS = 16
"""Lines are taken while less than this part of the engine's places is taken and waits: some, since prompts are admitted
together (scheduler.py), but what waits takes memory."""

LOOK_UP_LINES = 1024
"""Lines that one rank alone may take between two steps: a file of bad lines is left for a moment too."""

TOO_MANY_ERRORS = 1
"""Why a job stopped; other reasons are the numbers of signals, which are larger."""


class BatchEngine(Protocol):
    """What a job asks of an engine. A request that cannot run comes back from `step` with its `error` set.

    `expects_more`, `stop_wanted`: set by the job, heard by all ranks in the next step; `stopped`: what they agreed on.
    """

    stats: EngineStats
    expects_more: bool
    stop_wanted: int
    stopped: int

    @property
    def has_unfinished(self) -> bool: ...

    @property
    def joined(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    def join(self) -> None: ...

    def add_request(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def step(self) -> list[RequestOutput]: ...


class Journal(Protocol):
    """Where finished records go."""

    def append(self, number: int, digest: int, record: bytes, kind: str = ...) -> None: ...


class _Running(msgspec.Struct, gc=False):
    """A line in the engine."""

    source: Line | BadLine
    line: LineRequest
    num_top: int  # likeliest tokens asked for at each position
    deadline: float
    timed_out: bool = False


class Job:
    """One run of lines through an engine; `run` does it all.

    `errors` counts error records by kind. `stopped`: why it ended before its lines did; 0: it did not.
    `count_errors` adds to the errors of all ranks and returns their number.
    """

    def __init__(
        self,
        config: Config,
        engine: BatchEngine,
        tokenizer: BatchTokenizer | None,
        model: str,
        *,
        on_error: Callable[[ErrorNote], None] = lambda note: None,
        count_errors: Callable[[int], int] | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._params = LineParams(config.sampling, tokenizer.generation_defaults if tokenizer is not None else {})
        self._on_error = on_error
        self._count_errors = count_errors
        self._timeout_s = config.job.line_timeout_s
        self._running: dict[str, _Running] = {}
        self._more = True  # of the lines
        self._input_fault: InputFault | None = None
        self._several = False  # ranks
        self._turn_lines = FIRST_LINES  # what one of several may take before the next step
        self._tokens_left = 0  # of what may be taken before the next step
        self.errors: Counter[str] = Counter()
        self.lines_read = 0
        self.lines_written = 0
        self.stopped = 0
        self.seconds = 0.0

    @property
    def lines_failed(self) -> int:
        return self.errors.total()

    def run(
        self,
        lines: Iterator[Line | BadLine],
        journal: Journal,
        on_step: Callable[[Progress], None] | None = None,
        stop: Callable[[], int] = lambda: 0,
    ) -> None:
        """Answer every line, or those up to a stop, which `stop` asks for with its reason. A fault of the engine, the
        input or the journal propagates; what was finished before is in the journal."""
        begin = time.monotonic()
        engine, self._journal = self._engine, journal
        engine.expects_more = True
        engine.join()
        self._several = engine.joined
        while True:
            self._fill(lines)
            if not self._running and not engine.has_unfinished:
                if not self._more:
                    break
            else:
                self._end_late_lines()
                for result in engine.step():
                    if result.finished:
                        self._finish(self._running.pop(result.request_id), result)
            self.seconds = time.monotonic() - begin
            if on_step is not None:
                on_step(self._progress())
            engine.stop_wanted = engine.stop_wanted or stop()
            self.stopped = engine.stopped if self._several else engine.stop_wanted
            if self.stopped:
                return
        if self._input_fault is not None:
            raise self._input_fault

    def _fill(self, lines: Iterator[Line | BadLine]) -> None:
        """Hand lines to the engine while it has room for more. What the input says of its own fault waits until the
        lines before it are answered."""
        left = self._turn_lines if self._several else LOOK_UP_LINES
        self._turn_lines = min(2 * self._turn_lines, LOOK_UP_LINES)
        self._tokens_left = self._config.engine.max_batched_tokens
        while self._more and (wanted := min(left, self._room())) > 0:
            read = self.lines_read
            try:
                for line in islice(lines, wanted):
                    self.lines_read += 1
                    self._submit(line)
                    if self._engine.stop_wanted:
                        return
            except InputFault as error:
                self._input_fault = error
            left -= self.lines_read - read
            if self.lines_read - read < wanted:
                self._more = self._engine.expects_more = False

    def _room(self) -> int:
        """How many further lines are wanted now, before this is asked again. Alone there is nobody to leave them to."""
        engine = self._engine
        backlog = max(1, engine.max_num_seqs // BACKLOG_PARTS)
        if engine.stop_wanted:
            return 0
        if not self._several:
            return engine.max_num_seqs + backlog - len(self._running)
        return int(self._tokens_left > 0 and engine.num_waiting < backlog)

    def _submit(self, source: Line | BadLine) -> None:
        """Hand a line to the engine, or finish it with an error record."""
        try:
            line = parse(source)
            params = self._params.of(line)
        except LineError as error:
            self._fail(source, INVALID, str(error), BAD_REQUEST)
            return
        request_id = f"line-{line.number}"
        try:
            ids = prompt_ids(line, self._tokenizer)
            self._tokens_left -= len(ids)
            deadline = time.monotonic() + self._timeout_s if self._timeout_s is not None else math.inf
            self._running[request_id] = _Running(source, line, params.logprobs or 0, deadline)
            seed = self._params.seed_of(line, params)
            self._engine.add_request(Request(request_id, ids, params, line.prompt, seed=seed))
        except ValueError as error:
            self._running.pop(request_id, None)
            self._fail(source, FAILED, str(error), BAD_REQUEST)

    def _end_late_lines(self) -> None:
        """Take lines out of the engine that are in it for too long; they come back with the step. All have the same
        time, so they are late in the order in which they came."""
        if self._timeout_s is None:
            return
        now = time.monotonic()
        for request_id, running in self._running.items():
            if running.deadline > now:
                break
            if not running.timed_out:
                running.timed_out = self._engine.abort(request_id)

    def _finish(self, running: _Running, result: RequestOutput) -> None:
        """Turn a finished request into its record."""
        fault = fault_of(result)
        if fault is None:
            record = dump_line(answer_record(running.line, result, self._model, running.num_top))
            self._journal.append(running.source.number, line_digest(running.source), record)
            self.lines_written += 1
        elif running.timed_out:
            seconds = f"{self._config.job.line_timeout_s:g} s (job.line_timeout_s)"
            had = f"it had {num_tokens(result)} tokens"
            self._fail(running.source, TIMEOUT, f"not answered within {seconds}; {had}", TIMED_OUT)
        else:
            self._fail(running.source, FAILED, fault, BAD_REQUEST if result.rejected else SERVER_FAULT)

    def _fail(self, line: Line | BadLine, kind: str, message: str, status: int) -> None:
        record = dump_line(error_record(line, kind, message, status=status))
        self._journal.append(line.number, line_digest(line), record, kind)
        self.lines_written += 1
        self.errors[kind] += 1
        self._on_error(ErrorNote(line.number, line.origin, line_id(line), kind, message))
        most = self._config.job.max_errors
        if most is not None:
            total = self.lines_failed if self._count_errors is None else self._count_errors(1)
            if total > most:
                self._engine.stop_wanted = self._engine.stop_wanted or TOO_MANY_ERRORS

    def _progress(self) -> Progress:
        stats = self._engine.stats
        return Progress(
            lines_read=self.lines_read,
            lines_done=self.lines_read - len(self._running),
            lines_failed=self.lines_failed,
            output_tokens=stats.output_tokens,
            kv_use=stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0,
            seconds=self.seconds,
            stats=stats,
        )
