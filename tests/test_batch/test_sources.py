"""Inputs of every format: what is found, read, refused, and what a damaged file says."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from configs.checks import freeze
from configs.schema import Config, JobConfig
from moe.batch.ledger import line_digest
from moe.batch.lines import BadLine, InputFault, Line
from moe.batch.sources import DEMO_PROMPTS, Source, column_mapping, job_lines, resolve_order
from moe.batch.streams import unpacked

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

THREE = b'{"id":1,"prompt":"a"}\n\n{"id":2,"prompt":"b"}\n{"id":3,"prompt":"c"}'
ROWS = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}, {"id": 3, "prompt": "c"}]


def config_of(name: Path | str | None, **job: Any) -> Config:
    return freeze(Config(input=None if name is None else str(name), job=JobConfig(**job)))


def read(name: Path | str, limit: int | None = None, **job: Any) -> list[Line | BadLine]:
    return list(Source.open(config_of(name, **job)).lines(limit))


def records(lines: list[Line | BadLine]) -> list[dict[str, Any]]:
    assert all(isinstance(line, Line) for line in lines), lines
    return [line.record for line in lines if isinstance(line, Line)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(THREE, id="plain"),
        pytest.param(gzip.compress(THREE), id="gzip"),
        pytest.param(gzip.compress(THREE[:30]) + gzip.compress(THREE[30:]), id="gzip of two members"),
        pytest.param(gzip.compress(THREE) + b"\0" * 9000, id="gzip filled up with zeros"),
        pytest.param(gzip.compress(b"") + gzip.compress(THREE), id="gzip with an empty member"),
        pytest.param(zstandard.compress(THREE), id="zstd"),
        pytest.param(zstandard.compress(THREE[:30]) + zstandard.compress(THREE[30:]), id="zstd of two frames"),
        pytest.param(
            b"\x53\x2a\x4d\x18\x02\x00\x00\x00xy" + zstandard.compress(THREE), id="zstd after a skipped frame"
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".gz", ".zst", ""])  # what it is stands in its first bytes
def test_packed_or_not_the_lines_are_the_same(tmp_path: Path, data: bytes, suffix: str) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_bytes(data)
    lines = read(path)
    assert records(lines) == ROWS
    assert [line.number for line in lines] == [1, 3, 4] and all(line.origin is None for line in lines)
    assert records(read(path, 2)) == ROWS[:2]


def many_lines() -> bytes:
    chance = random.Random(0)
    return b"".join(b'{"id":%d,"prompt":"%s"}\n' % (at, chance.randbytes(500).hex().encode()) for at in range(1000))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-5], "stream is cut off before its end"),
        (lambda data: data[: len(data) // 2], "stream is cut off before its end"),
        (lambda data: data + b"trailing garbage", "stream is damaged"),
        (lambda data: data[: len(data) // 2] + bytes(9000) + data[len(data) // 2 + 9000 :], "stream is damaged"),
    ],
    ids=["end", "half", "garbage", "middle"],
)
def test_a_damaged_stream_gives_its_whole_lines_and_says_how_many(
    tmp_path: Path, pack: Any, damage: Any, reason: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(damage(pack(many_lines())))
    source = Source.open(config_of(path))
    lines: list[Line | BadLine] = []
    with pytest.raises(InputFault, match=reason) as raised:
        for line in source.lines():
            lines.append(line)  # what came before the fault counts
    if reason != "stream is damaged" or pack is zstandard.compress:  # gzip finds damage inside late, by its sum
        assert [record["id"] for record in records(lines)] == list(range(len(lines)))
    message = str(raised.value)
    assert str(path) in message and f"after {len(lines)} records of it" in message
    assert 300 < len(lines) <= 1000 and f"job.limit={len(lines)}" in message
    assert len(list(source.lines(len(lines)))) == len(lines)


def test_a_stream_that_is_damaged_from_its_first_bytes_is_refused_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(b"\x1f\x8b" + b"nothing of the kind")
    with pytest.raises(ValueError, match=r"input=.*in\.gz cannot be read: the gzip stream is damaged"):
        Source.open(config_of(path))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"PK\x03\x04", "is a zip archive"),
        (b"BZh9", "is a bzip2 file"),
        (b"\xfd7zXZ\x00", "is an xz file"),
        (b"ARROW1", "is an Arrow file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, head: bytes, words: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(head + b"rest")
    with pytest.raises(ValueError, match=words):
        Source.open(config_of(path))


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x1f\x8b", b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd", b"PAR1"]))
def test_any_bytes_are_lines_or_a_reason(tmp_path_factory: pytest.TempPathFactory, data: bytes, head: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(head + data)
    try:
        lines = read(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert [line.number for line in lines] == sorted({line.number for line in lines})
        assert len(lines) <= (head + data).count(b"\n") + 1


@given(st.lists(st.binary(max_size=60), max_size=8), st.data())
def test_any_bytes_packed_in_any_pieces_are_the_same_bytes(pieces: list[bytes], data: st.DataObject) -> None:
    pack = data.draw(st.sampled_from([gzip.compress, zstandard.compress]))
    packed = b"".join(pack(piece) for piece in [b"x", *pieces])
    assert unpacked(io.BufferedReader(io.BytesIO(packed))).read() == b"x" + b"".join(pieces)  # pyright: ignore


def test_several_files_and_patterns_are_one_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"id":"b"}')  # no last end of line
    (tmp_path / "a.jsonl").write_bytes(b'{"id":"a"}\n\n\n')
    (tmp_path / "z.gz").write_bytes(gzip.compress(b'nope\n{"id":"z"}\n'))
    (tmp_path / "x[1].jsonl").write_bytes(b'{"id":"x"}\n')
    source = Source.open(config_of("[ab].jsonl", more_input=["z.gz", "x[1].jsonl"]))  # a file of that name comes first
    assert source.paths == (Path("a.jsonl"), Path("b.jsonl"), Path("z.gz"), Path("x[1].jsonl"))
    lines = list(source.lines())
    assert [(line.number, line.origin) for line in lines] == [
        (1, "a.jsonl:1"),
        (4, "b.jsonl:1"),  # the blank lines of a.jsonl count
        (5, "z.gz:1"),
        (6, "z.gz:2"),
        (7, "x[1].jsonl:1"),
    ]
    assert [line.record and line.record["id"] for line in lines] == ["a", "b", None, "z", "x"]
    assert [line.number for line in source.lines(3)] == [1, 4, 5]
    assert source.name == "a.jsonl and 3 more"


@pytest.mark.parametrize(
    ("name", "job", "message"),
    [
        ("no.jsonl", {}, r"input=no\.jsonl does not exist"),
        ("no*.jsonl", {}, r"input=no\*\.jsonl matches no file"),
        (
            "a.jsonl",
            {"more_input": ["*.jsonl"]},
            r"job\.more_input=\*\.jsonl names a\.jsonl, which input=a\.jsonl names",
        ),
        ("folder", {}, r"input=folder is a folder, and no dataset .* as in folder/\*\.parquet"),
        ("/dev/null", {}, r"input=/dev/null is a pipe or a device"),
        ("x" * 300, {}, r"cannot be read: File name too long"),
        ("a.parquet", {}, r"input=a\.parquet is no Parquet file \(it does not begin with PAR1\)"),
        ("a.jsonl", {"columns": [":x"]}, r"job\.columns has ':x'; write FIELD:COLUMN"),
        ("a.jsonl", {"columns": ["prompt:"]}, r"job\.columns has 'prompt:'"),
        ("a.jsonl", {"columns": ["id", "id:x"]}, r"job\.columns sets 'id' twice"),
    ],
)
def test_wrong_names_are_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, job: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(THREE)
    (tmp_path / "a.parquet").write_bytes(THREE)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message):
        Source.open(config_of(name, **job))


def test_standard_input_is_read_once_and_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (THREE, gzip.compress(THREE), zstandard.compress(THREE)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))  # pyright: ignore
        config = config_of("-")
        source = Source.open(config)
        assert not source.rereadable and source.paths == () and source.name == "standard input"
        assert records(list(job_lines(config, source))) == ROWS
        with pytest.raises(InputFault, match="standard input cannot be read on: it was read once"):
            next(source.lines())


def test_parquet_on_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"PAR1 and more"))))  # pyright: ignore
    with pytest.raises(
        InputFault, match="Parquet file, which cannot be read from a pipe; give its name, after 0 records"
    ):
        next(Source.open(config_of("-")).lines())


def test_a_standard_input_that_is_closed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a scheduler that gives a process none: a wrong command, told before anything is loaded."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match=r"^input=- is standard input, which is closed; pipe lines into it"):
        Source.open(config_of("-"))


def test_the_demos_prompts_are_the_default() -> None:
    source = Source.open(config_of(None))
    assert source.paths == (DEMO_PROMPTS,) and len(records(list(source.lines()))) > 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(input="-", job=JobConfig(strict=True)), "job.strict=true reads every line"),
        (Config(job=JobConfig(more_input=["a"])), "give the first file as input"),
        (Config(input="-", job=JobConfig(more_input=["a"])), "input=- names none"),
        (Config(input="a", job=JobConfig(more_input=[""])), "has an empty name"),
        (Config(job=JobConfig(order="shuffled")), "job.order='shuffled' is unknown; give auto or file or prefix"),
        (Config(job=JobConfig(look_ahead=0)), "job.look_ahead=0 is out of range"),
        (Config(job=JobConfig(look_ahead_mb=0)), "job.look_ahead_mb=0 is out of range"),
    ],
)
def test_keys_that_contradict_each_other(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        freeze(config)


def test_auto_orders_by_prefix_where_that_helps(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(THREE)
    config = config_of(path)
    source = Source.open(config)
    assert resolve_order(config, source) == "prefix"
    assert resolve_order(config_of("-"), Source.open(config_of("-"))) == "file"
    no_cache = Config(input=str(path))
    no_cache.cache.prefix_caching = False
    assert resolve_order(freeze(no_cache), source) == "file"
    assert resolve_order(config_of(path, order="file"), source) == "file"
    assert [line.number for line in job_lines(config_of(path, limit=2), source)] == [1, 3]


# Tables


def table(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


CHATS = [
    {"id": "a", "messages": [{"role": "user", "content": "x", "name": None}], "max_tokens": 3, "temperature": None},
    {
        "id": None,
        "messages": [{"role": "assistant", "content": None, "name": "n"}],
        "max_tokens": 4,
        "temperature": 0.5,
    },
]
FILLED = [
    {"id": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    {"messages": [{"role": "assistant", "content": None, "name": "n"}], "max_tokens": 4, "temperature": 0.5},
]


def test_rows_of_parquet_are_lines_without_their_empty_cells(tmp_path: Path) -> None:
    lines = read(table(tmp_path / "in.data", CHATS))
    assert records(lines) == FILLED and [line.number for line in lines] == [1, 2]
    assert all(line.num_bytes > 0 for line in lines)


def test_columns_make_fields_and_the_rest_is_left_out(tmp_path: Path) -> None:
    rows = [{"row": at, "question": f"q{at}", "when": b"bytes"} for at in range(300)]
    path = table(tmp_path / "in.parquet", rows, row_group_size=70)
    assert records(read(path, 299, columns=["prompt:question", "id:row"])) == [
        {"prompt": f"q{at}", "id": at} for at in range(299)
    ]
    for columns, message in (
        ([], "has a column 'row', and 'row' is no field of a line; name the columns .*prompt:row"),
        (["prompt:answer"], "has no column 'answer', which job.columns names; it has row, question, when"),
        (["question"], "has a column 'question', and 'question' is no field"),
        (["prompt:when"], "has binary in column 'when', which no line holds"),
    ):
        with pytest.raises(ValueError, match=message):
            Source.open(config_of(path, columns=columns))


def test_columns_rename_the_fields_of_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"q":"x","other":1}\nnope\n{"other":2}\n{"q":"y","q":"z"}\n')
    first, bad, without, twice = read(path, columns=["prompt:q"])
    assert first == Line(1, {"prompt": "x"}) and without == Line(3, {})
    assert line_digest(first) == line_digest(Line(1, {"prompt": "x"}))  # of what it holds now
    assert isinstance(bad, BadLine) and bad.record is None
    assert isinstance(twice, BadLine) and twice.record == {"prompt": "z"}
    assert column_mapping(["prompt:a:b"]) == {"prompt": "a:b"}


def test_a_cell_that_json_lacks_is_a_bad_line_and_the_rest_is_read(tmp_path: Path) -> None:
    rows = [{"id": 1, "prompt": "a", "top_p": float("nan")}, {"id": 2, "prompt": "b", "top_p": 0.5}]
    bad, good = read(table(tmp_path / "in.parquet", rows))
    assert bad == BadLine(1, "column 'top_p': nan is no number of JSON", {"id": 1, "prompt": "a"})
    assert good == Line(2, rows[1])
    raw = pyarrow.array([b"fine", b"\xff\xfe"]).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"prompt": raw}), tmp_path / "utf8.parquet")
    fine, broken = read(tmp_path / "utf8.parquet")
    assert fine == Line(1, {"prompt": "fine"}) and isinstance(broken, BadLine) and "utf-8" in broken.reason


def test_a_torn_parquet_file_is_refused_and_a_damaged_one_says_how_far_it_went(tmp_path: Path) -> None:
    rows = [{"id": at, "prompt": random.Random(at).randbytes(200).hex()} for at in range(2000)]
    path = table(tmp_path / "in.parquet", rows, row_group_size=500, use_dictionary=False)
    whole = path.read_bytes()
    for cut in (5, 100, len(whole) // 2, len(whole) - 4):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"input=.*in\.parquet is no whole Parquet file"):
            Source.open(config_of(path))
    middle = len(whole) * 5 // 8
    path.write_bytes(whole[:middle] + bytes(60_000) + whole[middle + 60_000 :])
    seen = []
    with pytest.raises(InputFault, match=r"in\.parquet cannot be read on: .* after \d+ records of it") as raised:
        for line in Source.open(config_of(path)).lines():
            seen.append(line)
    assert f"after {len(seen)} records" in str(raised.value) and 500 <= len(seen) < 2000
    assert records(seen) == rows[: len(seen)]


def test_a_saved_dataset_is_read_with_its_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"id": at, "prompt": f"p{at}"} for at in range(300)]
    whole = datasets.Dataset.from_list(rows)
    whole.filter(lambda row: row["id"] % 2 == 0).save_to_disk(tmp_path / "even", num_shards=2)
    datasets.DatasetDict(train=whole).save_to_disk(tmp_path / "splits")
    assert records(read(tmp_path / "even", 149)) == rows[0:298:2]
    with pytest.raises(ValueError, match=r"is a dataset of several splits; give one of them: .*splits/train"):
        Source.open(config_of(tmp_path / "splits"))
    both = read(tmp_path / "splits" / "train", more_input=[str(tmp_path / "even")], columns=["prompt"])
    assert len(both) == 450 and both[300] == Line(301, {"prompt": "p0"}, f"{tmp_path}/even:1")
    (tmp_path / "even" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="is no whole dataset"):
        Source.open(config_of(tmp_path / "even"))


@pytest.mark.parametrize(
    ("module", "head", "package"),
    [("zstandard", b"\x28\xb5\x2f\xfd", "zstandard"), ("pyarrow", b"PAR1", "pyarrow")],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, head: bytes, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "in").write_bytes(head + b"rest")
    with pytest.raises(ValueError, match=rf"needs the package {package}; install sortyard\[jobs\]"):
        Source.open(config_of(tmp_path / "in"))


def test_identity_tells_changed_inputs_and_not_other_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        (tmp_path / folder / "in.jsonl").write_bytes(THREE)
    (tmp_path / "b" / "more.jsonl").write_bytes(THREE)
    first = Source.open(config_of(tmp_path / "a" / "in.jsonl")).identity()
    assert first == Source.open(config_of(tmp_path / "b" / "in.jsonl")).identity()
    more = Source.open(config_of(tmp_path / "b" / "in.jsonl", more_input=[str(tmp_path / "b" / "more.jsonl")]))
    assert len(more.identity()) == 2 and more.identity()["input.0"] == first["input.0"]
    (tmp_path / "b" / "in.jsonl").write_bytes(THREE.replace(b'"c"', b'"d"'))
    assert Source.open(config_of(tmp_path / "b" / "in.jsonl")).identity() != first
    assert json.dumps(first)  # goes into a fingerprint


def test_identity_of_a_large_file_looks_at_its_ends(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        file.write(THREE)
        file.truncate(5 << 30)  # a hole: no disk, no time
    source = Source.open(config_of(path))
    first = source.identity()
    with path.open("r+b") as file:
        file.seek(-1, io.SEEK_END)
        file.write(b"\n")
    assert source.identity() != first
