"""The judge of drafts: what differs is seen, what breaks says so and takes nothing else along."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GOOD = '''"""Doubles."""
import torch
from benchmarks.drafts.case import Case

def cases(device):
    x = torch.arange(4.0, device=device)
    yield Case("four", {"add": [lambda: x + x], "multiply": [lambda: 2 * x]})
    yield Case("off", {"add": [lambda: (x + x, x)], "wrong": [lambda: (2 * x + (x == 3), x)]})
    yield Case("rounded", {"add": [lambda: x + x], "near": [lambda: (x + x) * (1 + 1e-6)]}, tolerance=1e-5)
    yield Case("shape", {"add": [lambda: x + x], "short": [lambda: x[:2]]})
'''
BROKEN = '''"""Breaks."""
import os
import torch
from benchmarks.drafts.case import Case

def cases(device):
    x = torch.ones(2, device=device)
    yield Case("fine", {"add": [lambda: x + x], "multiply": [lambda: 2 * x]})
    yield Case("gone", {"add": [lambda: os._exit(7)]})
'''


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """benchmarks/trial.py in a tree of its own, whose drafts are these two."""
    folder = tmp_path / "benchmarks" / "drafts"
    folder.mkdir(parents=True)
    for name in ("trial.py", "drafts/case.py"):
        (tmp_path / "benchmarks" / name).write_text((ROOT / "benchmarks" / name).read_text("utf-8"), "utf-8")
    for name in ("launch", "moe", "kernels", "configs", "router", "kv_cache", "expert_parallel"):
        (tmp_path / name).symlink_to(ROOT / name)
    (folder / "doubles.py").write_text(GOOD, "utf-8")
    (folder / "breaks.py").write_text(BROKEN, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return load(tmp_path / "benchmarks" / "trial.py")


def test_each_draft_is_judged_by_itself(trial: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "trial.json"
    assert trial.main(["drafts=all", "device=cpu", "seconds=0.001", f"result={result}"]) == 1
    rows = {(row["draft"], row["case"]): row for row in json.loads(result.read_text("utf-8"))["cases"]}
    assert set(rows) == {
        ("doubles", "four"), ("doubles", "off"), ("doubles", "rounded"), ("doubles", "shape"),
        ("breaks", "fine"), ("breaks", ""),
    }  # fmt: skip
    assert {name for name, row in rows.items() if row["good"]} == {
        ("doubles", "four"), ("doubles", "rounded"), ("breaks", "fine"),
    }  # fmt: skip
    assert rows["doubles", "four"]["off"] == {"multiply": 0.0} and set(rows["doubles", "four"]["us"]) == {
        "add",
        "multiply",
    }
    assert rows["doubles", "off"]["off"] == {"wrong": pytest.approx(1 / 6)}
    assert 0 < rows["doubles", "rounded"]["off"]["near"] < 1e-5
    assert "shapes of short" in rows["doubles", "shape"]["error"]
    assert rows["breaks", ""]["error"] == "exit status 7"
    assert "doubles: off: us" in capfd.readouterr().out


def test_a_draft_that_breaks_or_hangs_behind_a_wrong_case_is_known_by_both(trial: ModuleType, tmp_path: Path) -> None:
    off = BROKEN.replace("2 * x", "3 * x")
    (trial.FOLDER / "stumbles.py").write_text(off, "utf-8")
    (trial.FOLDER / "sleeps.py").write_text(off.replace("os._exit(7)", "__import__('time').sleep(600)"), "utf-8")
    result = tmp_path / "trial.json"
    assert trial.main(["drafts=stumbles,sleeps", "device=cpu", "seconds=0.001", "limit=60", f"result={result}"]) == 1
    rows = json.loads(result.read_text("utf-8"))["cases"]
    assert {(row["draft"], row["case"], row.get("error")) for row in rows if not row["good"]} == {
        ("stumbles", "fine", None), ("stumbles", "", "exit status 7"),
        ("sleeps", "fine", None), ("sleeps", "", "cut after 60 s"),
    }  # fmt: skip


def test_what_differs(trial: ModuleType) -> None:
    x = torch.tensor([1.0, -2.0])
    assert trial.distance(x, x.clone()) == 0.0
    assert trial.distance(x, torch.tensor([1.0, -1.0])) == 0.5
    assert trial.distance(x, torch.tensor([1.0, torch.nan])) == float("inf")
    assert trial.distance(torch.tensor([torch.nan]), torch.tensor([torch.nan])) == 0.0, "the same bits"
    assert 0 < trial.distance(torch.tensor([0.0]), torch.tensor([-0.0])) < 1e-300, "not the same bits"


def test_words(trial: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert trial.main([]) == 0
    assert capsys.readouterr().out == "breaks: Breaks.\ndoubles: Doubles.\n"
    for words, text in (
        (["drafts=none"], "draft none is unknown; there are breaks, doubles."),
        (["with=none", "workload=w2"], "draft none is unknown"),
        (["seconds=1"], "drafts= is unknown or missing"),
        (["drafts=all", "speed=1"], "speed=1 is unknown or missing"),
    ):
        assert trial.main(words) == 2
        assert text in capsys.readouterr().err


def test_a_patch_is_named_with_its_first_lines(trial: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (trial.FOLDER / "widens.patch").write_text("Widens\nall.\n\nPredicted: much.\n\ndiff --git a/x b/x\n", "utf-8")
    assert trial.main([]) == 0
    assert capsys.readouterr().out.endswith("git apply benchmarks/drafts/widens.patch: Widens\nall.\n")


REAL = load(ROOT / "benchmarks" / "trial.py")


@pytest.mark.parametrize("name", REAL.names())
def test_drafts_are_asked_in_the_product_s_way(name: str) -> None:
    """On a CPU both sides are references: what is checked is that the product has not moved away from under a draft."""
    draft = REAL.load(name)
    assert callable(draft.install)
    for case in draft.cases(torch.device("cpu")):
        off = REAL.differences(case)
        assert off and all(each <= case.tolerance for each in off.values()), f"{case.name}: {off}"


@pytest.mark.skipif(shutil.which("git") is None, reason="patches are applied by git")
@pytest.mark.parametrize("patch", sorted(REAL.FOLDER.glob("*.patch")), ids=lambda path: path.stem)
def test_patches_fit_the_product(patch: Path) -> None:
    """Or are applied already."""
    checks = [["git", "apply", "--check", *way, str(patch)] for way in ([], ["--reverse"])]
    ended = [subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False) for check in checks]
    assert any(each.returncode == 0 for each in ended), ended[0].stderr
