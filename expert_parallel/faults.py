"""A fault on one rank ends all: it is told through the store, and who still runs a while later is ended.

Knows ranks, texts and a clock; knows nothing of what a rank does. A rank whose partner died sees a broken connection
(gloo) or nothing at all (NCCL): in both cases the store says which rank it was, and why.

A rank that was killed tells nobody. torchrun ends those on the same node; for those on others, and for whoever waits
for a device, each rank watches the next one's process (lifeline.py) and tells of its end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from expert_parallel.group import Ranks
from expert_parallel.lifeline import Lifeline

_KEY = "fault"
_POLL_S = 0.5
_ECHO_S = 2.0
"""How long a rank whose collective broke waits for the reason."""


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
        # A connection of its own: in the other somebody may wait for a key. torch's stubs leave `clone` out.
        self.store = ranks.store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self.patience_s = patience_s
        self.end = end
        self._lifeline = Lifeline(ranks)
        if self._lifeline.unwatched is not None:
            ranks.say(
                f"a kill is noticed late (parallel.timeout_s), for want of a connection to {self._lifeline.unwatched}"
            )
        self._closed = threading.Event()
        self._telling = False  # this process is about to end by itself
        self._heard: str | None = None  # outlives the store
        self._thread = threading.Thread(target=self._listen, name="fault-watch", daemon=True)
        self._thread.start()
        atexit.register(self._hear_no_more)  # for who ends without `close`

    def tell(self, error: BaseException) -> str:
        """Tell all ranks that this one has failed. What failed first stands; returns it, with its rank.

        An error here may be the echo of another rank's fault, which is told a moment later: it is waited for. The
        caller ends this process next, so the rank that serves the store returns when the others have read it.
        """
        self._telling = True
        own = f"rank {self.ranks.values.rank}: {type(error).__name__}: {error}"
        first = self._echoed() if _is_echo(error) else None
        if first is None:
            try:
                first = self.store.compare_set(_KEY, "", own).decode()
                self.store.set(f"{_KEY}/heard/{self.ranks.values.rank}", "yes")
            except RuntimeError:
                return own  # the store is gone with the rank that served it
        self._wait_until_heard()
        return first

    def _echoed(self) -> str | None:
        """The fault that broke a collective here, where another rank tells it in time."""
        deadline = time.monotonic() + _ECHO_S
        while (told := self.told()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        return told

    def told(self) -> str | None:
        """The first fault of any rank."""
        try:
            if not self.store.check([_KEY]):
                return None
            self._heard = self.store.get(_KEY).decode()
            self.store.set(f"{_KEY}/heard/{self.ranks.values.rank}", "yes")
        except RuntimeError:
            served = "torchrun" if self.ranks.values.agent_has_store else "rank 0"
            return self._heard or f"{served}: it served the ranks' store, and is gone"
        return self._heard

    def _wait_until_heard(self) -> None:
        """Where this process serves the store, the others lose it with this process: it stays until all have read the
        fault, whoever told it; for those that are gone themselves no longer than its patience."""
        values = self.ranks.values
        if values.rank or values.agent_has_store:
            return
        others = [f"{_KEY}/heard/{rank}" for rank in range(1, values.world_size)]
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline and not self.store.check(others):
            time.sleep(_POLL_S / 10)

    def close(self) -> None:
        """Listen no longer; closing twice is fine."""
        if not self._closed.is_set():
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self.store.set(f"{_KEY}/left/{self.ranks.values.rank}", "yes")
        self._closed.set()
        self._thread.join()
        self._lifeline.close()
        atexit.unregister(self._hear_no_more)

    def _hear_no_more(self) -> None:
        """Ends the thread alone. One that comes back from the store while Python itself ends would end the process by
        SIGABRT, and torchrun calls a finished script failed. Whether this rank may leave is not for this to say: the
        others see its process end, as ever.
        """
        self._closed.set()
        self._thread.join(self.patience_s)

    def _watch_next(self) -> None:
        """Tell it where the next rank's process has ended, though it has not left."""
        if not self._lifeline.next_has_ended():
            return
        next_rank = self._lifeline.next_rank
        try:
            if not self.store.check([f"{_KEY}/left/{next_rank}"]):
                self.store.compare_set(
                    _KEY, "", f"rank {next_rank}: its process has ended: killed, gone with its machine, or left early"
                )
        except RuntimeError:
            pass  # the store is gone, which is told like any other fault

    def _listen(self) -> None:
        while not self._closed.wait(_POLL_S):
            self._watch_next()
            if (told := self.told()) is None:
                continue
            if not self._closed.wait(self.patience_s) and not self._telling:
                self._wait_until_heard()
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
