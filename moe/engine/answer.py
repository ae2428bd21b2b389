"""What a request has brought forth so far: the text and the ending of each sample, and the records that callers get.

Knows tokens that end a text, text streams and output records; knows nothing of blocks, steps or devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe.engine.request import CompletionOutput, FinishReason, Request, RequestOutput, TokenLogprobs
from moe.engine.sequence import Sequence
from moe.engine.stop import TextStream


@dataclass(eq=False)
class Sample:
    """One sequence and its text. `stream` is None where no text is wanted (detokenize=False).

    `eos_ids`: the ids that end a text of this model; none where the request ignores them.
    """

    sequence: Sequence
    stream: TextStream | None
    eos_ids: frozenset[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_at: float | None = None  # when its newest token was accepted

    def __post_init__(self) -> None:
        params = self.sequence.request.params
        if params.ignore_eos:
            self.eos_ids = frozenset()
        self._ending_ids = self.eos_ids.union(params.stop_token_ids)

    def accept(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """See what the sequence's newest token does to the text, and whether it is the last."""
        sequence, stream = self.sequence, self.stream
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token_id].logprob
        ends_by_id = token_id in self._ending_ids
        if stream is not None and (not ends_by_id or sequence.request.params.include_stop_str_in_output):
            stream.push(token_id)
            if stream.match is not None:
                self.end("stop")
                return
        if ends_by_id:
            self.end("stop", None if token_id in self.eos_ids else token_id)
        elif len(sequence.output_ids) >= sequence.max_tokens:
            self.end("length")

    def end(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Close the text. A stop string that only the last held-back characters complete still counts."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.stream is None:
            return
        self.stream.finish()
        if self.stream.match is not None and reason in ("stop", "length"):
            self.finish_reason, self.stop_reason = "stop", self.stream.match.stop

    def fail(self) -> None:
        """End with an error without touching the text any more: it may be what failed."""
        self.finish_reason = "error"

    def output(self) -> CompletionOutput:
        sequence = self.sequence
        wants_logprobs = sequence.request.params.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text=self.stream.text if self.stream is not None else "",
            token_ids=list(sequence.output_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
            logprobs=list(sequence.logprobs) if wants_logprobs else None,
        )


@dataclass(eq=False)
class Answer:
    """All samples of one request. `streamed`: the caller wants a record after every step that changed something."""

    request: Request
    prompt_ids: list[int]
    samples: list[Sample]
    streamed: bool = False
    error: str | None = None
    has_token: bool = False

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def output(self) -> RequestOutput:
        first = self.samples[0].sequence
        wants_prompt = self.request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=[sample.output() for sample in self.samples],
            finished=self.finished,
            num_cached_tokens=first.num_cached,
            prompt_logprobs=list(first.prompt_logprobs) if wants_prompt else None,
            error=self.error,
        )


def rejection(request: Request, prompt_ids: list[int], error: str) -> RequestOutput:
    """The answer to a request that cannot run: every sample ends with an error, at once."""
    outputs = [CompletionOutput(index, "", [], "error") for index in range(request.params.n)]
    return RequestOutput(
        request.request_id, request.prompt, prompt_ids, outputs, finished=True, error=error, rejected=True
    )


def logits_fault(sequence: Sequence, token_id: int) -> str | None:
    """What is wrong with the logits that gave this token; a sequence's first token answers for its prompt too."""
    if token_id < 0:
        return f"the model's logits for position {sequence.num_tokens} hold NaN or infinity; no token was drawn."
    scores = (each.logprob for entry in sequence.prompt_logprobs if entry for each in entry.values())
    if not sequence.output_ids and any(math.isnan(score) for score in scores):
        return "the model's logits for a prompt position hold NaN or infinity."
    return None
