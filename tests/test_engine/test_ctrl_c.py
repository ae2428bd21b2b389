"""Ctrl-C while an LLM answers: once, the running step is done first and the LLM can be asked again; twice, at once, and
the LLM can be asked again or says that it cannot. At named places, and at every line that runs meanwhile.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kv_cache.allocator import BlockAllocator
from kv_cache.prefix_cache import PrefixCache
from moe import LLM, SamplingParams
from moe.engine.request import Request
from moe.engine.scheduler import Scheduler
from moe.engine.shared_engine import SharedEngine
from moe.model.step_input import StepInput
from tests.test_engine.fake_network import FakeNetwork, expected_tokens, make_engine, make_parts

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
REFUSED = "this LLM was interrupted before the running step was done .* close it and make a new one"

pytestmark = pytest.mark.usefixtures("hears_ctrl_c")


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """As in a terminal: a shell's job in the background is told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def make(folder: Path, network: FakeNetwork | None = None, **options: Any) -> LLM:
    return LLM("fake", parts=make_parts(folder, network), **({"num_blocks": 9, "block_size": 8} | options))


PLACES = {  # where Ctrl-C comes: a class, its method, and the call of it
    "while prompts are queued": (Scheduler, "add", 2),
    "while waiting ones are looked through": (PrefixCache, "count", 6),
    "while blocks are bound": (BlockAllocator, "allocate", 7),
    "while a step is computed": (FakeNetwork, "forward", 3),
    "while its tokens are handed out": (Scheduler, "receive", 5),
    "while blocks are given back": (BlockAllocator, "release", 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_batch_leaves_nothing_behind(folder: Path, monkeypatch: Any, place: str) -> None:
    """Ctrl-C anywhere: the call raises KeyboardInterrupt, its requests are gone, the next batch is answered."""
    owner, name, number = PLACES[place]
    calls, method = itertools.count(1), getattr(owner, name)

    def interrupt(*args: Any, **keys: Any) -> Any:
        if next(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return method(*args, **keys)

    with make(folder) as llm:
        monkeypatch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1] * 20, [1] * 20 + [2], [2] * 20], replace(PARAMS, n=2))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.engine.num_unfinished == 0 and llm.engine.cache.allocator.num_used == 0
        llm.engine.scheduler.check_idle()
        assert llm.generate([[3]], PARAMS)[0].outputs[0].token_ids == expected_tokens([3], 6)


def test_an_interrupt_leaves_other_streams_alone(folder: Path) -> None:
    """The step it came in is ended first, so who goes on gets the same answer."""
    steps = itertools.count()
    network = FakeNetwork(before_forward=lambda _: signal.raise_signal(signal.SIGINT) if next(steps) == 3 else None)
    with make(folder, network) as llm:
        stream = llm.stream([5], PARAMS)
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1] * 20], PARAMS)
        assert list(stream)[-1].outputs[0].token_ids == expected_tokens([5], 6)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_second_interrupt_is_heard_at_once_and_later_calls_are_refused(folder: Path, streamed: bool) -> None:
    """The step is left where it is. Streams that were open hear of it too; closing is all that is left."""
    steps, ended = itertools.count(), []

    def interrupt(step: StepInput) -> None:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            ended.append("the step")

    with make(folder, FakeNetwork(before_forward=interrupt)) as llm:
        stream = llm.stream([5], PARAMS)
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream([1] * 20, PARAMS)) if streamed else llm.generate([[1] * 20], PARAMS)
        assert not ended and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        for call in (
            lambda: llm.generate([[3]], PARAMS),
            lambda: list(llm.stream([3], PARAMS)),
            lambda: list(stream),
            lambda: llm.abort("request-0"),
        ):
            with pytest.raises(RuntimeError, match=REFUSED):
                call()
        watchdog = llm.engine.watchdog
    assert not watchdog.alive


def test_ranks_that_answer_together_are_left_by_the_first_interrupt(folder: Path) -> None:
    """The others go on to their next step, which this one is not in any more."""
    steps = itertools.count()
    network = FakeNetwork(before_forward=lambda _: signal.raise_signal(signal.SIGINT) if next(steps) == 2 else None)
    engine = make_engine(make_parts(folder, network))
    shared = SharedEngine(engine)
    with pytest.raises(KeyboardInterrupt):
        shared.answer_in_step([Request("a", [1] * 20, PARAMS)])
    assert next(steps) == 3 and engine.num_unfinished == 1, "the running step is the last"
    with pytest.raises(RuntimeError, match=REFUSED):
        shared.check_in_order()
    engine.close()


class Interrupts:
    """Ctrl-C at the n-th lines that run in the engine's own files and in contextlib, for each n of `at`."""

    def __init__(self, at: Collection[int]) -> None:
        self.at = at
        self.lines: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        return self.line if "/moe/engine/" in name or name.endswith("/contextlib.py") else None

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) in self.at:
                signal.raise_signal(signal.SIGINT)
        return self.line


def answered(llm: LLM, at: Collection[int] = ()) -> list[tuple[str, int]]:
    """The lines that run while two prompts are answered, or until an interrupt ends that."""
    interrupts, before = Interrupts(at), sys.gettrace()
    sys.settrace(interrupts)
    try:
        outputs = llm.generate([[1] * 10, [2] * 3], replace(PARAMS, max_tokens=2))
        assert [each.outputs[0].token_ids for each in outputs] == [expected_tokens(p, 2) for p in ([1] * 10, [2] * 3)]
    finally:
        sys.settrace(before)
    return interrupts.lines


def first_and_last(lines: list[tuple[str, int]]) -> list[int]:
    """Numbers of the lines, each place's first and last time: all of the calls that answer, some of what they call."""
    own = ("shared_engine.py", "llm.py", "ctrl_c.py", "contextlib.py")
    first = {place: number for number, place in reversed(list(enumerate(lines, 1)))}
    last = {place: number for number, place in enumerate(lines, 1)}
    chosen = {n for each in (first, last) for (name, _), n in each.items() if name.endswith(own)}
    return sorted(chosen | set(list(first.values())[::12]))


@pytest.mark.parametrize("behind", [None, 1, 40], ids=["once", "twice-running", "twice"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a context that was not entered yet
def test_interrupts_at_every_line(folder: Path, behind: int | None) -> None:
    """Whatever line it comes at: the call ends with KeyboardInterrupt, and the next one is answered and leaves nothing
    behind it, or is refused: that only where there was a second, `behind` so many lines."""
    made = partial(make, folder, enable_prefix_caching=False)  # so that the same lines run each time
    llm = made()
    answered(llm)
    lines = answered(llm)
    refused = 0
    for number in first_and_last(lines):
        with pytest.raises(KeyboardInterrupt):
            answered(llm, {number} if behind is None else {max(number - behind, 1), number})
        try:
            (output,) = llm.generate([[3]], replace(PARAMS, max_tokens=2))
        except RuntimeError as error:
            assert behind is not None and "was interrupted" in str(error), (lines[number - 1], error)
            refused += 1
            llm.close()
            llm = made()
            answered(llm)
            continue
        assert output.outputs[0].token_ids == expected_tokens([3], 2), lines[number - 1]
        assert llm.engine.num_unfinished == 0 and not llm._shared._boxes, lines[number - 1]
        llm.engine.scheduler.check_idle()
    llm.close()
    assert (refused > 0) == (behind is not None)
