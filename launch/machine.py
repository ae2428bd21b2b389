"""What a measurement was taken on: commit, device, clocks, versions. Asks git and nvidia-smi; both may be missing."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

import torch
import triton

from launch.figure import ROOT
from moe.version import __version__

CLOCK_FIELDS = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"


def machine_record(device: torch.device, command: str, commit: str | None) -> dict[str, Any]:
    """The head of a result file; `commit` as the caller knows it, where the tree may not say."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit or git_commit(),
        "device": device_name(device),
        "software": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "clocks": {"fields": CLOCK_FIELDS, "before": clocks()},
    }


def device_name(device: torch.device) -> str:
    """As the driver calls it; the processor's name for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def clocks() -> str | None:
    """CLOCK_FIELDS of every GPU, as nvidia-smi prints them."""
    return _output(["nvidia-smi", f"--query-gpu={CLOCK_FIELDS}", "--format=csv,noheader"])


def git_commit() -> str | None:
    """HEAD, and whether the tree differs from it."""
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit} with uncommitted changes" if commit and changed else commit


def _output(command: list[str]) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
