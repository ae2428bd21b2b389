"""A placement made more even by few changes, where `balancer.rebalance` would make it anew and move nearly everything.

Knows one layer's loads and slots; knows no bytes and no time. The idea: take the heaviest rank and do the one change
that brings most for each expert moved: swap one of its experts with another rank's, or give one of its experts a
further replica, in a slot that is empty or whose expert has others. Repeat until no rank is above what a new placement
reaches, or nothing helps. Experts stay on their node where there are several.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from expert_parallel.placement import Placement


class _Change(NamedTuple):
    """Worth (how far the heaviest rank falls, for each expert moved), and the slots whose content is written."""

    worth: float
    writes: tuple[tuple[int, int], ...]  # slot, expert


def adjust(
    current: Placement, load_E: npt.ArrayLike, limit: float, *, num_nodes: int = 1, most_changes: int | None = None
) -> Placement:
    """`current` with changes until no rank carries more than `limit`, or none helps; at most four a rank by default.

    The heaviest rank's load never grows; no change puts a second replica of an expert on a rank. Pure, ties by lower
    index.
    """
    state = _State(current, np.asarray(load_E, dtype=np.float64), num_nodes)
    for _ in range(4 * current.num_ranks if most_changes is None else most_changes):
        rank = int(state.load_N.argmax())
        if state.load_N[rank] <= limit:
            break
        change = max(state.best_swap(rank, limit), state.best_replica(rank, limit), key=lambda each: each.worth)
        if change.worth <= 0:
            break
        state.apply(change)
    return state.placement(current)


class _State:
    """The slots of all ranks in one array. An empty slot holds expert number E, whose load is 0."""

    def __init__(self, placement: Placement, load_E: np.ndarray, num_nodes: int) -> None:
        empty = placement.num_experts
        self.load_X = np.append(load_E, 0.0)  # X: experts and the empty one
        self.expert_P = np.array(
            [empty if e is None else e for slots in placement.ranks for e in slots], dtype=np.int64
        )
        self.rank_P = np.repeat(np.arange(placement.num_ranks), [len(slots) for slots in placement.ranks])
        self.node_P = self.rank_P // (placement.num_ranks // num_nodes)
        # How many slots of a rank hold an expert; as floats, so that the product with the shares needs no conversion.
        self.held_NX = np.zeros((placement.num_ranks, empty + 1))
        np.add.at(self.held_NX, (self.rank_P, self.expert_P), 1)
        self._refresh()

    def _refresh(self) -> None:
        self.count_X = self.held_NX.sum(axis=0)
        self.count_X[-1] = 1
        self.share_X = self.load_X / self.count_X
        self.load_N = self.held_NX @ self.share_X

    def apply(self, change: _Change) -> None:
        """Write its slots."""
        for slot, expert in change.writes:
            self.held_NX[self.rank_P[slot], self.expert_P[slot]] -= 1
            self.held_NX[self.rank_P[slot], expert] += 1
            self.expert_P[slot] = expert
        self._refresh()

    def placement(self, like: Placement) -> Placement:
        """The slots as they stand."""
        flat = iter([None if expert == like.num_experts else expert for expert in self.expert_P.tolist()])
        return Placement.of_ranks(like.num_experts, [[next(flat) for _ in slots] for slots in like.ranks])

    def _own_and_others(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots of a rank that hold an expert, and the slots of the other ranks of its node."""
        own_A = np.flatnonzero((self.rank_P == rank) & (self.expert_P < len(self.load_X) - 1))
        other_B = np.flatnonzero((self.rank_P != rank) & (self.node_P == self.node_P[own_A[0]]))
        return own_A, other_B

    def best_swap(self, rank: int, limit: float) -> _Change:
        """An expert of `rank` against one of another rank, or against an empty slot."""
        own_A, other_B = self._own_and_others(rank)
        if not other_B.size:
            return _Change(0.0, ())
        a_A1, b_B = self.expert_P[own_A][:, None], self.expert_P[other_B]
        there_B, is_empty_B = self.rank_P[other_B], b_B == len(self.load_X) - 1
        moved_AB = self.share_X[a_A1] - self.share_X[b_B]
        after_AB = np.maximum(self.load_N[rank] - moved_AB, self.load_N[there_B] + moved_AB)
        double_AB = (self.held_NX[there_B, a_A1] > 0) | ((self.held_NX[rank, b_B] > 0) & ~is_empty_B)
        after_AB[double_AB] = np.inf
        worth_AB = self._fall(rank, after_AB, limit) / np.where(is_empty_B, 1, 2)
        i, j = np.unravel_index(worth_AB.argmax(), worth_AB.shape)
        writes = ((int(other_B[j]), int(a_A1[i, 0])), (int(own_A[i]), int(b_B[j])))
        return _Change(float(worth_AB[i, j]), writes)

    def best_replica(self, rank: int, limit: float) -> _Change:
        """A further replica of an expert of `rank`, in another rank's slot that is empty or one of several replicas."""
        own_A, other_B = self._own_and_others(rank)
        is_empty_B = self.expert_P[other_B] == len(self.load_X) - 1
        keep_B = is_empty_B | (self.count_X[self.expert_P[other_B]] > 1)
        other_B, is_empty_B = other_B[keep_B], is_empty_B[keep_B]
        if not other_B.size:
            return _Change(0.0, ())
        a_A1, b_B = self.expert_P[own_A][:, None], self.expert_P[other_B]
        there_B = self.rank_P[other_B]
        share_A1 = self.load_X[a_A1] / (self.count_X[a_A1] + 1)
        grows_B = np.where(is_empty_B, 0, self.load_X[b_B] / np.maximum(1, self.count_X[b_B] - 1) - self.share_X[b_B])
        # The ranks that keep a replica of b carry more of it; this one among them, if it has one.
        keeps_NB = (self.held_NX[:, b_B] > 0) & ~is_empty_B
        keeps_NB[there_B, np.arange(len(b_B))] = False
        own_AB = self.load_N[rank] - (self.share_X[a_A1] - share_A1) + np.where(keeps_NB[rank], grows_B, 0)
        keeps_NB[rank] = False
        heavier_B = np.where(keeps_NB, self.load_N[:, None] + grows_B, 0).max(axis=0)
        there_AB = self.load_N[there_B] - self.share_X[b_B] + share_A1
        after_AB = np.maximum(np.maximum(own_AB, there_AB), heavier_B)
        after_AB[(self.held_NX[there_B, a_A1] > 0) | (a_A1 == b_B)] = np.inf
        worth_AB = self._fall(rank, after_AB, limit)
        i, j = np.unravel_index(worth_AB.argmax(), worth_AB.shape)
        return _Change(float(worth_AB[i, j]), ((int(other_B[j]), int(a_A1[i, 0])),))

    def _fall(self, rank: int, after_AB: np.ndarray, limit: float) -> np.ndarray:
        """How far the heaviest falls. Below `limit` nothing more is gained; a rounding error is no gain."""
        fall_AB = self.load_N[rank] - np.maximum(after_AB, limit)
        return np.where(fall_AB > 1e-9 * self.load_N[rank], fall_AB, 0.0)
