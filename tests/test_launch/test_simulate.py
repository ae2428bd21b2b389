"""The simulator's command line: table, result and picture of a small run, a run's load file, and wrong words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from expert_parallel.simulate import Outcome, Setting
from launch import simulate
from launch.simulate import RowBytes
from router.load_window import LoadWindow

SMALL = ["experts=16", "top_k=2", "groups=4", "topk_groups=2", "layers=2", "looks=3", "tokens=512", "exponent=1"]


def test_a_small_run_gives_table_result_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, picture = tmp_path / "r.json", tmp_path / "p.png"
    words = [*SMALL, "ranks=2,8", "ranks_per_node=4", "redundant=0,8", f"result={result}", f"picture={picture}"]
    assert simulate.main(words) == 0
    out = capsys.readouterr().out
    assert "hierarchical +8" in out and "moves/layer" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    outcomes = json.loads(result.read_text())["outcomes"]
    named = [(o["setting"]["num_ranks"], o["setting"]["policy"], o["setting"]["redundant"]) for o in outcomes]
    assert named == [
        *[(2, "static", 0), (2, "global", 0), (2, "global", 8)],  # two ranks are one node: nothing to be hierarchical
        *[(8, "static", 0), (8, "global", 0), (8, "global", 8), (8, "hierarchical", 0), (8, "hierarchical", 8)],
    ]
    of = dict(zip(named, outcomes, strict=True))
    assert of[8, "static", 0]["balancedness"] < of[8, "global", 0]["balancedness"] < of[8, "global", 8]["balancedness"]
    assert of[2, "static", 0]["far_dispatch_bytes"] == 0 < of[8, "static", 0]["far_dispatch_bytes"]
    assert len(of[8, "static", 0]["balancedness_of_looks"]) == 2


def test_bytes_by_hand() -> None:
    """The busiest rank gets 1.5 rows near and 2 far for each token of a rank, 3 and 5 counted by expert; 10 tokens of
    256 numbers: 512 bytes in bf16, 256 + 2 scales of 4 bytes in fp8."""
    outcome = Outcome(Setting(8, "static"), 0.5, 0.5, 2.0, 3.0, 1.0, 1.5, 2.0, 3.0, 5.0, 0.0, (0.5,))
    fast = RowBytes(hidden=256, fp8=False, exact=False, batch=10).links(outcome)
    assert (fast.near_dispatch, fast.far_dispatch) == (fast.near_combine, fast.far_combine) == (7680, 10240)
    exact = RowBytes(hidden=256, fp8=True, exact=True, batch=10).links(outcome)
    assert (exact.near_dispatch, exact.far_dispatch) == (15 * 264, 20 * 264)
    assert (exact.near_combine, exact.far_combine) == (30 * 512, 50 * 512)


def test_a_load_file_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layer 0 is dense. On two ranks experts 0 and 1 make rank 0 carry 12 of 14 rows; apart they are even."""
    load = LoadWindow(num_layers=2, num_experts=4, window=4)
    for look in range(1, 4):
        load.push(look, np.array([[0, 0, 0, 0], [6, 6, 1, 1]]) * look)
    path, result = tmp_path / "load.json", tmp_path / "r.json"
    path.write_text(load.as_text())
    words = [f"load={path}", "top_k=1", "ranks=2", "redundant=0", "policies=global,static", f"result={result}"]
    assert simulate.main(words) == 0
    static, eplb = json.loads(result.read_text())["outcomes"]
    assert static["balancedness"] == pytest.approx(7 / 12, abs=1e-5) and eplb["balancedness"] == 1.0
    short = LoadWindow(2, 4, window=4)
    short.push(1, np.ones((2, 4)))
    path.write_text(short.as_text())
    assert simulate.main(words) == 2
    assert "holds 1 looks, the trace needs two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["rank=8"], "rank=8 is no key of the simulator; did you mean ranks=?"),
        (["verbose"], "verbose is no key of the simulator; the keys are load, experts"),
        (["ranks=8", "ranks=9"], "ranks is given twice"),
        (["ranks=8,x"], "ranks=x is no whole number above 0"),
        (["ranks=12", "ranks_per_node=8"], "ranks=12 fills no whole number of nodes of ranks_per_node=8"),
        (["policies=static,best"], "policies=best is unknown; use static, global, hierarchical"),
        (["policies=hierarchical", "ranks=4"], "fits none of the ranks"),
        (["redundant=-1"], "redundant=-1 is no whole number"),
        (["rows=int8"], "rows=int8 must be bf16 or fp8"),
        (["combine=none"], "combine=none must be exact or fast"),
        (["exponent=-1"], "exponent=-1 must be a number above 0"),
        (["top_k=300"], "top_k=300"),
        (["groups=7"], "num_groups=7 must divide num_experts=16"),
        (["looks=1"], "a trace of 1 looks cannot be played"),
        (["adjust=maybe"], "adjust=maybe must be true or false"),
        (["load=none.json"], "does not say how many experts a token has; give top_k"),
        (["load=none.json", "top_k=2", "experts=4"], "experts=4 shapes a drawn trace"),
        (["load=none.json", "top_k=2"], "load file none.json cannot be read"),
        (["result=/nowhere/at/all.json"], "there is no folder /nowhere/at; make it first"),
    ],
)
def test_wrong_words(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = {word.partition("=")[0] for word in words}
    small = [] if "load" in own else [word for word in SMALL if word.partition("=")[0] not in own]
    assert simulate.main([*small, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and text in error


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}=" in out for name in simulate.KEYS)
