"""A run after another: what goes on, what is refused and why, and that no line is lost or answered twice."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, JobConfig
from moe.batch import resume
from moe.batch.journal import ANSWERED, Header, frame, header_frame
from moe.batch.journal_writer import JournalWriter
from moe.batch.ledger import Ledger, line_digest
from moe.batch.lines import BadLine, Line
from moe.batch.resume import begin_run, differing, kept_errors
from moe.batch.run_files import RunFiles
from tests.test_batch.fakes import FakeEngine, jsonl, read_jsonl, run_job

PRINT = {"model": "demo", "sampling.temperature": "0"}


class Killed(BaseException):
    """Stands for a process that is gone at once."""


def config_of(folder: Path, num_lines: int = 6, **job: Any) -> Config:
    lines = [{"id": f"日{i}", "prompt": f"line {i}", "max_tokens": 1 + i % 6} for i in range(num_lines)]
    (folder / "in.jsonl").write_bytes(jsonl(*lines))
    return Config(input=str(folder / "in.jsonl"), output=str(folder / "out.jsonl"), job=JobConfig(order="file", **job))


def killed_run(config: Config, after_steps: int, fingerprint: dict[str, str] = PRINT, places: int = 256) -> None:
    def on_step(_: Any) -> None:
        if engine.stats.steps >= after_steps:
            raise Killed

    engine = FakeEngine(places)
    with pytest.raises(Killed):
        run_job(config, engine, on_step=on_step, fingerprint=fingerprint)


def answered(engine: FakeEngine) -> list[int]:
    return [int(request.request_id.removeprefix("line-")) for request in engine.requests]


def journal_of(folder: Path, run: int = 1) -> Path:
    return folder / f"out.jsonl.journal-{run}-rank-0"


@pytest.mark.parametrize(
    ("cut", "left"),
    [
        (0, 3),
        (1, 3),  # the third lacks its line end alone
        (9, 2),
        (len('", "line": 3, "text": "LINE 2"') + 120, 2),  # inside the id's three bytes, or before them
    ],
)
def test_c13_a_torn_tail_costs_the_torn_line_alone(tmp_path: Path, cut: int, left: int) -> None:
    config = config_of(tmp_path)
    killed_run(config, 3)
    journal = journal_of(tmp_path)
    whole = journal.read_bytes()
    old = [line.split(b"\t", 4)[4] for line in whole.split(b"\n")[1:4]]
    journal.write_bytes(whole[: len(whole) - cut])
    engine = FakeEngine()
    run_job(config, engine, fingerprint=PRINT)
    assert answered(engine) == list(range(left + 1, 7))
    output = (tmp_path / "out.jsonl").read_bytes().split(b"\n")[:-1]
    assert output[:left] == old[:left] and len(output) == 6
    assert [record["id"] for record in read_jsonl(tmp_path / "out.jsonl")] == [f"日{i}" for i in range(6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job.json"]


def test_c13_cut_inside_a_character_of_three_bytes(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    killed_run(config, 3)
    journal = journal_of(tmp_path)
    whole = journal.read_bytes()
    journal.write_bytes(whole[: whole.rindex("日".encode()) + 2])
    _, ledger = run_job(config, fingerprint=PRINT)
    assert ledger.kept == 2 and [record["line"] for record in read_jsonl(tmp_path / "out.jsonl")] == list(range(1, 7))


def test_many_runs_each_go_a_step_further(tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    run_job(config_of(tmp_path / "once", 30), fingerprint=PRINT)
    config = config_of(tmp_path, 30)
    for _ in range(4):
        killed_run(config, 8, places=2)  # a few lines further each time
    assert len(list(tmp_path.glob("*.journal-*"))) > 1 and not (tmp_path / "out.jsonl").exists()
    engine = FakeEngine()
    _, ledger = run_job(config, engine, fingerprint=PRINT)
    assert ledger.kept + len(engine.requests) == 30 and ledger.kept >= 8
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "once" / "out.jsonl").read_bytes()


def test_a_mismatch_is_refused_with_the_keys_and_both_values(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    killed_run(config, 3)
    other = {"model": "demo", "sampling.temperature": "0.5", "device": "cpu"}
    with pytest.raises(ValueError) as caught:
        run_job(config, fingerprint=other)
    text = str(caught.value)
    assert "sampling.temperature=0 there, 0.5 now; device not set there, cpu now" in text and "model" not in text
    assert "job.resume=force" in text and "job.overwrite=true" in text
    config.job.resume = "force"
    engine = FakeEngine()
    _, ledger = run_job(config, engine, fingerprint=other, stop=lambda: 15 if engine.stats.steps == 4 else 0)
    assert ledger.kept == 3 and answered(engine) == [4, 5, 6]
    config.job.resume = "auto"
    _, ledger = run_job(config, fingerprint=other)  # the newest run's settings count from then on
    assert ledger.kept == 4
    assert differing({"a": "1"}, {"a": "1"}) == ""


def test_overwrite_drops_a_run_of_other_settings_but_goes_on_with_its_own(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old\n")
    config = config_of(tmp_path, overwrite=True)
    killed_run(config, 3)
    assert (tmp_path / "out.jsonl").read_text() == "old\n"  # until the new one is whole
    engine = FakeEngine()
    run_job(config, engine, fingerprint=PRINT)
    assert answered(engine) == [4, 5, 6] and len(read_jsonl(tmp_path / "out.jsonl")) == 6
    killed_run(config, 3)
    engine = FakeEngine()
    run_job(config, engine, fingerprint={"model": "other"})
    assert answered(engine) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("never", ["never", "false"])
def test_never_and_require(tmp_path: Path, never: str) -> None:
    config = config_of(tmp_path, resume="require")
    with pytest.raises(ValueError, match=r"job.resume=require: beside output=.* there is no unfinished run"):
        run_job(config, fingerprint=PRINT)
    config.job.resume = "true"
    killed_run(config, 3)
    config.job.resume = never
    with pytest.raises(ValueError, match=r"out.jsonl.journal-1-rank-0 holds records of a run that did not end; go on"):
        run_job(config, fingerprint=PRINT)
    assert journal_of(tmp_path).exists()
    config.job.overwrite = True
    engine = FakeEngine()
    run_job(config, engine, fingerprint=PRINT)
    assert answered(engine) == [1, 2, 3, 4, 5, 6]
    config.job.resume, config.job.overwrite = "require", False
    files = RunFiles(tmp_path / "out.jsonl")
    assert begin_run(files, PRINT, config.job, overwrite=False).whole is not None  # complete is as good


def test_a_whole_output_is_nothing_to_do_for_the_same_job_and_protected_from_another(tmp_path: Path) -> None:
    config, files = config_of(tmp_path), RunFiles(tmp_path / "out.jsonl")
    run_job(config, fingerprint=PRINT)
    content = (tmp_path / "out.jsonl").read_bytes()
    start = begin_run(files, PRINT, config.job, overwrite=False)
    assert start.whole is not None and (start.whole.lines, start.whole.failed) == (6, 0)
    with pytest.raises(ValueError, match=r"exists and was made with other settings: model=demo there, x now"):
        begin_run(files, {**PRINT, "model": "x"}, config.job, overwrite=False)
    assert begin_run(files, PRINT, config.job, overwrite=True, restarted=True).whole is not None
    (tmp_path / "out.jsonl").write_bytes(content[:-10])  # somebody touched it
    with pytest.raises(ValueError, match=r"out.jsonl exists; give another name, or job.overwrite=true"):
        begin_run(files, PRINT, config.job, overwrite=False)


def test_a_crash_between_the_moves_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, shards=3)
    moved, replace = [], os.replace

    def crashing(source: Path, target: Path) -> None:
        if len(moved) == 2:
            raise Killed
        moved.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", crashing)
    with pytest.raises(Killed):
        run_job(config, fingerprint=PRINT)
    assert len(moved) == 2 and len(list(tmp_path.glob("out-*.jsonl"))) == 1  # the mark, and the first file
    monkeypatch.undo()
    engine = FakeEngine()
    run_job(config, engine, fingerprint=PRINT)
    assert not engine.requests
    shards = [read_jsonl(tmp_path / f"out-{i:05}-of-00003.jsonl") for i in (1, 2, 3)]
    assert [[record["line"] for record in shard] for shard in shards] == [[1, 2], [3, 4], [5, 6]]
    assert not list(tmp_path.glob("*.journal-*")) and not list(tmp_path.glob("*.partial"))


def test_error_records_are_kept_or_tried_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    lines = [
        {"id": 1, "prompt": "a"},
        {"id": 2, "prompt": 5},
        {"id": 3, "prompt": "NaN!"},
        {"id": 4, "prompt": "d", "max_tokens": 9},
    ]
    (tmp_path / "in.jsonl").write_bytes(jsonl(*lines))
    killed_run(config, 3)
    files = RunFiles(tmp_path / "out.jsonl")
    start = begin_run(files, PRINT, config.job, overwrite=False)
    assert start.ledger.kinds == {"invalid_line": 1, "request_failed": 1} and start.ledger.num_failed == 2
    notes = {note.number: note for note in kept_errors(files, start.ledger)}
    assert notes[2].id == 2 and "prompt=5 must be a text" in notes[2].message and notes[3].kind == "request_failed"
    engine = FakeEngine()
    _, ledger = run_job(config, engine, fingerprint=PRINT, stop=lambda: 15)
    assert answered(engine) == [4] and ledger.kept == 3
    config.job.retry_errors = True
    engine = FakeEngine()
    job, _ = run_job(config, engine, fingerprint=PRINT)
    assert answered(engine) == [3, 4] and job.errors == {"invalid_line": 1, "request_failed": 1}
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [1, 2, 3, 4] and ["error" in record for record in records] == [
        False,
        True,
        True,
        False,
    ]


def test_c47_an_answer_belongs_to_its_line_not_to_its_number(tmp_path: Path) -> None:
    """Equal ids, and lines that change places between two runs."""
    config = config_of(tmp_path, resume="force")
    first = {"id": "a", "prompt": "first"}, {"id": "a", "prompt": "second"}, {"id": "c", "prompt": "c", "max_tokens": 9}
    (tmp_path / "in.jsonl").write_bytes(jsonl(*first))
    killed_run(config, 3)
    (tmp_path / "in.jsonl").write_bytes(jsonl(first[1], first[0], first[2], {"id": "d", "prompt": "more"}))
    engine = FakeEngine()
    run_job(config, engine, fingerprint=PRINT)
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [(r["id"], r["line"], r["text"]) for r in records] == [
        ("a", 1, "SECOND"),
        ("a", 2, "FIRST"),
        ("c", 3, "C"),
        ("d", 4, "MORE"),
    ]
    assert line_digest(Line(1, {"a": 1})) == line_digest(Line(2, {"a": 1})) != line_digest(Line(1, {"a": 2}))
    assert line_digest(BadLine(1, "x")) != line_digest(BadLine(1, "y"))
    assert line_digest(BadLine(1, "x", {"id": "a"})) != line_digest(BadLine(1, "x", {"id": "b"}))  # records say the id


def test_a_shorter_input_leaves_what_it_lacks_out(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="force")
    killed_run(config, 4)
    config.job.limit = 2
    run_job(config, fingerprint=PRINT)
    assert [record["line"] for record in read_jsonl(tmp_path / "out.jsonl")] == [1, 2]


def test_another_number_of_ranks_left_journals(tmp_path: Path) -> None:
    """Three ranks were killed; one goes on. A later record of a line stands over an earlier one."""
    config, files = config_of(tmp_path), RunFiles(tmp_path / "out.jsonl")
    lines = [
        Line(number, {"id": f"日{number - 1}", "prompt": f"line {number - 1}", "max_tokens": number})
        for number in range(1, 7)
    ]
    for run, rank, held in ((1, 0, [1, 4]), (1, 2, [2]), (2, 1, [4, 6])):
        with JournalWriter(files.journal_path(run, rank), Header(run, rank, PRINT)) as journal:
            for number in held:
                journal.append(number, line_digest(lines[number - 1]), b'{"line": %d, "run": %d}\n' % (number, run))
    files.journal_path(2, 0).write_bytes(b"")  # killed at birth
    engine = FakeEngine()
    run_job(config, engine, fingerprint=PRINT)
    assert answered(engine) == [3, 5]
    assert [record.get("run") for record in read_jsonl(tmp_path / "out.jsonl")] == [1, 1, None, 2, None, 2]


def test_a_run_that_is_alive_is_waited_for_and_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, files = config_of(tmp_path), RunFiles(tmp_path / "out.jsonl")
    monkeypatch.setattr(resume, "PATIENCE_S", 0.2)
    with JournalWriter(files.journal_path(1, 0), Header(1, 0, PRINT)) as journal:
        with pytest.raises(ValueError, match=r"a run that is still alive writes out.jsonl.journal-1-rank-0; stop it"):
            begin_run(files, PRINT, config.job, overwrite=False)
        journal.append(1, 0, b"{}\n")
    assert begin_run(files, PRINT, config.job, overwrite=False).run == 2


def write_until_killed(path: str) -> None:
    writer = JournalWriter(Path(path), Header(1, 0, PRINT))
    number = 0
    while True:
        number += 1
        writer.append(number, number, b'{"id": %d, "text": "%s"}\n' % (number, b"x" * (number % 50)))
        if number % 100 == 0:
            time.sleep(0.001)


def test_c13_kill_9_at_any_moment_leaves_a_beginning(tmp_path: Path) -> None:
    """All records up to some point, each whole; and the lock is free at once."""
    path = tmp_path / "out.jsonl.journal-1-rank-0"
    for _ in range(5):
        process = get_context("fork").Process(target=write_until_killed, args=(str(path),), daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 20_000) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        start = begin_run(RunFiles(tmp_path / "out.jsonl"), PRINT, JobConfig(), overwrite=False)
        assert start.run == 2 and start.ledger.num_done > 100
        ledger = Ledger()
        assert ledger.read([path]) <= 1
        path.unlink()


def test_old_records_survive_a_header_only_newer_run(tmp_path: Path) -> None:
    config, files = config_of(tmp_path), RunFiles(tmp_path / "out.jsonl")
    line = Line(1, {"id": "日0", "prompt": "line 0", "max_tokens": 1})
    record = frame(1, line_digest(line), ANSWERED, b'{"line": 1}\n')
    files.journal_path(1, 0).write_bytes(header_frame(Header(1, 0, PRINT)) + record)
    files.journal_path(2, 0).write_bytes(header_frame(Header(2, 0, PRINT))[:20])
    start = begin_run(files, PRINT, config.job, overwrite=False)
    assert (start.run, start.ledger.num_done) == (2, 1)
