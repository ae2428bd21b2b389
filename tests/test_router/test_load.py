"""Load counts: only known experts; balancedness by hand."""

from __future__ import annotations

import pytest
import torch

from kernels.routing import RoutingRule
from router.gate import Gate
from router.load import LoadCounter, balancedness
from router.synthetic import one_expert_routing, skewed_routing


def count(load: LoadCounter, layer: int, ids: torch.Tensor) -> None:
    """As the router does."""
    load.of_layer(layer).add_(torch.bincount(ids.flatten(), minlength=load.num_experts))


def test_counts_by_hand() -> None:
    """Through the gate, whose logits are its rows: two experts a token, a padding row counts for nothing."""
    load = LoadCounter(num_layers=3, num_experts=4, device="cpu")
    gate = Gate(torch.eye(4), None, RoutingRule(top_k=2))
    x_TD = torch.tensor([[2.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 2.0], [0.0, 5.0, 0.0, 5.0]])
    gate(x_TD, None, load.of_layer(1))
    gate(x_TD, torch.tensor([False, True, False]), load.of_layer(2))
    gate(x_TD[:0], None, load.of_layer(2))
    assert load.snapshot().tolist() == [[0, 0, 0, 0], [1, 1, 1, 3], [0, 0, 1, 1]]
    load.reset()
    assert load.snapshot().sum() == 0


def test_a_snapshot_does_not_change_afterwards() -> None:
    load = LoadCounter(num_layers=1, num_experts=2, device="cpu")
    before = load.snapshot()
    load.of_layer(0)[0] += 1
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
        count(load, 0, routing.expert_ids_TK)
        assert load.snapshot().sum() == 4096 * 4
        return balancedness(load.snapshot())

    assert evenness(0.0) > 0.8
    assert 0.05 < evenness(1.0) < 0.2
    worst = LoadCounter(1, 64, "cpu")
    count(worst, 0, one_expert_routing(100, 5).expert_ids_TK)
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
