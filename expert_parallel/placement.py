"""Where every expert lives: one table, logical expert -> physical slots (rank, slot). Knows no weights and no tokens.

A rank holds its experts in numbered slots; kernels index weights by slot. An expert may have several slots (replicas),
a slot may be empty, ranks may hold different numbers. Moving an expert makes another table, never another kernel.

    rank 0: slots [0, 1, 2]        logical 0 -> (0, 0)
    rank 1: slots [2, 3, None]     logical 2 -> (0, 2), (1, 0)     a replica
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """One physical place for an expert."""

    rank: int
    slot: int


@dataclass(frozen=True)
class Placement:
    """`ranks[r][s]` is the logical expert in slot s of rank r, None where the slot is empty."""

    num_experts: int
    ranks: tuple[tuple[int | None, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("placement has no rank; give at least one.")
        seen: set[int] = set()
        for rank, slots in enumerate(self.ranks):
            for slot, expert in enumerate(slots):
                if expert is None:
                    continue
                if not 0 <= expert < self.num_experts:
                    raise ValueError(
                        f"placement: rank {rank} slot {slot} names expert {expert}, outside 0..{self.num_experts - 1}."
                    )
                seen.add(expert)
        missing = sorted(set(range(self.num_experts)) - seen)
        if missing:
            raise ValueError(f"placement: experts {missing} have no slot on any rank; every expert needs at least one.")

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int, redundant: int = 0) -> Placement:
        """Experts in order over the ranks, then `redundant` replicas of experts 0, 1, ... behind the last.

        Where the slots do not divide evenly the first ranks hold one more:
        >>> Placement.contiguous(5, 2).ranks
        ((0, 1, 2), (3, 4))
        """
        if num_experts < 1 or num_ranks < 1 or redundant < 0:
            raise ValueError(
                f"placement: num_experts={num_experts} and num_ranks={num_ranks} must be positive, "
                f"redundant={redundant} not negative."
            )
        experts = [slot % num_experts for slot in range(num_experts + redundant)]
        base, extra = divmod(len(experts), num_ranks)
        ranks, start = [], 0
        for rank in range(num_ranks):
            stop = start + base + (rank < extra)
            ranks.append(tuple(experts[start:stop]))
            start = stop
        return cls(num_experts, tuple(ranks))

    @classmethod
    def of_ranks(cls, num_experts: int, ranks: Sequence[Sequence[int | None]]) -> Placement:
        """A placement from any nested sequence."""
        return cls(num_experts, tuple(tuple(slots) for slots in ranks))

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def num_slots(self, rank: int) -> int:
        return len(self.ranks[rank])

    def experts_of(self, rank: int) -> tuple[int | None, ...]:
        """The logical expert in each slot of a rank: what that rank reads from a checkpoint, in slot order."""
        return self.ranks[rank]

    def slots_of(self, expert: int) -> tuple[Slot, ...]:
        """Every slot of a logical expert, by rank, then slot."""
        return tuple(
            Slot(rank, slot)
            for rank, slots in enumerate(self.ranks)
            for slot, held in enumerate(slots)
            if held == expert
        )

    def slot_table(self, rank: int, device: torch.device | str) -> Tensor:
        """int32 [E]: the slot of each logical expert on this rank (the first of several), -1 where it has none."""
        slots = [-1] * self.num_experts
        for slot, expert in reversed(list(enumerate(self.ranks[rank]))):
            if expert is not None:
                slots[expert] = slot
        return torch.tensor(slots, dtype=torch.int32).to(device)
