"""What a job writes of itself: when, what, and that no fault of it reaches the job."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from moe.batch import monitor as monitor_module
from moe.batch import report_files
from moe.batch.monitor import ErrorLog, ErrorNote, Monitor
from moe.batch.report import Progress
from tests.metrics_record import make_monitor, make_record, run_job


def note(number: int, kind: str = "invalid_line", message: str = "why") -> ErrorNote:
    return ErrorNote(number, None, f"id-{number}", kind, message)


def test_a_finished_jobs_record_has_every_part(tmp_path: Path) -> None:
    record = make_record(tmp_path / "report")
    assert record["outcome"] == "some failed" and record["model"] == "some/model" and record["lines_total"] == 10_000
    assert record["answered"] == 2000 and record["failed"] == 46 and record["lines"] == 2046
    assert record["command"].startswith("python -m launch.generate model=some/model input=prompts.jsonl ")
    assert record["config"]["engine"]["max_batched_tokens"] == 16384 and "model" in record["changed_keys"]
    assert record["plan"]["num_blocks"] == 4000 and record["memory_used"]["host_peak"] > 10 << 20
    assert record["versions"]["torch"] and record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(record["expert_counts"]) == 12 and record["expert_balance"] == 0.41
    for name in ("first_token", "between_tokens", "answer"):
        times = record["latencies"][name]
        assert times["p50"] <= times["p95"] <= times["p99"] <= times["max"]
    assert record["ttft_median"] == record["latencies"]["first_token"]["p50"]
    series = record["series"]
    assert 2 <= len(series["seconds"]) <= 240 and series["output_tokens"][-1] == record["output_tokens"]
    assert max(series["kv_use_max"]) == record["kv_peak_use"]
    kinds = {each["kind"]: each for each in record["errors"]}
    assert kinds["invalid_line"]["count"] == 45 and len(kinds["invalid_line"]["lines"]) == 20
    assert kinds["invalid_line"]["lines"][1]["origin"] == "prompts.jsonl:8"
    assert kinds["request_failed"]["lines"][0]["origin"] == "more/a b.jsonl:17"
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "metrics.json",
        "metrics.prom",
        "report.html",
    ]


def test_files_are_written_while_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: now[0])
    monitor = make_monitor(tmp_path / "report", report_every_s=10.0)
    monitor.start(model="m", device="cpu", lines_resumed=100)
    written = []
    for second in range(0, 35, 3):
        now[0] = 100.0 + second
        monitor.step(Progress(40, second, 0, 10 * second, 0.5, float(second)))
        path = tmp_path / "report" / "metrics.json"
        written.append(json.loads(path.read_text("utf-8"))["lines"] if path.exists() else None)
    assert written == [None, None, None, None, 112, 112, 112, 112, 124, 124, 124, 124]
    assert json.loads(path.read_text("utf-8"))["outcome"] == "running"
    assert "still running" in (tmp_path / "report" / "report.html").read_text("utf-8")


def test_a_fault_before_the_first_step_is_told(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path / "report")
    monitor.finish(None, outcome="fault", fault="no such model <here>")
    record = json.loads((tmp_path / "report" / "metrics.json").read_text("utf-8"))
    assert record["outcome"] == "fault" and record["fault"] == "no such model <here>" and record["lines"] == 0
    assert "no such model &lt;here&gt;" in (tmp_path / "report" / "report.html").read_text("utf-8")


def test_a_fault_of_the_last_step_keeps_its_numbers(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path / "report")
    run_job(monitor, steps=50, failed=2)
    monitor.finish(None, outcome="fault", fault="StepError")
    record = json.loads((tmp_path / "report" / "metrics.json").read_text("utf-8"))
    assert record["answered"] == 100 - 3 and record["failed"] == 3 and record["output_tokens"] > 0


@pytest.mark.parametrize("what", ["render_page", "prometheus_text"])
def test_a_fault_of_the_report_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def fail(metrics: Any) -> str:
        raise RuntimeError("no ink")

    monkeypatch.setattr(report_files, what, fail)
    monitor = make_monitor(tmp_path / "report")
    with caplog.at_level(logging.WARNING):
        monitor.finish(run_job(monitor, steps=3), outcome="complete")
    assert "the report is not written: RuntimeError: no ink" in caplog.text
    assert json.loads((tmp_path / "report" / "metrics.json").read_text("utf-8"))["outcome"] == "complete"


def test_a_folder_that_went_away_is_a_warning_and_old_files_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "report"
    monitor = make_monitor(folder)
    report = run_job(monitor, steps=3)
    monitor.finish(report, outcome="complete")
    before = (folder / "metrics.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        monitor.finish(report, outcome="stopped")
    assert "No space left on device" in caplog.text
    assert (folder / "metrics.json").read_bytes() == before
    assert len(list(folder.iterdir())) == 3, "half a file lies about"


def test_nothing_is_written_without_a_folder_or_on_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config()
    plain = Monitor(config, [])
    plain.finish(run_job(plain, steps=3), outcome="complete")
    config.job.report = "report"
    other = Monitor(config, [], rank=1)
    other.finish(run_job(other, steps=3), outcome="complete")
    assert list(tmp_path.iterdir()) == [] and other.errors.counts.total() == 46


def test_errors_of_ranks_are_merged_lowest_lines_first() -> None:
    first, second = ErrorLog(), ErrorLog()
    for number in range(0, 60, 2):
        first.add(note(number))
        second.add(note(number + 1))
    second.add(note(7, "timeout"))
    first.merge(second)
    invalid, timeout = first.as_list("in.jsonl")
    assert invalid["count"] == 60 and [line["number"] for line in invalid["lines"]] == list(range(20))
    assert timeout["lines"][0]["origin"] == "in.jsonl:7"


def test_what_is_kept_of_errors_is_bounded() -> None:
    log = ErrorLog()
    for number in range(3000):
        log.add(note(number, kind=f"kind-{number % 100}", message="x" * 5000))
    shown = log.as_list(None)
    assert sum(each["count"] for each in shown) == 3000 and sum(len(each["lines"]) for each in shown) == 40 * 20
    assert all(len(line["message"]) == 500 and line["origin"] is None for each in shown for line in each["lines"])
