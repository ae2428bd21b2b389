"""Which replica of an expert a token goes to: a table on the device, and a rule that spreads tokens over replicas.

Knows placements, source ranks and token indices; knows no loads. Replicas hold equal weights, so the choice moves work
between ranks and never changes a bit of a result.

Token t of source rank r takes replica (t + r) mod count of its expert: replicas of one source's tokens differ by one at
most, and where every rank has a single token, the ranks take turns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from expert_parallel.placement import Placement


class Targets(NamedTuple):
    """int32 [T, K] each: the rank and the slot on it where (token, k) goes; -1 where the id is no expert."""

    ranks_TK: Tensor
    slots_TK: Tensor


class ReplicaTable:
    """Replicas of every expert by rank, then slot. Captured graphs may read it: `set` writes in place.

    `width`: the most replicas that an expert will ever have; the number of ranks where no rank holds one twice.
    """

    def __init__(self, placement: Placement, width: int, device: torch.device | str) -> None:
        self.width = width
        shape = (placement.num_experts, width)
        self._ranks_EC = torch.empty(shape, dtype=torch.int32, device=device)
        self._slots_EC = torch.empty(shape, dtype=torch.int32, device=device)
        self._count_E = torch.empty(placement.num_experts, dtype=torch.int32, device=device)
        self.set(placement)

    def set(self, placement: Placement) -> None:
        """Take over a placement of the same experts."""
        places: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_experts)]
        for rank, slots in enumerate(placement.ranks):
            for slot, expert in enumerate(slots):
                if expert is not None:
                    places[expert].append((rank, slot))
        shape = (len(places), self.width)
        assert shape == tuple(self._ranks_EC.shape), f"{shape[0]} experts do not fit a table of {self._ranks_EC.shape}"
        most = max(range(len(places)), key=lambda expert: len(places[expert]))
        if len(places[most]) > self.width:
            raise ValueError(
                f"placement: expert {most} has {len(places[most])} replicas, the table has room for {self.width}."
            )
        # Unused columns repeat the first replica: whatever is read there is a valid place.
        padded_EC2 = torch.tensor(
            [of_expert + of_expert[:1] * (self.width - len(of_expert)) for of_expert in places], dtype=torch.int32
        )
        self._ranks_EC.copy_(padded_EC2[:, :, 0])
        self._slots_EC.copy_(padded_EC2[:, :, 1])
        self._count_E.copy_(torch.tensor([len(of_expert) for of_expert in places], dtype=torch.int32))

    def choose(self, expert_ids_TK: Tensor, source_rank: int) -> Targets:
        """Where each (token, k) of a source rank goes. No host sync. Ids outside [0, E) give -1."""
        num_tokens, device = expert_ids_TK.shape[0], expert_ids_TK.device
        return self.choose_in_turn(expert_ids_TK, source_rank + torch.arange(num_tokens, device=device))

    def choose_in_turn(self, expert_ids_TK: Tensor, turn_T: Tensor) -> Targets:
        """The same for tokens of any ranks: `turn` is source rank + index on it."""
        known_TK = (expert_ids_TK >= 0) & (expert_ids_TK < self._count_E.shape[0])
        ids_TK = torch.where(known_TK, expert_ids_TK, 0).long()
        column_TK = turn_T[:, None] % self._count_E[ids_TK]
        ranks_TK, slots_TK = (
            torch.where(known_TK, table_EC[ids_TK, column_TK], -1) for table_EC in (self._ranks_EC, self._slots_EC)
        )
        return Targets(ranks_TK, slots_TK)
