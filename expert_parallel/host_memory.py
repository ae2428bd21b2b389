"""How much memory the host can still give: what the kernel calls available, and what control groups leave.

Knows files below /proc and /sys; knows nothing of experts. Read once, at start.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

RESERVE = 1 << 30
"""Left to the processes themselves and to the files that they read."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes. `source` says whose number `available` is."""

    available: int
    source: str

    def check(self, num_bytes: int, what: str, way_out: str) -> None:
        """ValueError where so many pinned bytes do not fit beside the reserve."""
        if num_bytes + RESERVE > self.available:
            raise ValueError(
                f"{what} take {_gib(num_bytes)} of pinned host memory, and {self.source} leaves {_gib(self.available)} "
                f"({_gib(RESERVE)} of them for the processes themselves); {way_out}"
            )


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Of this machine and this process's control groups, whichever leaves less. `root`: tests have one of their own."""
    return HostMemory(*min([(mem_available(root), "MemAvailable of /proc/meminfo"), *_group_limits(root)]))


def locked_limit() -> int | None:
    """Of memory that a process may lock, in bytes (ulimit -l); None: none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def mem_available(root: Path = Path("/")) -> int:
    """What the kernel says that new programs can have."""
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no line MemAvailable: this is no Linux that the engine knows")


def _group_limits(root: Path) -> list[tuple[int, str]]:
    """Of each control group that this process is in, up to the uppermost; versions 1 and 2."""
    groups = root / "proc/self/cgroup"
    if not groups.is_file():
        return []
    found: list[tuple[int, str]] = []
    for line in groups.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            found += _limit_of(folder, *names, root)
            if folder == base:
                break
            folder = folder.parent
    return found


def _limit_of(folder: Path, limit_name: str, used_name: str, root: Path) -> list[tuple[int, str]]:
    """What one group leaves; pages of files that it holds can be given up, and count as free."""
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        used = int((folder / used_name).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return []
    if limit == "max":
        return []
    files = int(stat.get("inactive_file", 0))
    name = folder.relative_to(root)
    return [(max(int(limit) - used + files, 0), f"the limit {limit_name}={limit} of the control group /{name}")]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"
