"""The answers that are being made: which token belongs to which, which of them end, and what is handed out.

Knows requests, samples and the order of a step's results; knows nothing of launches, devices or what a step costs.
A request's own fault (too long, NaN logits, text that cannot be decoded) ends that request and nobody else's.
"""

from __future__ import annotations

import logging
import time

from moe.engine.answer import Answer, logits_fault, rejection
from moe.engine.in_flight import InFlight
from moe.engine.intake import Intake
from moe.engine.request import Request, RequestOutput
from moe.engine.runner import Runner
from moe.engine.scheduler import Scheduler
from moe.engine.sequence import Status
from moe.engine.stats import EngineStats
from moe.engine.tokenizer import truncate_prompt

logger = logging.getLogger(__name__)


class Answers:
    """Those whose requests have not ended, by id, and the outputs that the next step hands out."""

    def __init__(self, intake: Intake, scheduler: Scheduler, runner: Runner, stats: EngineStats) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._runner = runner
        self._stats = stats
        self._open: dict[str, Answer] = {}
        self._ready: list[RequestOutput] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def request_ids(self) -> list[str]:
        return list(self._open)

    @property
    def any_ready(self) -> bool:
        """Whether `take_ready` has something."""
        return bool(self._ready)

    def take_ready(self) -> list[RequestOutput]:
        """Outputs that ended without a step: rejections and aborts."""
        ready, self._ready = self._ready, []
        return ready

    def add(self, request: Request, *, stream: bool) -> None:
        """Queue its sequences; a request that can never run is answered with an error."""
        if request.request_id in self._open:
            raise ValueError(f"request_id={request.request_id!r} is already being answered; ids must be unique.")
        prompt_ids = truncate_prompt(request.prompt_token_ids, request.params.truncate_prompt_tokens)
        try:
            max_tokens = self._intake.max_tokens(request, prompt_ids)
        except ValueError as error:
            self._count_end(failed=True)
            self._ready.append(rejection(request, prompt_ids, str(error)))
            return
        answer = self._intake.answer(request, prompt_ids, max_tokens, stream=stream)
        for sample in answer.samples:
            self._scheduler.add(sample.sequence)
        self._open[request.request_id] = answer
        self._stats.prompt_tokens += len(prompt_ids)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is, with what it had. False: not known, or ended."""
        answer = self._open.get(request_id)
        if answer is None:
            return False
        for sample in answer.samples:
            if sample.finish_reason is None:
                sample.end("abort")
        self._close(answer)
        self._ready.append(answer.output())
        return True

    def accept(self, step: InFlight) -> list[RequestOutput]:
        """Give each token of a step that has arrived to its answer; the outputs of those that ended, and of those that
        are streamed."""
        changed = self._accept_tokens(step)
        for answer in changed:
            if answer.finished:
                self._close(answer)
        return [answer.output() for answer in changed]

    def _accept_tokens(self, step: InFlight) -> list[Answer]:
        """The answers that ended, and those that are streamed, in order."""
        for rows in step.prompts:
            sequence = rows.chunk.sequence
            if sequence.num_prompt_rows < rows.chunk.end or sequence.finished:
                continue  # it gave way meanwhile, and its prompt is computed again
            if rows.chunk.start == 0:
                sequence.prompt_logprobs.append(None)
            sequence.prompt_logprobs += self._runner.prompt_records(rows)
        ids, logprobs = step.token_ids(), step.logprobs()
        changed: dict[str, Answer] = {}
        now = time.monotonic()
        befores: dict[float | None, int] = {}  # rows by the time of their token before: a few times for all rows
        for row, (sequence, token_id) in enumerate(zip(step.schedule.sampled, ids, strict=True)):
            if sequence.status is Status.FINISHED:
                continue  # it ended at the token before, or was aborted
            answer = self._open[sequence.request.request_id]
            sample = answer.samples[sequence.index]
            fault = logits_fault(sequence, token_id) if token_id < 0 or not sequence.output_ids else None
            if fault is not None:
                self._fail(answer, fault, forget=True)
            else:
                try:
                    self._scheduler.receive(sequence, token_id)
                    sample.accept(token_id, self._runner.with_texts(logprobs[row]) if logprobs is not None else None)
                    self._stats.output_tokens += 1
                    before, sample.token_at = sample.token_at, now
                    befores[before] = befores.get(before, 0) + 1
                except Exception as error:
                    logger.exception("request %s failed", answer.request.request_id)
                    self._fail(answer, f"{type(error).__name__}: {error}")
                if not answer.has_token and answer.error is None:
                    answer.has_token = True
                    self._stats.ttft_seconds.append(now - answer.request.arrival)
                    self._stats.latencies.first_token.add(now - answer.request.arrival)
            if sample.finish_reason is not None or answer.streamed:
                changed[answer.request.request_id] = answer
                if sample.finish_reason is not None:
                    self._scheduler.finish(sequence)
        for before, num_rows in befores.items():
            if before is not None:
                self._stats.latencies.between_tokens.add(now - before, num_rows)
        return [answer for answer in changed.values() if answer.streamed or answer.finished]

    def _fail(self, answer: Answer, error: str, *, forget: bool = False) -> None:
        """One sample's fault ends the whole request; samples that had ended keep their ending.

        `forget`: its cache may hold NaN and is not to be found by others.
        """
        answer.error = error
        for sample in answer.samples:
            if sample.finish_reason is None:
                sample.fail()
            self._scheduler.finish(sample.sequence, forget=forget)

    def _close(self, answer: Answer) -> None:
        """The one way out of the engine, whatever the ending."""
        for sample in answer.samples:
            self._scheduler.finish(sample.sequence)
        del self._open[answer.request.request_id]
        self._stats.cached_tokens += sum(sample.sequence.num_cached for sample in answer.samples)
        if answer.error is None and answer.has_token:
            self._stats.latencies.answer.add(time.monotonic() - answer.request.arrival)
        self._count_end(failed=answer.error is not None)

    def _count_end(self, *, failed: bool) -> None:
        self._stats.requests += 1
        self._stats.failed_requests += failed
