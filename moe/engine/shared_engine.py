"""One engine for several callers: threads, and streams that are read in turns, share its steps.

Whoever waits for an output runs a step, and every output goes to its owner's box. Knows locks, boxes and Ctrl-C; knows
nothing of prompts.
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
    """Holds the engine until `close`; after that every call raises RuntimeError."""

    def __init__(self, engine: Engine) -> None:
        self.lock = threading.RLock()
        self._engine: Engine | None = engine
        self._boxes: dict[str, deque[RequestOutput]] = {}

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

    def close(self) -> Engine | None:
        """The engine, which is the caller's now; None where it was closed before."""
        with self.lock:
            engine, self._engine = self._engine, None
            self._boxes.clear()
        return engine

    @contextmanager
    def asked(self, requests: Sequence[Request], *, stream: bool = False) -> Iterator[None]:
        """Inside, `next_output` answers these; on the way out, whatever the reason, unfinished ones are aborted."""
        engine = self.engine
        with self.lock:
            taken = [each.request_id for each in requests if each.request_id in self._boxes]
            if taken:
                raise ValueError(f"request_id={taken[0]!r} is already being answered; ids must be unique.")
            self._boxes.update({each.request_id: deque() for each in requests})
        try:
            self._add(engine, requests, stream=stream)
            yield
        finally:
            with self.lock, kept_until_done():
                for each in requests:
                    engine.abort(each.request_id)
                    self._boxes.pop(each.request_id, None)

    def next_output(self, request_id: str) -> RequestOutput:
        """The next output of one request: from its box, or by running steps until there is one."""
        while True:
            with self.lock:
                engine = self.engine
                box = self._boxes[request_id]
                if box:
                    return box.popleft()
                assert engine.has_unfinished, f"request {request_id} vanished from the engine"
                with kept_until_done():
                    for output in engine.step():
                        if output.request_id in self._boxes:
                            self._boxes[output.request_id].append(output)

    def answer_in_step(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Answers in order, together with other ranks: steps go on until none of them has work left."""
        engine = self.engine
        found: dict[str, RequestOutput] = {}
        with self.lock:
            self._add(engine, requests)
            engine.join()
            while engine.has_unfinished:
                with kept_until_done():
                    found |= {output.request_id: output for output in engine.step()}
        return [found[request.request_id] for request in requests]

    def abort(self, request_id: str) -> bool:
        """False where no such request runs."""
        engine = self.engine
        with self.lock, kept_until_done():
            return engine.abort(request_id)

    def _add(self, engine: Engine, requests: Sequence[Request], *, stream: bool = False) -> None:
        with self.lock:
            for request in requests:
                with kept_until_done():
                    engine.add_request(request, stream=stream)
