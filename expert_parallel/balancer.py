"""Which expert lives in which slot, so that ranks carry even loads: DeepSeek's EPLB as a pure function.

Knows loads, slots, ranks and nodes; knows no weights, no tokens and no time. It starts anew each time: `moves.py`
names its ranks so that few experts move, `adjust.py` changes the placement there is, `proposal.py` weighs them.

The idea, for one layer: the heaviest experts get replicas, one slot at a time, each to the expert whose replicas carry
most; then all replicas, heaviest first, go to the lightest rank that has room. The hierarchical policy first packs
groups of experts onto nodes in the same way, as many to each, and does the above inside each node: a router that picks
few groups for a token then reaches few nodes. The global policy is the same with one node.

Beyond the published algorithm: ranks may have different numbers of slots, slots may outnumber what is useful (they stay
empty), and no rank gets two replicas of one expert where that can be avoided. Equal loads are decided by lower index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from expert_parallel.placement import Placement

Policy = Literal["hierarchical", "global"]


@dataclass(frozen=True)
class SlotShape:
    """The slots to fill: `slots_per_rank[r]` on rank r. Ranks are numbered node by node, as many on each node.

    `num_groups`: the router's groups of experts, neighbours in number (1 where it has none).
    """

    num_experts: int
    slots_per_rank: tuple[int, ...]
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        if not self.slots_per_rank or min(self.slots_per_rank) < 0:
            raise ValueError(f"slots_per_rank={self.slots_per_rank} must name a rank and no negative number.")
        if self.num_experts < 1 or self.num_slots < self.num_experts:
            raise ValueError(
                f"{self.num_slots} slots on {self.num_ranks} ranks cannot hold num_experts={self.num_experts}; "
                "every expert needs one, and there must be at least one expert."
            )
        if self.num_nodes < 1 or self.num_ranks % self.num_nodes:
            raise ValueError(f"num_nodes={self.num_nodes} must divide the {self.num_ranks} ranks.")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_experts={self.num_experts}.")

    @classmethod
    def even(
        cls, num_experts: int, num_ranks: int, redundant: int = 0, *, num_nodes: int = 1, num_groups: int = 1
    ) -> SlotShape:
        """As many slots as experts and redundant ones, spread as `Placement.contiguous` spreads them."""
        ranks = Placement.contiguous(num_experts, num_ranks, redundant).ranks
        return cls(num_experts, tuple(len(slots) for slots in ranks), num_nodes, num_groups)

    @property
    def num_ranks(self) -> int:
        return len(self.slots_per_rank)

    @property
    def num_slots(self) -> int:
        return sum(self.slots_per_rank)

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups

    def slots_of_node(self, node: int) -> tuple[int, ...]:
        """Slots of each rank of a node."""
        return self.slots_per_rank[node * self.ranks_per_node : (node + 1) * self.ranks_per_node]

    @property
    def policy(self) -> Policy:
        """Hierarchical where groups divide over several nodes and every node has the slots for its share of them."""
        if self.num_nodes == 1 or self.num_groups % self.num_nodes:
            return "global"
        needed = self.num_experts // self.num_nodes
        fits = all(sum(self.slots_of_node(node)) >= needed for node in range(self.num_nodes))
        return "hierarchical" if fits else "global"


def rebalance(loads_LE: npt.ArrayLike, shape: SlotShape, *, policy: Policy | None = None) -> tuple[Placement, ...]:
    """A placement for every layer, from its loads (not negative, of any scale). Pure: equal input, equal output.

    `policy` None takes the shape's own; "global" may be asked for anywhere, "hierarchical" only where the shape has it.
    The ranks that come out are interchangeable: `keep_slots` renames them to move few experts.
    """
    loads_LE = np.asarray(loads_LE, dtype=np.float64)
    if loads_LE.ndim != 2 or loads_LE.shape[1] != shape.num_experts:
        raise ValueError(f"loads of shape {loads_LE.shape} do not fit [layers, num_experts={shape.num_experts}].")
    if not (np.isfinite(loads_LE).all() and (loads_LE >= 0).all()):
        raise ValueError("loads hold a negative or non-finite number; they count rows.")
    policy = policy or shape.policy
    if policy == "hierarchical" and shape.policy != "hierarchical":
        raise ValueError(
            f"the hierarchical policy needs several nodes, num_groups={shape.num_groups} divisible by "
            f"num_nodes={shape.num_nodes}, and slots for {shape.num_experts // shape.num_nodes} experts on each node."
        )
    whole = [(list(range(shape.num_experts)), shape.slots_per_rank)]
    placements = []
    for load_E in loads_LE.tolist():
        parts = _experts_of_nodes(load_E, shape) if policy == "hierarchical" else whole
        ranks = [slots for experts, capacities in parts for slots in _fill(load_E, experts, capacities)]
        placements.append(Placement.of_ranks(shape.num_experts, ranks))
    return tuple(placements)


def _experts_of_nodes(load_E: list[float], shape: SlotShape) -> list[tuple[list[int], tuple[int, ...]]]:
    """For each node: the experts of its groups, and the slots of its ranks."""
    size = shape.group_size
    load_of_group = [sum(load_E[group * size : (group + 1) * size]) for group in range(shape.num_groups)]
    groups = list(range(shape.num_groups))
    nodes = _pack(load_of_group, groups, [shape.num_groups // shape.num_nodes] * shape.num_nodes)
    return [
        ([group * size + i for group in groups for i in range(size)], shape.slots_of_node(node))
        for node, groups in enumerate(nodes)
    ]


def _fill(load_E: list[float], experts: list[int], capacities: Sequence[int]) -> list[list[int | None]]:
    """Replicate and pack the experts of one node. Every rank's slots, empty ones last."""
    replicas = _replicate(load_E, experts, sum(capacities), sum(capacity > 0 for capacity in capacities))
    count = dict.fromkeys(experts, 0)
    for expert in replicas:
        count[expert] += 1
    share_E = list(load_E)
    for expert, n in count.items():
        share_E[expert] = load_E[expert] / n
    held = _pack(share_E, replicas, capacities)
    return [slots + [None] * (capacity - len(slots)) for slots, capacity in zip(held, capacities, strict=True)]


