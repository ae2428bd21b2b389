"""Weights of some expert slots on the device, copied there from a source, and the tags that say which: nothing is read
before it has landed, nor overwritten while it is read.

Knows slots, places, tickets; knows nothing of what an expert computes or which one is wanted next. A source says where
the bundles of a layer's slots lie in host memory. A place of a buffer is in one of these states:

    empty  --fill-->  tagged, on its way  --ready-->  tagged, readable  --read-->  tagged, being read
      ^                                                                               |
      '--forget--                          fill waits for the last reader  <----------'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from expert_parallel.copy_engine import CopyEngine

Bundle = Sequence[Tensor]
"""All that is indexed by a slot (weights, scales), each [n, ...]: row i of every tensor belongs to one expert."""


class ExpertSource(Protocol):
    """Where bundles of slots lie in host memory."""

    def find(self, layer: int, slots: Sequence[int]) -> tuple[Bundle, list[int]]:
        """Tensors, and the row of each of these slots in them. They stay there until `reading`'s copy has landed."""
        ...

    def reading(self, rows: Sequence[int], landed: Any) -> None:
        """The rows that were found last are copied until then."""
        ...

    def place(self, layer: int, experts: Sequence[int | None]) -> None:
        """Other experts are behind a layer's slots: `experts[slot]`."""
        ...


class HostSource(ExpertSource):
    """All bundles of all layers, in host memory for good. A slot has the row of its own number; or, where `experts`
    tells the logical expert in each slot of a layer, that of its expert's."""

    def __init__(
        self, bundles: Mapping[int, Bundle], experts: Mapping[int, Sequence[int | None]] | None = None
    ) -> None:
        self.bundles = dict(bundles)
        self.experts = None if experts is None else dict(experts)

    def find(self, layer: int, slots: Sequence[int]) -> tuple[Bundle, list[int]]:
        if self.experts is None:
            return self.bundles[layer], list(slots)
        experts = self.experts[layer]
        return self.bundles[layer], [experts[slot] or 0 for slot in slots]  # no row is ever sent to an empty slot

    def reading(self, rows: Sequence[int], landed: Any) -> None:
        """Nothing is overwritten here but by moves of experts, which drain the copies first."""

    def place(self, layer: int, experts: Sequence[int | None]) -> None:
        if self.experts is not None:
            self.experts[layer] = experts


def runs(rows: Sequence[int], places: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row, place, count) of neighbours that are neighbours in both: one copy each.

    >>> runs([4, 5, 6, 9], [0, 1, 2, 3])
    [(4, 0, 3), (9, 3, 1)]
    """
    found: list[tuple[int, int, int]] = []
    for row, place in zip(rows, places, strict=True):
        if found:
            first_row, first_place, count = found[-1]
            if row == first_row + count and place == first_place + count:
                found[-1] = (first_row, first_place, count + 1)
                continue
        found.append((row, place, 1))
    return found


class SlotBuffer:
    """`tensors`: each [n, ...], n places. A place's tag is (layer, slot), None in an empty one."""

    def __init__(self, tensors: Bundle, source: ExpertSource, engine: CopyEngine) -> None:
        self.tensors = tuple(tensors)
        self.source = source
        self.engine = engine
        num_places = self.tensors[0].shape[0]
        self.tags: list[tuple[int, int] | None] = [None] * num_places
        self._landed: list[Any] = [None] * num_places  # of copies that no product has waited for yet
        self._used: list[Any] = [None] * num_places
        self._handed_out: set[int] = set()  # ready, but the products are not launched

    def fill(self, layer: int, slots: Sequence[int], places: Sequence[int]) -> None:
        """Start to copy the bundles of these slots to these places, in one go."""
        taken = self._handed_out.intersection(places)
        assert not taken, f"places {sorted(taken)} were handed to products that are not launched yet"
        bundle, rows = self.source.find(layer, slots)
        for ticket in _distinct(self._used[place] for place in places):
            self.engine.copy_waits(ticket)
        pieces = runs(rows, places)
        landed = self.engine.copy(
            [mine[place : place + count] for _, place, count in pieces for mine in self.tensors],
            [theirs[row : row + count] for row, _, count in pieces for theirs in bundle],
        )
        self.source.reading(rows, landed)
        for slot, place in zip(slots, places, strict=True):
            self.tags[place] = (layer, slot)
            self._landed[place] = landed
            self._used[place] = None

    def ready(self, layer: int, slots: Sequence[int], places: Sequence[int]) -> None:
        """Products launched from now on may read these places, which hold these slots."""
        for slot, place in zip(slots, places, strict=True):
            assert self.tags[place] == (layer, slot), (
                f"place {place} holds {self.tags[place]}, a product wants slot {slot} of layer {layer}"
            )
        for ticket in _distinct(self._landed[place] for place in places):
            self.engine.compute_waits(ticket)
        for place in places:
            self._landed[place] = None
        self._handed_out.update(places)

    def on_its_way(self, place: int) -> bool:
        """Whether a product that reads this place now would wait for its copy."""
        landed = self._landed[place]
        return landed is not None and not self.engine.landed(landed)

    def read(self, places: Sequence[int]) -> None:
        """Products that read these places are launched; nothing is copied there before they end."""
        used = self.engine.used(self.tensors, places)
        for place in places:
            assert self._landed[place] is None, f"place {place} was read before its copy was waited for"
            self._used[place] = used
        self._handed_out.difference_update(places)

    def adopt(self, tags: Sequence[tuple[int, int] | None]) -> None:
        """This is in the places, nothing is on its way, and whoever brought it waited for those who read."""
        assert not self._handed_out, f"places {sorted(self._handed_out)} were handed to products that are not launched"
        self.tags = list(tags)
        self._landed, self._used = [None] * len(self.tags), [None] * len(self.tags)

    def forget(self, places: Iterable[int]) -> None:
        """What is there is of no use any more."""
        for place in places:
            self.tags[place] = None


def _distinct(tickets: Iterable[Any]) -> list[Any]:
    """Those that are there, each once, in order."""
    return list({id(ticket): ticket for ticket in tickets if ticket is not None}.values())
