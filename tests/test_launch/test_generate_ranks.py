"""The entry point on several ranks: one file of answers, byte for byte that of one rank; what a fault leaves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import generate
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
FAST = ("engine.device=cpu", "cache.num_blocks=64", "parallel.timeout_s=60")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def generate_on(rank: int, num_ranks: int, port: int, folder: Path, runs: list[list[str]]) -> list[tuple[int, str]]:
    """Exit codes and errors of several runs, one after another."""
    os.chdir(folder)
    generate.FIRST_SPEAKS_S = 0.0
    codes = []
    for number, words in enumerate(runs):
        values = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ.update({name: str(value) for name, value in values.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + number)})
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            codes.append((generate.main(words), errors.getvalue()))
    return codes


def test_ranks_write_the_bytes_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "set_up_logging", lambda console, **_: None)
    chat = {"messages": [{"role": "user", "content": "Read Psalms 23:1"}]}
    many = [
        {"id": f"p{i}", "prompt": "And it came to pass " * (i % 5), "max_tokens": 1 + 7 * i % 23} for i in range(1, 22)
    ]
    source = write(
        tmp_path / "in.jsonl",
        "not json",
        *many,
        "",
        {"id": "d", "prompt": 5},
        {"id": "e", "prompt": "word " * 3000},
        {"custom_id": "f", "method": "POST", "url": "/v1/chat/completions", "body": {"max_tokens": 3, **chat}},
        {"id": "b", **chat, "n": 2, "max_tokens": 5},
    )
    write(tmp_path / "two.jsonl", {"prompt": "And it", "max_tokens": 3}, {"prompt": "Blessed", "max_tokens": 9})
    # How much of a prompt was cached is in the records, and is each rank's own matter.
    words = [
        f"input={source.name}",
        "cache.prefix_caching=false",
        "engine.max_num_seqs=3",
        "engine.max_batched_tokens=64",
        *FAST,
    ]
    few = ["input=two.jsonl", "model=demo-deepseek", *FAST]
    assert generate.main([*words, "output=one.jsonl"]) == generate.SOME_FAILED
    assert generate.main([*few, "output=few-one.jsonl"]) == generate.OK
    runs = [
        [*words, "output=ranks.jsonl", "job.report=report"],
        [*few, "output=few-ranks.jsonl"],  # a rank without a line
        [*words, "output=ranks.jsonl"],  # whole already
        [*words, "output=ranks.jsonl", "sampling.seed=1"],  # exists, of another seed
        [*words, "output=strict.jsonl", "job.strict=true"],
        ["parallel.dispatcher=local", *FAST],
    ]
    results = run_ranks(generate_on, 3, free_port(), tmp_path, runs, joined=False, timeout_s=200)
    codes = [[code for code, _ in of_rank] for of_rank in results]
    assert [code[:2] for code in codes] == [[generate.SOME_FAILED, generate.OK]] * 3
    assert [code[2] for code in codes] == [generate.SOME_FAILED] * 3
    assert [code[3] for code in codes] == [generate.USAGE, generate.FAULT, generate.FAULT]
    for of_rank in results[1:]:
        assert (
            "ended by rank 0: ValueError: output=ranks.jsonl exists and was made with other settings" in of_rank[3][1]
        )
    # The first rank says what all of them meet; nobody has ended the others before they say it too.
    said = ["error: ", "error on rank 1: ", "error on rank 2: "]
    assert [of_rank[5][1].startswith(text) for of_rank, text in zip(results, said)] == [True] * 3
    assert all("but 3 ranks share the experts" in of_rank[5][1] for of_rank in results)
    assert [code[4:] for code in codes] == [[generate.USAGE] * 2] * 3
    assert Path("ranks.jsonl").read_bytes() == Path("one.jsonl").read_bytes()
    assert Path("few-ranks.jsonl").read_bytes() == Path("few-one.jsonl").read_bytes()
    report = json.loads(Path("report/metrics.json").read_text())
    records = [json.loads(line) for line in Path("ranks.jsonl").read_text().splitlines()]
    assert (report["lines"], report["failed"]) == (26, 3) and len(records) == 26
    assert report["output_tokens"] == sum(
        len(sample["token_ids"])
        for record in records
        for sample in record.get("outputs", [record])
        if "token_ids" in sample
    ) + next(record["response"]["body"]["usage"]["completion_tokens"] for record in records if "response" in record)
    assert report["device"] == "3 x cpu" and report["expert_balance"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [
            *("in.jsonl", "two.jsonl", "one.jsonl", "few-one.jsonl", "ranks.jsonl", "few-ranks.jsonl", "report"),
            *(f"{name}.jsonl.job.json" for name in ("one", "few-one", "ranks", "few-ranks")),
        ]
    )


def test_what_one_rank_alone_meets_before_the_others_is_said_by_all(tmp_path: Path) -> None:
    """Two torchruns stand for two nodes, of which the second lacks the input."""
    (tmp_path / "second").mkdir()
    write(tmp_path / "in.jsonl", {"prompt": "And", "max_tokens": 2})
    where = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--nproc-per-node=1"]
    words = ["-m", "launch.generate", "input=in.jsonl", f"output={tmp_path}/out.jsonl", "engine.device=cpu"]
    begin = time.monotonic()
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *where, f"--node-rank={node}", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            cwd=tmp_path / ("second" if node else "."),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        texts = [node.communicate(timeout=150)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    missing = "input=in.jsonl"
    assert [node.returncode for node in nodes] == [1, 1], texts
    assert f"error on rank 0: rank 1: {missing}" in texts[0], texts[0]
    assert f"error on rank 1: {missing}" in texts[1], texts[1]
    assert time.monotonic() - begin < 140  # the start of two torchruns, and not parallel.timeout_s, ten minutes


FAULTY = """
import os, runpy, sys, time
from moe.engine.runner import Runner
launch, steps = Runner.launch, []

def failing(self, *args):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 5:
        {fault}
    return launch(self, *args)

Runner.launch = failing
runpy.run_module("launch.generate", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise ArithmeticError('the cause itself')", "rank 1: StepError: stage"),
        ("print('pid', os.getpid(), flush=True); time.sleep(300)", None),  # killed from outside
    ],
    ids=["raised", "killed"],
)
def test_a_fault_on_one_rank_ends_torchrun_with_its_cause(fault: str, said: str | None, tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(fault=fault))
    source = write(tmp_path / "in.jsonl", *({"prompt": "And", "max_tokens": 30, "ignore_eos": True} for _ in range(6)))
    words = ["--nproc-per-node", "3", str(script), f"input={source}", f"output={tmp_path}/out.jsonl", *FAST]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    begin = time.monotonic()
    if said is None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("pid "):
                os.kill(int(line.split()[1]), signal.SIGKILL)
                begin = time.monotonic()
                break
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    if said is None:
        assert time.monotonic() - begin < 30
        assert "Signal 9 (SIGKILL)" in errors and "rank      : 1" in errors
    else:
        assert said in errors and "ArithmeticError: the cause itself" in errors, errors
    assert not (tmp_path / "out.jsonl").exists()
