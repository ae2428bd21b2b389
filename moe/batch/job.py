"""A whole job: lines of a file through the engine, one record for each, in the order of the input.

Knows lines, records and two calls of an engine (add a request, take a step); knows nothing of command lines or models.

At most `job.window` lines are between the reader and the file at a time: read, being answered, or answered and waiting
for an earlier one. So memory does not grow with the file. A line that cannot be run is one error record.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from configs.schema import Config, SamplingConfig
from moe.batch.answers import AnswerFile
from moe.batch.lines import BadLine, Line, dump_line, read_lines
from moe.batch.openai import is_openai, openai_answer, openai_error, parse_openai
from moe.batch.plain import parse_plain, plain_answer, plain_error, plain_id
from moe.batch.protocol import LineError, LineRequest, resolve_params
from moe.batch.report import Progress
from moe.engine.request import Request, RequestOutput
from moe.engine.stats import EngineStats

DEMO_PROMPTS = Path(__file__).resolve().parent.parent / "demo" / "prompts.jsonl"
INVALID, FAILED = "invalid_line", "request_failed"
# Of OpenAI records: clients send a line again after the second, not after the first.
BAD_REQUEST, SERVER_FAULT = 400, 500


class BatchTokenizer(Protocol):
    """What a job asks of a tokenizer."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...

    def encode_prompt(self, text: str) -> list[int]: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


class BatchEngine(Protocol):
    """What a job asks of an engine. A request that cannot run comes back from `step` with its `error` set."""

    stats: EngineStats

    def add_request(self, request: Request) -> None: ...

    def step(self) -> list[RequestOutput]: ...


@dataclass(frozen=True)
class JobFiles:
    """Where lines come from and answers go. The demo's own output is replaced without asking."""

    input: Path
    output: Path
    overwrite: bool
    report: Path | None = None


@dataclass
class _Slot:
    """One line between reader and file; `record` is set once it is finished."""

    number: int
    line: LineRequest | None
    num_top: int = 0  # likeliest tokens asked for at each position
    record: bytes | None = None
    failed: bool = False


def job_files(config: Config) -> JobFiles:
    """The job's files, checked as far as names go, and that the input can be read. ValueError where one is wrong."""
    source = DEMO_PROMPTS if config.input is None else Path(config.input)
    _check_input(source)
    if config.output is not None:
        output = Path(config.output)
    else:
        output = Path(f"{'demo' if config.input is None else source.stem}.answers.jsonl")
    if os.path.isdir(output):
        raise ValueError(f"output={output} is a folder; give the name of a file in it.")
    if _is_same(output, source):
        raise ValueError(f"output={output} is the input file; answers would destroy the prompts. Give another name.")
    report = None if config.job.report is None else Path(config.job.report)
    if report is not None:
        if os.path.isdir(report) or not os.path.isdir(report.absolute().parent):
            raise ValueError(f"job.report={report} cannot be written: it must be a file in a folder that exists.")
        for key, other in (("input", source), ("output", output)):
            if _is_same(report, other):
                raise ValueError(f"job.report={report} is the {key} file, which it would destroy; give another name.")
    overwrite = config.job.overwrite or (config.input is None and config.output is None)
    return JobFiles(source, output, overwrite, report)


def _check_input(path: Path) -> None:
    # Not Path's methods: they raise where the system refuses the very question (a name too long, a closed folder).
    if os.path.exists(path) and not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "is a pipe or a device, but it may be read twice"
        raise ValueError(f"input={path} {what}; give a JSONL file of prompts.")
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise ValueError(f"input={path} does not exist; give a JSONL file of prompts.") from None
    except OSError as error:
        raise ValueError(f"input={path} cannot be read: {error.strerror}; give a JSONL file of prompts.") from error


def _is_same(path: Path, other: Path) -> bool:
    """Whether two names mean one file, which need not exist yet."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def parse(line: Line | BadLine) -> LineRequest:
    """Understand a line of either form; LineError with the reason otherwise."""
    if isinstance(line, BadLine):
        raise LineError(line.reason)
    return (parse_openai if is_openai(line.record) else parse_plain)(line.number, line.record)


def error_record(line: Line | BadLine, kind: str, message: str) -> dict[str, Any]:
    """The error record of a line, in the form that the line has."""
    record = line.record
    if record is None:
        return plain_error(None, line.number, kind, message)
    if is_openai(record):
        return openai_error(record.get("custom_id"), line.number, kind, message, status=BAD_REQUEST)
    return plain_error(plain_id(line.number, record), line.number, kind, message)


def bad_lines(path: Path, limit: int | None, sampling: SamplingConfig) -> Iterator[tuple[int, str | None]]:
    """Every line's number, and the reason why it cannot be run or None: all that can be known without a model."""
    with path.open("rb") as file:
        for line in read_lines(file, limit):
            try:
                resolve_params(parse(line), sampling, {})
                yield line.number, None
            except LineError as error:
                yield line.number, str(error)


