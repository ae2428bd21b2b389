"""Stands in for the memory that GPUs of one host share: files that all ranks of a CPU run map into their memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from expert_parallel.group import ExpertGroup
from kernels.peer_layout import PeerLayout, Peers


class PeerFiles:
    """Makes buffers in a folder that all ranks see. Unused bytes are 255: NaN in every dtype, -1 in every index."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.num_made = 0

    def __call__(self, group: ExpertGroup, layout: PeerLayout, device: torch.device) -> Peers:
        assert device.type == "cpu", "GPUs have symmetric memory"
        members = "-".join(str(rank) for rank in dist.get_process_group_ranks(group.process_group))
        name = f"{self.folder}/group-{members}-set-{self.num_made}-rank-"
        self.num_made += 1
        own = _mapped(f"{name}{group.rank}", layout.num_bytes)
        own.fill_(255)
        layout.clear(own)
        group.barrier()
        buffers = tuple(_mapped(f"{name}{peer}", layout.num_bytes) for peer in range(group.size))
        group.barrier()
        return Peers(group.rank, buffers, torch.tensor([buffer.data_ptr() for buffer in buffers]))


def _mapped(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
