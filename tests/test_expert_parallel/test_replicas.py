"""Tokens go to replicas that exist, in turns; the table changes in place."""

from __future__ import annotations

import pytest
import torch

from expert_parallel.placement import Placement, Slot
from expert_parallel.replicas import ReplicaTable

# 0 on both ranks, 1 and 2 on rank 0, 3 on rank 1.
TWO_RANKS = Placement.of_ranks(4, [[1, 0, 2], [3, None, 0]])


def test_by_hand() -> None:
    """Expert 0 has (rank 0, slot 1) and (rank 1, slot 2): token t of source rank r takes number (t + r) mod 2."""
    table = ReplicaTable(TWO_RANKS, width=2, device="cpu")
    ids_TK = torch.tensor([[0, 1], [0, 3], [2, 0], [-1, 4]], dtype=torch.int32)
    first, second = table.choose(ids_TK, source_rank=0), table.choose(ids_TK, source_rank=1)
    assert first.ranks_TK.tolist() == [[0, 0], [1, 1], [0, 0], [-1, -1]]
    assert first.slots_TK.tolist() == [[1, 0], [2, 0], [2, 1], [-1, -1]]
    assert second.ranks_TK.tolist() == [[1, 0], [0, 1], [0, 1], [-1, -1]]
    assert second.slots_TK.tolist() == [[2, 0], [1, 0], [2, 2], [-1, -1]]
    assert first.ranks_TK.dtype == first.slots_TK.dtype == torch.int32


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_every_token_finds_its_expert_and_replicas_share_evenly(num_ranks: int) -> None:
    placement = Placement.contiguous(5, num_ranks, redundant=2 * num_ranks)
    width = max(len(placement.slots_of(expert)) for expert in range(5))
    table = ReplicaTable(placement, width, "cpu")
    generator = torch.Generator().manual_seed(0)
    for source in range(num_ranks):
        ids_TK = torch.rand(64, 5, generator=generator).argsort(dim=1)[:, :3].to(torch.int32)
        chosen = table.choose(ids_TK, source)
        for expert, rank, slot in zip(*(x.ravel().tolist() for x in (ids_TK, *chosen[:2])), strict=True):
            assert placement.experts_of(rank)[slot] == expert
        # All tokens to one expert: its replicas differ by one token at most.
        everyone = table.choose(torch.zeros(65, 1, dtype=torch.int32), source)
        places = list(zip(everyone.ranks_TK.ravel().tolist(), everyone.slots_TK.ravel().tolist(), strict=True))
        shares = [places.count((place.rank, place.slot)) for place in placement.slots_of(0)]
        assert sum(shares) == 65 and max(shares) - min(shares) <= 1


def test_ranks_with_one_token_each_take_turns() -> None:
    table = ReplicaTable(Placement.of_ranks(2, [[0], [0], [1], [0]]), width=4, device="cpu")
    one_token = torch.zeros(1, 1, dtype=torch.int32)
    assert [int(table.choose(one_token, rank).ranks_TK) for rank in range(4)] == [0, 1, 3, 0]


def test_the_table_changes_in_place_and_no_token_is_no_work() -> None:
    table = ReplicaTable(TWO_RANKS, width=2, device="cpu")
    addresses = [tensor.data_ptr() for tensor in (table._ranks_EC, table._slots_EC, table._count_E)]
    moved = Placement.of_ranks(4, [[1, 3, 2], [0, None, 3]])
    table.set(moved)
    assert addresses == [tensor.data_ptr() for tensor in (table._ranks_EC, table._slots_EC, table._count_E)]
    ids_TK = torch.tensor([[0, 3]], dtype=torch.int32)
    assert [Slot(*place) for place in zip(*(x[0].tolist() for x in table.choose(ids_TK, 0)[:2]), strict=True)] == [
        Slot(1, 0),
        Slot(0, 1),
    ]
    assert table.choose(torch.empty(0, 2, dtype=torch.int32), 1).ranks_TK.shape == (0, 2)


def test_too_many_replicas_are_refused_and_the_table_stays() -> None:
    table = ReplicaTable(TWO_RANKS, width=2, device="cpu")
    with pytest.raises(ValueError, match="expert 3 has 3 replicas, the table has room for 2"):
        table.set(Placement.of_ranks(4, [[3, 0, 3], [1, 2, 3]]))
    assert table.choose(torch.tensor([[3]]), 0).slots_TK.tolist() == [[0]]
