"""Where a report goes: a folder, never over a file of the job; every file whole at any time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe.batch.report_files import check_report_folder


def test_a_folder_that_is_there_or_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("old", "new", "run.1"):
        folder = check_report_folder(str(tmp_path / name), {"output": tmp_path / "out.jsonl"})
        assert folder == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"], "looking makes nothing"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "is a file; give a folder: report.html, metrics.json and metrics.prom go into it."),
        ("report.json", "looks like the name of a file; give a folder, for example job.report="),
        ("no/such/report", "cannot be made: "),
        ("file/report", "cannot be made: "),
    ],
)
def test_a_wrong_place_is_refused_with_the_way_out(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"job\.report=") as caught:
        check_report_folder(str(tmp_path / name), {})
    assert words in str(caught.value)


def test_the_jobs_own_files_are_not_written_over(tmp_path: Path) -> None:
    for name in ("metrics.json", "report.html", "metrics.prom"):
        with pytest.raises(ValueError, match=f"its {name} is the output file, which it would destroy"):
            check_report_folder(str(tmp_path), {"input": tmp_path / "in.jsonl", "output": tmp_path / name})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="cannot be written to"):
        check_report_folder(str(tmp_path / "report"), {})
