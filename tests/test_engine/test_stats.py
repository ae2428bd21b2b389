"""Counters of several ranks put together."""

from __future__ import annotations

from moe.engine.stats import EngineStats


def test_balance_over_ranks_by_hand() -> None:
    """Two ranks, three layers: one dense, one where a rank has all rows, one where it has three quarters of them."""
    first = EngineStats(steps=7, expert_counts=[[0, 0], [5, 3], [1, 5]], rebalances=2, experts_moved=3)
    second = EngineStats(steps=7, expert_counts=[[0, 0], [0, 0], [2, 0]], rebalances=2, experts_moved=4)
    second.balance_seconds = 0.5
    whole = EngineStats.of_ranks([first, second])
    assert whole.rank_balance == (4 / 8 + 4 / 6) / 2
    assert whole.expert_counts == [[0, 0], [5, 3], [3, 5]]
    assert (whole.steps, whole.rebalances, whole.experts_moved, whole.balance_seconds) == (7, 2, 7, 0.5)
    assert EngineStats.of_ranks([first]).rank_balance is None
    assert EngineStats.of_ranks([EngineStats(), EngineStats()]).rank_balance is None
    assert whole.as_dict()["rank_balance"] == whole.rank_balance
