"""A fault on one rank ends all: it is told through the store, and who still runs a while later is ended.

Knows ranks, texts and a clock; knows nothing of what a rank does. A rank whose partner died sees a broken connection
(gloo) or nothing at all (NCCL): in both cases the store says which rank it was, and why.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from expert_parallel.group import Ranks

_KEY = "fault"
_POLL_S = 0.5


def end_process(text: str, code: int = 1) -> None:
    """At once, with last words: cleaning up would wait for the ranks that are gone."""
    if text:
        print(text, file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


class FaultWatch:
    """Tells the other ranks of a fault here, and listens for theirs in a daemon thread.

    When one is told, this process has `patience_s` to end by itself (its collectives fail too); then `end` ends it.
    """

    def __init__(self, ranks: Ranks, *, patience_s: float = 5.0, end: Callable[[str], None] = end_process) -> None:
        self.ranks = ranks
        self.patience_s = patience_s
        self.end = end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="fault-watch", daemon=True)
        self._thread.start()

    def tell(self, error: BaseException) -> str:
        """Tell all ranks that this one has failed. What failed first stands; returns it, with its rank.

        An error here may be the echo of another rank's fault, which is told a moment later: it is waited for.
        """
        own = f"rank {self.ranks.values.rank}: {type(error).__name__}: {error}"
        if _is_echo(error):
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline:
                if (told := self.told()) is not None:
                    return told
                time.sleep(0.05)
        try:
            return self.ranks.store.compare_set(_KEY, "", own).decode()
        except RuntimeError:
            return own  # the store is gone with the rank that served it

    def told(self) -> str | None:
        """The first fault of any rank."""
        try:
            return self.ranks.store.get(_KEY).decode() if self.ranks.store.check([_KEY]) else None
        except RuntimeError:
            return "the rank that serves the store is gone"

    def close(self) -> None:
        """Listen no longer; closing twice is fine."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._closed.wait(_POLL_S):
            if (told := self.told()) is not None and not self._closed.wait(self.patience_s):
                self.end(f"rank {self.ranks.values.rank} is ended by a fault of another: {told}")
                return


def _is_echo(error: BaseException | None) -> bool:
    """Whether an error comes from a collective, or from one underneath it: somebody else's fault, most likely."""
    while error is not None:
        text = str(error)
        if isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "NCCL", "Connection", "c10d")):
            return True
        error = error.__cause__
    return False
