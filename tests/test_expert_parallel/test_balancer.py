"""EPLB: the published example, worked examples, and 1,000 random cases against what must always hold."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from expert_parallel.balancer import SlotShape, rank_loads, rebalance
from expert_parallel.placement import Placement

# The example of EPLB's own description: two layers of 12 experts in 4 groups, 16 replicas on 2 nodes of 4 ranks.
PUBLISHED_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_EXPERTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def flat(placement: Placement) -> list[int | None]:
    return [expert for slots in placement.ranks for expert in slots]


def counts(placement: Placement) -> np.ndarray:
    return np.bincount([e for e in flat(placement) if e is not None], minlength=placement.num_experts)


def test_the_published_example() -> None:
    shape = SlotShape.even(12, num_ranks=8, redundant=4, num_nodes=2, num_groups=4)
    assert shape.policy == "hierarchical" and shape.slots_per_rank == (2,) * 8
    assert [flat(placement) for placement in rebalance(PUBLISHED_LOADS, shape)] == PUBLISHED_EXPERTS
    assert rebalance(torch.tensor(PUBLISHED_LOADS), shape) == rebalance(PUBLISHED_LOADS, shape)


def test_the_global_policy_by_hand() -> None:
    """Expert 0 carries 8 of 14: with one redundant slot it has two replicas of 4. Heaviest first, to the lightest rank
    with room: 0 to rank 0 (4), 0 to rank 1 (4), 1 to rank 0 (7), 2 to rank 1 (6), which is full then, 3 to rank 0 (8).
    With two redundant slots expert 1 has two replicas of 1.5, since 0 is on both ranks: 0 (4), 0 (4), 2 to rank 0 (6),
    1 to rank 1 (5.5), 1 to rank 0, which has none yet (7.5), 3 to rank 1 (6.5).
    """
    (placement,) = rebalance([[8, 3, 2, 1]], SlotShape.even(4, num_ranks=2, redundant=1))
    assert placement.ranks == ((0, 1, 3), (0, 2))
    assert rank_loads([[8, 3, 2, 1]], [placement]).tolist() == [[8, 6]]
    (wide,) = rebalance([[8, 3, 2, 1]], SlotShape(4, (3, 3)))
    assert wide.ranks == ((0, 2, 1), (0, 1, 3))
    assert rank_loads([[8, 3, 2, 1]], [wide]).tolist() == [[7.5, 6.5]]


def test_the_hierarchical_policy_keeps_groups_on_a_node() -> None:
    """Groups (0, 1) and (2, 3), two nodes of two ranks: no expert of one group is on the other's node."""
    shape = SlotShape(4, (2, 2, 2, 2), num_nodes=2, num_groups=2)
    (placement,) = rebalance([[10, 1, 1, 1]], shape)
    assert placement.ranks == ((0, 1), (0, 1), (2, 3), (2, 3))
    (anywhere,) = rebalance([[10, 1, 1, 1]], shape, policy="global")
    assert counts(anywhere)[0] == 4  # as many as ranks: its load is shared by all


def test_when_the_policy_is_hierarchical() -> None:
    """As published: where groups divide over nodes; and where every node has room for its share of the experts."""
    assert SlotShape.even(12, 8, 4, num_nodes=2, num_groups=4).policy == "hierarchical"
    assert SlotShape.even(12, 8, 4, num_nodes=2, num_groups=3).policy == "global"
    assert SlotShape.even(12, 8, 4, num_nodes=1, num_groups=4).policy == "global"
    assert SlotShape(4, (3, 1), num_nodes=2, num_groups=2).policy == "global"
    with pytest.raises(ValueError, match="hierarchical policy needs"):
        rebalance([[1, 1, 1, 1]], SlotShape(4, (2, 2)), policy="hierarchical")


def test_ties_go_to_the_lower_index() -> None:
    """Of four equal experts 0 and 1 get the replicas (0.5 each), so 2 and 3 go first, then 0 and 1 to both ranks."""
    (placement,) = rebalance([[1, 1, 1, 1]], SlotShape.even(4, 2, 2))
    assert placement.ranks == ((2, 0, 1), (3, 0, 1))
    (silent,) = rebalance([[0, 0, 0, 0]], SlotShape.even(4, 2, 2))
    assert sorted(counts(silent).tolist()) == [1, 1, 2, 2]


def test_more_ranks_than_experts() -> None:
    """Three experts on five ranks of one slot: 0 gets a second (9 > 5), then 1 (5 > 4.5). Without redundant slots two
    ranks hold nothing."""
    (placement,) = rebalance([[9, 5, 1]], SlotShape(3, (1,) * 5))
    assert counts(placement).tolist() == [2, 2, 1]
    (idle,) = rebalance([[9, 5, 1]], SlotShape.even(3, 5))
    assert [len(slots) for slots in idle.ranks] == [1, 1, 1, 0, 0]


def test_slots_that_would_hold_a_second_copy_on_a_rank_stay_empty() -> None:
    (placement,) = rebalance([[4]], SlotShape(1, (2, 3)))
    assert placement.ranks == ((0, None), (0, None, None))
    # Rank 1 has one slot: it takes 0, the heavier; a second replica of 1 has no rank left to go to.
    (pair,) = rebalance([[4, 2]], SlotShape(2, (3, 1)))
    assert pair.ranks == ((0, 1, None), (0,))


