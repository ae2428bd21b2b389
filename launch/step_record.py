"""What the steps of an engine were, for the roofline: lengths, chunks, and the distinct experts that their rows hit.

Knows the scheduler's answer and the load counter, and reads both around each step. Reading waits for the device, so a
recorded pass is never the timed one: it is the warm-up, whose schedule is the same (nothing in it depends on time).

An engine schedules a step while the last one runs. What the counter gained between two schedules is the first one's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from launch.roofline import StepWork
from moe.engine.engine import Engine
from moe.engine.scheduler import Schedule


class StepRecorder:
    """Use as a context manager around steps of one engine. `steps`, complete on the way out, is what they were."""

    def __init__(self, engine: Engine) -> None:
        load = engine.parts.network.load
        assert load is not None, "an engine counts its experts' load"
        self.load = load
        self.scheduler = engine.scheduler
        self.steps: list[StepWork] = []
        self._plain: Callable[..., Schedule] = self.scheduler.schedule
        self._open: StepWork | None = None
        self._counts_LE: Tensor = load.snapshot()

    def __enter__(self) -> StepRecorder:
        setattr(self.scheduler, "schedule", self._schedule)  # noqa: B010 - a method is replaced for this one object
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self.scheduler, "schedule")
        self._close()

    def _schedule(self, *args: Any, **named: Any) -> Schedule:
        self._close()
        schedule = self._plain(*args, **named)
        if schedule.num_tokens:
            self._open = step_work(schedule)
        return schedule

    def _close(self) -> None:
        """Give what was counted since the last call to the step scheduled then."""
        counts_LE = self.load.snapshot()
        hit = float((counts_LE > self._counts_LE).sum())
        self._counts_LE = counts_LE
        if self._open is not None:
            self.steps.append(replace(self._open, experts_hit=hit))
        self._open = None


def step_work(schedule: Schedule, experts_hit: float = 0.0) -> StepWork:
    """The schedule's sizes. Rows of logits: every decoding sequence, and every chunk that ends its prompt."""
    ends = sum(chunk.end == chunk.sequence.num_prompt for chunk in schedule.chunks)
    return StepWork(
        tuple(sequence.num_computed + 1 for sequence in schedule.decodes),
        tuple((chunk.start, chunk.length) for chunk in schedule.chunks),
        len(schedule.decodes) + ends,
        experts_hit,
    )
