"""One engine for several callers: threads, and streams that are read in turns, share its steps.

Whoever waits for an output runs a step, and every output goes to its owner's box. Knows locks, boxes and Ctrl-C; knows
nothing of prompts.

The first Ctrl-C waits for the end of what was begun, so that the books add up and the engine can be asked again. The
second is heard in the middle of it: whatever it was, nobody can say what of it was done, and so every later call but
`close` is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moe.engine.ctrl_c import kept_until_done
from moe.engine.engine import Engine
from moe.engine.request import Request, RequestOutput


class SharedEngine:
    """Holds the engine until `close`; after that every call raises RuntimeError, and so after a second Ctrl-C."""

    def __init__(self, engine: Engine) -> None:
        self.lock = threading.RLock()
        self._engine: Engine | None = engine
        self._boxes: dict[str, deque[RequestOutput]] = {}
        self._left: dict[int, tuple[str, ...]] = {}  # by thread, what its call has asked and not yet cleared away
        self.in_order = True  # whatever was begun was ended; said by who holds the lock

    @property
    def engine(self) -> Engine:
        """The engine itself, for those who hold the lock, or are alone."""
        self.check_open()
        assert self._engine is not None, "an open one has an engine"
        return self._engine

    def check_open(self) -> None:
        """RuntimeError where it is closed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed; make a new one.")

    def check_in_order(self) -> None:
        """RuntimeError where it is closed, or was left in the middle of something. Waits for a step that runs."""
        with self.lock:
            self.check_open()
            if not self.in_order:
                raise RuntimeError(
                    "this LLM was interrupted before the running step was done (by a second Ctrl-C, or by one where "
                    "several ranks answer together), and cannot be asked again; close it and make a new one."
                )

    def close(self) -> Engine | None:
        """The engine, which is the caller's now; None where it was closed before."""
        with self.lock:
            engine, self._engine = self._engine, None
            self._boxes.clear()
        return engine

    @contextmanager
    def _whole(self) -> Iterator[Engine]:
        """The engine, for something that is done whole: who leaves this other than at its end, or by an error that the
        engine told, leaves it out of order. So it is from the beginning until the contrary is known, for an interrupt
        may come at any line, here too. With the lock held."""
        self.check_in_order()
        self.in_order = False
        try:
            yield self.engine
        except Exception:
            self.in_order = True
            raise
        self.in_order = True

    @contextmanager
    def asked(self, requests: Sequence[Request], *, stream: bool = False) -> Iterator[None]:
        """Inside, `next_output` answers these; on the way out, whatever the reason, unfinished ones are aborted.

        Where Ctrl-C comes on that very way, the next call of the thread does it; a stream's then run on unheard.
        """
        engine, thread = self.engine, threading.get_ident()
        with self.lock:
            with kept_until_done():
                self._clear(engine, self._left.pop(thread, ()))
            taken = [each.request_id for each in requests if each.request_id in self._boxes]
            if taken:
                raise ValueError(f"request_id={taken[0]!r} is already being answered; ids must be unique.")
            if not stream:
                self._left[thread] = tuple(each.request_id for each in requests)
            self._boxes.update({each.request_id: deque() for each in requests})
        try:
            for request in requests:
                with self.lock, kept_until_done(), self._whole():
                    engine.add_request(request, stream=stream)
            yield
        finally:
            with self.lock, kept_until_done():
                self._clear(engine, [each.request_id for each in requests])
                if not stream:
                    self._left.pop(thread, None)

    def next_output(self, request_id: str) -> RequestOutput:
        """The next output of one request: from its box, or by running steps until there is one."""
        while True:
            with self.lock:
                self.check_open()
                box = self._boxes[request_id]
                if box:
                    return box.popleft()
                with kept_until_done(), self._whole() as engine:
                    assert engine.has_unfinished, f"request {request_id} vanished from the engine"
                    for output in engine.step():
                        if output.request_id in self._boxes:
                            self._boxes[output.request_id].append(output)

    def answer_in_step(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Answers in order, together with other ranks: steps go on until none of them has work left. Who is interrupted
        between two of them has left the others' step, and is out of order."""
        found: dict[str, RequestOutput] = {}
        with self.lock, self._whole() as engine:
            for request in requests:
                engine.add_request(request)
            engine.join()
            while engine.has_unfinished:
                with kept_until_done():
                    found |= {output.request_id: output for output in engine.step()}
        return [found[request.request_id] for request in requests]

    def is_asked(self, request_id: str) -> bool:
        """Whether a request of that id is being answered."""
        return request_id in self._boxes

    def abort(self, request_id: str) -> bool:
        """False where no such request runs."""
        self.check_open()
        with self.lock, kept_until_done(), self._whole() as engine:
            return engine.abort(request_id)

    def _clear(self, engine: Engine, request_ids: Sequence[str]) -> None:
        """End those that run, of an engine in order, and take their boxes away. With the lock held, and Ctrl-C kept."""
        for request_id in request_ids:
            if self.in_order and self._engine is not None:
                with self._whole():
                    engine.abort(request_id)
            self._boxes.pop(request_id, None)
