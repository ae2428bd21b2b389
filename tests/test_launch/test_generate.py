"""The entry point around the real demo model: exit codes, files, messages, ranks."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import generate, job_run
from moe.batch import sources
from moe.engine.engine import Engine
from moe.version import __version__

ROOT = Path(__file__).resolve().parents[2]
FAST = ("engine.device=cpu", "cache.num_blocks=64", "sampling.max_tokens=4")


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs happen in a folder of their own, and leave this process's loggers alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "set_up_logging", lambda console, **_: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield


def write(name: str, *records: Any) -> str:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return name


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text("utf-8").splitlines()]


def test_the_demo_alone_answers_its_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write("short.jsonl", *({"prompt": text, "max_tokens": 4} for text in ("And it", "Blessed", "Thus")))
    monkeypatch.setattr(sources, "DEMO_PROMPTS", Path(prompts).absolute())
    assert generate.main([*FAST]) == generate.OK
    records = read("demo.answers.jsonl")
    assert [record["line"] for record in records] == [1, 2, 3]
    assert all(record["text"] and record["finish_reason"] for record in records)
    shown = capsys.readouterr().out
    assert "lines answered / failed" in shown and "3 / 0" in shown and "answers: demo.answers.jsonl" in shown
    assert generate.main(["job.limit=1", *FAST]) == generate.OK  # its own output is replaced without asking
    assert len(read("demo.answers.jsonl")) == 1
    assert sorted(path.name for path in Path().iterdir()) == [
        "demo.answers.jsonl",
        "demo.answers.jsonl.job.json",
        "short.jsonl",
    ]  # no run folder, nothing else


def test_a_job_of_all_forms_with_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"messages": [{"role": "user", "content": "Read Psalms 23:1"}]}
    source = write(
        "in.jsonl",
        {"id": "a", "prompt": "In the beginning", "max_tokens": 5, "ignore_eos": True},
        {"id": "b", **chat, "n": 2},
        {"id": "c", "prompt_token_ids": [300, 301, 302], "logprobs": 1},
        {"id": "d", "prompt": 5},
        {"id": "e", "prompt": "word " * 3000},
        {"custom_id": "f", "method": "POST", "url": "/v1/chat/completions", "body": {"max_tokens": 3, **chat}},
    )
    code = generate.main([f"input={source}", "output=out.jsonl", "job.report=report", *FAST])
    assert code == generate.SOME_FAILED
    records = read("out.jsonl")
    assert records[0]["completion_tokens"] == 5 and len(records[0]["token_ids"]) == 5
    assert len(records[1]["outputs"]) == 2
    assert [entry["token_id"] for entry in records[2]["logprobs"]] == records[2]["token_ids"]
    assert records[3]["error"]["type"] == "invalid_line"
    assert records[4]["error"]["type"] == "request_failed" and "engine.max_model_len" in records[4]["error"]["message"]
    assert records[5]["response"]["body"]["usage"]["completion_tokens"] <= 3
    report = json.loads(Path("report/metrics.json").read_text("utf-8"))
    assert (report["lines"], report["answered"], report["failed"]) == (6, 4, 2)
    assert report["version"] == __version__ and report["expert_balance"] > 0 and report["ttft_p95"] > 0
    assert report["outcome"] == "some failed" and {entry["kind"] for entry in report["errors"]} == {
        "invalid_line",
        "request_failed",
    }
    assert (
        report["output_tokens"]
        == sum(len(sample["token_ids"]) for record in records[:3] for sample in record.get("outputs", [record]))
        + records[5]["response"]["body"]["usage"]["completion_tokens"]
    )


def test_answers_do_not_depend_on_order_or_neighbours() -> None:
    lines = [
        {"id": i, "prompt": f"And {word} said", "temperature": 0.8} for i, word in enumerate(["he", "she", "Moses"])
    ]
    together, alone = write("all.jsonl", *lines), write("one.jsonl", lines[2])
    assert generate.main([f"input={together}", "output=all.out", *FAST]) == generate.OK
    assert generate.main([f"input={alone}", "output=one.out", "job.look_ahead=1", *FAST]) == generate.OK
    assert (
        read("all.out")[2]["token_ids"] == read("one.out")[0]["token_ids"]
    )  # the line number differs, the id does not
    assert generate.main([f"input={together}", "output=other.out", "sampling.seed=1", *FAST]) == generate.OK
    assert [r["token_ids"] for r in read("other.out")] != [r["token_ids"] for r in read("all.out")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["samplng.n=2"], "error: unknown key 'samplng.n'; did you mean 'sampling.n'?"),
        (["input=missing.jsonl"], "error: input=missing.jsonl does not exist"),
        (["output=no/such/out.jsonl"], "/no/such); make that folder first"),
        (["output=old.jsonl"], "output=old.jsonl exists"),
        (["job.report=no/such/report"], "job.report=no/such/report cannot be made"),
        (["model=no-such-folder/x/y"], "no-such-folder"),
        (["engine.max_model_len=100000"], "engine.max_model_len=100000 exceeds this checkpoint's"),
    ],
)
def test_wrong_usage_is_code_2_and_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old.jsonl").write_text("precious\n")
    assert generate.main([*words, "engine.device=cpu"]) == generate.USAGE
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err
    assert [path.name for path in Path().iterdir()] == ["old.jsonl"]
    assert Path("old.jsonl").read_text() == "precious\n"


def test_strict_and_dry_run_load_no_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_engine(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(job_run, "Engine", no_engine)
    bad, good = write("bad.jsonl", {"prompt": "x"}, {"prompt": 5}), write("good.jsonl", {"prompt": "x"})
    assert generate.main([f"input={bad}", "job.strict=true"]) == generate.USAGE
    assert "bad.jsonl:2: prompt=5 must be a text." in capsys.readouterr().err
    assert generate.main([f"input={bad}", "job.dry_run=true"]) == generate.SOME_FAILED
    assert generate.main([f"input={good}", "job.dry_run=true", "job.strict=true"]) == generate.OK
    assert "1 lines read, 0 of them cannot be run" in capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir()) == ["bad.jsonl", "good.jsonl"]
    assert generate.main([f"input={good}", "job.strict=true"]) == generate.FAULT
    assert "error: a model was loaded" in capsys.readouterr().err


def test_a_fault_is_code_1_and_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def fail(self: object, *args: object) -> None:
        raise RuntimeError("the device is gone")

    step, steps = Engine.step, []

    def third_fails(self: Engine) -> Any:
        steps.append(1)
        return fail(self) if len(steps) == 3 else step(self)

    source = write("in.jsonl", {"prompt": "And", "max_tokens": 1}, {"prompt": "Thus", "max_tokens": 9})
    monkeypatch.setattr(Engine, "step", third_fails)
    assert generate.main([f"input={source}", "output=out.jsonl", *FAST]) == generate.FAULT
    shown = capsys.readouterr().err
    assert "error: the device is gone\n1 records are whole in" in shown
    assert "out.jsonl.journal-*; the same command goes on from there" in shown
    assert generate.main([f"input={source}", "output=out.jsonl", *FAST]) == generate.OK
    assert len(read("out.jsonl")) == 2 and "going on after an unfinished run: 1 records" in caplog.text
    assert generate.main([f"input={source}", "output=out.jsonl", *FAST]) == generate.OK
    assert "nothing to do: out.jsonl is complete, 2 lines, 0 of them with an error record" in capsys.readouterr().out
    assert generate.main([f"input={source}", "output=out.jsonl", "sampling.seed=1", *FAST]) == generate.USAGE
    assert "made with other settings: sampling.seed=0 there, 1 now" in capsys.readouterr().err


def test_c23_prompts_about_the_length_limit_have_one_record_each_under_their_own_id() -> None:
    lengths = {"ten": 10, "over": 65, "at": 64, "under": 63, "ten again": 10}
    lines = [
        {"id": name, "prompt_token_ids": [300 + i for i in range(length)], "max_tokens": 50 if length == 63 else 2}
        for name, length in lengths.items()
    ]
    source = write("in.jsonl", *(line | {"ignore_eos": True} for line in lines))
    words = [f"input={source}", "output=out.jsonl", "engine.max_model_len=64", *FAST]
    assert generate.main(words) == generate.SOME_FAILED
    records = read("out.jsonl")
    assert [record["id"] for record in records] == list(lengths)
    for place, length in ((1, 65), (2, 64)):
        error = records[place]["error"]
        assert error["type"] == "request_failed"
        assert f"the prompt has {length} tokens, but engine.max_model_len=64" in error["message"]
    ends = [(len(records[place]["token_ids"]), records[place]["finish_reason"]) for place in (0, 3, 4)]
    assert ends == [(2, "length"), (1, "length"), (2, "length")]
    assert [records[place]["prompt_tokens"] for place in (0, 3, 4)] == [10, 63, 10]


def test_a_damaged_input_that_is_mended_goes_on_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    whole = gzip.compress(
        Path(write("in.jsonl", *({"prompt": f"{i} And", "max_tokens": 1} for i in range(40)))).read_bytes()
    )
    source = Path("in.jsonl.gz")
    source.write_bytes(whole[: len(whole) * 3 // 4])
    words = [f"input={source}", "output=out.jsonl", *FAST]
    assert generate.main(words) == generate.USAGE
    shown = capsys.readouterr().err
    found = re.search(r"cut off before its end, after (\d+) records of it; fetch or write it again", shown)
    assert found and 0 < int(found[1]) < 40, shown
    assert f"{found[1]} records are whole in" in shown
    assert "the same command with job.resume=force goes on from there" in shown
    source.write_bytes(whole)
    assert generate.main(words) == generate.USAGE
    shown = capsys.readouterr().err
    assert "made with other settings: input.0=in.jsonl.gz" in shown and "goes on from there" not in shown
    assert generate.main([*words, "job.resume=force"]) == generate.OK
    assert [record["line"] for record in read("out.jsonl")] == list(range(1, 41))


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_stops_after_the_running_step_and_says_how_to_go_on(
    number: int, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    step, steps = Engine.step, []

    def with_signal(self: Engine) -> Any:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), number)
        return step(self)

    source = write("in.jsonl", {"prompt": "And", "max_tokens": 1}, {"prompt": "Thus", "max_tokens": 9})
    before = signal.getsignal(number)
    monkeypatch.setattr(Engine, "step", with_signal)
    words = [f"input={source}", "output=out.jsonl", "job.report=report", *FAST]
    assert generate.main(words) == 128 + number
    shown = capfd.readouterr().err
    assert f"{name}: stopping after the running step; a second one ends at once" in shown
    assert f"stopped by {name}\n1 records are whole in" in shown and "the same command goes on from there" in shown
    assert len(steps) == 3 and signal.getsignal(number) == before and not Path("out.jsonl").exists()
    assert json.loads(Path("report/metrics.json").read_text("utf-8"))["outcome"] == "stopped"
    assert generate.main(words) == generate.OK and len(read("out.jsonl")) == 2


def test_a_signal_before_the_first_line_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loading(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(job_run, "Engine", loading)
    source = write("in.jsonl", {"prompt": "And"})
    assert generate.main([f"input={source}", "output=out.jsonl", *FAST]) == 128 + signal.SIGTERM
    shown = capsys.readouterr().err
    assert "SIGTERM" in shown and "Traceback" not in shown and "goes on" not in shown
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_a_signal_when_the_output_is_whole_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "print_report", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    source = write("in.jsonl", {"prompt": "And it"})
    words = [f"input={source}", "output=out.jsonl", "job.report=report", *FAST]
    assert generate.main(words) == generate.OK
    shown = capsys.readouterr()
    assert "answers: out.jsonl" in shown.out and "stopped by" not in shown.err
    assert json.loads(Path("report/metrics.json").read_text())["outcome"] == "complete"


def test_too_many_errors_are_a_failed_job(capsys: pytest.CaptureFixture[str]) -> None:
    source = write("in.jsonl", *({"prompt": 5} for _ in range(5)))
    words = [f"input={source}", "output=out.jsonl", *FAST]
    assert generate.main([*words, "job.max_errors=2"]) == generate.FAULT
    shown = capsys.readouterr().err
    assert "lines failed, more than job.max_errors=2; raise it, or mend what fails" in shown and "goes on" in shown
    assert generate.main(words) == generate.SOME_FAILED and len(read("out.jsonl")) == 5


def test_c37_an_output_that_cannot_be_written_is_told_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_engine(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(job_run, "Engine", no_engine)
    monkeypatch.setattr(
        os, "open", lambda *args, **kwargs: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    source = write("in.jsonl", {"prompt": "And"})
    for output, words in (
        ("out.jsonl", "output=out.jsonl cannot be written: Permission denied"),
        ("/dev/full", "output=/dev/full is a pipe or a device"),
        (".", "output=. is a folder"),
    ):
        assert generate.main([f"input={source}", f"output={output}", *FAST]) == generate.USAGE
        assert words in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("input_words", [[], ["input=in.jsonl"]])
def test_a_job_whose_reader_has_gone_is_whole_and_says_so(input_words: list[str]) -> None:
    """`python -m launch.generate | head -1`: of the demo the answers are shown, of all jobs a table."""
    write("in.jsonl", {"prompt": "And"})
    words = [*input_words, "output=out.jsonl", "job.limit=1", "job.report=report", *FAST]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    gone, ours = os.pipe()
    os.close(gone)
    done = subprocess.run(
        [sys.executable, "-m", "launch.generate", *words], env=environment, stdout=ours, stderr=subprocess.PIPE
    )
    os.close(ours)
    assert done.returncode == generate.OK, done.stderr
    assert b"Traceback" not in done.stderr and b"Broken" not in done.stderr
    assert len(read("out.jsonl")) == 1
    assert json.loads(Path("report/metrics.json").read_text("utf-8"))["outcome"] == "complete"


@pytest.mark.parametrize("streams", [">/dev/full", ">&- 2>&-"])
def test_a_job_that_cannot_show_its_summary_is_whole_and_says_so(streams: str) -> None:
    """A log on a disk that is full; a scheduler that gives a process no streams."""
    write("in.jsonl", {"prompt": "And"})
    words = [sys.executable, "-m", "launch.generate", "input=in.jsonl", "output=out.jsonl", *FAST]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {streams}', "sh", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == generate.OK and b"Traceback" not in done.stderr, done.stderr
    assert len(read("out.jsonl")) == 1
    assert (b"the summary cannot be shown: No space left on device" in done.stderr) == ("full" in streams)


def test_help_and_cfg(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--help"]) == generate.OK
    assert "sampling.temperature=null" in capsys.readouterr().out
    assert generate.main(["--cfg", "job", "preset=greedy", "sampling.max_tokens=7"]) == generate.OK
    shown = capsys.readouterr().out
    assert "max_tokens: 7" in shown and "temperature: 0.0" in shown and "look_ahead: 8192" in shown


def test_torchrun_with_one_rank() -> None:
    source = write("in.jsonl", {"prompt": "And it", "max_tokens": 3}, {"prompt": "Blessed", "max_tokens": 3})
    words = ["--nproc-per-node", "1", "-m", "launch.generate", f"input={source}", "output=out.jsonl", *FAST]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert len(read("out.jsonl")) == 2
    assert "2 / 0" in done.stdout and "answering" in done.stderr  # plain log lines away from a terminal
