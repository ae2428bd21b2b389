"""Bringing ranks up: who sits where, what is printed, what is refused, and torchrun's own store."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from expert_parallel.group import RankValues, backend_of, bring_up, meet, rank_device, refuse, split
from tests.ranks import RanksFailed, run_ranks, world

ROOT = Path(__file__).resolve().parents[2]


def values(rank: int = 0, num_ranks: int = 1, port: int = 29500, **changes) -> RankValues:
    return RankValues(
        **{
            "rank": rank,
            "world_size": num_ranks,
            "local_rank": rank,
            "local_world_size": num_ranks,
            "master_addr": "127.0.0.1",
            "master_port": port,
            "agent_has_store": False,
            **changes,
        }
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_script(
    folder: Path, script: str, *before: str, words: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """A script in a Python of its own, which it ends as scripts do; `before` and `words`: Python's and its own."""
    path = folder / "script.py"
    path.write_text(script)
    return subprocess.run(
        [sys.executable, *before, str(path), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def join_and_sum(rank: int, num_ranks: int, port: int) -> tuple[list[str], list[float], int]:
    said: list[str] = []
    ranks = bring_up(values(rank, num_ranks, port), torch.device("cpu"), 30.0, said.append)
    gathered = torch.empty(num_ranks)
    ranks.everyone.all_gather(gathered, torch.tensor([rank + 0.5]))
    # The store counts for all ranks: a queue's lines are claimed by it.
    claimed = ranks.store.add("lines", 1)
    ranks.everyone.all_gather(torch.empty(num_ranks), torch.zeros(1))
    ranks.close()
    return said, gathered.tolist(), claimed


def test_ranks_find_each_other_and_the_first_says_so() -> None:
    port = free_port()
    results = run_ranks(join_and_sum, 2, port, joined=False)
    assert results[0][0] == [
        f"2 ranks at 127.0.0.1:{port}, gloo on cpu; start and collectives time out after 30 s (parallel.timeout_s)"
    ]
    assert results[1][0] == []
    assert [gathered for _, gathered, _ in results] == [[0.5, 1.5]] * 2
    assert sorted(claimed for _, _, claimed in results) == [1, 2]


def find_nobody(rank: int, num_ranks: int, port: int) -> tuple[str, float]:
    """The second of two ranks; the first never starts."""
    start = time.monotonic()
    try:
        bring_up(values(1, 2, port), torch.device("cpu"), 1.0)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "found somebody", 0.0


def test_a_rank_that_finds_nobody_names_the_address_in_time() -> None:
    port = free_port()
    ((text, seconds),) = run_ranks(find_nobody, 1, port, joined=False)
    assert (
        text
        == f"rank 1 of 2 found nobody at 127.0.0.1:{port} within 1 s: is rank 0 running there, and is the port open?"
    )
    assert seconds < 20


def start_alone(rank: int, num_ranks: int, port: int) -> str:
    """The first of three ranks; the others never start."""
    try:
        bring_up(values(0, 3, port), torch.device("cpu"), 0.5)
    except RuntimeError as error:
        return str(error)
    return "found somebody"


def test_a_rank_that_waits_names_those_that_are_missing() -> None:
    assert run_ranks(start_alone, 1, free_port(), joined=False) == [
        "rank 0 of 3 is at 'start'; ranks [1, 2] did not come within 0.5 s (parallel.timeout_s)."
    ]


def refuse_or_wait(rank: int, num_ranks: int, port: int) -> tuple[str, float]:
    """Rank 2 finds a fault of its own before it has met the others."""
    begin = time.monotonic()
    own = values(rank, num_ranks, port, agent_has_store=True)
    if rank == 2:
        refuse(own, "input=there.jsonl does not exist")
        return "", 0.0
    with pytest.raises(RuntimeError) as error:
        bring_up(own, torch.device("cpu"), 60.0, lambda text: None)
    return str(error.value), time.monotonic() - begin


def test_C10_who_will_not_come_says_so_to_those_who_wait() -> None:
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # torchrun's
    results = run_ranks(refuse_or_wait, 3, port, joined=False)
    assert [text for text, _ in results[:2]] == ["rank 2: input=there.jsonl does not exist"] * 2
    assert all(seconds < 30 for _, seconds in results)
    del store


def come_late(rank: int, num_ranks: int, port: int) -> list[str]:
    """Rank 1 comes to a stage when the first has said that it waits, and the first when all others are there."""
    ranks = bring_up(values(rank, num_ranks, port), torch.device("cpu"), 30.0, lambda text: None)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        ranks.store.set("said", "yes")

    if rank < 2:
        ranks.store.wait(["said" if rank == 1 else "loaded/2"])
    meet(ranks.store, ranks.values, "loaded", ranks.timeout, say, patience_s=0.2)
    ranks.meet("loaded too")
    # Rank 0 serves the store: it may not leave before the others have read it.
    ranks.everyone.all_gather(torch.empty(num_ranks), torch.zeros(1))
    ranks.close()
    return said


def test_C10_a_slow_rank_is_waited_for_by_name() -> None:
    said = run_ranks(come_late, 3, free_port(), joined=False)
    assert said[0] and all(re.fullmatch(r"loaded: waiting for ranks \[1\] since \d+ s", text) for text in said[0])
    assert not said[1] and not said[2]


def come_twice(rank: int, num_ranks: int, port: int) -> list[str]:
    """Bring up, leave, and bring up again over a store that outlives both, as torchrun's does."""
    texts = []
    for value in ("first", "second"):
        ranks = bring_up(values(rank, num_ranks, port, agent_has_store=True), torch.device("cpu"), 30.0, lambda _: None)
        ranks.agree("model", value if rank == 0 else "first")
        texts.append(value)
        ranks.everyone.barrier()
        ranks.close()
    return texts


def test_what_an_earlier_run_of_the_same_processes_agreed_on_is_forgotten() -> None:
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(RanksFailed, match="model: rank 0 has second, but rank 1 has first"):
        run_ranks(come_twice, 2, port, joined=False)
    del server


def agree_on(rank: int, num_ranks: int, port: int) -> str:
    ranks = bring_up(values(rank, num_ranks, port), torch.device("cpu"), 30.0, lambda text: None)
    ranks.agree("model", "demo")
    try:
        ranks.agree("parallel.row_cap", "128" if rank == 0 else "300")
        text = "agreed"
    except ValueError as error:
        text = str(error)
    ranks.everyone.all_gather(torch.empty(num_ranks), torch.zeros(1))  # rank 0 serves the store
    ranks.close()
    return text


def test_C22_settings_that_differ_between_ranks_are_seen_by_all() -> None:
    texts = run_ranks(agree_on, 2, free_port(), joined=False)
    assert texts == ["parallel.row_cap: rank 0 has 128, but rank 1 has 300; give all ranks the same."] * 2


def test_C44_a_port_in_use_is_named_with_the_way_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rank 0 cannot listen at 127.0.0.1:{port}: .*another --master-port"):
            bring_up(values(0, 2, port), torch.device("cpu"), 1.0)


def test_C44_more_processes_than_gpus() -> None:
    assert rank_device(values(3, 4), "cpu", 0) == torch.device("cpu")
    assert rank_device(values(5, 8, local_rank=1, local_world_size=4), "cuda", 4) == torch.device("cuda", 1)
    with pytest.raises(
        ValueError, match=r"torchrun starts 2 processes on this node and 1 GPUs are visible.*-per-node=1"
    ):
        rank_device(values(1, 2), "cuda", 1)


def test_the_backend_follows_the_device() -> None:
    """NCCL never sees a CPU tensor, nor gloo one of a GPU."""
    assert backend_of(torch.device("cpu")) == "gloo"
    assert backend_of(torch.device("cuda", 3)) == "cpu:gloo,cuda:nccl"


def split_in(rank: int, num_ranks: int, size: int) -> tuple[int, int, list[float]]:
    group = split(world(rank, num_ranks), size, timedelta(seconds=30))
    members = torch.empty(size)
    group.all_gather(members, torch.tensor([float(rank)]))
    return group.rank, group.size, members.tolist()


def test_C28_groups_are_neighbours_and_ranks_are_numbered_inside_them() -> None:
    assert run_ranks(split_in, 4, 2) == [(0, 2, [0, 1]), (1, 2, [0, 1]), (0, 2, [2, 3]), (1, 2, [2, 3])]


def split_unevenly(rank: int, num_ranks: int) -> str:
    try:
        split(world(rank, num_ranks), 2, timedelta(seconds=30))
    except ValueError as error:
        return str(error)
    return "split"


def test_groups_that_do_not_divide_are_refused_with_the_choices() -> None:
    assert (
        run_ranks(split_unevenly, 3)
        == ["3 ranks do not divide into groups of 2; give one of [1, 3] ranks to a group."] * 3
    )


TORCHRUN_SCRIPT = """
import os, torch
from expert_parallel.group import RankValues, bring_up
e = os.environ
values = RankValues(int(e["RANK"]), int(e["WORLD_SIZE"]), int(e["LOCAL_RANK"]), int(e["LOCAL_WORLD_SIZE"]),
                    e["MASTER_ADDR"], int(e["MASTER_PORT"]), e.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
ranks = bring_up(values, torch.device("cpu"), 60.0)
numbers = torch.empty(2, dtype=torch.int64)
ranks.everyone.all_gather(numbers, torch.tensor([values.rank]))
print(f"rank {values.rank} agent {values.agent_has_store} sees {numbers.tolist()}", flush=True)
ranks.close()
"""


def test_under_torchrun_the_store_is_the_agents(tmp_path: Path) -> None:
    """Rank 0 must not listen at a port where torchrun does."""
    run = run_script(tmp_path, TORCHRUN_SCRIPT, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert run.returncode == 0, run.stderr
    assert "rank 0 agent True sees [0, 1]" in run.stdout and "rank 1 agent True sees [0, 1]" in run.stdout
    assert run.stdout.count("time out after 60 s") == 1


ALONE_SCRIPT = """
import atexit, sys, torch
from datetime import timedelta
from pathlib import Path
from expert_parallel.group import RankValues, bring_up, split

def gloo():
    names = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]

atexit.register(lambda: print("at the end", gloo(), flush=True))  # known first, so it runs last
ranks = bring_up(RankValues(0, 1, 0, 1, "127.0.0.1", int(sys.argv[1]), False), torch.device("cpu"), 60.0)
part = split(ranks.everyone, 1, timedelta(seconds=60))
for group in (ranks.everyone, part):
    group.all_gather(torch.empty(2), torch.zeros(2))
assert gloo()
if sys.argv[2] == "closed":
    ranks.close()
    print("closed", gloo(), flush=True)
"""


@pytest.mark.parametrize("way", ["closed", "left"])
def test_no_thread_of_a_collective_is_left_when_python_ends(tmp_path: Path, way: str) -> None:
    """One that let go of a tensor then ended the process by SIGABRT: "terminate called without an active exception"."""
    run = run_script(tmp_path, ALONE_SCRIPT, words=(str(free_port()), way))
    assert run.returncode == 0, run.stderr
    assert ("closed []\n" in run.stdout) == (way == "closed")
    assert run.stdout.endswith("at the end []\n")
