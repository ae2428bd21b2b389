"""Which experts a layer will ask for: what its router says of the rows of the layer before, and how often each was
used.

Knows slots, steps and shares; knows no router and no weights. Both sources are blended by how right the first one was
of late: with a the moving share of its guesses that came true and f a slot's moving share of steps,

    expected = a + (1 - a) f  of a guessed slot      (1 - a) f  of any other

A slot is fetched ahead where it will more likely be used than not: a wrong guess costs the time that a right one saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

_DECAY = 0.98
"""Of the moving shares, each step: half of their weight lies on the last 34 steps."""
_FETCH_FROM = 0.5


class ExpectedUse:
    """Of the slots of one layer. Before anything is known a guess counts as right, and no slot as used."""

    def __init__(self, num_slots: int) -> None:
        self.share = [0.0] * num_slots  # f
        self.trust = 1.0  # a
        self._guessed: frozenset[int] = frozenset()

    def expect(self, guessed: Iterable[int]) -> None:
        """The router's guess for the next step of this layer."""
        self._guessed = frozenset(guessed)

    def see(self, needed: Collection[int]) -> None:
        """What the layer asked for; the guess is used up."""
        if self._guessed:
            right = len(self._guessed.intersection(needed)) / len(self._guessed)
            self.trust = _DECAY * self.trust + (1 - _DECAY) * right
            self._guessed = frozenset()
        for slot, share in enumerate(self.share):
            self.share[slot] = _DECAY * share
        for slot in needed:
            self.share[slot] += 1 - _DECAY

    def expected(self, slot: int) -> float:
        """How likely the layer's next step asks for this slot."""
        if self._guessed:
            by_share = (1 - self.trust) * self.share[slot]
            return self.trust + by_share if slot in self._guessed else by_share
        return self.share[slot]

    def wanted(self) -> list[int]:
        """The slots worth fetching ahead, the likeliest first."""
        likely = [(self.expected(slot), slot) for slot in range(len(self.share))]
        return [slot for value, slot in sorted(likely, key=lambda each: (-each[0], each[1])) if value > _FETCH_FROM]
