"""The launch scripts: what they refuse, what they start, and answers of real torchrun runs on one node and on two."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import generate
from tests.test_expert_parallel.test_group import free_port

ROOT = Path(__file__).resolve().parents[2]
ONE_NODE, SEVERAL_NODES, SLURM = (ROOT / "launch" / f"{name}.sh" for name in ("one_node", "several_nodes", "slurm"))
WORDS = ("engine.device=cpu", "cache.num_blocks=64", "cache.prefix_caching=false", "parallel.timeout_s=120")
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def start(script: Path, *words: str, folder: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [script, *words],
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outcome(process: subprocess.Popen[str], timeout_s: float = 280.0) -> tuple[int, str]:
    try:
        text, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()  # torchrun ends its ranks when it is gone; each watches for the others
    return process.returncode, text


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (ONE_NODE, []),
        (ONE_NODE, ["--help"]),
        (ONE_NODE, ["input=in.jsonl"]),  # no number of processes
        (ONE_NODE, ["0"]),
        (SEVERAL_NODES, []),
        (SEVERAL_NODES, ["2", "2", "localhost", "gpu"]),  # nodes count from 0
        (SEVERAL_NODES, ["2", "localhost", "gpu", "input=in.jsonl"]),
        (SLURM, ["input=in.jsonl"]),  # not a Slurm job
    ],
)
def test_what_makes_no_sense_shows_the_usage(script: Path, words: list[str]) -> None:
    code, text = outcome(start(script, *words, SLURM_JOB_ID=""))
    assert code == 2 and text.startswith("usage: ") and "KEY=VALUE" in text


def test_C44_a_port_in_use_is_named_with_the_way_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, text = outcome(start(SEVERAL_NODES, "2", "0", f"127.0.0.1:{port}", "1", PYTHON="echo"))
        assert code == 2 and f"port {port} of 127.0.0.1 is in use; give all machines another" in text
        # Whoever comes to the first machine finds it taken, as it should be.
        code, text = outcome(start(SEVERAL_NODES, "2", "1", f"127.0.0.1:{port}", "1", PYTHON="echo"))
        assert code == 0 and f"--master-port={port}" in text


def test_what_torchrun_is_given() -> None:
    code, text = outcome(start(ONE_NODE, "4", "model=a b", "job.limit=3", PYTHON="echo"))
    assert code == 0
    run = "-m torch.distributed.run"
    assert text == f"{run} --standalone --nproc-per-node=4 -m launch.generate model=a b job.limit=3\n"
    code, text = outcome(start(SEVERAL_NODES, "3", "1", "10.0.0.1", "8", "job.limit=3", PYTHON="echo", TIMEOUT_S="90"))
    assert code == 0
    where = "--rdzv-conf=timeout=90 --master-addr=10.0.0.1 --master-port=29500"
    assert text == (
        "machine 1 of 3: meets the others at 10.0.0.1:29500, for at most 90 s (TIMEOUT_S)\n"
        f"{run} --nnodes=3 --node-rank=1 {where} --nproc-per-node=8 -m launch.generate job.limit=3\n"
    )


@pytest.mark.parametrize("words", [["gpu"], ["2", "0", "127.0.0.1:29999", "gpu"]], ids=["one node", "several"])
def test_one_process_for_each_gpu(words: list[str]) -> None:
    code, text = outcome(start(ONE_NODE if len(words) == 1 else SEVERAL_NODES, *words, PYTHON="echo"))
    if list(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists():
        assert code == 0 and "--nproc-per-node=gpu" in text
    else:
        assert code == 2 and text.startswith("error: there is no GPU here; give a number of processes, and engine.")


def test_a_machine_that_nobody_knows_is_named_at_once() -> None:
    code, text = outcome(start(SEVERAL_NODES, "2", "1", "no-such-machine.invalid:29501", "1", PYTHON="echo"))
    assert code == 2 and text.startswith("error: no-such-machine.invalid is no machine that this one knows; give ")


def test_slurm_starts_one_torchrun_on_each_node(tmp_path: Path) -> None:
    """With stand-ins for Slurm's two commands: the names of its nodes, and a command that runs once on each."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames n[7-8]" ] && printf "n7\\nn8\\n"\n')
    (tmp_path / "srun").write_text('#!/bin/bash\nshift 2\nfor node in 0 1; do SLURM_NODEID=$node "$@"; done\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "40007",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    path = f"{tmp_path}:{os.environ['PATH']}"
    code, text = outcome(start(SLURM, "model=a b", "job.limit=3", PATH=path, PYTHON="echo", **slurm))
    assert code == 0
    where = "--rdzv-conf=timeout=600 --master-addr=n7 --master-port=20007"
    assert text.splitlines() == [
        f"-m torch.distributed.run --nnodes=2 --node-rank={node} --nproc-per-node=4 {where} "
        "-m launch.generate model=a b job.limit=3"
        for node in (0, 1)
    ]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", [ONE_NODE, SEVERAL_NODES, SLURM])
def test_shellcheck_has_no_word_to_say(script: Path) -> None:
    run = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_answers_on_one_node_and_on_two_are_those_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two torchruns on one host stand for two nodes."""
    lines = [{"prompt": "And it came to pass " * (at % 3), "max_tokens": 1 + 3 * at % 8} for at in range(1, 9)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "set_up_logging", lambda *_, **__: None)
    words = ["input=in.jsonl", *WORDS]
    assert generate.main([*words, "output=one.jsonl"]) == generate.OK
    expected = (tmp_path / "one.jsonl").read_bytes()

    code, text = outcome(start(ONE_NODE, "2", *words, "output=node.jsonl", folder=tmp_path))
    assert code == 0 and "2 ranks at " in text, text
    assert (tmp_path / "node.jsonl").read_bytes() == expected

    where = f"127.0.0.1:{free_port()}"
    nodes = [
        start(SEVERAL_NODES, "2", str(node), where, "1", *words, "output=nodes.jsonl", folder=tmp_path)
        for node in (0, 1)
    ]
    outcomes = [outcome(node) for node in nodes]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert f"2 ranks at {where}, gloo on cpu; start and collectives time out after 120 s" in outcomes[0][1]
    assert (tmp_path / "nodes.jsonl").read_bytes() == expected
