"""A hang is named once, an idle engine never, and the thread ends."""

from __future__ import annotations

import logging
import re
import threading
import time
from types import SimpleNamespace

import pytest

from moe.engine import watchdog as watchdog_module
from moe.engine.watchdog import SHOWN_IDS, Watchdog


def wait_for(watchdog: Watchdog, hangs: int) -> None:
    deadline = time.monotonic() + 60
    while watchdog.num_hangs < hangs and time.monotonic() < deadline:
        time.sleep(0.005)
    assert watchdog.num_hangs == hangs


class Hours:
    """A clock that the test sets, and a watchdog's thread that looks at it all the time: a busy machine, on which any
    line may take seconds, changes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looks = 1000.0, 0
        monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(Watchdog, "_next_look", self._next_look)

    def _next_look(self) -> float:
        self.looks += 1
        return 0.001

    def pass_by(self, seconds: float) -> None:
        """Returns when the thread has looked at the new hour."""
        self.now += seconds
        seen, deadline = self.looks, time.monotonic() + 60
        while self.looks < seen + 2:
            assert time.monotonic() < deadline, "the thread looks no more"
            time.sleep(0.001)


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    return Hours(monkeypatch)


def test_a_hang_is_reported_once_with_stage_requests_and_stacks(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(0.05)
    with caplog.at_level(logging.ERROR):
        watchdog.enter("forward", ["job-1", "job-2"])
        wait_for(watchdog, 1)
        time.sleep(0.2)  # still the same hang
    watchdog.close()
    assert watchdog.num_hangs == 1 and len(caplog.records) == 1
    assert re.search(r"stage 'forward' has made no progress for \d+\.\d s", caplog.text)
    assert "requests: job-1, job-2" in caplog.text
    assert f"--- thread {threading.current_thread().name}" in caplog.text
    assert "test_a_hang_is_reported_once" in caplog.text, "the stack shows where the engine's thread stands"
    assert not watchdog.alive


def test_the_next_hang_is_reported_again_and_progress_is_none(caplog: pytest.LogCaptureFixture, hours: Hours) -> None:
    watchdog = Watchdog(3600.0)
    for _ in range(8):  # longer than the limit together, each stage below it
        watchdog.enter("forward", ["a"])
        hours.pass_by(3000.0)
    assert watchdog.num_hangs == 0
    with caplog.at_level(logging.ERROR):
        for hangs in (1, 2):
            watchdog.enter("sample", [str(number) for number in range(SHOWN_IDS + 3)])
            hours.pass_by(3600.0)
            assert watchdog.num_hangs == hangs
    watchdog.close()
    assert len(caplog.records) == 2 and " and 3 more" in caplog.text
    assert "no progress for 3600.0 s" in caplog.text


def test_an_idle_engine_is_never_reported(hours: Hours) -> None:
    watchdog = Watchdog(3600.0)
    hours.pass_by(4000.0)  # before the first step
    watchdog.enter("forward", ["a"])
    watchdog.leave()
    hours.pass_by(4000.0)  # after it
    watchdog.close()
    watchdog.close()
    assert watchdog.num_hangs == 0 and not watchdog.alive


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_limit_of_nothing_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"engine\.step_timeout_s=.* must be above 0"):
        Watchdog(timeout)
