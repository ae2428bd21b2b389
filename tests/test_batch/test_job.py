"""A whole file through a job: order, what is held, error records, timeouts, stops."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Config, JobConfig
from moe.batch import job as job_module
from moe.batch.job import TOO_MANY_ERRORS, Job
from moe.batch.lines import InputFault, Line
from moe.batch.report import Progress
from moe.engine.request import RequestOutput
from tests.test_batch.fakes import FakeEngine, FakeTokenizer, jsonl, read_jsonl, run_job


def run(
    folder: Path, data: bytes, config: Config | None = None, tokenizer: Any = FakeTokenizer
) -> tuple[list[dict[str, Any]], FakeEngine, Job, list[Progress]]:
    """Records written for the input bytes, and everything that took part."""
    config = config or Config()
    config.input, config.output = str(folder / "in.jsonl"), str(folder / "out.jsonl")
    config.job.overwrite = True
    Path(config.input).write_bytes(data)
    engine, seen = FakeEngine(), []
    job, _ = run_job(config, engine, tokenizer, on_step=seen.append)
    return read_jsonl(Path(config.output)), engine, job, seen


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
        b'"prompt":"x","user":{"a":[-1e400]}',
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
    data = b'{"id":"bad",' + fields + b"}\n" + jsonl({"id": "good", "prompt": "x"}) + b'{"id":[1e400],"prompt":"x"}\n'
    records, _, job, _ = run(tmp_path, data)
    assert job.lines_failed == 2 and records[2]["id"] == [None] and records[0]["error"]["type"] == "invalid_line"
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


def test_what_is_held_is_what_runs_and_a_little(tmp_path: Path) -> None:
    config = Config(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"), job=JobConfig(order="file"))
    lines = [{"id": 0, "prompt": "p", "max_tokens": 60}, *({"id": i, "prompt": "p"} for i in range(1, 200))]
    (tmp_path / "in.jsonl").write_bytes(jsonl(*lines))
    engine, seen = FakeEngine(max_num_seqs=4), []
    run_job(config, engine, on_step=seen.append)
    assert [record["id"] for record in read_jsonl(tmp_path / "out.jsonl")] == list(range(200))
    assert engine.most_running == 5  # the places and a sixteenth of them, but one at least
    assert max(progress.lines_read - progress.lines_done for progress in seen) <= 5
    assert seen[50].lines_done > 150  # the oldest line, still running, holds nobody up


def test_bad_lines_alone_need_no_step(tmp_path: Path) -> None:
    records, engine, job, _ = run(tmp_path, b"nope\n" * 2000)
    assert [record["line"] for record in records] == list(range(1, 2001))
    assert engine.stats.steps == 0 and job.lines_failed == 2000


def test_duplicate_ids_are_both_kept_and_told_apart_by_line(tmp_path: Path) -> None:
    records, _, _, _ = run(tmp_path, jsonl({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"prompt": "z"}))
    assert [(record["id"], record["line"], record["text"]) for record in records] == [
        ("a", 1, "X"),
        ("a", 2, "Y"),
        (3, 3, "Z"),
    ]


def test_c47_ids_of_all_kinds_come_back_with_their_lines_whichever_finishes_first(tmp_path: Path) -> None:
    ids: list[Any] = ["a", "a", 1, "1", 1.0, True, None, "x" * 300, {"k": [1 << 70, 1e-7]}]
    lines = [{"id": each, "prompt": f"p{i}", "max_tokens": 50 - 5 * i} for i, each in enumerate(ids)]
    lines.append({"prompt": "without", "max_tokens": 1})
    records, engine, _, _ = run(tmp_path, jsonl(*lines))
    assert engine.finished == [f"line-{number}" for number in range(len(lines), 0, -1)]
    expected = [7 if each is None else each for each in ids] + [10]  # a line without an id has its number
    assert repr([record["id"] for record in records]) == repr(expected)
    assert [record["line"] for record in records] == list(range(1, 11))
    assert [record["text"] for record in records] == [f"P{i}" for i in range(9)] + ["WITHOUT"]


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


def test_a_fault_of_the_engine_leaves_earlier_records_whole(tmp_path: Path) -> None:
    class Faulty(FakeEngine):
        def step(self) -> Any:
            if self.stats.steps == 2:
                raise RuntimeError("the device is gone")
            return super().step()

    config = Config(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"))
    (tmp_path / "in.jsonl").write_bytes(jsonl({"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 9}))
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_job(config, Faulty())
    assert not (tmp_path / "out.jsonl").exists()
    engine = FakeEngine()
    run_job(config, engine)
    assert [request.request_id for request in engine.requests] == ["line-2"]
    assert [record["text"] for record in read_jsonl(tmp_path / "out.jsonl")] == ["A", "B"]


def test_a_damaged_input_is_told_after_the_lines_before_it(tmp_path: Path) -> None:
    def lines() -> Any:
        yield Line(1, {"prompt": "a"})
        yield Line(2, {"prompt": "b", "max_tokens": 9})
        raise InputFault("in.gz is cut off")

    class Kept(list[Any]):
        def append(self, *entry: Any) -> None:
            super().append(entry)

    journal = Kept()
    with pytest.raises(InputFault, match=r"in\.gz is cut off"):
        Job(Config(), FakeEngine(), FakeTokenizer(), "m").run(lines(), journal)
    assert [entry[0] for entry in journal] == [1, 2]


def test_a_line_that_takes_too_long_is_an_error_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(job_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(FakeEngine):
        def step(self) -> list[RequestOutput]:
            now[0] += 0.002
            return super().step()

    config = Config(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"))
    config.job.line_timeout_s = 0.2
    body = {"prompt": "c", "max_tokens": 1_000_000}
    openai = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    slow, quick = {"id": "a", "prompt": "a", "max_tokens": 1_000_000}, {"id": "b", "prompt": "b"}
    (tmp_path / "in.jsonl").write_bytes(jsonl(slow, quick, openai))
    job, _ = run_job(config, Slow())
    records = read_jsonl(tmp_path / "out.jsonl")
    assert records[0]["error"]["type"] == "timeout" and job.errors == {"timeout": 2}
    assert records[0]["error"]["message"].startswith("not answered within 0.2 s (job.line_timeout_s); it had ")
    assert records[1]["text"] == "B"
    assert records[2]["response"]["status_code"] == 504 and records[2]["error"]["code"] == "timeout"


def test_too_many_errors_stop_the_job_and_it_goes_on(tmp_path: Path) -> None:
    config = Config(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"), job=JobConfig(order="file"))
    lines = [{"id": i, "prompt": 5 if i in (1, 3, 5) else "x"} for i in range(8)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(*lines))
    config.job.max_errors = 3
    job, _ = run_job(config)
    assert (job.stopped, job.lines_failed) == (0, 3)  # so many may fail
    (tmp_path / "out.jsonl").unlink()
    config.job.max_errors = 1
    engine = FakeEngine()
    job, _ = run_job(config, engine)
    assert (job.stopped, job.lines_failed) == (TOO_MANY_ERRORS, 2) and not (tmp_path / "out.jsonl").exists()
    config.job.max_errors, again = None, FakeEngine()
    job, ledger = run_job(config, again)
    assert ledger.kept == 4 and job.lines_failed == 1  # two error records, and what ran beside them
    assert [record["id"] for record in read_jsonl(tmp_path / "out.jsonl")] == list(range(8))


def test_a_stop_comes_after_the_running_step(tmp_path: Path) -> None:
    config = Config(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"), job=JobConfig(order="file"))
    (tmp_path / "in.jsonl").write_bytes(jsonl(*({"prompt": "x", "max_tokens": 1 + i} for i in range(20))))
    engine = FakeEngine()
    job, _ = run_job(config, engine, stop=lambda: 15 if engine.stats.steps == 5 else 0)
    assert (job.stopped, job.lines_written, engine.stats.steps) == (15, 5, 5)
    _, ledger = run_job(config)
    assert ledger.kept == 5 and len(read_jsonl(tmp_path / "out.jsonl")) == 20
