"""Load counts: only known experts; balancedness by hand."""

from __future__ import annotations

import pytest
import torch

from router.load import LoadCounter, balancedness
from router.synthetic import one_expert_routing, skewed_routing


def offsets(*counts: int) -> torch.Tensor:
    """The offsets of slots with so many rows."""
    return torch.tensor([sum(counts[:slot]) for slot in range(len(counts) + 1)], dtype=torch.int32)


def count(load: LoadCounter, ids: torch.Tensor) -> None:
    """One step of one layer whose slots are its experts."""
    load.add(0, offsets(*torch.bincount(ids.flatten(), minlength=load.num_experts).tolist()))
    load.end_step()


def test_counts_by_hand() -> None:
    """Two steps of layers 1 and 2; layer 0 has no experts."""
    load = LoadCounter(num_layers=3, num_experts=4, device="cpu")
    for of_one, of_two in ((offsets(1, 0, 1, 2), offsets(1, 1, 0, 0)), (offsets(0, 1, 0, 1), offsets(0, 0, 0, 0))):
        load.add(1, of_one)
        load.add(2, of_two)
        load.end_step()
    assert load.snapshot().tolist() == [[0, 0, 0, 0], [1, 1, 1, 3], [1, 1, 0, 0]]
    load.reset()
    assert load.snapshot().sum() == 0
    load.add(1, offsets(1, 0, 0, 0))
    with pytest.raises(AssertionError, match="layers \\[1\\] after steps of layers \\[1, 2\\]"):
        load.end_step()


def test_a_step_that_ended_in_a_fault_is_forgotten() -> None:
    load = LoadCounter(num_layers=2, num_experts=2, device="cpu")
    load.start_step()
    load.add(0, offsets(1, 1))  # the step ends before layer 1
    load.start_step()
    load.add(0, offsets(2, 0))
    load.add(1, offsets(0, 2))
    load.end_step()
    assert load.snapshot().tolist() == [[2, 0], [0, 2]]


def test_slots_hold_experts_in_any_order_some_twice_some_none() -> None:
    load = LoadCounter(num_layers=1, num_experts=3, device="cpu", experts_of_slots={0: [2, None, 0, 2]})
    load.add(0, offsets(5, 7, 1, 2))
    load.end_step()
    assert load.snapshot().tolist() == [[1, 0, 7]]


def test_C25_counts_stay_with_their_experts_when_these_move() -> None:
    """In place: sums that a captured graph adds to keep their address."""
    load = LoadCounter(num_layers=3, num_experts=3, device="cpu", experts_of_slots={1: [0, 1], 2: [2, None]})
    sums = load._offsets_PS1.data_ptr()
    for experts in ([1, 0], [2, 2], [0, 1]):
        load.add(1, offsets(5, 1))
        load.add(2, offsets(1, 0))
        load.end_step()
        load.place(1, experts)
    assert load.snapshot().tolist() == [[0, 0, 0], [5 + 1, 1 + 5, 5 + 1], [0, 0, 3]]
    load.add(1, offsets(0, 9))
    load.add(2, offsets(0, 0))
    load.end_step()
    assert load.snapshot().tolist() == [[0, 0, 0], [6, 15, 6], [0, 0, 3]]
    assert load._offsets_PS1.data_ptr() == sums
    load.reset()
    assert load.snapshot().sum() == 0
    with pytest.raises(AssertionError, match="layer 1: the number of slots never changes"):
        load.place(1, [0, 1, 2])


def test_a_step_without_experts_counts_nothing() -> None:
    load = LoadCounter(num_layers=1, num_experts=4, device="cpu")
    load.end_step()
    assert load.snapshot().tolist() == [[0, 0, 0, 0]]


def test_a_snapshot_does_not_change_afterwards() -> None:
    load = LoadCounter(num_layers=1, num_experts=2, device="cpu")
    before = load.snapshot()
    count(load, torch.tensor([0, 1]))
    assert before.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[2, 2, 2, 2]], 1.0),
        ([[4, 0, 0, 0]], 0.25),
        ([[4, 2], [0, 0]], 0.75),  # a layer without rows (dense) is left out
        ([[4, 2], [1, 1]], 0.875),
        ([[0, 0]], 1.0),
    ],
)
def test_balancedness_by_hand(counts: list[list[int]], expected: float) -> None:
    assert balancedness(torch.tensor(counts)) == expected


def test_synthetic_routing_has_the_skew_that_was_asked_for() -> None:
    """Uniform odds are near even, Zipf's law is far from it, one expert for all is the worst there is."""

    def evenness(exponent: float) -> float:
        load = LoadCounter(1, 64, "cpu")
        routing = skewed_routing(4096, 64, 4, exponent=exponent, seed=3)
        count(load, routing.expert_ids_TK)
        assert load.snapshot().sum() == 4096 * 4
        return balancedness(load.snapshot())

    assert evenness(0.0) > 0.8
    assert 0.05 < evenness(1.0) < 0.2
    worst = LoadCounter(1, 64, "cpu")
    count(worst, one_expert_routing(100, 5).expert_ids_TK)
    assert worst.snapshot()[0, 5] == 100
    assert balancedness(worst.snapshot()) == 1 / 64


def test_synthetic_routing_is_valid_and_repeatable() -> None:
    routing, again = (
        skewed_routing(200, 12, 12, exponent=2.0, seed=1),
        skewed_routing(200, 12, 12, exponent=2.0, seed=1),
    )
    assert torch.equal(routing.expert_ids_TK, again.expert_ids_TK)
    assert torch.equal(routing.expert_ids_TK.sort(dim=1).values, torch.arange(12).int().expand(200, 12))
    torch.testing.assert_close(routing.weights_TK.sum(dim=1), torch.ones(200))
    assert (routing.weights_TK > 0).all()
    assert not torch.equal(routing.expert_ids_TK, skewed_routing(200, 12, 12, exponent=2.0, seed=2).expert_ids_TK)


def test_synthetic_routing_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="top_k=5"):
        skewed_routing(3, 4, 5)
    with pytest.raises(ValueError, match="exponent=-1"):
        skewed_routing(3, 4, 2, exponent=-1)
