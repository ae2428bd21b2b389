"""The output: order, shards, Parquet, and what a full disk leaves."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, JobConfig
from moe.batch import output
from moe.batch.output import put_together
from moe.batch.parquet_output import check_pyarrow
from moe.batch.run_files import RunFiles
from tests.test_batch.fakes import FakeEngine, jsonl, read_jsonl, run_job


def config_of(folder: Path, *lines: Any, name: str = "out.jsonl", **job: Any) -> Config:
    (folder / "in.jsonl").write_bytes(jsonl(*lines))
    return Config(input=str(folder / "in.jsonl"), output=str(folder / name), job=JobConfig(**job))


@pytest.mark.parametrize(("num_lines", "shards"), [(7, 3), (2, 4), (0, 2), (5, 1)])
def test_shards_are_even_and_in_order(tmp_path: Path, num_lines: int, shards: int) -> None:
    config = config_of(tmp_path, *({"id": i, "prompt": "x", "max_tokens": 9 - i} for i in range(num_lines)))
    config.job.shards = shards
    run_job(config)
    names = sorted(path.name for path in tmp_path.glob("out*.jsonl"))
    assert len(names) == shards
    parts = [read_jsonl(tmp_path / name) for name in names]
    assert [record["id"] for part in parts for record in part] == list(range(num_lines))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_parquet_holds_the_records_and_what_they_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("moe.batch.parquet_output.GROUP_RECORDS", 2)

    def openai(custom_id: str, body: dict[str, Any], kind: str) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{kind}", "body": body}

    messages = [{"role": "user", "content": "hi"}]
    lines = (
        {"id": "a", "prompt": "x\u2028y", "n": 2},
        {"id": {"b": 1}, "prompt": 5},
        openai("c", {"prompt": "p"}, "completions"),
        openai("d", {"messages": messages}, "chat/completions"),
        openai("e", {"prompt": "p", "stream": True}, "completions"),
    )
    run_job(config_of(tmp_path, *lines))
    run_job(config_of(tmp_path, *lines, name="out.parquet"))
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [json.loads(row["record"]) for row in table] == read_jsonl(tmp_path / "out.jsonl")
    assert [row["id"] for row in table] == ["a", '{"b":1}', "c", "d", "e"]
    assert [row["line"] for row in table] == [1, 2, 3, 4, 5]  # records of OpenAI's form have no such field
    assert [row["text"] for row in table] == ["X\u2028Y", None, "P", "USER:HI", None]
    assert [row["error_type"] for row in table] == [None, "invalid_line", None, None, "invalid_line"]
    assert [row["prompt_tokens"] for row in table] == [3, None, 1, 7, None]
    assert [row["finish_reason"] for row in table] == ["stop", None, "stop", "stop", None]
    assert parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3


def test_parquet_takes_what_is_no_utf8(tmp_path: Path) -> None:
    """Half of a surrogate pair in the id of a line that is refused: one cell must not cost the whole output."""
    parquet = pytest.importorskip("pyarrow.parquet")
    config = config_of(tmp_path, {"id": "a", "prompt": "x"}, name="out.parquet")
    with (tmp_path / "in.jsonl").open("ab") as file:
        file.write(rb'{"id": "\ud800", "prompt": NaN}' + b"\n" + rb'{"id": ["\ud800"], "prompt": NaN}' + b"\n")
    run_job(config)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column("id").to_pylist() == ["a", r"\ud800", r'["\ud800"]']


def test_the_form_is_that_of_the_name_not_of_what_it_links_to(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"id": "a", "prompt": "x"}, name="out.jsonl")
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "data.parquet")
    run_job(config)
    assert read_jsonl(tmp_path / "data.parquet")[0]["id"] == "a" and (tmp_path / "out.jsonl").is_symlink()


def test_parquet_without_its_package_is_told_before_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"out.parquet asks for Parquet, which needs the package pyarrow; install"):
        check_pyarrow(tmp_path / "out.parquet")


def test_c37_a_disk_full_at_the_end_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is in the journals: with some space the same command only puts the output together."""

    class Full(output.LineOutput):
        def write(self, number: int, record: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    config = config_of(tmp_path, *({"id": i, "prompt": "x"} for i in range(5)))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is full while the output is put toget"):
        patch.setattr(output, "LineOutput", Full)
        run_job(config)
    assert not (tmp_path / "out.jsonl").exists() and not list(tmp_path.glob("*.partial"))
    engine = FakeEngine()
    _, ledger = run_job(config, engine)
    assert ledger.kept == 5 and not engine.requests and len(read_jsonl(tmp_path / "out.jsonl")) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job.json"]


def test_records_out_of_sight_are_not_passed_over(tmp_path: Path) -> None:
    config = config_of(tmp_path, *({"id": i, "prompt": "x"} for i in range(5)))
    _, ledger = run_job(config)
    with pytest.raises(ValueError, match=r"0 records of 5 lines can be seen here; all ranks need one folder"):
        put_together(RunFiles(tmp_path / "other.jsonl"), {}, ledger)
