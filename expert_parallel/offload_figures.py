"""What experts in host memory came to: which were there when they were asked for, and what copying the others took.

Knows counters; knows nothing of who counts. Everything adds up over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from expert_parallel.copy_engine import CopyFigures
from expert_parallel.held_slots import SlotFigures


@dataclass
class OffloadFigures:
    """Since the experts were first brought to the device, or since a reset."""

    slots: SlotFigures = field(default_factory=SlotFigures)
    copies: CopyFigures = field(default_factory=CopyFigures)

    @classmethod
    def together(cls, parts: Sequence[OffloadFigures]) -> OffloadFigures:
        """Of all ranks: busy and waiting seconds of each are added up."""
        whole = cls()
        for part in parts:
            for mine, theirs in ((whole.slots, part.slots), (whole.copies, part.copies)):
                for each in fields(theirs):
                    setattr(mine, each.name, getattr(mine, each.name) + getattr(theirs, each.name))
        return whole

    def as_dict(self) -> dict[str, Any]:
        """Every counter and every derived number, JSON-ready."""
        copies, slots = self.copies, self.slots
        derived = {
            "gb_per_second": copies.gb_per_second,
            "busy_share": copies.busy_share,
            "hit_rate": slots.hit_rate,
            "guess_rate": slots.guess_rate,
        }
        return asdict(slots) | asdict(copies) | derived

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of a summary."""
        copies, slots = self.copies, self.slots
        rate = (
            f"{copies.num_bytes / 1e9:,.1f} GB at {copies.gb_per_second:.1f} GB/s, {copies.busy_share:.0%} of the time"
        )
        found = [("experts copied to the GPU", rate), ("time waited for experts", f"{copies.stall_seconds:.1f} s")]
        if slots.hit_rate is not None:
            ahead = f"{slots.fetched_and_used:,} fetched ahead, {slots.fetched_in_vain:,} in vain"
            found.append(("experts found on the GPU", f"{slots.hit_rate:.1%} ({ahead})"))
        return found
