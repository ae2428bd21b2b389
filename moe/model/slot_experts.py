"""Which logical expert each slot of a rank holds, for whoever fills the slots with weights. Knows no weights itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SlotExperts = Sequence[int | None] | Mapping[int, Sequence[int | None]]
"""The logical expert in each slot, None in an empty one: alike in all layers, or by layer index."""


def experts_in_slots(name: str, experts: SlotExperts) -> Sequence[int | None]:
    """Of `experts` those in the slots of the expert parameter `name` (layers.N.moe.experts...)."""
    return experts[int(name.split(".")[1])] if isinstance(experts, Mapping) else experts


class Places:
    """For each layer the slots of every logical expert that has any here."""

    def __init__(self, experts: SlotExperts) -> None:
        self._experts = experts
        self._known: dict[tuple[int | None, ...], dict[int, list[int]]] = {}
        self.num_slots = len(next(iter(experts.values()), ()) if isinstance(experts, Mapping) else experts)

    def slots_of(self, name: str) -> dict[int, list[int]]:
        """In the layer of this expert parameter."""
        held = tuple(experts_in_slots(name, self._experts))
        if held not in self._known:
            slots_of: dict[int, list[int]] = {}
            for slot, expert in enumerate(held):
                if expert is not None:
                    slots_of.setdefault(expert, []).append(slot)
            self._known[held] = slots_of
        return self._known[held]

    def filled(self, name: str) -> list[int]:
        """All slots of that layer that hold an expert."""
        return [slot for slots in self.slots_of(name).values() for slot in slots]
