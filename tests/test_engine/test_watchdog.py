"""A hang is named once, an idle engine never, and the thread ends."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from moe.engine.watchdog import SHOWN_IDS, Watchdog


def wait_for(watchdog: Watchdog, hangs: int) -> None:
    deadline = time.monotonic() + 10
    while watchdog.num_hangs < hangs and time.monotonic() < deadline:
        time.sleep(0.005)
    assert watchdog.num_hangs == hangs


def test_a_hang_is_reported_once_with_stage_requests_and_stacks(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(0.05)
    with caplog.at_level(logging.ERROR):
        watchdog.enter("forward", ["job-1", "job-2"])
        wait_for(watchdog, 1)
        time.sleep(0.2)  # still the same hang
    watchdog.close()
    assert watchdog.num_hangs == 1 and len(caplog.records) == 1
    assert "stage 'forward' has made no progress for 0." in caplog.text
    assert "requests: job-1, job-2" in caplog.text
    assert f"--- thread {threading.current_thread().name}" in caplog.text
    assert "test_a_hang_is_reported_once" in caplog.text, "the stack shows where the engine's thread stands"
    assert not watchdog.alive


def test_the_next_hang_is_reported_again_and_progress_is_none(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(0.3)
    for _ in range(8):  # longer than the limit together, each stage far below it
        watchdog.enter("forward", ["a"])
        time.sleep(0.06)
    assert watchdog.num_hangs == 0
    with caplog.at_level(logging.ERROR):
        for hangs in (1, 2):
            watchdog.enter("sample", [str(number) for number in range(SHOWN_IDS + 3)])
            wait_for(watchdog, hangs)
    watchdog.close()
    assert len(caplog.records) == 2 and " and 3 more" in caplog.text


def test_an_idle_engine_is_never_reported() -> None:
    watchdog = Watchdog(0.02)
    time.sleep(0.15)  # before the first step
    watchdog.enter("forward", ["a"])
    watchdog.leave()
    time.sleep(0.15)  # after it
    watchdog.close()
    watchdog.close()
    assert watchdog.num_hangs == 0 and not watchdog.alive


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_limit_of_nothing_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"engine\.step_timeout_s=.* must be above 0"):
        Watchdog(timeout)