def _replicate(load_E: list[float], experts: list[int], num_slots: int, most: int) -> list[int]:
    """Every expert once, then one replica at a time to the one whose replicas carry most; at most `most` of each."""
    replicas = list(experts)
    heaviest = [(-load_E[expert], 1, expert) for expert in experts if most > 1]
    heapq.heapify(heaviest)
    while len(replicas) < num_slots and heaviest:
        _, count, expert = heaviest[0]
        replicas.append(expert)
        if count + 1 < most:
            heapq.heapreplace(heaviest, (-load_E[expert] / (count + 1), count + 1, expert))
        else:
            heapq.heappop(heaviest)
    return replicas


def _pack(share_E: list[float], items: list[int], capacities: Sequence[int]) -> list[list[int]]:
    """Items, heaviest first, to the lightest rank that has room and does not hold the same item yet.

    Where only ranks that hold it have room, another rank gives up something for it; if none can, it is left out: a
    second copy on one rank would carry nothing.
    """
    held: list[list[int]] = [[] for _ in capacities]
    load = [0.0] * len(capacities)
    lightest = [(0.0, 0, rank) for rank, capacity in enumerate(capacities) if capacity > 0]
    for item in sorted(items, key=lambda item: (-share_E[item], item)):
        passed = []
        while lightest and item in held[lightest[0][2]]:
            passed.append(heapq.heappop(lightest))
        if lightest:
            _, _, rank = heapq.heappop(lightest)
            held[rank].append(item)
            load[rank] += share_E[item]
            changed = [rank]
        else:
            changed = _make_way(item, share_E, held, load, capacities)
            passed = [entry for entry in passed if entry[2] not in changed]
        for entry in passed:
            heapq.heappush(lightest, entry)
        for rank in changed:
            if len(held[rank]) < capacities[rank]:
                heapq.heappush(lightest, (load[rank], len(held[rank]), rank))
    return held


def _make_way(
    item: int, share_E: list[float], held: list[list[int]], load: list[float], capacities: Sequence[int]
) -> list[int]:
    """Put `item` on a full rank that lacks it, whose own item goes to a rank with room. The ranks that changed."""
    best: tuple[float, int, int, int] | None = None
    for target in range(len(held)):
        if len(held[target]) == capacities[target]:
            continue
        for giver in range(len(held)):
            if item in held[giver]:
                continue
            for other in held[giver]:
                if other not in held[target]:
                    after = max(load[target] + share_E[other], load[giver] - share_E[other] + share_E[item])
                    if best is None or (after, target, giver, other) < best:
                        best = (after, target, giver, other)
    if best is None:
        return []
    _, target, giver, other = best
    held[giver][held[giver].index(other)] = item
    held[target].append(other)
    load[giver] += share_E[item] - share_E[other]
    load[target] += share_E[other]
    return [target, giver]


def slot_arrays(placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    """The filled slots in order of rank, then slot: their experts and their ranks, int64 [P] each."""
    pairs = [
        (expert, rank) for rank, slots in enumerate(placement.ranks) for expert in slots if expert is not None
    ]  # never empty: every expert has a slot
    experts_P, ranks_P = np.array(pairs, dtype=np.int64).T
    return experts_P, ranks_P


def rank_loads(loads_LE: npt.ArrayLike, placements: Sequence[Placement]) -> np.ndarray:
    """float64 [L, N]: what each rank carries where replicas share the load of their expert evenly.

    >>> rank_loads([[6.0, 1.0]], [Placement.of_ranks(2, [[0, 1], [0, None]])]).tolist()
    [[4.0, 3.0]]
    """
    loads_LE = np.asarray(loads_LE, dtype=np.float64)
    assert len(loads_LE) == len(placements), f"{len(loads_LE)} layers of loads, {len(placements)} placements"
    out = []
    for load_E, placement in zip(loads_LE, placements, strict=True):
        experts_P, ranks_P = slot_arrays(placement)
        share_E = load_E / np.bincount(experts_P, minlength=placement.num_experts)
        out.append(np.bincount(ranks_P, weights=share_E[experts_P], minlength=placement.num_ranks))
    return np.array(out)
