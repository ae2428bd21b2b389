"""What a rank runs on, as far as memory goes. Knows devices and hosts; knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from expert_parallel.group import Ranks
from expert_parallel.host_memory import HostMemory, read_host_memory

OTHER_BYTES = 3 << 28
"""On a GPU beside all that torch allocates: context, modules, handles. An H200 showed 0.741 GiB."""


@dataclass(frozen=True)
class Machine:
    """What one rank runs on. `total`: bytes of its GPU; None: the CPU. `ranks_here`: of its host."""

    name: str
    total: int | None
    other: int = OTHER_BYTES
    hopper: bool = True
    host: HostMemory | None = None  # None: not looked at
    num_ranks: int = 1
    rank: int = 0
    ranks_here: int = 1
    problems: Mapping[str, str] = field(default_factory=dict)  # why its ranks cannot use a dispatcher, as far as known


def find_machine(device: torch.device, ranks: Ranks | None, *, asks_host: bool) -> Machine:
    """Of this process. `asks_host`: the host's memory is looked at, before any rank takes of it; ranks then call it
    together and see the GPU that leaves least, so that all come to one answer whether experts live in host memory."""
    host = read_host_memory() if asks_host else None
    total, other = None, 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Kernels' modules are not loaded yet.
        other = max(total - free - torch.cuda.memory_reserved(device), OTHER_BYTES)
    num_ranks, rank, ranks_here = 1, 0, 1
    if ranks is not None:
        num_ranks, rank, ranks_here = ranks.everyone.size, ranks.everyone.rank, ranks.values.local_world_size
        if asks_host and num_ranks > 1:
            of_ranks = ranks.everyone.gather_objects((total, other))
            if total is not None:
                total, other = min(each for each, _ in of_ranks), max(each for _, each in of_ranks)
    if total is None:
        return Machine("cpu", None, 0, host=host, num_ranks=num_ranks, rank=rank, ranks_here=ranks_here)
    return Machine(
        torch.cuda.get_device_name(device),
        total,
        other,
        hopper=torch.cuda.get_device_capability(device) >= (9, 0),
        host=host,
        num_ranks=num_ranks,
        rank=rank,
        ranks_here=ranks_here,
    )
