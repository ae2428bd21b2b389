"""Run a test's body in N real processes that are joined by gloo, and bring back what each returned.

    def body(rank: int, num_ranks: int, extra: int) -> Tensor: ...     # at the top of a test file
    results = run_ranks(body, 4, extra)                                # one result for each rank

torch.distributed is up when the body begins. Processes are forked from one server that has imported torch once, so a
launch takes tenths of a second. The first fault of any rank ends all ranks and is raised here with that rank's own
traceback; a rank that hangs writes where it stands and dies. No rank outlives this process, even if it is killed: each
watches for its end.
"""

# torch.distributed lists its stores nowhere.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expert_parallel.group import ExpertGroup

SERVER = multiprocessing.get_context("forkserver")
# Takes effect when the server starts, with the first run. A name that cannot be imported is skipped there.
SERVER.set_forkserver_preload(["torch.distributed", "pytest", "launch.generate", "tests.tiny_models"])

_LAST_WORDS_S = 2.0
"""How long the other ranks may go on after a fault: their own tracebacks are printed below the first one."""


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the text holds every traceback, the first fault first."""


def run_ranks(
    body: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0, joined: bool = True
) -> list[Any]:
    """body(rank, num_ranks, *args) in `num_ranks` processes; results by rank. `body` and `args` can be pickled.

    joined=False leaves it to the body to bring torch.distributed up, and to end it.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        readers: list[Connection] = []
        processes = []
        try:
            for rank in range(num_ranks):
                reader, writer = SERVER.Pipe(duplex=False)
                process = SERVER.Process(
                    target=_run_rank, args=(folder, writer, timeout_s, joined, body, rank, num_ranks, args), daemon=True
                )
                process.start()
                writer.close()
                readers.append(reader)
                processes.append(process)
            return _collect(readers, processes, Path(folder), timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def world(rank: int, num_ranks: int) -> ExpertGroup:
    """The group of all ranks of a joined run."""
    assert dist.group.WORLD is not None, "the run is not joined"
    return ExpertGroup(rank, num_ranks, dist.group.WORLD)


def _run_rank(
    folder: str,
    writer: Connection,
    timeout_s: float,
    joined: bool,
    body: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
) -> None:
    """The process of one rank. It says how it went exactly once, as (fine, pickled result or traceback, when)."""
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    with open(_hang_file(Path(folder), rank), "w") as hang_file:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=hang_file)
        try:
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            if joined:
                store, timeout = dist.FileStore(f"{folder}/store", num_ranks), timedelta(seconds=timeout_s)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
            result = body(rank, num_ranks, *args)
            if joined:
                dist.barrier()  # a rank that left while another still talks to it would break the connection
                dist.destroy_process_group()
            message: tuple[bool, Any, float] = (True, pickle.dumps(result), time.monotonic())
        except BaseException:
            message = (False, traceback.format_exc(), time.monotonic())
        writer.send(message)
        faulthandler.cancel_dump_traceback_later()


def _end_with_the_test() -> None:
    test_process = multiprocessing.parent_process()
    assert test_process is not None, "a rank is always started by a test"
    wait([test_process.sentinel])
    os._exit(1)


def _collect(readers: list[Connection], processes: list[Any], folder: Path, timeout_s: float) -> list[Any]:
    """Waits for all ranks, or for the first fault and what the others say within a moment of it."""
    results: list[Any] = [None] * len(readers)
    faults: list[tuple[float, str]] = []  # by the ranks' own clocks: on a busy machine several are found at once
    waiting = dict(enumerate(readers))
    deadline = time.monotonic() + timeout_s + 5.0  # the ranks' own alarms come first: they know where they stand
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, reader in waiting.items() if reader in ready]:
            content: Any
            try:
                fine, content, told_at = waiting.pop(rank).recv()
            except EOFError:
                processes[rank].join()
                fine, content = False, _how_it_died(processes[rank].exitcode, _hang_file(folder, rank))
                told_at = time.monotonic()
            if fine:
                results[rank] = pickle.loads(content)
            else:
                if not faults:
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
                faults.append((told_at, f"rank {rank} of {len(readers)}: {content}"))
    if faults or waiting:
        texts = [text for _, text in sorted(faults)]
        if waiting:
            texts.append(f"ranks {sorted(waiting)} had not ended")
        raise RanksFailed("\n".join(texts))
    return results


def _hang_file(folder: Path, rank: int) -> Path:
    return folder / f"hang-{rank}"


def _how_it_died(exitcode: int | None, hang_file: Path) -> str:
    where = hang_file.read_text()
    if where:
        return f"timed out\n{where}"
    return f"ended with exit code {exitcode} and no word"
