"""Few changes to a placement: worked examples, what must always hold, and how near it comes to a new placement."""

from __future__ import annotations

import numpy as np
import pytest

from expert_parallel.adjust import adjust
from expert_parallel.balancer import SlotShape, rank_loads, rebalance
from expert_parallel.moves import keep_slots, moves
from expert_parallel.placement import Placement


def heaviest(load_E, placement: Placement) -> float:
    return float(rank_loads(np.asarray(load_E, dtype=float)[None], [placement]).max())


def test_a_swap_by_hand() -> None:
    """Ranks carry 9 and 3; 5 against 2 makes 6 and 6. The other slots stay."""
    current = Placement.of_ranks(4, [[0, 1], [2, 3]])
    assert adjust(current, [5, 4, 2, 1], 6.0).ranks == ((2, 1), (0, 3))
    assert adjust(current, [5, 4, 2, 1], 9.0) == current  # even enough


def test_an_empty_slot_takes_an_expert_in_one_move() -> None:
    """Moving 4 away makes 5 and 5; a swap would take two moves."""
    current = Placement.of_ranks(3, [[0, 1], [None, 2]])
    assert adjust(current, [5, 4, 1], 5.0).ranks == ((0, None), (1, 2))


def test_a_replica_by_hand() -> None:
    """Expert 0 carries 12, no swap helps. Of rank 1's slots only the second replica of 1 may go: 0 takes its place."""
    current = Placement.of_ranks(3, [[0], [1, 1], [2]])
    assert adjust(current, [12, 1, 3], 7.0).ranks == ((0,), (0, 1), (2,))


def test_the_last_replica_of_an_expert_stays() -> None:
    current = Placement.of_ranks(2, [[0], [1]])
    assert adjust(current, [100, 1], 0.0) == current


def test_nodes_keep_their_experts() -> None:
    current = Placement.of_ranks(4, [[0, 1], [2, 3]])
    assert adjust(current, [5, 4, 2, 1], 6.0, num_nodes=2) == current


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_random_cases(num_nodes: int) -> None:
    """Never heavier than before, never two replicas on a rank, within 5 % of a new placement with far fewer moves."""
    rng = np.random.default_rng(num_nodes)
    anew_moves = few_moves = 0
    for _ in range(40):
        num_ranks = num_nodes * int(rng.integers(2, 5))
        shape = SlotShape.even(24, num_ranks, int(rng.integers(0, 13)), num_nodes=num_nodes, num_groups=4)
        before_1E = rng.gamma(1.0, 100.0, (1, 24))
        load_E = before_1E[0] * rng.gamma(20, 1 / 20, 24)
        (current,), (anew,) = rebalance(before_1E, shape), rebalance(load_E[None], shape)
        limit = 1.05 * heaviest(load_E, anew)
        adjusted = adjust(current, load_E, limit, num_nodes=num_nodes)
        assert adjusted == adjust(current, load_E, limit, num_nodes=num_nodes)
        assert [len(slots) for slots in adjusted.ranks] == list(shape.slots_per_rank)
        for slots in adjusted.ranks:
            held = [expert for expert in slots if expert is not None]
            assert len(held) == len(set(held))
        assert heaviest(load_E, adjusted) <= heaviest(load_E, current) * (1 + 1e-9)
        if num_nodes == 1:
            assert heaviest(load_E, adjusted) <= 1.1 * limit
        else:
            half = num_ranks // 2
            assert {e for slots in current.ranks[:half] for e in slots} == {
                e for slots in adjusted.ranks[:half] for e in slots
            }
        anew_moves += len(moves(current, keep_slots(current, anew, num_nodes=num_nodes)))
        few_moves += len(moves(current, adjusted))
    assert 0 < few_moves < 0.4 * anew_moves


def test_what_is_found_is_what_it_does() -> None:
    """The worth of the chosen change, worked out before, is the fall of the heaviest rank after it."""
    rng = np.random.default_rng(9)
    for _ in range(50):
        load_E = rng.integers(1, 60, 8).astype(float)
        current = Placement.contiguous(8, 4, redundant=4)
        once = adjust(current, load_E, 0.0, most_changes=1)
        if once == current:
            continue
        before, after = (rank_loads(load_E[None], [each])[0] for each in (current, once))
        rank = int(before.argmax())
        assert after[rank] < before[rank]
        assert after[after != before].max() < before[rank]
