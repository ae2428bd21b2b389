"""A fault reaches every rank, whichever order they fail, read and leave in. Rank 0 serves the store."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expert_parallel import faults
from expert_parallel.faults import FaultWatch
from expert_parallel.group import RankValues, bring_up
from tests.ranks import RanksFailed, run_ranks
from tests.test_expert_parallel.test_group import free_port, run_script

ROOT = Path(__file__).resolve().parents[2]
SLOW_S = 1.5
"""How much later than the others a slow rank reads: longer than they need to leave."""


def watch(rank: int, num_ranks: int, port: int) -> FaultWatch:
    values = RankValues(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, agent_has_store=False)
    ranks = bring_up(values, torch.device("cpu"), 60.0, lambda text: None)
    # On a busy machine the one that failed may be the last to say so; here it says so in any order.
    faults._ECHO_S = 60.0
    watch = FaultWatch(ranks, patience_s=60.0)
    watch._closed.set()  # its thread reads no more: the test decides who reads when
    watch._thread.join()
    ranks.meet("watched")
    return watch


def fail(rank: int, num_ranks: int, port: int, faulty: int, slow: int) -> str:
    """What a rank is told at its end. The faulty one raises, the others' collectives break; one is slow to see it."""
    own = watch(rank, num_ranks, port)
    if rank == faulty:
        return own.tell(ArithmeticError("the cause"))
    if rank == slow:
        time.sleep(SLOW_S)
    return own.tell(RuntimeError("gloo: Connection closed by peer"))


@pytest.mark.parametrize(("faulty", "slow"), [(1, 2), (0, 2), (2, 0), (1, 0)])
def test_C10_every_rank_is_told_the_cause_before_the_store_is_gone(faulty: int, slow: int) -> None:
    told = run_ranks(fail, 3, free_port(), faulty, slow, joined=False)
    assert told == [f"rank {faulty}: ArithmeticError: the cause"] * 3


def leave(rank: int, num_ranks: int, port: int) -> tuple[str, float]:
    """The last rank is gone without having read anything. What each is told, and how long that took."""
    own = watch(rank, num_ranks, port)
    own.patience_s = SLOW_S
    if rank == 2:
        return "gone", 0.0
    begin = time.monotonic()
    error = ArithmeticError("the cause") if rank == 1 else RuntimeError("gloo: Connection closed by peer")
    return own.tell(error), time.monotonic() - begin


def test_who_is_gone_is_not_waited_for_beyond_the_patience() -> None:
    (first, waited_s), (second, _), _ = run_ranks(leave, 3, free_port(), joined=False)
    assert first == second == "rank 1: ArithmeticError: the cause"
    assert SLOW_S <= waited_s < 30.0


def vanish(rank: int, num_ranks: int, port: int) -> tuple[list[str], str | None]:
    """What ends a rank, and what it is told, when the last one's process ends without a word."""
    ended: list[str] = []
    values = RankValues(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, agent_has_store=False)
    ranks = bring_up(values, torch.device("cpu"), 60.0, lambda text: None)
    watch = FaultWatch(ranks, patience_s=0.1, end=ended.append)
    if rank == num_ranks - 1:
        watch._closed.set()
        watch._lifeline.close()  # what the system does for a process that was killed
    while (told := watch.told()) is None:
        time.sleep(0.05)
    watch._thread.join()
    ranks.everyone.barrier()
    watch.close()
    return ended, told


def test_C10_a_rank_that_was_killed_is_missed_though_nobody_is_in_a_collective_with_it() -> None:
    cause = "rank 2: its process has ended: killed, gone with its machine, or left early"
    *others, (ended, told) = run_ranks(vanish, 3, free_port(), joined=False)
    assert others == [([f"rank {rank} is ended by a fault of another: {cause}"], cause) for rank in (0, 1)]
    assert (ended, told) == ([], cause)


def leave_early(rank: int, num_ranks: int, port: int) -> str | None:
    """Rank 1 leaves; the first, which watches it, sees its end and is there for some time yet."""
    values = RankValues(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, agent_has_store=False)
    watch = FaultWatch(bring_up(values, torch.device("cpu"), 60.0, lambda text: None))
    if rank == 1:
        watch.close()
    else:
        while not watch._lifeline.next_has_ended():
            time.sleep(0.05)
        time.sleep(SLOW_S)  # a few looks of the thread that watches
    told = watch.told()
    watch.ranks.everyone.barrier()
    watch.close()
    return told


def test_a_rank_that_has_left_is_not_missed() -> None:
    assert run_ranks(leave_early, 2, free_port(), joined=False) == [None, None]


def be_killed(rank: int, num_ranks: int, port: int) -> str:
    """The last words of the rank before one that is killed, for real."""
    own = watch(rank, num_ranks, port)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not own._lifeline.next_has_ended():
        time.sleep(0.05)
    raise ArithmeticError("it has ended")


