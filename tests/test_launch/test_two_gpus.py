"""A job of 2,000 lines on two GPUs is, byte for byte, that of one; also with a rank killed halfway and restarted, while
experts move from GPU to GPU, and with experts in host memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_batch.fakes import jsonl, read_jsonl

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
OPENINGS = ("And it came to pass", "In the beginning", "Blessed are the", "The words of the wise", "Then said he")


def write_lines(path: Path, num_lines: int) -> None:
    """Prompts of many lengths, some of them drawn from; answers of 1 to 32 tokens."""
    draw = random.Random(0)
    lines = []
    for index in range(num_lines):
        prompt = " ".join(draw.choices(OPENINGS, k=draw.randint(1, 12)))
        line = {"id": f"l{index}", "prompt": prompt, "max_tokens": draw.randint(1, 32)}
        lines.append(line | ({"temperature": 0.9, "seed": index} if index % 3 == 0 else {}))
    path.write_bytes(jsonl(*lines))


def jobs_end_alike(folder: Path, num_lines: int, device: str) -> None:
    """One rank; two; two of which one is killed after a quarter of all records, which is half of its own; two between
    which experts move; two that hold half of their experts, the others in host memory. All five at a time."""
    write_lines(folder / "in.jsonl", num_lines)
    words = ["input=in.jsonl", f"engine.device={device}", "cache.num_blocks=4096", "cache.prefix_caching=false"]
    words += ["engine.max_num_seqs=64", "engine.max_batched_tokens=2048", "parallel.timeout_s=120"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests" / "restarted_job.py")
    commands = {
        "one": ["-m", "launch.generate", *words],
        "two": [*TORCHRUN, "--master-port=29611", "-m", "launch.generate", *words],
        "moving": [
            *(*TORCHRUN, "--master-port=29613", "-m", "launch.generate", *words),
            *("balance.interval=5", "balance.move=always", "balance.load_file=load.json"),
        ],
        "offloaded": [
            *(*TORCHRUN, "--master-port=29614", "-m", "launch.generate", *words),
            *("offload.regime=auto", "offload.slots_per_layer=2"),
        ],
        "killed": [*TORCHRUN, "--master-port=29612", "--max-restarts=1", script, f"1:{num_lines // 4}", *words],
    }
    running = {}
    for name, command in commands.items():
        with (folder / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                [sys.executable, *command, f"output={name}.jsonl", "job.resume=auto"],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    try:
        codes = {name: process.wait(timeout=240) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    logs = {name: (folder / f"{name}.log").read_text(errors="replace") for name in commands}
    assert set(codes.values()) == {0}, "\n".join(f"{name}: {codes[name]}\n{logs[name][-4000:]}" for name in commands)
    assert logs["killed"].count("going on after an unfinished run") == 1, logs["killed"][-4000:]
    one = folder / "one.jsonl"
    assert [record["id"] for record in read_jsonl(one)] == [f"l{index}" for index in range(num_lines)]
    assert "experts moved" in logs["moving"], logs["moving"][-4000:]
    assert "the GPU holds 2 of 4" in logs["offloaded"], logs["offloaded"][-4000:]
    for name in ("two", "moving", "offloaded", "killed"):
        different = [
            (own["id"], own["text"], other["text"])
            for own, other in zip(read_jsonl(one), read_jsonl(folder / f"{name}.jsonl"), strict=True)
            if own != other
        ]
        assert not different, f"{name}: {len(different)} records differ, the first: {different[:3]}"
        assert (folder / f"{name}.jsonl").read_bytes() == one.read_bytes()


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
def test_two_thousand_lines(tmp_path: Path) -> None:
    jobs_end_alike(tmp_path, 2000, "cuda")
