"""A copy engine whose copies are late, whose buffers hold NaN until then, and that notices what a GPU would not.

One operation is one call of the engine. A copy lands some operations after it was asked for, in order, or when a
product waits for it; until then its target is NaN, and its source is read only when it lands. Products end some
operations after they were launched: a copy into rows that they read, asked for before and without waiting for them, is
an AssertionError.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expert_parallel.copy_engine import CopyEngine, CopyFigures


@dataclass(eq=False)
class SimulatedCopy:
    """A ticket. `due`: the operation at which it lands by itself."""

    targets: list[Tensor]
    sources: list[Tensor]
    due: int
    has_landed: bool = False


@dataclass(eq=False)
class Reading:
    """Products that read the bytes between these addresses, until the operation `due`."""

    spans: list[tuple[int, int]]
    due: int
    number: int


class SimulatedEngine(CopyEngine):
    """`most_late`: operations that a copy or a product takes at the most, drawn anew for each; from a seed."""

    kernels_read_host = False

    def __init__(self, most_late: int = 6, seed: int = 0) -> None:
        self.most_late = most_late
        self.random = random.Random(seed)
        self.num_operations = 0
        self.num_early = 0  # products that had to wait for their copy
        self.num_held_up = 0  # copies that had to wait for products
        self._pending: deque[SimulatedCopy] = deque()
        self._readings: list[Reading] = []
        self._waited_for = -1  # the copies wait for products up to this number
        self._num_readings = 0
        self._figures = CopyFigures()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> SimulatedCopy:
        self._operation()
        for target, source in zip(targets, sources, strict=True):
            assert target.shape == source.shape and target.dtype == source.dtype
            for reading in self._readings:
                free = reading.number <= self._waited_for
                assert free or not any(_overlap(span(target), each) for each in reading.spans), (
                    "a copy overwrites weights that products still read"
                )
            poison(target)
        ticket = SimulatedCopy(list(targets), list(sources), self._due())
        self._pending.append(ticket)
        self._figures.num_copies += 1
        self._figures.num_bytes += sum(target.nbytes for target in targets)
        return ticket

    def compute_waits(self, landed: SimulatedCopy) -> None:
        self._operation()
        self.num_early += not landed.has_landed
        self._land_until(landed)

    def used(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> Reading:
        self._operation()
        spans = [span(tensor[row]) for tensor in tensors for row in rows]
        reading = Reading(spans, self._due(), self._num_readings)
        self._num_readings += 1
        self._readings.append(reading)
        return reading

    def copy_waits(self, used: Reading) -> None:
        self._operation()
        self.num_held_up += used in self._readings
        self._waited_for = max(self._waited_for, used.number)

    def landed(self, ticket: SimulatedCopy) -> bool:
        self._operation()
        return ticket.has_landed

    def host_waits(self, landed: SimulatedCopy) -> None:
        self._operation()
        self._land_until(landed)

    def drain(self) -> None:
        if self._pending:
            self._land_until(self._pending[-1])

    def figures(self) -> CopyFigures:
        return self._figures

    def reset(self) -> None:
        self._figures = CopyFigures()

    def _due(self) -> int:
        return self.num_operations + self.random.randint(0, self.most_late)

    def _operation(self) -> None:
        self.num_operations += 1
        while self._pending and self._pending[0].due <= self.num_operations:
            self._land_until(self._pending[0])
        self._readings = [each for each in self._readings if each.due > self.num_operations]

    def _land_until(self, last: SimulatedCopy) -> None:
        """Copies land in the order in which they were asked for."""
        while not last.has_landed:
            ticket = self._pending.popleft()
            for target, source in zip(ticket.targets, ticket.sources, strict=True):
                target.copy_(source)
            ticket.has_landed = True


def poison(tensor: Tensor) -> None:
    """NaN in every element, whatever the dtype."""
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # e4m3's NaN
    else:
        tensor.fill_(torch.nan)


def span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a contiguous tensor's bytes."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[0] < second[1] and second[0] < first[1]
