"""A whole file through a job: order, window, error records, the output file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from moe.batch.answers import AnswerFile
from moe.batch.job import Job, bad_lines, job_files
from moe.batch.lines import Line, read_lines
from moe.batch.report import Progress
from tests.test_batch.fakes import FakeEngine, FakeTokenizer


def run(
    folder: Path, data: bytes, config: Config | None = None, tokenizer: Any = FakeTokenizer
) -> tuple[list[dict[str, Any]], FakeEngine, Job, list[Progress]]:
    """Records written for the input bytes, and everything that took part."""
    config = config or Config()
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(data)
    engine, seen = FakeEngine(), []
    job = Job(config, engine, tokenizer() if tokenizer else None, "fake")
    with AnswerFile.open(output, overwrite=True) as answers:
        job.run(source, answers, seen.append)
    with output.open("rb") as file:
        lines = list(read_lines(file))
    assert all(isinstance(line, Line) for line in lines)
    return [line.record for line in lines if isinstance(line, Line)], engine, job, seen


def jsonl(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_c04_bad_lines_are_records_and_the_run_goes_on(tmp_path: Path) -> None:
    data = (
        b'\xef\xbb\xbf{"id":"1","prompt":"good"}\r\n'
        b'{"id":"2","prompt": \n'
        b"[1,2,3]\n"
        b"\n"
        b"null\n"
        b'{"id":"5","prompt":17}\r\n'
        b'{"id":"6","prompt":"x","temperature":NaN}\n'
        b"\xff\xfe\n"
        b'{"id":"8","prompt":"good too"}\n'
    )
    records, engine, job, _ = run(tmp_path, data)
    assert [record["line"] for record in records] == [1, 2, 3, 5, 6, 7, 8, 9]
    assert [record.get("text") for record in records if "error" not in record] == ["GOOD", "GOOD TOO"]
    errors = [record for record in records if "error" in record]
    assert len(errors) == job.lines_failed == 6 and len(engine.requests) == 2
    assert [error["id"] for error in errors] == [None, None, None, "5", "6", None]  # known where the object was read
    for error in errors:
        assert error["error"]["type"] == "invalid_line"
        assert error["error"]["message"] and "\n" not in error["error"]["message"]


def nested(depth: int) -> bytes:
    return b"[" * depth + b"1" + b"]" * depth


@pytest.mark.parametrize(
    "fields",
    [
        b'"prompt":"x","temperature":1' + b"0" * 400,
        b'"prompt":"x","top_k":1' + b"0" * 30,
        b'"prompt":"x","max_tokens":1.5',
        b'"prompt":"x","logit_bias":{"1":1' + b"0" * 400 + b"}",
        b'"prompt":"x","stop":' + nested(300),
        b'"messages":[{"role":"user","content":"hi"}],"tools":[{"a":' + nested(600) + b"}]",
        b'"messages":[{"role":"user","content":"hi","a":' + nested(960) + b"}]",
        b'"messages":' + nested(985),
    ],
    ids=lambda fields: fields[:60].decode(),
)
def test_c04_no_value_of_a_line_ends_the_run(tmp_path: Path, fields: bytes) -> None:
    data = b'{"id":"bad",' + fields + b"}\n" + jsonl({"id": "good", "prompt": "x"})
    records, _, job, _ = run(tmp_path, data)
    assert job.lines_failed == 1 and records[0]["error"]["type"] == "invalid_line"
    assert len(records[0]["error"]["message"]) < 300
    assert records[1]["text"] == "X"


def test_c04_openai_lines_with_a_fault_of_their_json_keep_form_and_id(tmp_path: Path) -> None:
    head = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":'
    data = head + b'{"prompt":"x","temperature":Infinity}}\n' + head + b'{"prompt":"x","n":1,"n":2}}\n'
    records, _, _, _ = run(tmp_path, data)
    assert [record["custom_id"] for record in records] == ["a", "a"]
    assert "Infinity is no number" in records[0]["error"]["message"]
    assert "key 'n' stands twice" in records[1]["error"]["message"]
    assert {record["response"]["status_code"] for record in records} == {400}


def test_errors_of_tokenizer_and_engine_are_records_too(tmp_path: Path) -> None:
    system = [{"role": "system", "content": "x"}]
    data = jsonl(
        {"id": 1, "messages": system},
        {"id": 2, "prompt": "x" * 1001},
        {"id": 3, "prompt": "NaN!"},
        {"id": 4, "prompt": "fine"},
    )
    records, _, job, _ = run(tmp_path, data)
    assert [record["id"] for record in records] == [1, 2, 3, 4]
    messages = [record["error"]["message"] for record in records[:3]]
    assert messages == [
        "the chat template refused the messages: no system role",
        "the prompt has too many tokens",
        "the request ended with error",
    ]
    assert {record["error"]["type"] for record in records[:3]} == {"request_failed"}
    assert records[3]["text"] == "FINE" and job.lines_failed == 3
    assert all("text" not in record for record in records[:3])


def test_openai_lines_get_openai_records(tmp_path: Path) -> None:
    def line(custom_id: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}

    chat = line("f") | {"url": "/v1/chat/completions", "body": {"messages": [{"role": "system", "content": "x"}]}}
    bad = [line("b", prompt="x", stream=True), line("c", prompt="NaN!"), {"custom_id": "d", "body": {}}]
    bad += [line("e", prompt="x" * 1001), chat]
    records, _, job, _ = run(tmp_path, jsonl(line("a", prompt="hi", n=2), *bad))
    assert [record["custom_id"] for record in records] == ["a", "b", "c", "d", "e", "f"]
    assert all(set(record) == {"id", "custom_id", "response", "error"} for record in records)
    assert [choice["text"] for choice in records[0]["response"]["body"]["choices"]] == ["HI", "HI"]
    assert [record["response"]["status_code"] for record in records] == [200, 400, 500, 400, 400, 400]
    assert records[0]["error"] is None and records[1]["error"]["code"] == "invalid_line"
    assert "line 2: stream=true" in records[1]["error"]["message"]
    assert records[1]["response"]["body"]["error"]["message"] == records[1]["error"]["message"]
    assert len({record["id"] for record in records}) == 6 and job.lines_failed == 5


def test_records_come_in_input_order_whatever_finishes_first(tmp_path: Path) -> None:
    data = jsonl(*({"id": i, "prompt": "p", "max_tokens": n} for i, n in enumerate([50, 30, 10])), {"id": 3})
    records, engine, _, seen = run(tmp_path, data)
    assert engine.finished == ["line-3", "line-2", "line-1"]
    assert [record["id"] for record in records] == [0, 1, 2, 3]
    assert [progress.lines_done for progress in seen][-1] == 4


def test_the_window_bounds_what_is_read_ahead(tmp_path: Path) -> None:
    config = Config()
    config.job.window = 4
    data = jsonl({"id": 0, "prompt": "p", "max_tokens": 20}, *({"id": i, "prompt": "p"} for i in range(1, 30)))
    records, engine, _, seen = run(tmp_path, data, config)
    assert [record["id"] for record in records] == list(range(30))
    assert engine.most_running == 4
    early = [progress for progress in seen if progress.lines_done < progress.lines_read]
    assert early and max(progress.lines_read for progress in early[:19]) == 4  # the first line holds the window


def test_a_window_full_of_bad_lines_is_written_without_a_step(tmp_path: Path) -> None:
    config = Config()
    config.job.window = 2
    records, engine, job, _ = run(tmp_path, b"nope\n" * 9, config)
    assert [record["line"] for record in records] == list(range(1, 10))
    assert engine.stats.steps == 0 and job.lines_failed == 9


def test_duplicate_ids_are_both_kept_and_told_apart_by_line(tmp_path: Path) -> None:
    records, _, _, _ = run(tmp_path, jsonl({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"prompt": "z"}))
    assert [(record["id"], record["line"], record["text"]) for record in records] == [
        ("a", 1, "X"),
        ("a", 2, "Y"),
        (3, 3, "Z"),
    ]


def test_limit_and_empty_input(tmp_path: Path) -> None:
    config = Config()
    config.job.limit = 2
    records, _, job, _ = run(tmp_path, jsonl(*({"prompt": "x"} for _ in range(5))), config)
    assert len(records) == job.lines_read == 2
    assert run(tmp_path, b"\n\n")[0] == []


def test_samples_and_unicode_come_back_unchanged(tmp_path: Path) -> None:
    text = "x\u2028y\u0085z日本😀"
    records, _, _, _ = run(
        tmp_path, (json.dumps({"id": text, "prompt": text, "n": 2}, ensure_ascii=False) + "\n").encode()
    )
    assert records[0]["id"] == text
    assert [sample["text"] for sample in records[0]["outputs"]] == [text.upper()] * 2


def test_chats_reach_the_template_with_their_options_and_defaults(tmp_path: Path) -> None:
    made: list[FakeTokenizer] = []

    def tokenizer() -> FakeTokenizer:
        made.append(FakeTokenizer(temperature=0.25))
        return made[0]

    messages = [{"role": "user", "content": "hi"}]
    chat = {"messages": messages, "tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}}
    _, engine, _, _ = run(tmp_path, jsonl({**chat, "continue_final_message": True}, {"prompt": "x"}), None, tokenizer)
    assert made[0].chats == [
        {
            "tools": [{"type": "function"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"a": 1},
        }
    ]
    assert [request.params.temperature for request in engine.requests] == [0.25, None]  # chats only


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    records, _, _, _ = run(tmp_path, jsonl({"prompt": "x"}, {"prompt_token_ids": [65]}), None, None)
    assert "has no tokenizer" in records[0]["error"]["message"]
    assert records[1]["token_ids"] == [65]


def test_each_record_is_in_the_file_before_the_next_step(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl({"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 3}))
    sizes: list[int] = []
    with AnswerFile.open(output, overwrite=False) as answers:
        Job(Config(), FakeEngine(), FakeTokenizer(), "m").run(
            source, answers, lambda _: sizes.append(output.stat().st_size)
        )
    assert 0 < sizes[0] == sizes[1] < sizes[2] == output.stat().st_size


def test_a_fault_of_the_engine_leaves_earlier_records_whole(tmp_path: Path) -> None:
    class Faulty(FakeEngine):
        def step(self) -> Any:
            if self.stats.steps == 2:
                raise RuntimeError("the device is gone")
            return super().step()

    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl({"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 9}))
    with pytest.raises(RuntimeError, match="the device is gone"), AnswerFile.open(output, overwrite=False) as answers:
        Job(Config(), Faulty(), FakeTokenizer(), "m").run(source, answers)
    assert [json.loads(line)["text"] for line in output.read_bytes().splitlines()] == ["A"]


def test_bad_lines_are_found_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl({"prompt": "x"}, {"prompt": 1}, {"prompt": "x", "max_tokens": 2}) + b"nope\n")
    config = Config()
    config.sampling.min_tokens = 5
    found = dict(bad_lines(path, None, config.sampling))
    assert found[1] is None
    assert [number for number, reason in found.items() if reason] == [2, 3, 4]
    assert "min_tokens=5 exceeds max_tokens=2" in str(found[3])  # line and command line together


def test_job_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    config.input, config.output = str(source), "b" * 300
    with pytest.raises(ValueError, match="b cannot be written: File name too long"):
        AnswerFile.open(job_files(config).output, overwrite=False)


@pytest.mark.parametrize("exists", [True, False])
def test_a_report_destroys_neither_prompts_nor_answers(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    if exists:
        (tmp_path / "out.jsonl").touch()
    config = Config(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"))
    for name, key in (("in.jsonl", "input"), ("link.jsonl", "input"), ("out.jsonl", "output")):
        config.job.report = str(tmp_path / "." / name)
        with pytest.raises(ValueError, match=f"is the {key} file, which it would destroy"):
            job_files(config)
    config.job.report = str(tmp_path / "report.json")
    assert job_files(config).report == tmp_path / "report.json"


def test_output_file_is_proved_and_protected(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="make the folder"):
        AnswerFile.open(tmp_path / "no" / "out.jsonl", overwrite=False)
    with AnswerFile.open(path, overwrite=False):
        assert path.exists()  # proved by making it
    assert not path.exists()  # nothing was written: the next run is not refused
    path.write_text("old\n")
    with pytest.raises(ValueError, match=r"exists; give another name, or job\.overwrite=true"):
        AnswerFile.open(path, overwrite=False)
    with AnswerFile.open(path, overwrite=True) as answers:
        assert path.read_text() == "old\n"  # untouched until the model is loaded
        answers.begin()
        answers.append(b"new\n")
        answers.append(b"more\n")
    assert path.read_text() == "new\nmore\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_says_so(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl({"prompt": "a"}))
    with (
        AnswerFile.open(Path("/dev/full"), overwrite=False) as answers,
        pytest.raises(OSError, match="the disk is full"),
    ):
        Job(Config(), FakeEngine(), FakeTokenizer(), "m").run(source, answers)
