"""What ranks know of their machines: each its own, and the memory of the GPU that leaves least."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from expert_parallel.group import Ranks
from moe.engine.machine import OTHER_BYTES, Machine, find_machine

GIB = 2**30


class Everyone:
    """Two ranks, of which this one gathers with what the other would say."""

    def __init__(self, rank: int, of_other: tuple[int | None, int]) -> None:
        self.size, self.rank, self.of_other = 2, rank, of_other
        self.said: list[Any] = []

    def gather_objects(self, own: Any) -> list[Any]:
        self.said.append(own)
        return [own, self.of_other] if self.rank == 0 else [self.of_other, own]


def found(rank: int, of_other: tuple[int | None, int], device: str, *, asks_host: bool) -> tuple[Machine, list[Any]]:
    everyone = Everyone(rank, of_other)
    ranks = cast(Ranks, SimpleNamespace(everyone=everyone, values=SimpleNamespace(local_world_size=2)))
    return find_machine(torch.device(device), ranks, asks_host=asks_host), everyone.said


def test_ranks_plan_by_the_gpu_that_leaves_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has 80 GiB and 1 GiB of others, the other 79 GiB and 3: both see 79 and 3. Where no experts go to host memory
    nothing has to be agreed on, and nobody is asked."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    seen = []
    for rank, (total, other) in enumerate([(80, 1), (79, 3)]):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, t=total, o=other: ((t - o - 2) * GIB, t * GIB))
        of_other = (79 * GIB, 3 * GIB) if rank == 0 else (80 * GIB, GIB)
        machine, said = found(rank, of_other, "cuda", asks_host=True)
        assert said == [(total * GIB, other * GIB)] and machine.rank == rank and machine.ranks_here == 2
        seen.append((machine.total, machine.other))
        alone, said = found(rank, of_other, "cuda", asks_host=False)
        assert (alone.total, alone.other, said) == (total * GIB, other * GIB, [])
    assert seen == [(79 * GIB, 3 * GIB)] * 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (78 * GIB, 80 * GIB))
    assert find_machine(torch.device("cuda"), None, asks_host=False).other == OTHER_BYTES  # modules are yet to come


def test_the_cpu_has_no_total_of_its_own() -> None:
    machine, said = found(1, (None, 0), "cpu", asks_host=True)
    assert (machine.name, machine.total, machine.other, machine.num_ranks) == ("cpu", None, 0, 2)
    assert said == [(None, 0)] and machine.host is not None and machine.host.available > 0
