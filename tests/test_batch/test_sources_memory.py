"""Memory of a process that reads more than it may hold: lines come through a pipe, so no disk is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE_BYTES = 20_000
# Every line is kept by nobody but the windows; the peak is the kernel's own, of this process since it began.
READER = """
import sys
from configs.schema import Config, JobConfig
from moe.batch.sources import Source, job_lines

def peak_mib():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

config = Config(input="-", job=JobConfig(order=sys.argv[1], look_ahead_mb=float(sys.argv[2])))
lines = job_lines(config, Source.open(config))
before = peak_mib()
count = sum(1 for line in lines)
print(count, before, peak_mib())
"""


def growth_mib(order: str, num_lines: int, *, look_ahead_mb: float = 32.0, packed: bool = False) -> float:
    """How much the peak of a fresh reader grows over so many lines."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READER, order, str(look_ahead_mb)]
    reader = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None
    pack = zlib.compressobj(1, wbits=31) if packed else None
    filler = "lorem ipsum dolor sit amet, " * (LINE_BYTES // 28)
    for number in range(num_lines):
        line = json.dumps({"id": number, "prompt": f"{number % 50} {filler}{number}"}).encode() + b"\n"
        reader.stdin.write(line if pack is None else pack.compress(line))
    if pack is not None:
        reader.stdin.write(pack.flush())
    shown, _ = reader.communicate()
    assert reader.returncode == 0
    count, before, after = shown.split()
    assert int(count) == num_lines
    return float(after) - float(before)


@pytest.mark.parametrize(("order", "packed"), [("file", False), ("prefix", True)])
def test_c37_memory_is_bounded_by_windows_and_not_by_the_input(order: str, packed: bool) -> None:
    """160 MB of lines; of order=prefix two windows of 8 MiB are held."""
    assert growth_mib(order, 8_000, look_ahead_mb=8, packed=packed) < (40 if order == "file" else 70)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("order", ["file", "prefix"])
def test_c37_half_a_million_lines_of_20_kb(order: str) -> None:
    """10 GB."""
    assert growth_mib(order, 500_000) < 300
