"""What the steps of an engine were, for the roofline: lengths, chunks, and the distinct experts that their rows hit.

Knows the scheduler's answer and the load counter, and reads both around each step. Reading waits for the device, so a
recorded pass is never the timed one: it is the warm-up, whose schedule is the same (nothing in it depends on time).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from launch.roofline import StepWork
from moe.engine.engine import Engine
from moe.engine.scheduler import Schedule


class StepRecorder:
    """Use as a context manager around steps of one engine; call `after_step` behind each. `steps` is what they were."""

    def __init__(self, engine: Engine) -> None:
        load = engine.parts.network.load
        assert load is not None, "an engine counts its experts' load"
        self.load = load
        self.scheduler = engine.scheduler
        self.steps: list[StepWork] = []
        self._plain: Callable[..., Schedule] = self.scheduler.schedule
        self._open: list[StepWork] = []
        self._counts_LE: Tensor = load.snapshot()

    def __enter__(self) -> StepRecorder:
        setattr(self.scheduler, "schedule", self._schedule)  # noqa: B010 - a method is replaced for this one object
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self.scheduler, "schedule")

    def after_step(self) -> None:
        """Give the hits since the last call to the steps scheduled since then (one, as a rule)."""
        counts_LE = self.load.snapshot()
        hit = float((counts_LE > self._counts_LE).sum())
        self._counts_LE = counts_LE
        for step in self._open:
            share = hit / len(self._open)
            self.steps.append(StepWork(step.decode_lens, step.chunks, step.logits_rows, share))
        self._open = []

    def _schedule(self, *args: Any, **named: Any) -> Schedule:
        schedule = self._plain(*args, **named)
        if schedule.num_tokens:
            self._open.append(step_work(schedule))
        return schedule


def step_work(schedule: Schedule, experts_hit: float = 0.0) -> StepWork:
    """The schedule's sizes. Rows of logits: every decoding sequence, and every chunk that ends its prompt."""
    ends = sum(chunk.end == chunk.sequence.num_prompt for chunk in schedule.chunks)
    return StepWork(
        tuple(sequence.num_computed + 1 for sequence in schedule.decodes),
        tuple((chunk.start, chunk.length) for chunk in schedule.chunks),
        len(schedule.decodes) + ends,
        experts_hit,
    )
