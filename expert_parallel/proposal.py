"""Whether and how to rebalance: for every layer, the placement that saves most time net of the moves it takes.

Knows loads, bytes and rates; measures nothing and moves nothing. Ranks that ask with the same numbers get the same
answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expert_parallel.adjust import adjust
from expert_parallel.balancer import Policy, SlotShape, rank_loads, rebalance, slot_arrays
from expert_parallel.moves import keep_slots, moves
from expert_parallel.placement import Placement

# A placement within so much of the new one's heaviest rank is as good. Loads of 256 experts that changed by 22 % each,
# 32 ranks of 10 slots: the new placement, ranks renamed, takes 256 moves a layer; one adjusted to within 0 / 2 / 5 %
# takes 44 / 22 / 8.
TOLERANCE = 0.02


@dataclass(frozen=True)
class MoveRates:
    """What rows and moves cost; measured by the caller, agreed by all ranks.

    expert_bytes: of one expert of one layer, scales and biases included. bytes_per_s: what a rank receives or sends
    while experts move. seconds_per_row: what one row more on the heaviest rank adds to a layer. steps: how long the
    new placement will serve.
    """

    expert_bytes: int
    bytes_per_s: float
    seconds_per_row: float
    steps: int


@dataclass(frozen=True)
class LayerGain:
    """Seconds that a layer's next placement saves over its service, and what the moves take."""

    num_moves: int
    saved_s: float
    cost_s: float

    @property
    def net_s(self) -> float:
        return self.saved_s - self.cost_s


@dataclass(frozen=True)
class Proposal:
    """The next placement of every layer, the current one where nothing pays, and what each layer gains."""

    placements: tuple[Placement, ...]
    gains: tuple[LayerGain, ...]

    @property
    def num_moves(self) -> int:
        return sum(gain.num_moves for gain in self.gains)

    def summary(self) -> str:
        """One line for the log."""
        changed = sum(gain.num_moves > 0 for gain in self.gains)
        if not changed:
            return "experts stay: no move would pay"
        saved, cost = (sum(getattr(gain, name) for gain in self.gains) for name in ("saved_s", "cost_s"))
        return f"{self.num_moves} experts move in {changed} layers: {cost:.3g} s of moving to save {saved:.3g} s"


def layer_gain(
    load_E: npt.ArrayLike, current: Placement, wanted: Placement, rates: MoveRates, *, num_nodes: int = 1
) -> LayerGain:
    """Loads in rows per step, of all ranks together. Ranks wait for the heaviest, so every step saves the difference of
    the maxima; moving takes as long as the rank that receives or sends most."""
    before, after = (float(rank_loads(np.asarray(load_E)[None], [each]).max()) for each in (current, wanted))
    copies = moves(current, wanted, num_nodes=num_nodes)
    remote = [(copy.source.rank, copy.target.rank) for copy in copies if copy.source.rank != copy.target.rank]
    # All sources, then all targets: the busiest direction of the busiest rank.
    busiest = max((int(np.bincount(ends).max()) for ends in zip(*remote, strict=True)), default=0)
    return LayerGain(
        num_moves=len(copies),
        saved_s=(before - after) * rates.seconds_per_row * rates.steps,
        cost_s=busiest * rates.expert_bytes / rates.bytes_per_s,
    )


def propose(
    loads_LE: npt.ArrayLike,
    current: Sequence[Placement],
    shape: SlotShape,
    rates: MoveRates,
    *,
    policy: Policy | None = None,
) -> Proposal:
    """Layer by layer the best of staying, adjusting what there is, and, where that falls short, starting anew.

    Loads in rows per step. Gains and costs add up over layers, so the best choice of each layer is the best of all; and
    a few layers may be asked about at a time.
    """
    placements, gains = [], []
    for load_E, candidates in _candidates(loads_LE, current, shape, policy):
        weighed = [layer_gain(load_E, candidates[0], each, rates, num_nodes=shape.num_nodes) for each in candidates]
        best = max(range(len(weighed)), key=lambda index: weighed[index].net_s)  # the first of equals: stay
        placements.append(candidates[best])
        gains.append(weighed[best])
    return Proposal(tuple(placements), tuple(gains))


def next_placements(
    loads_LE: npt.ArrayLike, current: Sequence[Placement], shape: SlotShape, *, policy: Policy | None = None
) -> tuple[Placement, ...]:
    """Even placements whatever the moves cost: adjusted where that comes within TOLERANCE of a new one, else anew."""
    return tuple(candidates[-1] for _, candidates in _candidates(loads_LE, current, shape, policy))


def _candidates(
    loads_LE: npt.ArrayLike, current: Sequence[Placement], shape: SlotShape, policy: Policy | None
) -> Iterator[tuple[np.ndarray, list[Placement]]]:
    """For each layer its loads, and: the current placement, it adjusted, one made anew with ranks named after it.

    The last is left out where the one before it is as even. A placement that splits the router's groups over nodes
    cannot be adjusted to the hierarchical policy, only made anew. A layer without rows stays.
    """
    loads_LE = np.asarray(loads_LE, dtype=np.float64)
    policy = policy or shape.policy
    # Under the global policy experts may cross nodes.
    num_nodes = shape.num_nodes if policy == "hierarchical" else 1
    for load_E, now, anew in zip(loads_LE, current, rebalance(loads_LE, shape, policy=policy), strict=True):
        candidates = [now]
        if not load_E.any():
            yield load_E, candidates
            continue
        limit = float(rank_loads(load_E[None], [anew]).max()) * (1 + TOLERANCE)
        if num_nodes == 1 or not splits_groups(now, shape):
            candidates.append(adjust(now, load_E, limit, num_nodes=num_nodes))
        if len(candidates) == 1 or rank_loads(load_E[None], candidates[-1:]).max() > limit:
            candidates.append(keep_slots(now, anew, num_nodes=num_nodes))
        yield load_E, candidates


def splits_groups(placement: Placement, shape: SlotShape) -> bool:
    """Whether experts of one of the router's groups lie on several nodes."""
    experts_P, ranks_P = slot_arrays(placement)
    pairs = {*zip((experts_P // shape.group_size).tolist(), (ranks_P // shape.ranks_per_node).tolist(), strict=True)}
    return len(pairs) > shape.num_groups
