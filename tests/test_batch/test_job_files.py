"""The names of a job's files: what is refused before anything is read or loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from configs.schema import Config, JobConfig
from moe.batch.job_files import job_files
from moe.batch.output import is_parquet
from moe.batch.run_files import RunFiles


def test_names_by_default_and_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "questions.jsonl"
    source.write_text("{}\n")
    config = Config()
    assert job_files(config).output == Path("demo.answers.jsonl") and job_files(config).overwrite
    config.input = str(source)
    assert job_files(config).output == Path("questions.answers.jsonl") and not job_files(config).overwrite
    config.output = str(source)
    with pytest.raises(ValueError, match="is the input file"):
        job_files(config)
    os.link(source, tmp_path / "other.jsonl")  # the same file by another name
    config.output = "other.jsonl"
    with pytest.raises(ValueError, match="is the input file"):
        job_files(config)
    config.output = str(tmp_path)
    (tmp_path / "o-00002-of-00002.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"o-00002-of-00002.jsonl is a folder"):  # found now, not at the job's end
        job_files(Config(input=str(source), output=str(tmp_path / "o.jsonl"), job=JobConfig(shards=2)))
    with pytest.raises(ValueError, match="is a folder"):
        job_files(config)
    config.input = "missing.jsonl"
    with pytest.raises(ValueError, match=r"input=missing\.jsonl does not exist"):
        job_files(config)
    config.input = "a" * 300  # a name that the system refuses to look up
    with pytest.raises(ValueError, match=r"a cannot be read: File name too long"):
        job_files(config)
    os.mkfifo("pipe")
    config.input = "pipe"
    with pytest.raises(ValueError, match="input=pipe is a pipe or a device"):
        job_files(config)
    config.input = str(source)
    for output in ("pipe", "/dev/null"):
        config.output = output
        with pytest.raises(ValueError, match=f"output={output} is a pipe or a device"):
            job_files(config)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("-", "is no file: answers are not written to standard output"),
        ("folder/", "is a folder's name"),
        ("a.jsonl.gz", "asks by its name for a form that is not written: there are JSONL and .parquet"),
        ("a.JSONL.ZST", "asks by its name for a form"),
        ("a.csv", "asks by its name for a form"),
    ],
)
def test_a_name_that_asks_for_something_else_is_refused(tmp_path: Path, name: str, said: str) -> None:
    """What would lie under it is JSONL, which whoever reads such a name takes for damaged."""
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    with pytest.raises(ValueError, match=f"^output={re.escape(name)} {re.escape(said)}"):
        job_files(Config(input=str(source), output=name))


def test_parquet_is_asked_for_in_capitals_too() -> None:
    assert is_parquet(Path("A.PARQUET")) and is_parquet(Path("a.parquet")) and not is_parquet(Path("parquet"))


def test_a_shard_is_not_the_input(tmp_path: Path) -> None:
    source = tmp_path / "a-00002-of-00003.jsonl"
    source.write_text("{}\n")
    config = Config(input=str(source), output=str(tmp_path / "a.jsonl"))
    job_files(config)
    config.job.shards = 3
    with pytest.raises(ValueError, match="is the input file"):
        job_files(config)


@pytest.mark.parametrize("key", ["input", "output"])
def test_a_report_destroys_neither_prompts_nor_answers(tmp_path: Path, key: str) -> None:
    report = tmp_path / "report"
    report.mkdir()
    names = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl", key: report / "metrics.json"}
    names["input"].write_text("{}\n")
    config = Config(input=str(names["input"]), output=str(names["output"]))
    config.job.report = str(report)
    with pytest.raises(ValueError, match=f"its metrics.json is the {key}.* file, which it would destroy"):
        job_files(config)
    config.job.report = str(tmp_path / "other")
    assert job_files(config).report == tmp_path / "other"


def test_a_linked_output_is_written_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "out.jsonl").symlink_to("far/answers.jsonl")
    files = RunFiles(tmp_path / "out.jsonl", shards=1)
    assert files.finals == [tmp_path / "far" / "answers.jsonl"]
    assert files.journal_path(2, 7) == tmp_path / "far" / "answers.jsonl.journal-2-rank-7"
    assert RunFiles(tmp_path / "a.b.jsonl", shards=2).finals[1].name == "a.b-00002-of-00002.jsonl"


def test_journals_are_found_by_their_whole_name(tmp_path: Path) -> None:
    """Names with characters of patterns, another output's journals, and ten runs in the right order."""
    files = RunFiles(tmp_path / "a[1].jsonl")
    for run in (10, 9, 1):
        files.journal_path(run, 0).touch()
    for other in ("a1.jsonl.journal-1-rank-0", "xa[1].jsonl.journal-1-rank-0", "a[1].jsonl.journal-1-rank-0.bak"):
        (tmp_path / other).touch()
    assert [journal.run for journal in files.journals()] == [1, 9, 10]
    assert RunFiles(tmp_path / "no" / "such.jsonl").journals() == []
