"""A step that was launched and whose results the host has not read yet. Knows copies under way and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe.engine.logprobs import LogprobTensors, to_records
from moe.engine.request import TokenLogprobs
from moe.engine.sampler import SampleResult
from moe.engine.scheduler import Chunk, Schedule


@dataclass(frozen=True)
class PromptRows:
    """Log-probabilities of the prompt tokens that a chunk's rows score."""

    chunk: Chunk
    num_top: int
    tensors: LogprobTensors | None  # None: the chunk scores none

    @property
    def records(self) -> list[TokenLogprobs]:
        if self.tensors is None:
            return []
        return to_records(self.tensors, [self.num_top] * self.tensors.ids_R.shape[0])


@dataclass(frozen=True)
class InFlight:
    """`result`, on the host, counts once `wait` has returned. `rows`: where in it the sampled sequences lie.

    `holds_back`: the next step cannot be prepared before this one's ids are known.
    """

    schedule: Schedule
    result: SampleResult | None  # None: no row is sampled
    rows: list[int] | None  # None: in order, all of it
    prompts: list[PromptRows]
    holds_back: bool
    arrived: torch.cuda.Event | None  # None: a device that computes at once

    def wait(self) -> None:
        """Until the results are here. Steps launched since go on."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def token_ids(self) -> list[int]:
        """Of `schedule.sampled`, in order; -1 where the logits held NaN."""
        if self.result is None:
            return []
        ids: list[int] = self.result.ids_B.tolist()
        return ids if self.rows is None else [ids[row] for row in self.rows]

    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """Of `schedule.sampled`, in order; None where nobody asked."""
        return self.result.logprobs if self.result is not None else None

    @property
    def wanted(self) -> bool:
        """Whether any sequence still runs that a row was computed for."""
        return any(not sequence.finished for sequence in self.schedule.sequences)
