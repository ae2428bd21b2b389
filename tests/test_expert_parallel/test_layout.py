"""Layers with placements of their own: what their dispatchers share, and what changes in place when experts move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from expert_parallel.choice import Choice, Dispatchers, make_dispatchers
from expert_parallel.group import ExpertGroup
from expert_parallel.layout import ExpertLayout
from expert_parallel.placement import Placement
from expert_parallel.replicas import most_replicas

FIRST = Placement.of_ranks(4, [[0, 1, 2], [3, 0, None]])
SECOND = Placement.of_ranks(4, [[3, 2, 1], [0, 1, 3]])


def dispatchers(decode: str) -> Dispatchers:
    nobody: Any = None
    return make_dispatchers(
        Choice("all_to_all", decode, "a test"),
        *(ExpertGroup(0, 2, nobody), FIRST),
        top_k=2,
        combine="exact",
        row_cap=None,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("decode", ["all_to_all", "all_gather"])
def test_layers_share_all_but_their_tables(decode: str) -> None:
    layout = ExpertLayout.spread(0, {1: FIRST, 4: SECOND}, dispatchers(decode), "cpu")
    assert layout.experts == {1: (0, 1, 2), 4: (3, 2, 1)} and layout.num_slots == 3 and layout.num_ranks == 2
    one, four = layout.dispatchers[1], layout.dispatchers[4]
    assert (one.prefill is one.decode) == (decode == "all_to_all")
    for mine, other in zip(one, four, strict=True):
        differing = {name for name, value in vars(mine).items() if vars(other)[name] is not value}
        assert differing == {"replicas"}
        assert vars(mine)["replicas"] is layout.replicas[1] and vars(other)["replicas"] is layout.replicas[4]


def test_a_move_changes_one_layer_in_place() -> None:
    layout = ExpertLayout.spread(1, {1: FIRST, 4: FIRST}, dispatchers("all_to_all"), "cpu")
    addresses = [tensor.data_ptr() for tensor in layout.replicas[4].columns]
    ids_TK = torch.tensor([[0, 3]], dtype=torch.int32)
    layout.set(4, SECOND)
    assert layout.experts == {1: (3, 0, None), 4: (0, 1, 3)}
    assert [tensor.data_ptr() for tensor in layout.replicas[4].columns] == addresses
    for layer, ranks, slots in ((1, [1, 1], [1, 0]), (4, [1, 1], [0, 2])):
        targets = layout.replicas[layer].choose(ids_TK, source_rank=1)
        assert targets.ranks_TK.tolist() == [ranks] and targets.slots_TK.tolist() == [slots]


def test_layers_have_as_many_slots() -> None:
    with pytest.raises(AssertionError, match="layers differ in the slots of their ranks"):
        ExpertLayout.local({0: Placement.contiguous(4, 2), 1: FIRST}, 0, "cpu")


def test_one_rank_has_no_table_of_replicas() -> None:
    layout = ExpertLayout.local({2: Placement.contiguous(4, 1)}, 0, "cpu")
    assert layout.experts == {2: (0, 1, 2, 3)} and not layout.replicas


def test_most_replicas_by_hand() -> None:
    assert most_replicas(Placement.contiguous(4, 2)) == 1
    assert most_replicas(FIRST) == 3  # all but three of six slots
