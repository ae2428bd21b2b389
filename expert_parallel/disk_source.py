"""Bundles that stay in their files, read through a bounded part of host memory.

Knows rows, tickets and which bundle was used last; knows nothing of files: a callable reads one bundle into given
tensors. A row gives way when its bundle was used least lately, and only once the last copy from it has landed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from expert_parallel.copy_engine import CopyEngine
from expert_parallel.slot_buffer import Bundle, ExpertSource

Read = Callable[[int, int, Sequence[Tensor]], None]
"""(layer, logical expert, a row of each tensor): fills them. Called from several threads."""

_MAX_READERS = 8


class DiskSource(ExpertSource):
    """`bundle`: [M, ...] each, room for M bundles of any layers; `experts[layer][slot]`: whose bundle a slot wants.

    `reads` counts bundles that were read, `found` those that were still there.
    """

    def __init__(
        self, bundle: Bundle, experts: Mapping[int, Sequence[int | None]], read: Read, engine: CopyEngine
    ) -> None:
        self.bundle = tuple(bundle)
        self.experts = dict(experts)
        self.read = read
        self.engine = engine
        self.reads = self.found = 0
        self._row_of: OrderedDict[tuple[int, int], int] = OrderedDict()  # the bundle used least lately comes first
        self._free = list(range(self.bundle[0].shape[0]))
        self._landed: list[Any] = [None] * len(self._free)
        self._pool = ThreadPoolExecutor(_MAX_READERS)

    def find(self, layer: int, slots: Sequence[int]) -> tuple[Bundle, list[int]]:
        assert len(slots) <= len(self._landed), f"{len(slots)} bundles at a time in {len(self._landed)} rows"
        wanted = [(layer, self.experts[layer][slot] or 0) for slot in slots]  # no row is ever sent to an empty slot
        missing = list(dict.fromkeys(each for each in wanted if each not in self._row_of))
        for each in wanted:
            if each in self._row_of:
                self._row_of.move_to_end(each)
        self.found += len(set(wanted)) - len(missing)
        self.reads += len(missing)
        for each in missing:
            self._row_of[each] = self._room()
        list(self._pool.map(self._fill, missing))
        return self.bundle, [self._row_of[each] for each in wanted]

    def reading(self, rows: Sequence[int], landed: Any) -> None:
        for row in rows:
            self._landed[row] = landed

    def place(self, layer: int, experts: Sequence[int | None]) -> None:
        self.experts[layer] = experts

    def _room(self) -> int:
        """A row that nobody copies from. What was just asked for is last in line, so it is not taken."""
        if self._free:
            return self._free.pop()
        _, row = self._row_of.popitem(last=False)
        if self._landed[row] is not None:
            self.engine.host_waits(self._landed[row])
            self._landed[row] = None
        return row

    def _fill(self, wanted: tuple[int, int]) -> None:
        row = self._row_of[wanted]
        self.read(*wanted, [tensor[row] for tensor in self.bundle])
