"""The harness of the multi-rank tests: results by rank, faults with their own traceback, hangs, deaths, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, _collect, run_ranks

ROOT = Path(__file__).resolve().parent.parent


def sum_of_ranks(rank: int, num_ranks: int, factor: int) -> torch.Tensor:
    total = torch.tensor([float(rank * factor)])
    dist.all_reduce(total)
    return torch.cat([total, torch.tensor([float(rank), float(num_ranks)])])


def one_rank_raises(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise KeyError("the cause itself")
    dist.barrier()


def one_rank_is_killed(rank: int, num_ranks: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_rank_never_joins(rank: int, num_ranks: int) -> None:
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def sleep_and_say_so(rank: int, num_ranks: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def test_results_come_back_by_rank() -> None:
    results = run_ranks(sum_of_ranks, 3, 10)
    assert [result.tolist() for result in results] == [[30.0, rank, 3.0] for rank in range(3)]


def test_a_fault_ends_all_ranks_and_shows_its_own_traceback_first() -> None:
    start = time.monotonic()
    with pytest.raises(
        RanksFailed, match=r"(?s)^rank 1 of 2: Traceback.*one_rank_raises.*KeyError: 'the cause itself'"
    ):
        run_ranks(one_rank_raises, 2)
    assert time.monotonic() - start < 30


def test_the_first_fault_stands_first_though_two_are_found_at_once(tmp_path: Path) -> None:
    """A busy machine lets this process look only when the echo of the fault has come as well."""
    pipes = [Pipe(duplex=False) for _ in range(2)]
    pipes[1][1].send((False, "the cause", 1.0))
    pipes[0][1].send((False, "its echo", 2.0))
    with pytest.raises(RanksFailed, match=r"^rank 1 of 2: the cause\nrank 0 of 2: its echo$"):
        _collect([reader for reader, _ in pipes], [], tmp_path, 60.0)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RanksFailed, match="rank 2 of 3: ended with exit code -9"):
        run_ranks(one_rank_is_killed, 3)


def test_a_rank_that_hangs_says_where() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 of 2: timed out.*in one_rank_never_joins"):
        run_ranks(one_rank_never_joins, 2, timeout_s=2.0)


def test_no_rank_outlives_a_killed_test(tmp_path: Path) -> None:
    program = (
        "from tests.ranks import run_ranks\nfrom tests.test_ranks import sleep_and_say_so\n"
        f"if __name__ == '__main__':\n    run_ranks(sleep_and_say_so, 2, {str(tmp_path)!r})\n"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    process = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_for(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    """A process that has ended but that nobody waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.05)