class Job:
    """One run of a file through an engine; `run` does it all."""

    def __init__(self, config: Config, engine: BatchEngine, tokenizer: BatchTokenizer | None, model: str) -> None:
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._slots: deque[_Slot] = deque()
        self._running: dict[str, _Slot] = {}
        self.lines_read = 0
        self.lines_failed = 0
        self.lines_written = 0
        self.seconds = 0.0

    def run(self, source: Path, answers: AnswerFile, on_step: Callable[[Progress], None] | None = None) -> None:
        """Answer every line. Records are written in input order, each flushed; a fault of the engine propagates."""
        begin = time.monotonic()
        answers.begin()
        with source.open("rb") as file:
            lines = read_lines(file, self._config.job.limit)
            while self._fill(lines) or self._slots:
                if self._running:
                    self._step()
                self._write(answers)
                self.seconds = time.monotonic() - begin
                if on_step is not None:
                    on_step(self._progress())

    def _step(self) -> None:
        for result in self._engine.step():
            if result.finished:
                self._finish(self._running.pop(result.request_id), result)

    def _fill(self, lines: Iterator[Line | BadLine]) -> bool:
        """Read lines until the window is full. Whether any was read."""
        before = self.lines_read
        while (
            len(self._slots) < self._config.job.window and self._has_room() and (line := next(lines, None)) is not None
        ):
            self.lines_read += 1
            self._slots.append(self._submit(line))
        return self.lines_read > before

    def _has_room(self) -> bool:
        """Whether a further line is wanted now. Alone there is nobody to leave it to: the window is the only bound."""
        return True

    def _submit(self, line: Line | BadLine) -> _Slot:
        """Hand a line to the engine, or finish it with an error record."""
        try:
            parsed = parse(line)
            defaults = self._tokenizer.generation_defaults if self._tokenizer is not None else {}
            params = resolve_params(parsed, self._config.sampling, defaults)
        except LineError as error:
            return self._failed(line, INVALID, str(error))
        try:
            request = Request(f"line-{line.number}", self._encode(parsed), params, parsed.prompt)
            slot = self._running[request.request_id] = _Slot(line.number, parsed, params.logprobs or 0)
            self._engine.add_request(request)
        except ValueError as error:
            self._running.pop(f"line-{line.number}", None)
            return self._failed(line, FAILED, str(error))
        return slot

    def _failed(self, line: Line | BadLine, kind: str, message: str) -> _Slot:
        self.lines_failed += 1
        return _Slot(line.number, None, record=dump_line(error_record(line, kind, message)), failed=True)

    def _encode(self, line: LineRequest) -> list[int]:
        if line.prompt_token_ids is not None:
            return line.prompt_token_ids
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer; give prompt_token_ids, or another tokenizer as tokenizer=.")
        if line.prompt is not None:
            return self._tokenizer.encode_prompt(line.prompt)
        assert line.messages is not None, f"line {line.number} has nothing to encode"
        return self._tokenizer.render_chat(
            line.messages,
            line.chat.tools,
            add_generation_prompt=line.chat.add_generation_prompt,
            continue_final_message=line.chat.continue_final_message,
            chat_template_kwargs=line.chat.template_kwargs,
        )

    def _finish(self, slot: _Slot, result: RequestOutput) -> None:
        """Turn a finished request into its record."""
        line = slot.line
        assert line is not None, f"{result.request_id} finished twice"
        reasons = {output.finish_reason for output in result.outputs}
        if result.error is not None or not reasons <= {"stop", "length"}:
            message = result.error or f"the request ended with {', '.join(sorted(map(str, reasons)))}"
            if line.form == "plain":
                record = plain_error(line.id, line.number, FAILED, message)
            else:
                status = BAD_REQUEST if result.rejected else SERVER_FAULT
                record = openai_error(line.id, line.number, FAILED, message, status=status)
            slot.failed = True
            self.lines_failed += 1
        elif line.form == "plain":
            record = plain_answer(line, result)
        else:
            record = openai_answer(line, result, self._model, slot.num_top)
        slot.record, slot.line = dump_line(record), None

    def _write(self, answers: AnswerFile) -> None:
        """Write the records that no earlier line is waiting for."""
        while self._slots and (record := self._slots[0].record) is not None:
            self._append(answers, self._slots[0].number, record)
            self._slots.popleft()
            self.lines_written += 1

    def _append(self, answers: AnswerFile, number: int, record: bytes) -> None:
        answers.append(record)

    def _progress(self) -> Progress:
        stats = self._engine.stats
        return Progress(
            lines_read=self.lines_read,
            lines_done=self.lines_read - len(self._running),
            lines_failed=self.lines_failed,
            output_tokens=stats.output_tokens,
            kv_use=stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0,
            seconds=self.seconds,
        )
