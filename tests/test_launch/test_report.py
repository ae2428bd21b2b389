"""A report drawn again from its numbers: the same page, and words for files that hold none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import report
from moe.batch.page import render_page
from tests.metrics_record import EVIL, make_record


def test_the_page_comes_back_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "report"
    make_record(folder)
    page = folder / "report.html"
    before = page.read_bytes()
    for argument in (folder, folder / "metrics.json"):
        page.unlink()
        assert report.main([str(argument)]) == report.OK
        assert page.read_bytes() == before
    assert capsys.readouterr().out == f"{page}\n" * 2


def test_what_was_moved_away_is_drawn_where_it_is(tmp_path: Path) -> None:
    make_record(tmp_path / "report")
    kept = (tmp_path / "report" / "metrics.json").rename(tmp_path / "friday.json")
    assert report.main([str(kept)]) == report.OK
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "report" / "report.html").read_bytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory; give a folder of job.report."),
        (b"{", "is no JSON: "),
        (b"\xff", "is no JSON: "),
        (b"[1]", "holds no record of a job"),
        (b"{}", "no report can be drawn from these numbers: KeyError: 'outcome'"),
        (json.dumps({"outcome": "complete"}).encode(), "no report can be drawn from these numbers: KeyError: "),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "metrics.json").write_bytes(content)
    assert report.main([str(tmp_path)]) == report.USAGE
    assert words in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "field", ["series", "errors", "memory_used", "latencies", "expert_counts", "config", "seconds"]
)
def test_a_field_of_another_kind_is_no_traceback(tmp_path: Path, field: str) -> None:
    record = make_record(tmp_path / "report")
    with pytest.raises(ValueError, match="no report can be drawn from these numbers"):
        render_page(record | {field: "<b>text</b>"})


def test_no_text_of_a_record_becomes_markup(tmp_path: Path) -> None:
    """Every text of the record replaced by markup, one after another."""
    record = make_record(tmp_path / "report")
    for field in ("model", "device", "outcome", "command", "began", "version", "fault", "folder"):
        page = render_page(record | {field: f"/{EVIL}"})
        assert "<script" not in page and "<img" not in page, field


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == report.USAGE and report.main(["--help"]) == report.OK
    assert "python -m launch.report FOLDER" in capsys.readouterr().out
