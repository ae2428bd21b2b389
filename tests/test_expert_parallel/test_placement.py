"""The placement table: contiguous, replicas, empty slots, uneven ranks, and what it refuses."""

from __future__ import annotations

import pytest

from expert_parallel.placement import Placement, Slot


def test_contiguous_by_hand() -> None:
    assert Placement.contiguous(8, 2).ranks == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Placement.contiguous(5, 2).ranks == ((0, 1, 2), (3, 4))
    assert Placement.contiguous(4, 2, redundant=2).ranks == ((0, 1, 2), (3, 0, 1))
    assert Placement.contiguous(2, 3).ranks == ((0,), (1,), ())


@pytest.mark.parametrize("num_experts", [1, 3, 60, 257])
@pytest.mark.parametrize("num_ranks", [1, 2, 7])
def test_every_expert_has_one_place(num_experts: int, num_ranks: int) -> None:
    placement = Placement.contiguous(num_experts, num_ranks)
    held = [expert for rank in range(num_ranks) for expert in placement.experts_of(rank)]
    assert held == list(range(num_experts))
    sizes = [placement.num_slots(rank) for rank in range(num_ranks)]
    assert max(sizes) - min(sizes) <= 1


def test_replicas_empty_slots_and_uneven_ranks() -> None:
    """The picture in the file's header, with a fourth expert."""
    placement = Placement.of_ranks(4, [[0, 1, 2], [2, 3, None], [None, 0, 0, 0]])
    assert placement.num_ranks == 3
    assert placement.slots_of(2) == (Slot(0, 2), Slot(1, 0))
    assert placement.slots_of(0) == (Slot(0, 0), Slot(2, 1), Slot(2, 2), Slot(2, 3))
    assert placement.slot_table(0, "cpu").tolist() == [0, 1, 2, -1]
    assert placement.slot_table(1, "cpu").tolist() == [-1, -1, 0, 1]
    assert placement.slot_table(2, "cpu").tolist() == [1, -1, -1, -1]


def test_C28_a_table_with_a_hole_or_a_stranger_is_refused() -> None:
    with pytest.raises(ValueError, match=r"experts \[1, 3\] have no slot"):
        Placement.of_ranks(4, [[0], [2]])
    with pytest.raises(ValueError, match="rank 1 slot 0 names expert 4"):
        Placement.of_ranks(4, [[0, 1, 2, 3], [4]])
    with pytest.raises(ValueError, match="no rank"):
        Placement.of_ranks(4, [])
    with pytest.raises(ValueError, match="num_ranks=0"):
        Placement.contiguous(4, 0)
