"""What a host can still give, read from made-up files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_parallel.host_memory import RESERVE, HostMemory, read_host_memory

GIB = 1 << 30


def host(root: Path, groups: str, files: dict[str, str], available_kb: int = 64 << 20) -> Path:
    """A machine with 64 GiB available whose processes are in `groups`."""
    written = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {available_kb} kB\n", "proc/self/cgroup": groups}
    for name, text in (written | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    read = read_host_memory(host(tmp_path, "0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n"}))
    assert read.available == 64 * GIB and "MemAvailable" in read.source
    assert read_host_memory().available > 0  # this machine's


def test_C50_a_control_group_of_6_gib_leaves_what_it_does_not_use(tmp_path: Path) -> None:
    """Limits of all groups above hold too; pages of files that can be dropped are free."""
    files = {
        "sys/fs/cgroup/job/memory.max": f"{6 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/job/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
    }
    read = read_host_memory(host(tmp_path, "0::/job/step\n", files))
    assert read.available == 5 * GIB
    assert read.source == f"the limit memory.max={6 * GIB} of the control group /sys/fs/cgroup/job"


def test_the_older_control_groups(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{5 * GIB}",
        "sys/fs/cgroup/memory/job/memory.stat": "cache 1\n",
    }
    groups = "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n"
    assert read_host_memory(host(tmp_path, groups, files)).available == 0


def test_too_much_is_refused_with_the_arithmetic() -> None:
    memory = HostMemory(6 * GIB, "the limit of a group")
    memory.check(6 * GIB - RESERVE, "experts", "free memory.")
    with pytest.raises(ValueError) as caught:
        memory.check(6 * GIB, "experts (2 layers)", "free memory.")
    assert str(caught.value) == (
        "experts (2 layers) take 6.000 GiB of pinned host memory, and the limit of a group leaves 6.000 GiB (1.000 GiB "
        "of them for the processes themselves); free memory."
    )
