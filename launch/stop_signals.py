"""Ctrl-C and SIGTERM: at once where nothing would be lost, after the running step where lines are being answered.

Knows signals and a clock; knows nothing of jobs. Handlers are the process's own, so there is one of these at a time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
STDERR = 2
ECHO_S = 3.0
"""torchrun passes on what the terminal has sent already: a signal so soon after the first is the same one."""


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop. `number`: which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.number = number


class StopSignals:
    """Installed with `with`. A signal raises Interrupted in the main thread, except inside `gently`, where the first
    one is only kept in `wanted` and the second ends the process, and inside `ending`, where the first is passed over.

    `echoes`: torchrun has started this process. `speaks`: whether it says what a signal has led to. `last`: the process
    ends behind it, with an exit code that a signal must not take: handlers stay, as inside `ending`.
    """

    def __init__(self, *, echoes: bool = False, speaks: bool = True, last: bool = False) -> None:
        self.wanted = 0
        self._last = last
        self._gentle = self._ending = False
        self._echoes = echoes
        self._speaks = speaks
        self._first_at = 0.0
        self._before: dict[signal.Signals, object] = {}

    @contextmanager
    def gently(self) -> Iterator[None]:
        """While lines are answered: `wanted` is looked at between steps."""
        self._gentle = True
        try:
            yield
        finally:
            self._gentle = False

    @contextmanager
    def ending(self) -> Iterator[None]:
        """While it is told how the job went: the process ends next, and torchrun must not take its last words."""
        self._ending = True
        try:
            yield
        finally:
            self._ending = self._last

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        if self._last:
            self._ending = True
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType] - what signal() gave

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and self._echoes and time.monotonic() < self._first_at + ECHO_S:
            return
        if self.wanted:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.wanted, self._first_at = number, time.monotonic()
        if self._ending:
            return
        if not self._gentle:
            raise Interrupted(number)
        if self._speaks:
            # Not print: the signal may have come in the middle of one.
            text = f"{signal_name(number)}: stopping after the running step; a second one ends at once\n"
            os.write(STDERR, text.encode())


def signal_name(number: int) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
