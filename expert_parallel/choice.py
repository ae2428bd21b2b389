"""Which dispatcher serves which steps, and why: the one place that decides. Knows ranks and devices; knows no model.

`parallel.dispatcher=auto` follows this rule:

    one rank                  local          nothing travels
    several ranks, CPU        all_to_all     gloo has no graphs to gain, and only rows that are needed travel
    several ranks, GPUs that reach each other's memory (and have tried it)
        all steps             one_sided      the fewest launches, each row once per rank, no host sync, no collective
    several ranks, other GPUs
        any rank has prompts  all_to_all     exact sizes: each row once per rank, and the host waits once a round
        decode alone          all_gather     fixed shapes and no host sync: the step is replayed as a CUDA graph; but
                                             every rank's rows go to every rank, and min(K, slots) rows for each return

A step is "decode alone" if no rank brings prompt rows: all ranks agree on that before it is launched.

What it rests on: `launch.bench workload=ep` on two H200s (NV18) at commit 6f08fa1, 30 November 2026, us of dispatch and
combine together, DeepSeek-V3's shape (D = 7168, E = 256, K = 8), even ranks, combine=exact | fast:

    tokens of a rank    one_sided       all_to_all        all_gather        deep_ep
    16384               3,850 | 1,612   5,694 | 3,050     9,256 | 2,857           | 4,460
    4096                  973 |   435   1,846 | 1,867     2,475 |   815           | 1,212
    128, in a graph        47 |    32   (1,695 | 1,333)     213 |    84           |   173 (its decode kernels)
    16, in a graph         23 |    19   (1,491 | 1,324)      96 |    39           |    71

one_sided was the fastest of all at every size, with both shapes and both ways to combine, even ranks and uneven ones:
its time was 0.17 to 0.68 of the next best's (up to 128 tokens in a graph). Read on two cards of one host; with more of
them no other reading is known, and a round's rows are bounded as ever (`parallel.row_cap`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from expert_parallel.all_gather import AllGatherDispatcher
from expert_parallel.all_to_all import AllToAllDispatcher
from expert_parallel.deep_ep import DeepEPDispatcher
from expert_parallel.deep_ep_buffer import deep_ep_problem
from expert_parallel.dispatcher import Dispatcher, LocalDispatcher
from expert_parallel.group import ExpertGroup
from expert_parallel.one_sided import OneSidedDispatcher
from expert_parallel.peer_memory import peer_problem
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable, most_replicas
from expert_parallel.rounds import Combine

DISPATCHERS = ("auto", "local", "all_to_all", "all_gather", "one_sided", "deep_ep")
GPU_DISPATCHERS = ("one_sided", "deep_ep")


class Choice(NamedTuple):
    """The dispatchers by name: of steps in which any rank has prompt rows, and of decode alone."""

    prefill: str
    decode: str
    reason: str

    def __str__(self) -> str:
        both = self.prefill if self.prefill == self.decode else f"{self.prefill} for prompts, {self.decode} for decode"
        return f"{both} ({self.reason})"


class Dispatchers(NamedTuple):
    """The dispatchers of a network: the same one twice, or two."""

    prefill: Dispatcher
    decode: Dispatcher

    @classmethod
    def local(cls, placement: Placement, rank: int, device: torch.device | str) -> Dispatchers:
        """One rank that holds all it uses."""
        dispatcher = LocalDispatcher(placement.slot_table(rank, device), placement.num_slots(rank))
        return cls(dispatcher, dispatcher)

    def buffer_bytes(self, num_tokens: int, width: int, dtype: torch.dtype) -> int:
        """The most that the buffers of one round hold, where each rank brings up to `num_tokens` rows."""
        return max(each.buffer_bytes(num_tokens, width, dtype) for each in self)

    @property
    def held_bytes(self) -> int:
        """Of their buffers that exist and that no allocator's statistics show."""
        return sum(each.held_bytes for each in self._distinct)

    def check(self) -> None:
        """RuntimeError where another rank was waited for in vain. Waits for nobody."""
        for each in self._distinct:
            each.check()

    def close(self) -> None:
        """After the last step, on every rank: gives back what a library would else complain of at its end."""
        for each in self._distinct:
            if isinstance(each, DeepEPDispatcher):
                each.shared.close()

    @property
    def _distinct(self) -> tuple[Dispatcher, ...]:
        return (self.prefill,) if self.prefill is self.decode else tuple(self)


def dispatcher_problems(group: ExpertGroup, device: torch.device, *, deep_ep: bool = False) -> dict[str, str]:
    """Why a dispatcher cannot be used by these ranks, for those that cannot. All ranks call it together.

    `deep_ep`: that one is looked at too, which loads its package.
    """
    found = {"one_sided": peer_problem(group, device)}
    if deep_ep:
        of_ranks: list[str | None] = group.gather_objects(deep_ep_problem(device, num_ranks=group.size))
        found["deep_ep"] = next((problem for problem in of_ranks if problem is not None), None)
    return {name: problem for name, problem in found.items() if problem is not None}


