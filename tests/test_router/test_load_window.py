"""What is new between two looks, the window, the average, the timeline, and the file they go to."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from router import load_window
from router.load_window import BalancePoint, LoadWindow, read_load


def test_looks_by_hand() -> None:
    """Counters grow; the window of two looks forgets the first; the average weighs a new look 2 / 3."""
    load = LoadWindow(num_layers=2, num_experts=2, window=2)
    assert load.push(5, [[3, 1], [0, 0]]).tolist() == [[3, 1], [0, 0]]
    assert load.average_LE is not None and load.average_LE.tolist() == [[3, 1], [0, 0]]
    assert load.push(10, [[3, 4], [6, 0]]).tolist() == [[0, 3], [6, 0]]
    assert load.average_LE == pytest.approx(np.array([[1, 7 / 3], [4, 0]]))
    assert load.recent_LE().tolist() == [[3, 4], [6, 0]]
    load.push(15, [[9, 4], [6, 0]])
    assert load.recent_LE().tolist() == [[6, 3], [6, 0]]
    assert load.total_LE.tolist() == [[9, 4], [6, 0]] and load.step == 15


def test_balancedness_is_of_ranks_where_they_are_given() -> None:
    """Without ranks: layer 0 has 3 and 1 (2/3). With: the caller's placement shared expert 0, so ranks are even."""
    load = LoadWindow(1, 2, window=4)
    load.push(1, [[3, 1]])
    load.push(2, [[6, 2]], rank_loads_LN=[[2.0, 2.0]])
    load.push(3, [[6, 6]], rank_loads_LN=[[1.0, 3.0]])
    assert load.timeline == [BalancePoint(1, 2 / 3, 4), BalancePoint(2, 1.0, 4), BalancePoint(3, 2 / 3, 4)]


def test_a_look_without_rows_changes_nothing_but_the_step() -> None:
    load = LoadWindow(1, 2, window=1)
    load.push(1, [[1, 0]])
    assert load.push(9, [[1, 0]]).tolist() == [[0, 0]]
    assert load.step == 9 and len(load.timeline) == 1 and load.recent_LE().tolist() == [[1, 0]]


def test_the_counters_that_are_handed_in_may_change_afterwards() -> None:
    counters = np.array([[1, 2]])
    load = LoadWindow(1, 2, window=1)
    load.push(1, counters)
    counters += 5
    assert load.push(2, counters).tolist() == [[5, 5]]
    counters += 1
    assert load.total_LE.tolist() == [[6, 7]]


def test_memory_stays_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeline drops every other point when it is full, and then takes every other one."""
    monkeypatch.setattr(load_window, "TIMELINE", 8)
    load = LoadWindow(1, 1, window=3)
    for step in range(1, 101):
        load.push(step, [[step]])
        assert len(load.timeline) < 8
    steps = [point.step for point in load.timeline]
    assert steps[0] == 1 and len(steps) >= 4
    assert len({after - before for before, after in pairwise(steps)}) == 1, "evenly spread"
    assert len(load.as_dict()["trace"]) == 3


def test_the_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    load = LoadWindow(3, 2, window=2)
    load.push(4, [[0, 0], [1, 2], [3, 1]])
    load.push(8, [[0, 0], [2, 2], [3, 9]], rank_loads_LN=[[0, 0], [0.5, 0.5], [6, 2]])
    path.write_text(load.as_text())
    record = read_load(path)
    assert record.total_LE.tolist() == [[0, 0], [2, 2], [3, 9]]
    assert record.trace_ILE.tolist() == [[[0, 0], [1, 2], [3, 1]], [[0, 0], [1, 0], [0, 8]]]
    assert record.timeline == tuple(load.timeline)
    # The newest look weighs 2 / 3.
    assert json.loads(path.read_text())["average"] == [[0, 0], [1, 0.667], [1, 5.667]]
    assert record.sparse_layers == (1, 2)
    path.write_text(LoadWindow(3, 2, window=2).as_text())  # a run that never looked
    assert read_load(path).trace_ILE.shape == (0, 3, 2) and read_load(path).sparse_layers == ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "sortyard-expert-plan"}, "is no load file"),
        ({"version": 7}, "has version 7, this code reads 1"),
        ({"total": [[1, 2], [3]]}, "is damaged"),
        ({"total": [[1, 2]]}, "is damaged"),
        ({"trace": [{"step": 1}]}, r"is damaged \(KeyError: 'counts'\)"),
        ({"trace": [{"step": 1, "counts": [[1, -1], [0, 0]]}]}, "negative counts"),
        ({"timeline": [[1, 0.5]]}, "is damaged"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict, text: str) -> None:
    load = LoadWindow(2, 2, window=2)
    load.push(1, [[1, 1], [1, 1]])
    path = tmp_path / "load.json"
    path.write_text(json.dumps(load.as_dict() | change))
    with pytest.raises(ValueError, match=text) as caught:
        read_load(path)
    assert str(path) in str(caught.value)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{")
    for name in ("x", "none"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_load(tmp_path / name)


def test_our_own_mistakes() -> None:
    with pytest.raises(ValueError, match=r"balance\.window=0"):
        LoadWindow(1, 1, window=0)
    load = LoadWindow(1, 2, window=1)
    load.push(1, [[4, 4]])
    with pytest.raises(AssertionError, match="counters went back"):
        load.push(2, [[4, 3]])
    with pytest.raises(AssertionError, match="shape"):
        load.push(2, [[4, 3, 1]])
