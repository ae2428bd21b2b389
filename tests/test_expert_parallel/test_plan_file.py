"""A plan comes back as it was saved; another model's, another run's or a broken one is refused with the difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from expert_parallel.placement import Placement
from expert_parallel.plan_file import ModelShape, load_plan, plan_text

MODEL = ModelShape(num_layers=3, num_experts=4, sparse_layers=(1, 2))
PLAN = {1: Placement.of_ranks(4, [[0, 1, 2], [3, 0, None]]), 2: Placement.of_ranks(4, [[0, 1, 3], [2, 3, None]])}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_text(MODEL, PLAN, "64 steps of profile"))
    return path


def test_a_plan_comes_back(path: Path) -> None:
    assert load_plan(path, MODEL, num_ranks=2) == PLAN


def test_the_file_is_the_one_in_the_docstring(path: Path) -> None:
    assert json.loads(path.read_text()) == {
        "format": "sortyard-expert-plan",
        "version": 1,
        "model": {"num_layers": 3, "num_experts": 4, "sparse_layers": [1, 2]},
        "source": "64 steps of profile",
        "ranks": 2,
        "layers": {"1": [[0, 1, 2], [3, 0, None]], "2": [[0, 1, 3], [2, 3, None]]},
    }
    assert len(path.read_text().splitlines()) == 4 + len(PLAN)  # a line for each layer


@pytest.mark.parametrize(
    ("model", "num_ranks", "text"),
    [
        (replace(MODEL, num_experts=8), 2, "is of another model: num_experts 4 in the plan, 8 here"),
        (replace(MODEL, num_layers=5), 2, "num_layers 3 in the plan, 5 here"),
        (replace(MODEL, sparse_layers=(0, 1, 2)), 2, r"sparse_layers \[1, 2\] in the plan, \[0, 1, 2\] here"),
        (MODEL, 4, "is for 2 ranks, this run has 4; make a plan of this model on as many ranks with balance.profile"),
    ],
)
def test_a_plan_of_something_else_is_refused(path: Path, model: ModelShape, num_ranks: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load_plan(path, model, num_ranks)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "x"}, "is no expert plan"),
        ({"version": 2}, "has version 2, this code reads 1"),
        ({"model": None}, "another model: num_layers None in the plan, 3 here; num_experts None"),
        ({"layers": {"1": [[0, 1], [2, 3]]}}, r"does not hold exactly the layers \[1, 2\]"),
        ({"layers": None}, "does not hold exactly the layers"),
        (
            {"layers": {"1": [[0, 1, 2], [3]], "2": [[0, 1, 2], [2]]}},
            r"in layer 2 .*experts \[3\] have no slot",
        ),
        ({"layers": {"1": [[0, 1, 2], [3, 4]], "2": [[0, 1, 2], [3]]}}, "damaged in layer 1 .*names expert 4"),
        ({"layers": {"1": [[0, 1, 2, 3]], "2": [[0, 1, 2], [3]]}}, "layer 1 .*no list of 2 lists of expert numbers"),
        ({"layers": {"1": [[0, 1, 2], [3.0]], "2": [[0, 1, 2], [3]]}}, "no list of 2 lists of expert numbers"),
        ({"layers": {"1": [[0, 1, 2], [True, 3]], "2": [[0, 1, 2], [3]]}}, "no list of 2 lists of expert numbers"),
    ],
)
def test_a_damaged_plan_is_refused(path: Path, change: dict, text: str) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=text) as caught:
        load_plan(path, MODEL, 2)
    assert str(caught.value).startswith(f"balance.plan={path} ")


def test_what_is_no_json_is_refused(path: Path) -> None:
    for content in (path.read_bytes()[:40], b"\xff\xfe", b"[1]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"balance\.plan=.*(cannot be read|is no expert plan)"):
            load_plan(path, MODEL, 2)
    with pytest.raises(ValueError, match=r"cannot be read .*No such file.*or leave balance\.plan out"):
        load_plan(path.with_name("none.json"), MODEL, 2)
