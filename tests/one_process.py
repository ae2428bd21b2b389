"""All ranks of a group in one process: as many buffers on one device, and launches of the ranks one after another.

A phase is the same launch of every rank; what it waits for was done by the phase before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.peer_flags import RoundState, new_state
from kernels.peer_layout import PeerLayout, Peers
from kernels.replica_choice import ReplicaColumns


class OneProcess:
    """Bytes that nobody has written are 255: NaN in every dtype, -1 in every index."""

    def __init__(self, layout: PeerLayout, device: str) -> None:
        self.layout = layout
        self.buffers = tuple(
            torch.full((layout.num_bytes,), 255, dtype=torch.uint8, device=device) for _ in range(layout.num_ranks)
        )
        for buffer in self.buffers:
            layout.clear(buffer)
        self.addresses_N = torch.tensor([buffer.data_ptr() for buffer in self.buffers], device=device)
        self.states: list[RoundState] = [new_state(layout.num_ranks, torch.device(device)) for _ in self.buffers]

    def peers(self, rank: int) -> Peers:
        return Peers(rank, self.buffers, self.addresses_N)

    def assert_same_bytes(self, other: OneProcess) -> None:
        """In every buffer, on whatever devices: nothing else was written either."""
        for rank, (own, others) in enumerate(zip(self.buffers, other.buffers)):
            differ = (own.cpu() != others.cpu()).nonzero().flatten()
            assert not len(differ), f"buffers of rank {rank} differ in {len(differ)} bytes from {int(differ[0])} on"


def draw_replicas(num_experts: int, num_ranks: int, device: str, width: int = 2) -> ReplicaColumns:
    """One or two replicas an expert, anywhere; columns that are not counted hold a wild value."""
    generator = torch.Generator().manual_seed(num_experts)
    shape = (num_experts, width)
    count_E = torch.randint(1, width + 1, (num_experts,), generator=generator)
    counted_EC = torch.arange(width) < count_E[:, None]
    ranks_EC = torch.randint(num_ranks, shape, generator=generator).where(counted_EC, 2**30)
    slots_EC = torch.randint(100, shape, generator=generator).where(counted_EC, 2**30)
    return ReplicaColumns(*(each.int().to(device) for each in (ranks_EC, slots_EC, count_E)))


def draw_ids(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Tensor:
    """Distinct experts in each row; every third row goes nowhere, and some choices are of no expert."""
    generator = torch.Generator().manual_seed(seed)
    ids_BK = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].int()
    ids_BK[2::3] = -1
    ids_BK[3::5, 0] = 2**30
    return ids_BK