def random_shape(rng: np.random.Generator) -> SlotShape:
    """Any number of experts and ranks that fit; often nodes and groups, uneven slots, more ranks than experts."""
    num_nodes, per_node = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    num_ranks = num_nodes * per_node
    num_groups = int(rng.choice([1, num_nodes, 2 * num_nodes, 3]))
    num_experts = num_groups * int(rng.integers(1, 7))
    redundant = int(rng.integers(0, 2 * num_experts))
    return SlotShape.even(num_experts, num_ranks, redundant, num_nodes=num_nodes, num_groups=num_groups)


def test_a_thousand_random_cases() -> None:
    rng = np.random.default_rng(4)
    seen = {"hierarchical": 0, "global": 0, "idle ranks": 0, "uneven": 0}
    for case in range(1000):
        shape = random_shape(rng)
        loads_LE = rng.integers(0, 100, (2, shape.num_experts)) if case % 3 else rng.zipf(1.5, (2, shape.num_experts))
        placements = rebalance(loads_LE, shape)
        assert placements == rebalance(loads_LE.copy(), shape)
        assert placements[1] == rebalance(loads_LE[1:] * 4, shape)[0], "neither other layers nor the scale matter"
        seen[shape.policy] += 1
        seen["idle ranks"] += 0 in shape.slots_per_rank
        seen["uneven"] += len(set(shape.slots_per_rank)) > 1
        for load_E, placement in zip(loads_LE, placements, strict=True):
            check(load_E, placement, shape)
    assert min(seen.values()) > 50, seen


def check(load_E: np.ndarray, placement: Placement, shape: SlotShape) -> None:
    """Every expert has a slot: `Placement` itself sees to that."""
    assert tuple(len(slots) for slots in placement.ranks) == shape.slots_per_rank
    for slots in placement.ranks:
        held = [expert for expert in slots if expert is not None]
        assert len(held) == len(set(held)), f"two replicas on a rank: {placement}"
    count_E = counts(placement)
    parts = [range(shape.num_experts)]
    if shape.policy == "hierarchical":
        size, nodes = shape.num_experts // shape.num_nodes, shape.num_nodes
        nodes_ranks = [placement.ranks[n * shape.ranks_per_node :][: shape.ranks_per_node] for n in range(nodes)]
        on_node = [{e for slots in ranks for e in slots if e is not None} for ranks in nodes_ranks]
        assert sum(len(experts) for experts in on_node) == shape.num_experts, "an expert is on two nodes"
        group = shape.num_experts // shape.num_groups
        for experts in on_node:
            assert len(experts) == size
            assert len({e // group for e in experts}) == shape.num_groups // nodes
        parts = [sorted(experts) for experts in on_node]
    # No slot stays empty that could hold a further replica.
    for n, part in enumerate(parts):
        slots_of_part = shape.slots_of_node(n) if len(parts) > 1 else shape.slots_per_rank
        ranks_with_slots = sum(slots > 0 for slots in slots_of_part)
        assert count_E[list(part)].sum() == min(sum(slots_of_part), len(part) * ranks_with_slots)
    # No expert's replicas carry more than one replica less of another would, unless it is on every rank of its part.
    share_E = load_E / count_E
    usable = sum(slots > 0 for slots in shape.slots_per_rank[: shape.ranks_per_node]) if len(parts) > 1 else None
    for part in parts:
        heaviest = max((share_E[e] for e in part if count_E[e] < (usable or shape.num_ranks)), default=0)
        for e in part:
            if count_E[e] > 1:
                assert load_E[e] / (count_E[e] - 1) >= heaviest - 1e-9
    # The published greedy rule keeps the heaviest rank of a part below its mean and one replica more.
    loads_N = rank_loads(load_E[None], [placement])[0]
    for n, part in enumerate(parts):
        ranks = slice(n * shape.ranks_per_node, (n + 1) * shape.ranks_per_node) if len(parts) > 1 else slice(None)
        with_slots = [load for load, slots in zip(loads_N[ranks], shape.slots_per_rank[ranks], strict=True) if slots]
        assert max(with_slots) <= np.mean(with_slots) + max(share_E[e] for e in part) + 1e-9
    assert loads_N.sum() == pytest.approx(load_E.sum())


def test_no_assignment_is_much_better() -> None:
    """Against every assignment of 6 experts to 3 ranks of 2: at most 4/3 of the best, and the best in most cases."""
    rng = np.random.default_rng(1)
    shape = SlotShape(6, (2, 2, 2))
    best_count = 0
    for _ in range(100):
        load_E = rng.integers(1, 50, 6).astype(float)
        ours = rank_loads(load_E[None], rebalance(load_E[None], shape)).max()
        best = min(
            max(sum(load_E[e] for e in range(6) if owner[e] == r) for r in range(3))
            for owner in product(range(3), repeat=6)
            if all(owner.count(r) == 2 for r in range(3))
        )
        assert ours <= 4 / 3 * best + 1e-9
        best_count += ours <= best + 1e-9
    assert best_count > 80


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: SlotShape(4, (1, 2)), "3 slots on 2 ranks cannot hold num_experts=4"),
        (lambda: SlotShape(4, ()), "must name a rank"),
        (lambda: SlotShape(2, (3, -1)), "no negative number"),
        (lambda: SlotShape(4, (2, 2, 2), num_nodes=2), "num_nodes=2 must divide the 3 ranks"),
        (lambda: SlotShape(4, (4,), num_groups=3), "num_groups=3 must divide num_experts=4"),
        (lambda: rebalance([[1, 2, 3]], SlotShape(4, (4,))), r"loads of shape \(1, 3\)"),
        (lambda: rebalance([[1, 2, 3, -1]], SlotShape(4, (4,))), "negative"),
        (lambda: rebalance([[1, 2, 3, np.nan]], SlotShape(4, (4,))), "non-finite"),
    ],
)
def test_what_is_refused(call, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
