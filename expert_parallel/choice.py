"""Which dispatcher serves which steps, and why: the one place that decides. Knows ranks and devices; knows no model.

`parallel.dispatcher=auto` follows this rule:

    one rank                  local          nothing travels
    several ranks, CPU        all_to_all     gloo has no graphs to gain, and only rows that are needed travel
    several ranks, GPU
        any rank has prompts  all_to_all     exact sizes: a prompt step has many rows, and its host sync costs little
        decode alone          all_gather     fixed shapes, no host sync: the step is replayed as a CUDA graph

A step is "decode alone" if no rank brings prompt rows: all ranks agree on that before it is launched.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from expert_parallel.all_gather import AllGatherDispatcher
from expert_parallel.all_to_all import AllToAllDispatcher
from expert_parallel.dispatcher import Dispatcher, LocalDispatcher
from expert_parallel.group import ExpertGroup
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable, most_replicas
from expert_parallel.rounds import Combine

DISPATCHERS = ("auto", "local", "all_to_all", "all_gather")


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


def choose(asked: str, num_ranks: int, device: torch.device) -> Choice:
    """The rule above, or what `parallel.dispatcher` asks for. ValueError where that cannot work."""
    if asked not in DISPATCHERS:
        raise ValueError(f"parallel.dispatcher={asked!r} is unknown; give {' or '.join(DISPATCHERS)}.")
    if asked == "local" and num_ranks > 1:
        raise ValueError(
            f"parallel.dispatcher=local, but {num_ranks} ranks share the experts and rows must travel; give auto, "
            "all_to_all or all_gather, or start one rank."
        )
    if num_ranks == 1:
        why = "one rank holds every expert" + (
            f", {asked} has nobody to talk to" if asked not in ("auto", "local") else ""
        )
        return Choice("local", "local", why)
    if asked != "auto":
        return Choice(asked, asked, f"parallel.dispatcher={asked}")
    if device.type != "cuda":
        return Choice("all_to_all", "all_to_all", f"auto: {num_ranks} ranks over gloo on {device.type}")
    return Choice("all_to_all", "all_gather", f"auto: {num_ranks} GPUs; decode is graph-safe with fixed shapes")


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
    device: torch.device,
) -> Dispatchers:
    """The dispatchers of `choice` over a group, with one table of replicas for both; `fp8_rows`: experts are in fp8."""
    if choice.prefill == "local":
        return Dispatchers.local(placement, group.rank, device)
    replicas = ReplicaTable(placement, most_replicas(placement), device)
    slots = tuple(placement.num_slots(rank) for rank in range(group.size))
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
        for name, kind in (("all_to_all", AllToAllDispatcher), ("all_gather", AllGatherDispatcher))
        if name in choice
    }
    return Dispatchers(made[choice.prefill], made[choice.decode])
