"""Which replica of an expert a token goes to: a table on the device, and a rule that spreads tokens over replicas.

Knows placements, source ranks and token indices; knows no loads. Replicas hold equal weights, so the choice moves work
between ranks and never changes a bit of a result.

Token t of source rank r takes replica (t + r) mod count of its expert: replicas of one source's tokens differ by one at
most, and where every rank has a single token, the ranks take turns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from expert_parallel.placement import Placement
from kernels.replica_choice import ReplicaColumns, Targets, choose_replicas, replicas_in_turn


def most_replicas(placement: Placement) -> int:
    """Replicas that an expert can have at all in these slots, where every other expert keeps one."""
    return sum(len(slots) for slots in placement.ranks) - placement.num_experts + 1


class ReplicaTable:
    """Replicas of every expert by rank, then slot. Captured graphs may read it: `set` writes in place.

    `width`: the most replicas that an expert will ever have.
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
        num_experts = self._count_E.shape[0]
        assert placement.num_experts == num_experts, f"{placement.num_experts} experts in a table of {num_experts}"
        filled = [
            (expert, rank, slot)
            for rank, slots in enumerate(placement.ranks)
            for slot, expert in enumerate(slots)
            if expert is not None
        ]
        places_P3 = np.array(sorted(filled), dtype=np.int32)
        count_E = np.bincount(places_P3[:, 0], minlength=num_experts)
        if count_E.max() > self.width:
            most = int(count_E.argmax())
            raise ValueError(
                f"placement: expert {most} has {count_E[most]} replicas, the table has room for {self.width}."
            )
        first_E = count_E.cumsum() - count_E
        # Unused columns repeat the first replica: whatever is read there is a valid place.
        padded_EC2 = np.repeat(places_P3[first_E, None, 1:], self.width, axis=1)
        padded_EC2[places_P3[:, 0], np.arange(len(places_P3)) - first_E.repeat(count_E)] = places_P3[:, 1:]
        self._ranks_EC.copy_(torch.from_numpy(padded_EC2[:, :, 0]))
        self._slots_EC.copy_(torch.from_numpy(padded_EC2[:, :, 1]))
        self._count_E.copy_(torch.from_numpy(count_E))

    @property
    def columns(self) -> ReplicaColumns:
        """For kernels that choose."""
        return ReplicaColumns(self._ranks_EC, self._slots_EC, self._count_E)

    def choose(self, expert_ids_TK: Tensor, source_rank: int) -> Targets:
        """Where each (token, k) of a source rank goes. No host sync. Ids outside [0, E) give -1."""
        return choose_replicas(expert_ids_TK, self.columns, source_rank)

    def choose_in_turn(self, expert_ids_TK: Tensor, turn_T: Tensor) -> tuple[Tensor, Tensor]:
        """Ranks and slots for tokens of any ranks: `turn` is source rank + index on it."""
        return replicas_in_turn(expert_ids_TK, self.columns, turn_T)
