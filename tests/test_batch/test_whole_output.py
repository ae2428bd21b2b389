"""When an output that is there counts as this job's own, whole: never while a line could be missing or be another's."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, JobConfig
from moe.batch.output_lock import output_lock
from moe.batch.resume import begin_run
from moe.batch.run_files import RunFiles
from tests.test_batch.fakes import FakeEngine, jsonl, read_jsonl, run_job

PRINT = {"model": "demo"}
OTHER = {"model": "other"}


class Killed(BaseException):
    """Stands for a process that is gone at once."""


def config_of(folder: Path, **job: Any) -> Config:
    (folder / "in.jsonl").write_bytes(jsonl(*({"id": i, "prompt": f"line {i}"} for i in range(4))))
    return Config(input=str(folder / "in.jsonl"), output=str(folder / "out.jsonl"), job=JobConfig(**job))


def killed_at_the_end(config: Config, monkeypatch: pytest.MonkeyPatch, moves: int, fingerprint: dict[str, str]) -> None:
    """A run that is gone after so many of the moves into place."""
    left, replace = [moves], os.replace

    def crashing(source: Path, target: Path) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", crashing)
        run_job(config, fingerprint=fingerprint)


def test_the_first_lines_alone_are_not_the_whole_job(tmp_path: Path) -> None:
    config, files = config_of(tmp_path, limit=2), RunFiles(tmp_path / "out.jsonl")
    run_job(config, fingerprint=PRINT)
    assert begin_run(files, PRINT, config.job, overwrite=False).whole is not None
    config.job.limit = None
    with pytest.raises(ValueError, match=r"was made with other settings: job.limit=2 there, null now"):
        run_job(config, fingerprint=PRINT)
    config.job.overwrite = True
    run_job(config, fingerprint=PRINT)
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 4


def test_standard_input_is_never_taken_for_what_it_held_before(tmp_path: Path) -> None:
    config, files = config_of(tmp_path), RunFiles(tmp_path / "out.jsonl")
    run_job(config, fingerprint=PRINT)
    with pytest.raises(ValueError, match="exists, whole; whether it answers what the input holds now"):
        begin_run(files, PRINT, config.job, overwrite=False, rereadable=False)


def test_another_number_of_shards_is_another_output(tmp_path: Path) -> None:
    config = config_of(tmp_path, shards=2)
    run_job(config, fingerprint=PRINT)
    config.job.shards = 1
    with pytest.raises(ValueError, match=r"out-00001-of-00002.jsonl exists and was made with job.shards=2"):
        run_job(config, fingerprint=PRINT)


def test_an_older_output_of_the_same_size_is_not_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the moves of the mark and of the output, of which the old one has as many bytes."""
    config = config_of(tmp_path)
    run_job(config, fingerprint=PRINT)
    new = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(b"x" * len(new))
    config.job.overwrite = True
    killed_at_the_end(config, monkeypatch, 1, OTHER)
    config.job.overwrite = False
    engine = FakeEngine()
    run_job(config, engine, fingerprint=OTHER)
    assert (tmp_path / "out.jsonl").read_bytes() == new and not engine.requests


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_while_journals_go_answers_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    config, files = config_of(tmp_path, overwrite=overwrite), RunFiles(tmp_path / "out.jsonl")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFiles, "drop_journals", lambda self: self.journals() and (_ for _ in ()).throw(Killed))
        run_job(config, fingerprint=PRINT)
    assert files.journals()
    assert begin_run(files, PRINT, config.job, overwrite=overwrite).whole is not None and not files.journals()


def test_an_output_that_is_made_again_is_not_whole_until_then(tmp_path: Path) -> None:
    """Also where torchrun starts the ranks again before the first of them wrote a record."""
    config, files = config_of(tmp_path, overwrite=True), RunFiles(tmp_path / "out.jsonl")
    run_job(config, fingerprint=PRINT)
    assert begin_run(files, PRINT, config.job, overwrite=True).whole is None
    assert begin_run(files, PRINT, config.job, overwrite=True, restarted=True).whole is None
    assert (tmp_path / "out.jsonl").exists()
    with pytest.raises(ValueError, match=r"out.jsonl exists; give another name"):
        begin_run(files, PRINT, config.job, overwrite=False)


def test_one_run_at_a_time_also_while_it_puts_the_output_together(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "out.jsonl")
    with output_lock(files):
        alive = r"another run towards it is still alive and holds out.jsonl.lock"
        with pytest.raises(ValueError, match=alive), output_lock(files, patience_s=0):
            pass
        with output_lock(RunFiles(tmp_path / "out.json"), patience_s=0):
            pass  # another output
    assert not files.lock_path.exists()
    files.lock_path.touch()  # as a killed run leaves it
    with output_lock(files, patience_s=0):
        files.lock_path.unlink()  # by a run that ended after this one had opened it
        files.lock_path.touch()
        with output_lock(files, patience_s=0):
            pass
    with output_lock(RunFiles(tmp_path / "no folder" / "out.jsonl")):
        pass  # which the journal says


def read_only(self: Path, *, missing_ok: bool = False) -> None:
    """Of a file system that is mounted so: it says no whether or not the file is there."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))


def test_a_whole_output_can_lie_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, files = config_of(tmp_path), RunFiles(tmp_path / "out.jsonl")
    run_job(config, fingerprint=PRINT)
    monkeypatch.setattr(Path, "unlink", read_only)
    assert begin_run(files, PRINT, config.job, overwrite=False).whole is not None
    other = RunFiles(tmp_path / "other.jsonl")
    assert begin_run(other, PRINT, config.job, overwrite=False).run == 1  # its journal will say that it cannot be made


@pytest.mark.parametrize("left", ["out.jsonl.journal-1-rank-0", "out.jsonl.partial"])
def test_what_is_in_the_way_and_stays_is_named(tmp_path: Path, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, files = config_of(tmp_path), RunFiles(tmp_path / "out.jsonl")
    (tmp_path / left).write_bytes(b"killed at birth")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=rf"{left} is in the way.*Read-only.*move it"):
        patch.setattr(Path, "unlink", read_only)
        begin_run(files, PRINT, config.job, overwrite=False)
    (tmp_path / left).unlink()
    (tmp_path / left).mkdir()
    with pytest.raises(ValueError, match=rf"{left} is.*Is a directory.*move it"):
        begin_run(files, PRINT, config.job, overwrite=False)


def test_an_output_that_cannot_be_looked_at_is_not_replaced(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    os.symlink("out.jsonl", tmp_path / "out.jsonl")  # to itself
    with pytest.raises(ValueError, match=r"out.jsonl exists; give another name"):
        begin_run(RunFiles(tmp_path / "out.jsonl"), PRINT, config.job, overwrite=False)
