"""Moves by hand, and slots that are kept: never more moves than without, never other loads."""

from __future__ import annotations

import numpy as np
import pytest

from expert_parallel.balancer import SlotShape, rank_loads, rebalance
from expert_parallel.moves import Move, keep_slots, moves
from expert_parallel.placement import Placement, Slot


def test_moves_by_hand() -> None:
    """Expert 3 comes from rank 1. Expert 0 has two sources: rank 0 has sent nothing yet, so it sends; then rank 2."""
    current = Placement.of_ranks(4, [[0, 1], [3, 2], [0, None], [1, None]])
    wanted = Placement.of_ranks(4, [[0, 1], [2, 0], [None, 0], [3, 0]])
    assert moves(current, wanted) == (
        Move(2, Slot(1, 1), Slot(1, 0)),  # on the same rank: no link is used
        Move(0, Slot(0, 0), Slot(1, 1)),
        Move(0, Slot(2, 0), Slot(2, 1)),
        Move(3, Slot(1, 0), Slot(3, 0)),
        Move(0, Slot(2, 0), Slot(3, 1)),
    )
    assert moves(current, current) == ()
    # On nodes of two ranks rank 3 gets it from rank 2 whatever has been sent.
    near = Placement.of_ranks(4, [[0, 1], [3, 2], [0, None], [1, 0]])
    assert moves(current, near, num_nodes=2) == (Move(0, Slot(2, 0), Slot(3, 1)),)


def test_C25_the_forced_swap() -> None:
    """Experts 0 and 7 change places: two moves, each from the slot that the other is about to write."""
    current = Placement.contiguous(8, 2)
    swapped = Placement.of_ranks(8, [[7, 1, 2, 3], [4, 5, 6, 0]])
    assert moves(current, swapped) == (Move(7, Slot(1, 3), Slot(0, 0)), Move(0, Slot(0, 0), Slot(1, 3)))


def test_keep_slots_by_hand() -> None:
    """The second rank of the new placement is nearly the first of the current one; in it 1 and 0 keep their slots."""
    current = Placement.of_ranks(6, [[0, 1, 2], [3, 4, 5]])
    wanted = Placement.of_ranks(6, [[4, 2, 3], [1, 5, 0]])
    kept = keep_slots(current, wanted)
    assert kept.ranks == ((0, 1, 5), (3, 4, 2))
    assert (len(moves(current, wanted)), len(moves(current, kept))) == (6, 2)


def test_an_empty_slot_is_written_before_one_that_holds_an_expert() -> None:
    current = Placement.of_ranks(3, [[1, None, 0], [2]])
    wanted = Placement.of_ranks(3, [[2, 0, None], [1]])
    assert keep_slots(current, wanted).ranks == ((None, 2, 0), (1,))


def test_names_stay_where_the_greedy_choice_keeps_less() -> None:
    """Rank 0 has three experts in common with the new rank 1, then rank 1 has none left; as they are, 2 + 2 stay."""
    current = Placement.of_ranks(7, [[0, 1, 2, 3, 4], [5, 6, None, None, None]])
    wanted = Placement.of_ranks(7, [[0, 1, None, None, None], [2, 3, 4, 5, 6]])
    kept = keep_slots(current, wanted)
    assert kept.ranks == ((0, 1, None, None, None), (5, 6, 2, 3, 4))


def test_ranks_with_other_numbers_of_slots_keep_their_names() -> None:
    """The contents of rank 1 would fit rank 0, but its three slots are no two."""
    current = Placement.of_ranks(5, [[3, 4], [0, 1, 2]])
    wanted = Placement.of_ranks(5, [[0, 1], [2, 3, 4]])
    kept = keep_slots(current, wanted)
    assert [sorted(e for e in slots if e is not None) for slots in kept.ranks] == [[0, 1], [2, 3, 4]]
    assert kept.ranks[1][2] == 2


def test_nodes_change_names_as_a_whole() -> None:
    """All of the second node's experts are on the first one now, its ranks in the other order."""
    current = Placement.of_ranks(4, [[0], [1], [2], [3]])
    wanted = Placement.of_ranks(4, [[3], [2], [1], [0]])
    assert keep_slots(current, wanted, num_nodes=2) == current
    # Without nodes to keep together the crosswise contents match as well; with them expert 1 must stay beside 2.
    crossed = Placement.of_ranks(4, [[2], [1], [0], [3]])
    assert keep_slots(current, crossed) == current
    kept = keep_slots(current, crossed, num_nodes=2)
    assert {frozenset(kept.ranks[:2]), frozenset(kept.ranks[2:])} == {frozenset({(2,), (1,)}), frozenset({(0,), (3,)})}


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_random_placements_keep_their_loads_and_move_less(num_nodes: int) -> None:
    rng = np.random.default_rng(num_nodes)
    plain = kept_in_all = 0
    for _ in range(60):
        num_ranks = num_nodes * int(rng.integers(1, 4))
        redundant = int(rng.integers(0, 9))
        shape = SlotShape.even(16, num_ranks, redundant, num_nodes=num_nodes, num_groups=4)
        before_1E = rng.integers(1, 100, (1, 16))
        after_1E = np.maximum(1, before_1E + rng.integers(-20, 20, (1, 16)))
        (current,), (wanted,) = rebalance(before_1E, shape), rebalance(after_1E, shape)
        nodes = num_nodes if shape.policy == "hierarchical" else 1
        kept = keep_slots(current, wanted, num_nodes=nodes)
        assert [len(slots) for slots in kept.ranks] == [len(slots) for slots in wanted.ranks]
        assert sorted(map(content, kept.ranks)) == sorted(map(content, wanted.ranks))
        assert sorted(rank_loads(after_1E, [kept])[0]) == pytest.approx(sorted(rank_loads(after_1E, [wanted])[0]))
        if nodes > 1:
            assert node_contents(kept, nodes) == node_contents(wanted, nodes)
        assert len(moves(current, kept)) <= len(moves(current, wanted))
        # No expert that stays on its rank changes its slot.
        for now, then in zip(current.ranks, kept.ranks, strict=True):
            assert all(now[slot] == e for slot, e in enumerate(then) if e is not None and e in now)
        plain += len(moves(current, wanted))
        kept_in_all += len(moves(current, kept))
    assert kept_in_all < 0.8 * plain


def content(slots: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(sorted(expert for expert in slots if expert is not None))


def node_contents(placement: Placement, num_nodes: int) -> list[list[tuple[int, ...]]]:
    per_node = placement.num_ranks // num_nodes
    return sorted(
        sorted(map(content, placement.ranks[node * per_node : (node + 1) * per_node])) for node in range(num_nodes)
    )
