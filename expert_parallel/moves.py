"""From one placement to the next: which experts must be copied, and how to name ranks and slots so that they are few.

Knows slots; knows no loads and no weights, and moves nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from expert_parallel.balancer import slot_arrays
from expert_parallel.placement import Placement, Slot


class Move(NamedTuple):
    """One expert of one layer is copied from a slot of the current placement into a slot of the next."""

    expert: int
    source: Slot
    target: Slot


def moves(current: Placement, wanted: Placement, *, num_nodes: int = 1) -> tuple[Move, ...]:
    """What must be copied, in order of target rank and slot: the same list on every rank. Emptying a slot is free.

    A source slot may be another move's target: what it holds now must have left, or be set aside, before it is written.
    Each comes from a replica in the current placement: one on the same rank if there is, else one on the same node, of
    those the one that has sent least so far, then the lowest rank.
    """
    _check_same_slots(current, wanted)
    ranks_per_node = current.num_ranks // num_nodes
    slots_of: dict[int, list[Slot]] = {}
    for rank, slots in enumerate(current.ranks):
        for slot, expert in enumerate(slots):
            if expert is not None:
                slots_of.setdefault(expert, []).append(Slot(rank, slot))
    sent = [0] * current.num_ranks
    found = []
    for rank, slots in enumerate(wanted.ranks):
        for slot, expert in enumerate(slots):
            if expert is None or expert == current.ranks[rank][slot]:
                continue
            source = min(
                slots_of[expert],
                key=lambda place: (
                    place.rank != rank,
                    place.rank // ranks_per_node != rank // ranks_per_node,
                    sent[place.rank],
                    place.rank,
                ),
            )
            sent[source.rank] += source.rank != rank
            found.append(Move(expert, source, Slot(rank, slot)))
    return tuple(found)


def keep_slots(current: Placement, wanted: Placement, *, num_nodes: int = 1) -> Placement:
    """`wanted` with its ranks renamed and its slots reordered, so that few experts move. Loads are as even as before.

    Only ranks with equally many slots change names, and only whole nodes or ranks within a node: the hierarchical
    policy's groups stay together. Pairs with most experts in common go first (lower index on ties); where that greedy
    choice keeps less than the names as they are, these stand. Within a rank an expert that was there keeps its slot.
    """
    _check_same_slots(current, wanted)
    num_ranks, per_node = current.num_ranks, current.num_ranks // num_nodes
    common_RW = _common_experts(current, wanted)
    sizes = np.array([current.num_slots(rank) for rank in range(num_ranks)]).reshape(num_nodes, per_node)
    # For each pair of nodes: how the ranks of wanted's would be named in the current one, and how many experts stay.
    inside = {
        (old, new): _match(common_RW[_node(old, per_node), _node(new, per_node)], sizes[old], sizes[new])
        for old in range(num_nodes)
        for new in range(num_nodes)
        if (np.sort(sizes[old]) == np.sort(sizes[new])).all()
    }
    kept_NN = np.zeros((num_nodes, num_nodes), dtype=np.int64)
    for pair, (kept, _) in inside.items():
        kept_NN[pair] = kept
    kinds = [tuple(each) for each in np.sort(sizes, axis=1).tolist()]
    kind_N = np.array([kinds.index(kind) for kind in kinds])
    _, node_names = _match(kept_NN, kind_N, kind_N)
    rank_names = [
        new * per_node + name for old, new in enumerate(node_names.tolist()) for name in inside[old, new][1].tolist()
    ]
    ranks = [_keep_within(current.ranks[rank], wanted.ranks[name]) for rank, name in enumerate(rank_names)]
    return Placement.of_ranks(wanted.num_experts, ranks)


def _check_same_slots(current: Placement, wanted: Placement) -> None:
    shapes = [[len(slots) for slots in placement.ranks] for placement in (current, wanted)]
    assert shapes[0] == shapes[1], f"slots of the ranks differ: {shapes[0]} now, {shapes[1]} wanted"
    assert current.num_experts == wanted.num_experts, f"{current.num_experts} experts now, {wanted.num_experts} wanted"


def _node(node: int, ranks_per_node: int) -> slice:
    return slice(node * ranks_per_node, (node + 1) * ranks_per_node)


def _common_experts(current: Placement, wanted: Placement) -> np.ndarray:
    """int64 [N, N]: distinct experts that rank r holds now and rank w of `wanted` would hold."""
    holds = np.zeros((2, current.num_ranks, current.num_experts), dtype=np.float32)
    for index, placement in enumerate((current, wanted)):
        experts_P, ranks_P = slot_arrays(placement)
        holds[index, ranks_P, experts_P] = 1
    return (holds[0] @ holds[1].T).astype(np.int64)


def _match(common_RW: np.ndarray, kind_R: np.ndarray, kind_W: np.ndarray) -> tuple[int, np.ndarray]:
    """(what is kept, for each r its w): pairs of one kind, most in common first; r = w throughout if that keeps more.

    Both sides have as many of each kind, so that nobody is left over.
    """
    rows, columns = np.nonzero((common_RW > 0) & (kind_R[:, None] == kind_W))
    order = np.lexsort((columns, rows, -common_RW[rows, columns]))
    name_R = np.full(len(kind_R), -1)
    taken_W = np.zeros(len(kind_W), dtype=bool)
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if name_R[row] < 0 and not taken_W[column]:
            name_R[row], taken_W[column] = column, True
    for kind in np.unique(kind_R):
        name_R[(kind_R == kind) & (name_R < 0)] = np.flatnonzero((kind_W == kind) & ~taken_W)
    as_is_R = np.arange(len(kind_R))
    kept, kept_as_is = (int(common_RW[as_is_R, names].sum()) for names in (name_R, as_is_R))
    if kept_as_is >= kept and (kind_R == kind_W).all():
        return kept_as_is, as_is_R
    return kept, name_R


def _keep_within(now: Sequence[int | None], wanted: Sequence[int | None]) -> list[int | None]:
    """The experts of `wanted`, in their old slots where they had one; the others in the slots left, in their order."""
    slots: list[int | None] = [None] * len(now)
    arriving: list[int] = []
    for expert in wanted:
        if expert is None:
            continue
        place = next((slot for slot, held in enumerate(now) if held == expert and slots[slot] is None), None)
        if place is None:
            arriving.append(expert)
        else:
            slots[place] = expert
    # Into empty or given-up slots; slots that were empty first, so that a given-up expert is overwritten last.
    left = sorted((slot for slot, held in enumerate(slots) if held is None), key=lambda slot: now[slot] is not None)
    for slot, expert in zip(left, arriving, strict=False):
        slots[slot] = expert
    return slots