def choose(
    asked: str, num_ranks: int, device: torch.device, problems: Mapping[str, str] = MappingProxyType({})
) -> Choice:
    """The rule above, or what `parallel.dispatcher` asks for. ValueError where that cannot work.

    `problems` as far as they are known: ranks that have not met yet know of none.
    """
    if asked not in DISPATCHERS:
        raise ValueError(f"parallel.dispatcher={asked!r} is unknown; give {' or '.join(DISPATCHERS)}.")
    if asked == "local" and num_ranks > 1:
        raise ValueError(
            f"parallel.dispatcher=local, but {num_ranks} ranks share the experts and rows must travel; give auto, "
            "all_to_all, all_gather, one_sided or deep_ep, or start one rank."
        )
    if num_ranks == 1:
        why = "one rank holds every expert" + (
            f", {asked} has nobody to talk to" if asked not in ("auto", "local") else ""
        )
        return Choice("local", "local", why)
    problem = problems.get(asked)
    if asked in GPU_DISPATCHERS and device.type != "cuda":
        problem = f"its kernels need GPUs, and the ranks run on {device.type}"
    if problem is not None:
        raise ValueError(
            f"parallel.dispatcher={asked} cannot be used here: {problem}; give auto, all_to_all or all_gather."
        )
    if asked != "auto":
        return Choice(asked, asked, f"parallel.dispatcher={asked}")
    if device.type != "cuda":
        return Choice("all_to_all", "all_to_all", f"auto: {num_ranks} ranks over gloo on {device.type}")
    if "one_sided" in problems:
        why = f"no rank needs another's memory for it, and one_sided cannot: {problems['one_sided']}"
        return Choice("all_to_all", "all_gather", f"auto: {num_ranks} GPUs; decode is graph-safe, {why}")
    why = "on two H200s it took 0.17 to 0.68 of the next dispatcher's time, for 16 to 16,384 tokens of a rank"
    return Choice("one_sided", "one_sided", f"auto: {num_ranks} GPUs that reach each other's memory; {why}")


def automatic_row_cap(row_cap: int | None, num_ranks: int, top_k: int, max_rows: int) -> int:
    """`parallel.row_cap`, or twice the even share of a step in which every rank brings `max_rows` rows."""
    if row_cap is not None:
        return row_cap
    return max(2 * max_rows, num_ranks) * top_k


def make_dispatchers(
    choice: Choice,
    group: ExpertGroup,
    placement: Placement,
    *,
    top_k: int,
    combine: Combine,
    row_cap: int | None,
    fp8_rows: bool = False,
    timeout_s: float = 600.0,
    device: torch.device,
) -> Dispatchers:
    """The dispatchers of `choice` over a group, with one table of replicas for both; `fp8_rows`: experts are in fp8.
    `timeout_s` of waits that no process group bounds."""
    if choice.prefill == "local":
        return Dispatchers.local(placement, group.rank, device)
    replicas = ReplicaTable(placement, most_replicas(placement), device)
    slots = tuple(placement.num_slots(rank) for rank in range(group.size))
    kinds = {
        "all_to_all": AllToAllDispatcher,
        "all_gather": AllGatherDispatcher,
        "one_sided": partial(OneSidedDispatcher, timeout_s=timeout_s),
        "deep_ep": DeepEPDispatcher,
    }
    made = {
        name: kind(
            group,
            replicas,
            slots,
            top_k=top_k,
            combine=combine,
            row_cap=row_cap,
            fp8_rows=fp8_rows,
            device=device,
        )
        for name, kind in kinds.items()
        if name in choice
    }
    decode = made[choice.decode]
    return Dispatchers(made[choice.prefill], decode.for_decode() if isinstance(decode, DeepEPDispatcher) else decode)


def planned_bytes(
    choice: Choice,
    rank: int,
    placement: Placement,
    num_tokens: int,
    width: int,
    dtype: torch.dtype,
    *,
    top_k: int,
    combine: Combine,
    row_cap: int | None,
    fp8_rows: bool = False,
) -> int:
    """`Dispatchers.buffer_bytes` of ranks that have not met: what the same dispatchers will say once they exist.

    ValueError where they cannot be made. DeepEP's package must be here: it alone knows the size of its buffer.
    """
    made = make_dispatchers(
        choice,
        ExpertGroup.planned(rank, placement.num_ranks),
        placement,
        top_k=top_k,
        combine=combine,
        row_cap=row_cap,
        fp8_rows=fp8_rows,
        device=torch.device("cpu"),
    )
    return made.buffer_bytes(num_tokens, width, dtype)