def test_the_end_of_a_process_is_seen_by_the_rank_before_it() -> None:
    with pytest.raises(RanksFailed, match="it has ended") as failed:
        run_ranks(be_killed, 2, free_port(), joined=False)
    assert "rank 1 of 2: ended with exit code -9" in str(failed.value)


def break_others(rank: int, num_ranks: int, port: int) -> str:
    """What a rank in a collective is told when another fails, and goes on with something else than ending."""
    own = watch(rank, num_ranks, port)
    own.ranks.everyone.barrier()
    if rank == 1:
        told = own.tell(ArithmeticError("the cause"))
        own.ranks.drop()
        own.store.wait(["told/0", "told/2"])
        own.store.set("done/1", "yes")
        return told
    try:
        own.ranks.everyone.barrier()
    except RuntimeError as error:
        told = own.tell(error)
        own.store.set(f"told/{rank}", "yes")
        if rank == 0:  # it serves the store
            own.store.wait(["done/1"])
        return told
    return "no fault"


def test_who_waits_for_a_rank_that_failed_is_told_though_its_process_lives_on() -> None:
    assert run_ranks(break_others, 3, free_port(), joined=False) == ["rank 1: ArithmeticError: the cause"] * 3


def tell_slowly(rank: int, num_ranks: int, port: int) -> tuple[list[str], str]:
    """Rank 0 waits in `tell` for one that never hears, for longer than its own patience with itself."""
    values = RankValues(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, agent_has_store=False)
    ended: list[str] = []
    own = FaultWatch(
        bring_up(values, torch.device("cpu"), 60.0, lambda text: None), patience_s=SLOW_S, end=ended.append
    )
    if rank == 1:
        own._closed.set()  # it never hears
        own._thread.join()
        own.store.wait(["told"])
        own.store.set("read", "yes")
        return ended, "gone"
    told = own.tell(ArithmeticError("the cause"))
    own._thread.join()
    own.store.set("told", "yes")
    own.store.wait(["read"])
    return ended, told


def test_who_is_telling_is_not_ended_for_being_slow() -> None:
    results = run_ranks(tell_slowly, 2, free_port(), joined=False)
    assert results == [([], "rank 0: ArithmeticError: the cause"), ([], "gone")]


def tell_and_hear(rank: int, num_ranks: int, port: int) -> tuple[str, float]:
    """How long the rank that serves the store waits in `tell` where all, the one that failed too, know the fault."""
    own = watch(rank, num_ranks, port)
    own.patience_s = 50.0
    begin = time.monotonic()
    if rank == 1:
        told = own.tell(ArithmeticError("the cause"))
        own.close()
        return told, 0.0
    return own.tell(RuntimeError("gloo: Connection closed by peer")), time.monotonic() - begin


def test_who_told_a_fault_need_not_hear_it() -> None:
    (first, waited_s), (second, _) = run_ranks(tell_and_hear, 2, free_port(), joined=False)
    assert first == second == "rank 1: ArithmeticError: the cause"
    assert waited_s < 40.0


@pytest.mark.parametrize(("agent_has_store", "who"), [(True, "torchrun"), (False, "rank 0")])
def test_who_served_the_store_that_is_gone_is_named(agent_has_store: bool, who: str) -> None:
    def broken(*_: object) -> bool:
        raise RuntimeError("Connection reset by peer")

    watch = FaultWatch.__new__(FaultWatch)
    values = SimpleNamespace(rank=1, agent_has_store=agent_has_store)
    watch.ranks = SimpleNamespace(values=values)  # pyright: ignore
    watch.store, watch._heard = SimpleNamespace(check=broken), None  # pyright: ignore
    assert watch.told() == f"{who}: it served the ranks' store, and is gone"
    watch._heard = "rank 2: ValueError: the cause"
    assert watch.told() == "rank 2: ValueError: the cause"


ALONE_SCRIPT = """
import atexit, sys, threading, torch
from expert_parallel.faults import FaultWatch
from expert_parallel.group import RankValues, bring_up

atexit.register(lambda: print("at the end", [each.name for each in threading.enumerate()]))  # so it runs last
ranks = bring_up(RankValues(0, 1, 0, 1, "127.0.0.1", int(sys.argv[1]), False), torch.device("cpu"), 60.0)
watch = FaultWatch(ranks)
if sys.argv[2] == "raised":
    raise ArithmeticError("the script's own")
if sys.argv[2] == "closed":
    watch.close()
    ranks.close()
"""


@pytest.mark.parametrize("way", ["closed", "left", "raised"])
def test_nobody_listens_when_python_ends(tmp_path: Path, way: str) -> None:
    """A thread that came back from the store then ended the process by SIGABRT: an LLM that nobody closed, say."""
    run = run_script(tmp_path, ALONE_SCRIPT, words=(str(free_port()), way))
    assert run.returncode == (way == "raised"), run.stderr
    assert run.stdout.endswith("at the end ['MainThread']\n"), run.stdout
