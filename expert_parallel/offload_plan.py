"""How many experts of a rank live where: on the GPU for good, in buffers that they pass through, in host memory.

Knows counts and bytes; knows nothing of models, tensors or devices. What a bundle weighs, and how much room the rest
of an engine leaves, is told by the caller.

    slots of a layer   |  held G  |           the other S - G            |
    on the GPU            always     C at a time, in two buffers of all layers
    in host memory     |                    S                            |
"""

from __future__ import annotations

from dataclasses import dataclass

# A copy of so many bytes takes 1.2 ms over a link of 55 GB/s: the launches around it (some 50 us) disappear behind it,
# and two such buffers are small beside what is held.
STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class OffloadPlan:
    """Of one rank. All layers hold as many experts, and pass the others through the same two buffers."""

    regime: str  # auto, cache or stream
    num_slots: int  # S, of this rank in each layer
    held_slots: int  # G, of them on the GPU
    staging_slots: int  # C, of each of the two buffers
    num_layers: int  # that have experts
    bundle_bytes: int  # of one slot of one layer: weights and scales
    tier: str  # host or disk
    host_bytes: int  # of pinned memory, of this rank

    def __post_init__(self) -> None:
        assert self.regime in ("auto", "cache", "stream"), f"{self.regime!r} is no regime"
        assert 0 <= self.held_slots < self.num_slots, f"{self.held_slots} of {self.num_slots} slots are held"
        assert 1 <= self.staging_slots <= self.num_slots, f"buffers of {self.staging_slots} of {self.num_slots} slots"

    @property
    def gpu_bytes(self) -> int:
        """Held slots of all layers, and the two buffers."""
        return (self.num_layers * self.held_slots + 2 * self.staging_slots) * self.bundle_bytes

    @property
    def streamed_bytes(self) -> int:
        """What crosses the link in a step that uses every slot."""
        return (self.num_slots - self.held_slots) * self.num_layers * self.bundle_bytes


def staging_slots(num_passing: int, bundle_bytes: int) -> int:
    """Slots of one buffer, where `num_passing` of a layer pass through: about STAGING_BYTES, chunks of equal size.

    >>> staging_slots(96, 9 << 20)  # 14 chunks of 7, 7, ... 5
    7
    """
    assert num_passing >= 1, "nothing passes through buffers"
    most = max(1, round(STAGING_BYTES / bundle_bytes))
    num_chunks = -(-num_passing // most)
    return -(-num_passing // num_chunks)
