"""Lines counted beside the job, and what ranks say of themselves added up."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import job_progress
from launch.crew import Single
from launch.job_progress import CrewProgress, LineCount, count_lines
from moe.batch.report import Progress


def wait_for(count: LineCount) -> None:
    end = time.monotonic() + 60
    while any(thread.name == "line count" for thread in threading.enumerate()):
        assert time.monotonic() < end, "lines are still being counted"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("content", "number"),
    [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"x" * 3_000_000 + b"\ny\n", 2)],
)
def test_lines_are_line_ends_and_a_rest(tmp_path: Path, content: bytes, number: int) -> None:
    (tmp_path / "in").write_bytes(content)
    assert count_lines(tmp_path / "in") == number


def test_files_are_added_up_and_the_limit_counts(tmp_path: Path) -> None:
    for name, number in (("a.jsonl", 3), ("b.jsonl", 4)):
        (tmp_path / name).write_bytes(b"{}\n" * number)
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for limit, total in ((None, 7), (5, 5), (50, 7)):
        count = LineCount(paths, limit)
        wait_for(count)
        assert count.total == total


def test_packed_files_and_standard_input_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"\n\n")
    for paths in ([tmp_path / "a.jsonl.gz"], [], [tmp_path], [tmp_path / "gone.jsonl"]):
        count = LineCount(paths, None)
        wait_for(count)
        assert count.total is None


class Pair:
    """One of two ranks, with counters in a dict that both hold."""

    ranks = None
    size = 2

    def __init__(self, rank: int, totals: Counter[str]) -> None:
        self.rank, self._totals = rank, totals

    def gather(self, own: object) -> list[object]:
        raise AssertionError("progress takes no part in collectives")

    def wait_for_first(self) -> None:
        raise AssertionError("progress waits for nobody")

    def counter(self, name: str) -> Callable[[int], int]:
        def add(number: int) -> int:
            self._totals[name] += number
            return self._totals[name]

        return add


def test_ranks_are_added_up_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(job_progress.time, "monotonic", lambda: now[0])
    totals: Counter[str] = Counter()
    first, second = (CrewProgress(Pair(rank, totals)) for rank in range(2))
    own = Progress(9, 4, 1, 100, 0.25, 2.0)
    assert first.of_all(own) == own
    second.of_all(Progress(20, 10, 2, 50, 0.5, 2.0))
    later = Progress(19, 14, 1, 200, 0.25, 3.0)
    assert first.of_all(later).lines_done == 4, "fresh enough"
    now[0] = 101.5
    assert first.of_all(later) == Progress(19, 24, 3, 250, 0.25, 3.0)
    assert second.of_all(Progress(20, 10, 2, 50, 0.5, 2.0)).lines_done == 24


def test_one_rank_is_its_own_sum() -> None:
    own = Progress(9, 4, 1, 100, 0.25, 2.0)
    assert CrewProgress(Single()).of_all(own) is own
