"""Where the experts of every layer live, and the tables that say so: one placement for each layer that has experts.

Knows layers, placements and dispatchers; knows no weights. Ranks hold as many slots in every layer. Experts that move
change a placement and the table of that layer, in place: captured graphs go on reading the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch

from expert_parallel.choice import Dispatchers
from expert_parallel.dispatcher import Dispatcher
from expert_parallel.group_dispatcher import GroupDispatcher
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable, most_replicas


class ExpertLayout:
    """Placements by layer index, as rank `rank` sees them. `replicas` is empty where one rank holds all: nothing moves.

    `dispatchers[i]` are those of layer i. Over several ranks they differ in their tables alone and share all else.
    """

    def __init__(
        self,
        rank: int,
        placements: Mapping[int, Placement],
        dispatchers: Mapping[int, Dispatchers],
        replicas: Mapping[int, ReplicaTable],
    ) -> None:
        shapes = {tuple(len(slots) for slots in placement.ranks) for placement in placements.values()}
        assert len(shapes) == 1, f"layers differ in the slots of their ranks: {sorted(shapes)}"
        self.rank = rank
        self.placements = dict(placements)
        self.dispatchers = dict(dispatchers)
        self.replicas = dict(replicas)

    @classmethod
    def whole(cls, layers: Sequence[int], num_experts: int, device: torch.device | str) -> ExpertLayout:
        """One rank holds every expert of these layers, in order; where there is no such layer, one is made up."""
        placement = Placement.contiguous(num_experts, num_ranks=1)
        return cls.local(dict.fromkeys(layers or (0,), placement), 0, device)

    @classmethod
    def local(cls, placements: Mapping[int, Placement], rank: int, device: torch.device | str) -> ExpertLayout:
        """What this rank holds is all that it uses."""
        made = {layer: Dispatchers.local(each, rank, device) for layer, each in placements.items()}
        return cls(rank, placements, made, {})

    @classmethod
    def spread(
        cls, rank: int, placements: Mapping[int, Placement], dispatchers: Dispatchers, device: torch.device | str
    ) -> ExpertLayout:
        """Over the ranks of the group that `dispatchers` belong to."""
        tables = {layer: ReplicaTable(each, most_replicas(each), device) for layer, each in placements.items()}
        return cls(rank, placements, {layer: _of_layer(dispatchers, table) for layer, table in tables.items()}, tables)

    @property
    def num_slots(self) -> int:
        """Of this rank, in each layer."""
        return next(iter(self.placements.values())).num_slots(self.rank)

    @property
    def num_ranks(self) -> int:
        return next(iter(self.placements.values())).num_ranks

    @property
    def experts(self) -> dict[int, tuple[int | None, ...]]:
        """For each layer the logical expert in each slot here, None in an empty one."""
        return {layer: placement.experts_of(self.rank) for layer, placement in self.placements.items()}

    def set(self, layer: int, placement: Placement) -> None:
        """The experts of a layer have moved."""
        self.replicas[layer].set(placement)
        self.placements[layer] = placement


def _of_layer(dispatchers: Dispatchers, replicas: ReplicaTable) -> Dispatchers:
    """The same with another table. Buffers, counters and streams are shared: layers take turns."""
    made: dict[int, Dispatcher] = {}
    for each in dispatchers:
        assert isinstance(each, GroupDispatcher), f"{type(each).__name__} has no table of replicas"
        other = copy(each)
        other.replicas = replicas
        made[id(each)] = other
    return Dispatchers(*(made[id(each)] for each in dispatchers))
