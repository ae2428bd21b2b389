"""A job among other ranks: which lines it takes and when, and stopping with them."""

from __future__ import annotations

import itertools
from typing import Any

from configs.schema import Config, EngineConfig
from moe.batch.job import FIRST_LINES, Job
from moe.batch.lines import Line
from moe.batch.order import in_runs
from moe.engine.request import RequestOutput
from tests.test_batch.fakes import FakeEngine, FakeTokenizer


class InStepEngine(FakeEngine):
    """One rank's engine beside others that stop when told to: `claimed` lines of each step."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.most_waiting = 0
        self.claimed: list[int] = []
        self.agreed_stop_at = 1 << 30

    @property
    def has_unfinished(self) -> bool:
        return self.joined

    def join(self) -> None:
        self.joined = True

    def step(self) -> list[RequestOutput]:
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        self.claimed.append(len(self.requests) - sum(self.claimed))
        if len(self.claimed) == self.agreed_stop_at:
            self.stopped, self.joined = 15, False
            return []
        outputs = super().step() if self._left else []
        self.joined = bool(self._left) or self.expects_more
        return outputs


def run_in_step(num_lines: int, engine: InStepEngine, **config: Any) -> tuple[Job, list[int]]:
    """A rank that claims every run of lines; each line is a run of its own. The numbers of the finished lines."""
    counter = itertools.count()
    lines = in_runs(
        (Line(i, {"prompt": "abcd", "max_tokens": 1 + i % 3}) for i in range(1, num_lines + 1)), lambda: next(counter)
    )
    job, finished = Job(Config(engine=EngineConfig(**config)), engine, FakeTokenizer(), "fake"), []

    class Numbers:
        def append(self, number: int, *_: Any) -> None:
            finished.append(number)

    job.run(lines, Numbers())
    return job, finished


def test_lines_are_claimed_in_turns_and_never_far_ahead() -> None:
    engine = InStepEngine(32)
    job, finished = run_in_step(100, engine)
    assert sorted(finished) == list(range(1, 101)) and not engine.expects_more and not job.stopped
    assert engine.claimed[0] == FIRST_LINES and max(engine.claimed) <= 32
    assert engine.most_waiting <= 2  # a sixteenth of the places


def test_a_short_file_is_dealt_out() -> None:
    """A rank claims no more lines in its first steps than leave some for three others that take as many in each."""
    engine = InStepEngine(32)
    run_in_step(12, engine)
    assert sum(engine.claimed[:2]) <= 12 // 4  # or one of four would be dry while another holds a backlog


def test_short_answers_fill_a_rank_as_fast_as_long_ones() -> None:
    engine = InStepEngine(64)
    run_in_step(200, engine, max_num_seqs=64)
    assert len(engine.claimed) < 24  # answers of 1 to 3 tokens: what runs at a time says little of what is free


def test_long_prompts_are_dealt_out_by_their_tokens() -> None:
    engine = InStepEngine(32)
    run_in_step(60, engine, max_batched_tokens=10)
    assert max(engine.claimed) == 3  # of 4 tokens each: the third goes over the budget of a step


def test_what_another_rank_wants_stops_this_one() -> None:
    engine = InStepEngine(32)
    engine.agreed_stop_at = 3
    job, finished = run_in_step(100, engine)
    assert job.stopped == 15 and len(engine.claimed) == 3 and len(finished) < 100
