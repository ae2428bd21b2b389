"""A job on one GPU that is stopped, killed and gone on with is, byte for byte, one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import generate
from moe.batch.journal_writer import JournalWriter
from tests.test_batch.fakes import jsonl, read_jsonl

ROOT = Path(__file__).resolve().parents[2]
NUM_LINES = 300
# The process is gone with its 80th record.
KILLED = """
import os, signal, sys
from launch import generate
from moe.batch.journal_writer import JournalWriter
append = JournalWriter.append
def last(self, *args):
    append(self, *args)
    if self.num_records == 80:
        os.kill(os.getpid(), signal.SIGKILL)
JournalWriter.append = last
sys.exit(generate.main(sys.argv[1:]))
"""


def check_a_job_in_three_runs(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by SIGTERM with its 90th record, killed with the 80th of the next run, and whole at last."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(generate, "set_up_logging", lambda console, **_: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    draw = random.Random(0)
    lines: list[dict[str, Any]] = [
        {"id": f"l{i}", "prompt": "And it came to pass " * draw.randint(1, 6), "max_tokens": draw.randint(1, 24)}
        for i in range(NUM_LINES)
    ]
    for line in lines[::3]:
        line |= {"temperature": 0.9}
    lines[50] = {"id": "l50", "prompt": 5}
    Path("in.jsonl").write_bytes(jsonl(*lines))
    words = ["input=in.jsonl", f"engine.device={device}", "cache.num_blocks=2048", "cache.prefix_caching=false"]
    words += ["engine.max_num_seqs=32", "engine.max_batched_tokens=512"]
    assert generate.main([*words, "output=alone.jsonl"]) == generate.SOME_FAILED

    append = JournalWriter.append

    def stopping(self: JournalWriter, *args: Any) -> None:
        append(self, *args)
        if self.num_records == 90:
            os.kill(os.getpid(), signal.SIGTERM)

    words.append("output=out.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(JournalWriter, "append", stopping)
        assert generate.main(words) == generate.BY_SIGNAL + signal.SIGTERM
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "going on after an unfinished run" in killed.stderr and not Path("out.jsonl").exists()
    assert generate.main(words) == generate.SOME_FAILED
    assert [record["id"] for record in read_jsonl(Path("out.jsonl"))] == [f"l{i}" for i in range(NUM_LINES)]
    assert Path("out.jsonl").read_bytes() == Path("alone.jsonl").read_bytes()


@pytest.mark.gpu
def test_a_job_in_three_runs_has_the_bytes_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_job_in_three_runs(tmp_path, "cuda", monkeypatch)
