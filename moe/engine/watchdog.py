"""Speaks when a step hangs: which stage, which requests, and where every Python thread stands.

Knows a clock and strings; knows nothing of what the engine does. It ends nothing: a job's time limit does that.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SHOWN_IDS = 20


class Watchdog:
    """A daemon thread that logs once per hang of more than `timeout_s` seconds in one stage.

    `enter` names the stage that begins, and counts as progress; `leave` says that no step runs, so that an idle
    engine is never reported. `end` tells the thread to end, `close` waits for it too; closing twice is fine.
    """

    def __init__(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"engine.step_timeout_s={timeout_s:g} must be above 0; give seconds, for example 300.")
        self.timeout_s = timeout_s
        self.num_hangs = 0
        self._condition = threading.Condition()
        self._stage: str | None = None
        self._request_ids: Sequence[str] = ()
        self._since = 0.0
        self._reported = False
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="step-watchdog", daemon=True)
        self._thread.start()

    def enter(self, stage: str, request_ids: Sequence[str] = ()) -> None:
        # Plain stores without a wake-up: the thread looks at the clock by itself, and this is called every step.
        with self._condition:
            self._stage, self._request_ids, self._since = stage, request_ids, time.monotonic()
            self._reported = False

    def leave(self) -> None:
        with self._condition:
            self._stage, self._request_ids = None, ()

    def end(self) -> None:
        """Waits for nothing, for the collector of garbage may call it from any thread, the watchdog's own included."""
        self._closed = True
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        self.end()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _watch(self) -> None:
        with self._condition:
            while not self._closed:
                self._condition.wait(self._next_look())
                waited = time.monotonic() - self._since
                if self._closed or self._stage is None or self._reported or waited < self.timeout_s:
                    continue
                self._reported = True
                self.num_hangs += 1
                logger.error(self._report(self._stage, self._request_ids, waited))

    def _next_look(self) -> float:
        """Seconds until a hang could be due; never a busy loop."""
        if self._stage is None or self._reported:
            return self.timeout_s / 4
        return max(self._since + self.timeout_s - time.monotonic(), 0.001)

    def _report(self, stage: str, request_ids: Sequence[str], waited: float) -> str:
        shown = ", ".join(request_ids[:SHOWN_IDS])
        more = f" and {len(request_ids) - SHOWN_IDS} more" if len(request_ids) > SHOWN_IDS else ""
        lines = [
            f"step hangs: stage {stage!r} has made no progress for {waited:.1f} s; requests: {shown or 'none'}{more}"
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != self._thread.ident:
                lines.append(f"--- thread {names.get(ident, ident)}")
                lines.append("".join(traceback.format_stack(frame)).rstrip())
        return "\n".join(lines)
