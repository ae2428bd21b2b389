"""The slots of one layer that stay on the device, those that come in for others, and what that came to.

Knows slots and how likely each is asked for; knows nothing of rows. Who needs room takes an empty place, or that of the
slot least likely asked for among those that may go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from expert_parallel.prefetch import ExpectedUse
from expert_parallel.slot_buffer import SlotBuffer


@dataclass
class SlotFigures:
    """How often slots with rows were there: `hits`, those fetched ahead included, and `misses`."""

    hits: int = 0
    misses: int = 0
    fetched_and_used: int = 0  # fetched ahead, and asked for in the layer's next step
    fetched_in_vain: int = 0
    guessed_right: int = 0  # slots of a router's guess that the next step asked for, fetched or not
    guessed: int = 0

    @property
    def hit_rate(self) -> float | None:
        """None before any slot was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    @property
    def guess_rate(self) -> float | None:
        """The share of a router's guesses that came true."""
        return self.guessed_right / self.guessed if self.guessed else None


class HeldSlots:
    """`buffer`: of this layer alone. Slots come and go by `fetch`; `slots[place]` is the one that is there."""

    def __init__(self, layer: int, buffer: SlotBuffer, num_slots: int) -> None:
        self.layer = layer
        self.buffer = buffer
        self.slots: list[int | None] = [None] * len(buffer.tags)
        self.place_of: dict[int, int] = {}
        self.use = ExpectedUse(num_slots)
        self.figures = SlotFigures()
        self._ahead: set[int] = set()  # fetched, not asked for since
        self._guess: frozenset[int] = frozenset()

    def fetch(self, slots: Sequence[int], places: Sequence[int]) -> None:
        """Start to copy slots to places, whose former slots are given up."""
        for slot, place in zip(slots, places, strict=True):
            former = self.slots[place]
            if former is not None:
                del self.place_of[former]
                self._drop_ahead(former)
            self.slots[place] = slot
            self.place_of[slot] = place
        if slots:
            self.buffer.fill(self.layer, slots, places)

    def adopt(self, slots: Sequence[int | None]) -> None:
        """These are in the places: somebody else brought them there, and nothing is on its way."""
        self.slots = list(slots)
        self.place_of = {slot: place for place, slot in enumerate(slots) if slot is not None}
        self.buffer.adopt([None if slot is None else (self.layer, slot) for slot in slots])

    def places_for(self, number: int, keep: Collection[int]) -> list[int]:
        """Up to `number` places whose slots are not in `keep`, in the order in which they are best given up."""
        free = [place for place, slot in enumerate(self.slots) if slot is None]
        others = [(self.use.expected(slot), place) for slot, place in self.place_of.items() if slot not in keep]
        return (free + [place for _, place in sorted(others)])[:number]

    def ask(self, needed: Collection[int]) -> tuple[list[int], list[int]]:
        """A step's slots with rows: (those that are held or on their way, the others), counted."""
        hits = [slot for slot in needed if slot in self.place_of]
        misses = [slot for slot in needed if slot not in self.place_of]
        figures = self.figures
        figures.hits += len(hits)
        figures.misses += len(misses)
        used = self._ahead.intersection(needed)
        figures.fetched_and_used += len(used)
        figures.fetched_in_vain += len(self._ahead) - len(used)
        figures.guessed += len(self._guess)
        figures.guessed_right += len(self._guess.intersection(needed))
        self._ahead, self._guess = set(), frozenset()
        self.use.see(needed)
        return hits, misses

    def look_ahead(self, guessed: Collection[int]) -> None:
        """Fetch what this layer's next step will likely ask for, as far as less likely ones make room."""
        self._guess = frozenset(guessed)
        self.use.expect(guessed)
        wanted = self.use.wanted()
        missing = [slot for slot in wanted if slot not in self.place_of]
        for slot, place in zip(missing, self.places_for(len(missing), keep=wanted)):
            self.fetch([slot], [place])
            self._ahead.add(slot)

    def forget(self, slots: Collection[int]) -> None:
        """Other experts are behind these slots now."""
        for slot in slots:
            place = self.place_of.pop(slot, None)
            if place is not None:
                self.slots[place] = None
                self.buffer.forget([place])
                self._drop_ahead(slot)

    def passing(self) -> list[int]:
        """The slots that are not held."""
        return [slot for slot in range(len(self.use.share)) if slot not in self.place_of]

    def _drop_ahead(self, slot: int) -> None:
        if slot in self._ahead:
            self._ahead.discard(slot)
            self.figures.fetched_in_vain += 1
