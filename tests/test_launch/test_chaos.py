"""Jobs that are killed at random moments end whole: every line once, the bytes of an undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import Chaos
from tests.test_batch.fakes import jsonl, read_jsonl

ROOT = Path(__file__).resolve().parents[2]


def test_c13_c37_three_rounds_of_chaos(tmp_path: Path) -> None:
    Chaos(tmp_path, 2000, seed=3).run(3)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0])
def test_twenty_five_rounds_of_chaos(tmp_path: Path, seed: int) -> None:
    Chaos(tmp_path, 2000, seed).run(25, sizes=(2, 2, 2, 2, 1, 3))


def check_restarts(folder: Path, kills: int, num_lines: int, launcher: list[str]) -> None:
    """A job under torchrun's agent that loses a rank `kills` times, against one that is left alone: the real engine."""
    lines = [
        {"id": f"l{i}", "prompt": "And it came to pass " * (i % 4), "max_tokens": 2 + i % 5} for i in range(num_lines)
    ]
    (folder / "in.jsonl").write_bytes(jsonl(*lines))
    words = ["input=in.jsonl", "engine.device=cpu", "cache.num_blocks=64", "cache.prefix_caching=false"]
    words += ["engine.max_num_seqs=3", "sampling.temperature=0.8", "parallel.timeout_s=120"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)

    alone = run("-m", "launch.generate", *words, "output=alone.jsonl")
    assert alone.returncode == 0, alone.stderr
    done = run(*launcher, str(kills), *words, "output=out.jsonl", "job.resume=never")  # about other launches' runs
    assert done.returncode == 0, done.stderr[-8000:]
    assert done.stderr.count("going on after an unfinished run") == kills, done.stderr[-8000:]
    assert [record["id"] for record in read_jsonl(folder / "out.jsonl")] == [f"l{i}" for i in range(num_lines)]
    assert (folder / "out.jsonl").read_bytes() == (folder / "alone.jsonl").read_bytes()
    assert not list(folder.glob("*.journal-*"))


@pytest.mark.timeout(900)
def test_three_lost_ranks_are_restarted_and_the_job_is_whole(tmp_path: Path) -> None:
    check_restarts(tmp_path, 3, 24, ["-m", "tests.restarted_job"])


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_ten_lost_ranks_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "10"]
    check_restarts(tmp_path, 10, 80, [*torchrun, str(ROOT / "tests" / "restarted_job.py")])
