"""Bring torch.distributed up, and the ranks that share one set of experts. Knows processes, devices and timeouts.

Values that torchrun puts into the environment come in as arguments. `ExpertGroup` is all that a dispatcher sees: a
rank's number in its group (never its number in the job), the size, and the collectives.
"""

# torch.distributed lists its stores nowhere.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import atexit
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed two collectives and warns at the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_BRING_UPS = itertools.count()
"""Of this process; every rank of a job brings itself up as often. torchrun's store outlives all of them."""

_POLL_S = 0.02
"""How often a rank asks whether the others are there."""

_REFUSED, _REFUSE_S = "refused", 5.0
"""The key under which a rank says that it will not come, and how long it tries to."""


@dataclass(frozen=True)
class RankValues:
    """What torchrun tells a process about itself, one field for each variable of its environment."""

    rank: int  # RANK
    world_size: int  # WORLD_SIZE
    local_rank: int  # LOCAL_RANK
    local_world_size: int  # LOCAL_WORLD_SIZE
    master_addr: str  # MASTER_ADDR
    master_port: int  # MASTER_PORT
    agent_has_store: bool  # TORCHELASTIC_USE_AGENT_STORE: torchrun itself serves the store at that port
    attempt: int = 0  # TORCHELASTIC_RESTART_COUNT: keys of an earlier attempt must not be found

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankValues:
        """From the variables; ValueError where one that should be a number is none."""
        numbers: dict[str, int] = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            if not environment[name].isdecimal():
                raise ValueError(f"{name}={environment[name]!r} is no number; start the ranks with torchrun.")
            numbers[name.lower()] = int(environment[name])
        return cls(
            **numbers,
            master_addr=environment["MASTER_ADDR"],
            agent_has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


@dataclass(eq=False)
class ExpertGroup:
    """Ranks that together hold one set of experts. Each is known by its rank in this group, 0 to size - 1.

    Tensors are contiguous; every rank of the group makes the same calls in the same order. After `drop` none.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup
    parts: list[ExpertGroup] = field(default_factory=list, repr=False)
    """What was split off it: they end with it."""

    @classmethod
    def planned(cls, rank: int, size: int) -> ExpertGroup:
        """Of ranks that have not met: what can be said of a group before any of its calls."""
        group = cls.__new__(cls)
        group.rank, group.size, group.parts = rank, size, []
        return group

    def drop(self) -> None:
        """Forget the connections. With the last one who holds them they close, their threads end, and calls of the
        others break."""
        for part in self.parts:
            part.drop()
        if hasattr(self, "process_group"):
            del self.process_group

    def all_to_all(self, out_XD: Tensor, x_XD: Tensor, out_rows: Sequence[int], rows: Sequence[int]) -> None:
        """The first rows[0] rows of x go to rank 0, the next rows[1] to rank 1, ...; out_rows[r] come from rank r."""
        dist.all_to_all_single(out_XD, x_XD, list(out_rows), list(rows), group=self.process_group)

    def all_gather(self, out_XD: Tensor, x_XD: Tensor) -> None:
        """The rows of all ranks, in rank order. Every rank gives equally many."""
        _all_gather(out_XD, x_XD, group=self.process_group)

    def reduce_scatter(self, out_XD: Tensor, x_XD: Tensor) -> None:
        """Rank r gets the sum over all ranks of the r-th part of x."""
        _reduce_scatter(out_XD, x_XD, group=self.process_group)

    def add_up(self, x_X: Tensor) -> None:
        """x becomes the sum over all ranks."""
        dist.all_reduce(x_X, group=self.process_group)

    def gather_objects(self, own: Any) -> list[Any]:
        """One object of every rank, in rank order, through host memory. For results, not for steps."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.process_group)
        return everyone

    def barrier(self) -> None:
        """Returns when every rank is here. Over host memory: launched work of the device is not waited for."""
        here = torch.zeros(1, dtype=torch.int64)
        self.all_gather(here.new_empty(self.size), here)


@dataclass(frozen=True)
class Ranks:
    """All ranks of a job, brought up. `store` holds small values for all of them, and counts for all of them."""

    values: RankValues
    device: torch.device
    store: dist.Store
    timeout: timedelta
    everyone: ExpertGroup
    say: Callable[[str], None]

    def meet(self, stage: str) -> None:
        """Returns when every rank is here: before a stretch whose length differs between ranks, such as loading, turns
        into a collective that would time out without saying for whom it waits. Each stage's name is used once."""
        meet(self.store, self.values, stage, self.timeout, self.say)

    def agree(self, what: str, value: str) -> None:
        """Every rank gives the same value, or every rank raises ValueError with those that differ. For settings that
        shape collectives: where they differ, ranks would hang. Each name is used once."""
        self.store.set(f"{what}={self.values.rank}", value)
        self.meet(what)
        keys = [f"{what}={rank}" for rank in range(self.everyone.size)]
        given = [content.decode() for content in self.store.multi_get(keys)]
        others = {rank: other for rank, other in enumerate(given) if other != given[0]}
        if others:
            raise ValueError(
                f"{what}: rank 0 has {given[0]}, but {', '.join(f'rank {r} has {v}' for r, v in others.items())}; "
                "give all ranks the same."
            )

    def drop(self) -> None:
        """Close the connections after a fault: whoever waits for this rank in a collective fails at once, and not only
        when this process ends. On a GPU they stay: NCCL would first wait for what has been launched."""
        if self.device.type == "cpu":
            self._leave()

    def close(self) -> None:
        """Leaves the job. Other ranks may still be in a collective with this one: end a run with one that all make."""
        atexit.unregister(self.drop)
        self._leave()

    def _leave(self) -> None:
        """Ends gloo's threads, too. One of them may be the last to hold a tensor of a collective that is over; where it
        lets go of it while Python itself ends, the process ends by SIGABRT, and torchrun calls a finished job failed.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        self.everyone.drop()


def split(everyone: ExpertGroup, size: int, timeout: timedelta) -> ExpertGroup:
    """The group of `size` neighbouring ranks of a whole job that this rank belongs to. All ranks call it together."""
    if not 1 <= size <= everyone.size or everyone.size % size:
        choices = [n for n in range(1, everyone.size + 1) if everyone.size % n == 0]
        raise ValueError(
            f"{everyone.size} ranks do not divide into groups of {size}; give one of {choices} ranks to a group."
        )
    # Every rank takes part in making every group, in the same order.
    groups = [
        dist.new_group(list(range(first, first + size)), timeout=timeout) for first in range(0, everyone.size, size)
    ]
    own, rank = divmod(everyone.rank, size)
    process_group = groups[own]
    assert isinstance(process_group, dist.ProcessGroup), f"new_group gave {process_group} to one of its members"
    group = ExpertGroup(rank, size, process_group)
    everyone.parts.append(group)
    return group


def rank_device(values: RankValues, kind: str, num_gpus: int) -> torch.device:
    """The device of a process: `cpu`, or the GPU with the number of the process on its node."""
    if kind == "cpu":
        return torch.device("cpu")
    if values.local_world_size > num_gpus:
        raise ValueError(
            f"torchrun starts {values.local_world_size} processes on this node and {num_gpus} GPUs are visible; each "
            f"process needs its own: give --nproc-per-node={num_gpus}, make more GPUs visible, or engine.device=cpu."
        )
    return torch.device("cuda", values.local_rank)


def backend_of(device: torch.device) -> str:
    """gloo for CPU tensors; on a GPU NCCL beside it, since what ranks agree on in each step lies in host memory."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def bring_up(values: RankValues, device: torch.device, timeout_s: float, say: Callable[[str], None] = print) -> Ranks:
    """Joins the job's ranks. Returns when all are there; RuntimeError that names those who are not there in time.

    `timeout_s` bounds the wait for the others, and later each collective. Rank 0 says backend, ranks and timeout.
    """
    timeout = timedelta(seconds=timeout_s)
    store = _store(values, timeout)
    backend = backend_of(device)
    if values.rank == 0:
        say(
            f"{values.world_size} ranks at {values.master_addr}:{values.master_port}, {backend} on {device.type}; "
            f"start and collectives time out after {timeout_s:g} s (parallel.timeout_s)"
        )
    meet(store, values, "start", timeout, say)
    dist.init_process_group(
        backend,
        store=store,
        rank=values.rank,
        world_size=values.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,  # NCCL allocates now, before memory is planned
    )
    world = dist.group.WORLD
    assert world is not None, "init_process_group makes the group of all ranks"
    ranks = Ranks(values, device, store, timeout, ExpertGroup(values.rank, values.world_size, world), say)
    atexit.register(ranks.drop)  # for who ends without `close`
    return ranks


def meet(
    store: dist.Store,
    values: RankValues,
    stage: str,
    timeout: timedelta,
    say: Callable[[str], None],
    *,
    patience_s: float = 10.0,
) -> None:
    """Waits for all ranks to come to `stage`. Rank 0 says for whom after `patience_s`, then after twice as long each
    time; after `timeout` every rank raises RuntimeError with the ranks that are missing, and at once where one has said
    that it will not come."""
    keys = [f"{stage}/{rank}" for rank in range(values.world_size)]
    store.set(keys[values.rank], "here")
    start = time.monotonic()
    while not store.check(keys):
        if store.check([_REFUSED]):
            raise RuntimeError(store.get(_REFUSED).decode())
        waited_s = time.monotonic() - start
        late = waited_s > timeout.total_seconds()
        if late or (values.rank == 0 and waited_s >= patience_s):
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if late:
                raise RuntimeError(
                    f"rank {values.rank} of {values.world_size} is at {stage!r}; ranks {missing} did not come within "
                    f"{timeout.total_seconds():g} s (parallel.timeout_s)."
                )
            say(f"{stage}: waiting for ranks {missing} since {waited_s:.0f} s")
            patience_s *= 2
        time.sleep(_POLL_S)


def refuse(values: RankValues, why: str) -> None:
    """Tell the ranks that wait for this one, in a `bring_up`, that it will not come. For as long as torchrun serves."""
    if values.agent_has_store:
        with contextlib.suppress(RuntimeError):
            _store(values, timedelta(seconds=_REFUSE_S)).compare_set(_REFUSED, "", f"rank {values.rank}: {why}")


def _store(values: RankValues, timeout: timedelta) -> dist.Store:
    """The store at the master's port: torchrun's own where it serves one, else rank 0's."""
    serves = values.rank == 0 and not values.agent_has_store
    address = f"{values.master_addr}:{values.master_port}"
    try:
        store = dist.TCPStore(
            values.master_addr,
            values.master_port,
            world_size=None if values.agent_has_store else values.world_size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,  # `meet` waits, and knows whom it waits for
        )
    except (RuntimeError, ValueError) as error:
        if serves:
            raise ValueError(
                f"rank 0 cannot listen at {address}: {error}. If another job uses the port, give torchrun another "
                f"--master-port (or --rdzv-endpoint=HOST:PORT)."
            ) from error
        raise RuntimeError(
            f"rank {values.rank} of {values.world_size} found nobody at {address} within "
            f"{timeout.total_seconds():g} s: is rank 0 running there, and is the port open?"
        ) from error
    return dist.PrefixStore(f"ranks/attempt-{values.attempt}/{next(_BRING_UPS)}", store)
