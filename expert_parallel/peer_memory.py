"""Memory that all ranks of a group can write to: who may have it, and how it is made. Knows processes and GPUs only.

Torch's symmetric memory: each rank allocates alike, hands its peers a handle, and maps theirs; over NVLink a kernel
then stores to a peer's address as to its own, and exchanges a word there atomically. Multicast is not used, and torch
should be told not to set it up (`configs.torchrun.without_multicast`), which some machines answer with an error.
"""

# torch.distributed lists its parts nowhere.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed._symmetric_memory import rendezvous

from expert_parallel.group import ExpertGroup
from kernels.peer_layout import PeerLayout, Peers

_TRIED_BYTES = 4096


@dataclass(frozen=True)
class _Seat:
    """Where a rank sits."""

    host: str
    gpu: str  # its number there and its name
    index: int
    uuid: str


def peer_problem(group: ExpertGroup, device: torch.device) -> str | None:
    """Why the ranks cannot reach each other's memory, the same text on every rank; None: they can.

    All ranks of the group call it together.
    """
    if device.type != "cuda":
        return f"its kernels need GPUs, and the ranks run on {device.type}"
    index = torch.cuda.current_device() if device.index is None else device.index
    own = torch.cuda.get_device_properties(index)
    seat = _Seat(socket.gethostname(), f"GPU {index} ({own.name})", index, str(own.uuid))
    seats: list[_Seat] = group.gather_objects(seat)
    problems: list[str | None] = group.gather_objects(_problem_of(group.rank, seats))
    known = next((problem for problem in problems if problem is not None), None)
    return known or meeting_problem(group, device)


def meeting_problem(group: ExpertGroup, device: torch.device) -> str | None:
    """Why no such memory can be made, tried with a little of it: drivers, containers and permissions may be against it.

    The same text on every rank; all call it together.
    """
    tried: list[Tensor] = []
    for attempt in (
        lambda: tried.append(_empty(_TRIED_BYTES, device)),
        lambda: rendezvous(tried[0], group.process_group),  # only where all have some: it waits for all
    ):
        own: str | None = None
        try:
            attempt()
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            own = f"rank {group.rank} could not share memory with the others ({first_line})"
        problems: list[str | None] = group.gather_objects(own)
        if any(problems):
            return next(problem for problem in problems if problem is not None)
    return None


def _problem_of(rank: int, seats: list[_Seat]) -> str | None:
    """What keeps this rank from a peer's memory."""
    own = seats[rank]
    for peer, other in enumerate(seats):
        pair = f"rank {rank} on {own.gpu} of {own.host} and rank {peer} on {other.gpu} of {other.host}"
        if other.host != own.host:
            return f"{pair} are on two hosts"
        if other.uuid == own.uuid:
            continue  # itself, or a card that two processes share
        index = _index_of(other)
        if index is None:
            return f"{pair}: the first process does not see the second GPU (CUDA_VISIBLE_DEVICES must name both)"
        if not torch.cuda.can_device_access_peer(own.index, index):
            return f"{pair} have no peer access"
    return None


def _index_of(seat: _Seat) -> int | None:
    """The number that another process's GPU has in this one."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == seat.uuid:
            return index
    return None


def symmetric_memory(group: ExpertGroup, layout: PeerLayout, device: torch.device) -> Peers:
    """A cleared buffer of `layout` on every rank, reachable from all. All ranks call it together, outside a graph.

    The memory is torch's, but not of its caching allocator: no statistic of that shows it.
    """
    own = _empty(layout.num_bytes, device)
    handle = rendezvous(own, group.process_group)
    layout.clear(own)
    buffers = [
        own if peer == group.rank else handle.get_buffer(peer, own.shape, own.dtype) for peer in range(group.size)
    ]
    mapped = handle.buffer_ptrs[group.rank]
    assert mapped == own.data_ptr(), f"the own buffer is at {own.data_ptr()}, peers are told {mapped}"
    addresses_N = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    group.barrier()  # nobody writes before all have cleared theirs
    return Peers(group.rank, tuple(buffers), addresses_N)


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    """Not by symm_mem.empty: newer torch takes that out of a shared pool, where the address is not the mapping's."""
    return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
