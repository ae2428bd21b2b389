"""workload=ep over gloo: which bytes must cross, what ranks bring, and a run of two ranks under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expert_parallel.group import ExpertGroup
from expert_parallel.placement import Placement
from kernels.routing import Routing
from launch.bench import main, read_choice
from launch.bench_ep import Crossing, bytes_to_cross, make_rows
from launch.bench_layer import LayerShape

CPU = torch.device("cpu")
SHAPE = LayerShape("odd", 6, 2, 32, 24)


def group_of(rank: int, size: int) -> ExpertGroup:
    return ExpertGroup(rank, size, None)  # pyright: ignore


def test_bytes_that_must_cross() -> None:
    """Three ranks with two experts each. Of rank 1: 0 and 1 are one rank's, so one row there and two back; 2 and 3 are
    its own; 5 and 3 send one row away; -1 sends nothing."""
    ids_TK = torch.tensor([[0, 1], [2, 3], [5, 3], [-1, -1], [0, 4]], dtype=torch.int32)
    routing = Routing(ids_TK, torch.ones(5, 2))
    placement = Placement.contiguous(6, 3)
    row = 2 * 32
    assert bytes_to_cross(group_of(1, 3), placement, SHAPE, routing, "exact") == Crossing(4 * row, 5 * row)
    assert bytes_to_cross(group_of(1, 3), placement, SHAPE, routing, "fast") == Crossing(4 * row, 4 * row)


def test_uneven_ranks_bring_as_many_rows_of_which_some_stay() -> None:
    for rank, real in enumerate((8, 2, 2, 0)):
        rows = make_rows(group_of(rank, 4), SHAPE, 8, "uneven", CPU)
        assert rows.x_TD.shape == (8, 32) and rows.x_TD.dtype == torch.bfloat16
        assert (rows.routing.expert_ids_TK >= 0).all(dim=1).tolist() == [True] * real + [False] * (8 - real)
        even = make_rows(group_of(rank, 4), SHAPE, 8, "even", CPU)
        assert (even.routing.expert_ids_TK >= 0).all()


def test_words() -> None:
    choice = read_choice(["workload=ep"])
    assert [shape.hidden for shape in choice.shapes] == [7168, 2048] and choice.shapes[0].num_experts == 256
    assert choice.tokens == (16, 128, 1024, 4096, 16384) and "one_sided" in choice.dispatchers
    assert [shape.name for shape in read_choice(["workload=ep", "shapes=qwen3,tiny"]).shapes] == ["qwen3", "tiny"]
    with pytest.raises(ValueError, match="ep needs ranks and the others need one process; give it alone"):
        read_choice(["workload=ep,w4"])
    with pytest.raises(ValueError, match="dispatchers=smoke is unknown; use all_to_all,"):
        read_choice(["workload=ep", "dispatchers=all_to_all,smoke"])


def test_without_torchrun_it_says_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["workload=ep", "device=cpu"]) == 2
    assert "start it with torchrun --nproc-per-node=N -m launch.bench" in capsys.readouterr().err


def test_two_ranks(tmp_path: Path) -> None:
    """Every dispatcher that runs on the CPU, both ways, both sizes; the others are named with the reason."""
    result = tmp_path / "ep.json"
    words = ["workload=ep", "device=cpu", "shapes=tiny", "tokens=3", "seconds=0.01", f"result={result}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "launch.bench", *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "one_sided is left out: its kernels need GPUs, and the ranks run on cpu" in done.stdout
    record = json.loads(result.read_text())
    assert "ranks run on cpu" in record["left_out"]["one_sided"] and "torchrun" in record["command"]
    names = {(figure["subject"], figure["name"]) for figure in record["figures"]}
    assert names == {
        (f"tiny x2 {combine}", f"T=3 {sizes} {way} {name}")
        for combine in ("exact", "fast")
        for sizes in ("even", "uneven")
        for way in ("dispatch", "combine")
        for name in ("all_to_all", "all_gather")
    }
    assert all(figure["value"] > 0 and figure["num_samples"] >= 10 for figure in record["figures"])
