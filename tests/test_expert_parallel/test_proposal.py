"""Whether a rebalance pays: gains and costs by hand, and the choice between staying, adjusting and starting anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from expert_parallel.balancer import SlotShape, rank_loads, rebalance
from expert_parallel.moves import moves
from expert_parallel.placement import Placement
from expert_parallel.proposal import TOLERANCE, MoveRates, layer_gain, next_placements, propose, splits_groups

RATES = MoveRates(expert_bytes=1000, bytes_per_s=1e6, seconds_per_row=1e-5, steps=100)


def test_gain_and_cost_by_hand() -> None:
    """The heaviest rank falls from 9 to 6 rows: 3 rows x 10 us x 100 steps. Each rank sends and receives one expert of
    1000 bytes at once: 1 ms."""
    current = Placement.of_ranks(4, [[0, 1], [2, 3]])
    gain = layer_gain([5, 4, 2, 1], current, Placement.of_ranks(4, [[2, 1], [0, 3]]), RATES)
    assert gain.num_moves == 2
    assert gain.saved_s == pytest.approx(3e-3) and gain.cost_s == pytest.approx(1e-3)
    assert gain.net_s == pytest.approx(2e-3)


def test_the_busiest_rank_makes_the_cost() -> None:
    """Rank 0 alone holds expert 0 and sends it three times; each of the others receives once."""
    current = Placement.of_ranks(4, [[0, None], [1, None], [2, None], [3, None]])
    wanted = Placement.of_ranks(4, [[0, None], [1, 0], [2, 0], [3, 0]])
    assert layer_gain([8, 1, 1, 1], current, wanted, RATES).cost_s == pytest.approx(3e-3)


def test_a_move_within_a_rank_uses_no_link() -> None:
    current, wanted = Placement.of_ranks(2, [[0, 1]]), Placement.of_ranks(2, [[1, 0]])
    gain = layer_gain([8, 1], current, wanted, RATES)
    assert (gain.num_moves, gain.cost_s) == (2, 0.0)


def test_nothing_moves_where_it_does_not_pay() -> None:
    current = (Placement.of_ranks(4, [[0, 1], [2, 3]]),)
    shape = SlotShape(4, (2, 2))
    proposal = propose([[5, 4, 2, 1]], current, shape, RATES)
    assert proposal.placements[0].ranks == ((2, 1), (0, 3)) and proposal.num_moves == 2
    assert proposal.summary() == "2 experts move in 1 layers: 0.001 s of moving to save 0.003 s"
    for slow in (replace(RATES, steps=30), replace(RATES, bytes_per_s=3e5), replace(RATES, seconds_per_row=0.0)):
        stays = propose([[5, 4, 2, 1]], current, shape, slow)
        assert stays.placements == current and stays.num_moves == 0
        assert stays.summary() == "experts stay: no move would pay"


def test_layers_are_judged_one_by_one() -> None:
    """The first is uneven, the second even, the third without rows."""
    current = (Placement.of_ranks(4, [[0, 1], [2, 3]]),) * 3
    loads_LE = [[50, 40, 20, 10], [5, 5, 5, 5], [0, 0, 0, 0]]
    proposal = propose(loads_LE, current, SlotShape(4, (2, 2)), RATES)
    assert [gain.num_moves for gain in proposal.gains] == [2, 0, 0]
    assert proposal.placements[1:] == current[1:]


def test_a_proposal_is_worth_as_much_as_starting_anew_and_no_less_than_staying() -> None:
    rng = np.random.default_rng(0)
    shape = SlotShape.even(32, 8, 8, num_nodes=2, num_groups=4)
    before_LE = rng.gamma(0.8, 100.0, (6, 32))
    loads_LE = before_LE * rng.gamma(10, 1 / 10, before_LE.shape)
    current = rebalance(before_LE, shape)
    anew = rebalance(loads_LE, shape)
    for steps in (1, 100, 10_000):
        rates = replace(RATES, steps=steps)
        proposal = propose(loads_LE, current, shape, rates)
        assert proposal == propose(loads_LE, current, shape, rates)
        for layer, gain in enumerate(proposal.gains):
            other = layer_gain(loads_LE[layer], current[layer], anew[layer], rates, num_nodes=2)
            tolerated = TOLERANCE * rank_loads(loads_LE, anew).max(axis=1)[layer] * rates.seconds_per_row * steps
            assert gain.net_s >= max(0.0, other.net_s - tolerated - 1e-12)
            assert gain.num_moves <= other.num_moves
            assert gain == layer_gain(loads_LE[layer], current[layer], proposal.placements[layer], rates, num_nodes=2)
    assert propose(loads_LE, current, shape, replace(RATES, steps=1)).num_moves < proposal.num_moves


def test_even_placements_whatever_they_cost() -> None:
    """As even as new ones, with fewer moves."""
    rng = np.random.default_rng(3)
    shape = SlotShape.even(32, 4, 8)
    before_LE = rng.gamma(0.8, 100.0, (5, 32))
    loads_LE = before_LE * rng.gamma(10, 1 / 10, before_LE.shape)
    current, anew = rebalance(before_LE, shape), rebalance(loads_LE, shape)
    chosen = next_placements(loads_LE, current, shape)
    heaviest, of_anew = (rank_loads(loads_LE, each).max(axis=1) for each in (chosen, anew))
    assert (heaviest <= of_anew * (1 + TOLERANCE) * (1 + 1e-9)).all()
    few, many = (sum(len(moves(*pair)) for pair in zip(current, each, strict=True)) for each in (chosen, anew))
    assert few < many / 3


def test_groups_on_wrong_nodes_are_placed_anew() -> None:
    """Small changes stay on a node: they cannot even out nodes that carry 36 and 4."""
    nodes = SlotShape(8, (2, 2, 2, 2), num_nodes=2, num_groups=4)
    wrong = (Placement.contiguous(8, 4),)
    load_1E = [[9, 9, 9, 9, 1, 1, 1, 1]]
    (moved,) = next_placements(load_1E, wrong, nodes)
    assert rank_loads(load_1E, [moved]).tolist() == [[10, 10, 10, 10]]


def test_groups_that_are_split_over_nodes_come_together() -> None:
    """Experts in order with replicas behind them split the second group; the hierarchical policy wants it whole."""
    shape = SlotShape.even(8, 4, 4, num_nodes=2, num_groups=4)
    in_order = Placement.contiguous(8, 4, redundant=4)
    assert splits_groups(in_order, shape)
    load_1E = [[4, 4, 4, 4, 4, 4, 4, 4]]
    (whole,) = next_placements(load_1E, (in_order,), shape)
    assert not splits_groups(whole, shape)
    # Once they are, small changes keep them so.
    (adjusted,) = next_placements([[4, 5, 4, 4, 6, 4, 4, 4]], (whole,), shape)
    assert not splits_groups(adjusted, shape)
    # The global policy does not ask for it, and a layer without rows is left alone.
    (anywhere,) = next_placements(load_1E, (in_order,), shape, policy="global")
    assert splits_groups(anywhere, shape) and len(moves(in_order, anywhere)) < len(moves(in_order, whole))
    assert next_placements([[0] * 8], (in_order,), shape) == (in_order,)
