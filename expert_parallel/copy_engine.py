"""Copies from host memory that run beside the products, and the marks by which both wait for each other.

Knows tensors and an order of work; knows nothing of experts. Copies run one after another in the order in which they
are asked for. A ticket is a mark in one of two orders, that of the copies or that of the products:

    copies     copy_waits(used)  copy -> landed
    products                                     compute_waits(landed)  product  used() -> used

Who overwrites a buffer lets the copies wait for its last reader's ticket; who reads one lets the products wait for its
copy's. The host need not wait for either. `ImmediateEngine` copies at once; tests have one whose copies are late and
whose buffers hold NaN until then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass
class CopyFigures:
    """Since the engine was made, or since `reset`; seconds of the device.

    `due_seconds`: over all copies that a product waited for, what was left of each copy's own time when the work
    between its order and its use was done: the least that these could stall, if none waited for another.
    """

    num_copies: int = 0
    num_bytes: int = 0
    busy_seconds: float = 0.0  # in which bytes were on their way
    span_seconds: float = 0.0  # from the first copy's start to the last one's end
    stall_seconds: float = 0.0  # in which products waited for copies
    due_seconds: float = 0.0

    @property
    def gb_per_second(self) -> float:
        """While bytes were on their way."""
        return self.num_bytes / self.busy_seconds / 1e9 if self.busy_seconds else 0.0

    @property
    def busy_share(self) -> float:
        return self.busy_seconds / self.span_seconds if self.span_seconds else 0.0


_KEPT_WAITS = 4096
"""How far back it is known how long products waited: further than any copy is ahead of its use that still matters."""


class CopyEngine(Protocol):
    """Tickets are the engine's own; they may be waited for any number of times, also when long passed."""

    kernels_read_host: bool
    """Whether kernels of the device may read the sources too."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Start to copy each source into its target; the ticket lands when all of them have."""
        ...

    def compute_waits(self, landed: Any) -> None:
        """Products launched from now on begin after this copy."""
        ...

    def used(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> Any:
        """A ticket that passes when the products launched so far, which read these rows of tensors, have ended."""
        ...

    def copy_waits(self, used: Any) -> None:
        """Copies asked for from now on begin after these products."""
        ...

    def landed(self, ticket: Any) -> bool:
        """Whether a copy is over. Waits for nobody."""
        ...

    def host_waits(self, landed: Any) -> None:
        """Until this copy is over."""
        ...

    def drain(self) -> None:
        """The host waits until every copy asked for has landed."""
        ...

    def figures(self) -> CopyFigures: ...

    def reset(self) -> None:
        """Count from here on."""
        ...


class ImmediateEngine(CopyEngine):
    """Copies at once, on the thread that asks: on the CPU, whose products are over when their call returns."""

    kernels_read_host = False  # there are none

    def __init__(self) -> None:
        self._figures = CopyFigures()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        begin = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        seconds = time.perf_counter() - begin
        figures = self._figures
        figures.num_copies += 1
        figures.num_bytes += sum(target.nbytes for target in targets)
        figures.busy_seconds += seconds
        figures.span_seconds += seconds
        figures.stall_seconds += seconds  # nothing else runs meanwhile
        figures.due_seconds += seconds

    def compute_waits(self, landed: None) -> None:
        """It has landed."""

    def used(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> None:
        """They are read."""

    def copy_waits(self, used: None) -> None:
        """They are read."""

    def landed(self, ticket: None) -> bool:
        return True

    def host_waits(self, landed: None) -> None:
        """It has landed."""

    def drain(self) -> None:
        """Nothing is on its way."""

    def figures(self) -> CopyFigures:
        return self._figures

    def reset(self) -> None:
        self._figures = CopyFigures()


@dataclass(eq=False)
class CudaCopy:
    """One copy's events: `asked` in the order of the products, `start` and `end` in that of the copies.

    `waits_before`: of the engine, when it was asked for."""

    asked: torch.cuda.Event
    start: torch.cuda.Event
    end: torch.cuda.Event
    num_bytes: int
    waits_before: int


@dataclass(eq=False)
class _Wait:
    """Events of the products around their wait for a copy."""

    copy: CudaCopy
    before: torch.cuda.Event
    after: torch.cuda.Event


class CudaEngine(CopyEngine):
    """A stream of its own, so that the GPU's copy engine works beside the multiprocessors. Sources are pinned.

    Times come from events that are read when they have passed, so that counting waits for nothing.
    """

    kernels_read_host = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._copies: deque[CudaCopy] = deque()
        self._waits: deque[_Wait] = deque()
        self._figures = CopyFigures()
        self._first: torch.cuda.Event | None = None
        self._num_waits = 0
        # Seconds of all waits up to each of the newest ones, the last that is over at the end.
        self._stalled: deque[float] = deque([0.0], maxlen=_KEPT_WAITS)
        self._num_over = 0

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> CudaCopy:
        num_bytes = sum(target.nbytes for target in targets)
        asked, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        copy = CudaCopy(asked, start, end, num_bytes, self._num_waits)
        copy.asked.record()
        with torch.cuda.stream(self.stream):
            copy.start.record()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copy.end.record()
        self._copies.append(copy)
        self._collect()
        return copy

    def compute_waits(self, landed: CudaCopy) -> None:
        if landed.end.query():
            return
        wait = _Wait(landed, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        stream = torch.cuda.current_stream(self.device)
        wait.before.record(stream)
        stream.wait_event(landed.end)
        wait.after.record(stream)
        self._waits.append(wait)
        self._num_waits += 1

    def used(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def copy_waits(self, used: torch.cuda.Event) -> None:
        self.stream.wait_event(used)

    def landed(self, ticket: CudaCopy) -> bool:
        return ticket.end.query()

    def host_waits(self, landed: CudaCopy) -> None:
        landed.end.synchronize()

    def drain(self) -> None:
        self.stream.synchronize()

    def figures(self) -> CopyFigures:
        """Of what is over by now."""
        self._collect()
        return self._figures

    def reset(self) -> None:
        self.drain()
        torch.cuda.synchronize(self.device)
        self._collect()
        self._figures, self._first = CopyFigures(), None

    def _collect(self) -> None:
        """Add up the copies and waits that are over. Both orders are first in, first out."""
        figures = self._figures
        while self._copies and self._copies[0].end.query():
            copy = self._copies.popleft()
            first = self._first = self._first or copy.start
            figures.num_copies += 1
            figures.num_bytes += copy.num_bytes
            figures.busy_seconds += copy.start.elapsed_time(copy.end) / 1e3
            figures.span_seconds = first.elapsed_time(copy.end) / 1e3
        while self._waits and self._waits[0].after.query():
            wait = self._waits.popleft()
            copy, stall = wait.copy, wait.before.elapsed_time(wait.after) / 1e3
            figures.stall_seconds += stall
            # What was computed since the copy was asked for: the time since, without the waits in it.
            since = self._num_over - copy.waits_before
            if since < len(self._stalled):
                waited = self._stalled[-1] - self._stalled[-1 - since]
                computed = copy.asked.elapsed_time(wait.before) / 1e3 - waited
                figures.due_seconds += max(0.0, copy.start.elapsed_time(copy.end) / 1e3 - computed)
            self._stalled.append(self._stalled[-1] + stall)
            self._num_over += 1


def make_engine(device: torch.device) -> CopyEngine:
    """The one of a device."""
    return CudaEngine(device) if device.type == "cuda" else ImmediateEngine()
