"""Counts which rows of which parameter were written, to hold that loading writes each of them exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from moe.model.parameter_shapes import is_expert_parameter


class FillCount:
    """Row ranges written so far. An expert parameter counts per filled slot, any other as a whole.

    `slots`: the filled slots of an expert parameter, by its name.
    """

    def __init__(self, targets: Mapping[str, Tensor], slots: Callable[[str], Iterable[int]]) -> None:
        self._lock = threading.Lock()
        self._num_rows: dict[tuple[str, int | None], int] = {}
        for name, tensor in targets.items():
            if is_expert_parameter(name):
                self._num_rows |= {(name, slot): tensor.shape[1] for slot in slots(name)}
            else:
                self._num_rows[name, None] = tensor.shape[0]
        self._written: dict[tuple[str, int | None], list[tuple[int, int]]] = {place: [] for place in self._num_rows}

    def add(self, name: str, slot: int | None, start: int, stop: int) -> None:
        """Rows [start, stop) of the parameter, or of one slot of it, have been written."""
        with self._lock:
            self._written[name, slot].append((start, stop))

    def check(self) -> None:
        """AssertionError where a row was written never or twice, naming parameter and row."""
        for (name, slot), ranges in self._written.items():
            where = name if slot is None else f"{name}[{slot}]"
            position = 0
            for start, stop in sorted(ranges):
                assert start <= position, f"{where}: rows {position} to {start} were never written"
                assert start >= position, f"{where}: row {start} was written twice"
                position = stop
            num_rows = self._num_rows[name, slot]
            assert position == num_rows, f"{where}: rows {position} to {num_rows} were never written"
