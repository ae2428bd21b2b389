"""A fault on any one rank, at any time, ends all of a job's ranks, with its cause in the last lines of each.

torchrun's own agent starts, watches and ends the ranks here; they are forked from the server of `tests/ranks.py`, which
has imported all they need. A fault comes by event: the rank that is to die says so and does it itself.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import launch.console
import launch.job_run
from expert_parallel.rebalance import ExpertMover
from launch.crew import Several
from moe.model import experts
from moe.model.checkpoint import Checkpoint
from tests import ranks
from tests.test_ranks import is_running, wait_for

WORDS = (
    "engine.device=cpu",
    "engine.max_num_seqs=2",
    "engine.max_batched_tokens=64",
    "cache.num_blocks=64",
    "parallel.timeout_s=60",
)
ENDED_BY_SIGNAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Fault:
    """What becomes of one rank: `how` is an exception to raise, or None to be killed."""

    rank: int
    stage: str
    how: type[Exception] | None

    def strike(self, folder: Path) -> None:
        (folder / "struck").write_text(str(time.time()))
        if self.how is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise self.how("the cause itself")


def generate(folder: str, words: list[str], fault: Fault) -> None:
    """The process of one rank, as `python -m launch.generate` is. Leaves its number and how it ended."""
    rank, place, leave = os.environ["RANK"], Path(folder), os._exit
    (place / f"pid-{rank}").write_text(str(os.getpid()))

    def leave_a_word(code: int) -> None:
        (place / f"code-{rank}").write_text(str(code))
        leave(code)

    os._exit = leave_a_word
    os.chdir(place)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if int(rank) == fault.rank:
        STAGES[fault.stage](lambda: fault.strike(place))
    elif fault.stage == "merging" and rank == "0":
        launch.job_run.put_together = lambda *_: merge_for_long(place)
    sys.argv = ["launch.generate", *words]
    runpy.run_module("launch.generate", run_name="__main__")


def in_loading(strike: Callable[[], None]) -> None:
    """While the second tensor is read: the others are done, and wait for this rank."""
    load, calls = Checkpoint.load_rule, []

    def failing(*args: Any) -> int:
        calls.append(1)
        if len(calls) == 2:
            strike()
        return load(*args)

    Checkpoint.load_rule = failing


def in_a_step(strike: Callable[[], None]) -> None:
    """In the experts of the second layer, in the third step: the others are in the same layer."""
    call, calls = experts.Experts.__call__, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 * NUM_SPARSE_LAYERS + 2:
            strike()
        return call(*args)

    experts.Experts.__call__ = failing


def in_a_rebalance(strike: Callable[[], None]) -> None:
    """In the second exchange of weights: the others are in the same one, or on their way to it."""
    exchange, calls = ExpertMover._exchange, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            strike()
        return exchange(*args)

    ExpertMover._exchange = failing  # pyright: ignore[reportAttributeAccessIssue]


def while_merging(strike: Callable[[], None]) -> None:
    """When all lines are answered: the first rank puts the output together, the others wait for it."""

    wait_for_first = Several.wait_for_first

    def failing(crew: Several, what: str) -> None:
        if what != "output":
            return wait_for_first(crew, what)
        wait_for(Path("merging").exists)
        return strike()

    launch.job_run.put_together = lambda *_: strike()
    Several.wait_for_first = failing


def merge_for_long(folder: Path) -> int:
    (folder / "merging").touch()
    while True:
        time.sleep(0.05)


STAGES = {"loading": in_loading, "step": in_a_step, "rebalance": in_a_rebalance, "merging": while_merging}
MOVING = ("balance.interval=2", "balance.move=always", "balance.layers_per_step=6", "balance.redundant_experts=3")
NUM_SPARSE_LAYERS = 6  # of the demo model


def run_as_torchrun(num_ranks: int, folder: Path, body: Callable[..., None], *args: Any) -> ChildFailedError | None:
    """What torchrun does with a function instead of a module; each rank's words go to files in `folder`/logs."""
    assert ranks.__file__  # imported, so that the server's list of imports is set
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    handlers = {number: signal.getsignal(number) for number in ENDED_BY_SIGNAL}
    try:
        elastic_launch(config, body)(*args)
    except ChildFailedError as error:
        return error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # the agent leaves its own behind
    return None


def last_words(folder: Path, rank: int) -> str:
    (path,) = (folder / "logs").rglob(f"{rank}/stderr.log")
    return "\n".join(path.read_text().splitlines()[-12:])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(0, "loading", ArithmeticError),
        Fault(1, "loading", MemoryError),
        Fault(2, "loading", None),
        Fault(0, "step", None),
        Fault(1, "step", ArithmeticError),
        Fault(2, "step", MemoryError),
        Fault(1, "rebalance", None),
        Fault(0, "merging", MemoryError),
        Fault(1, "merging", None),
        Fault(2, "merging", ArithmeticError),
    ],
    ids=lambda fault: f"{fault.stage}-{fault.rank}-{'killed' if fault.how is None else fault.how.__name__}",
)
def test_C10_a_fault_on_one_rank_ends_all_with_its_cause(fault: Fault, tmp_path: Path) -> None:
    lines = [{"prompt": "And it came to pass", "max_tokens": 8, "ignore_eos": True}] * 6
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [*WORDS, "input=in.jsonl", "output=out.jsonl", *(MOVING if fault.stage == "rebalance" else ())]
    error = run_as_torchrun(3, tmp_path, generate, str(tmp_path), words, fault)
    took_s = time.time() - float((tmp_path / "struck").read_text())
    said = {rank: last_words(tmp_path, rank) for rank in range(3)}
    assert error is not None, said
    # Nobody had to be killed: torchrun does that to those who still run after 30 s.
    codes = {rank: tmp_path / f"code-{rank}" for rank in range(3) if fault.how is not None or rank != fault.rank}
    assert all(path.exists() for path in codes.values()), (said, codes)
    assert all(path.read_text() not in ("0", "3") for path in codes.values()), said
    assert took_s < 60.0
    for rank in range(3):
        pid = int((tmp_path / f"pid-{rank}").read_text())
        wait_for(lambda pid=pid: not is_running(pid))
    assert not (tmp_path / "out.jsonl").exists()
    if fault.how is None:
        failed, failure = error.get_first_failure()
        if failed == fault.rank:
            assert failure.exitcode == -signal.SIGKILL, said
        else:  # torchrun looks at all at once, and this one had heard of it and ended by then
            assert failure.exitcode == 1 and f"rank {fault.rank}: " in said[failed], said
        return
    for rank, text in said.items():
        assert f"error on rank {rank}: " in text and f"rank {fault.rank}: " in text, said
        assert f"{fault.how.__name__}: the cause itself" in text, said
        if fault.stage == "loading":
            assert "model.safetensors" in text, said
        if fault.stage == "step":
            assert "stage 'forward'" in text and "layer " in text, said


def generate_with_a_slow_summary(folder: str, words: list[str]) -> None:
    """The process of one rank; the first shows its summary long after all know that the output is whole."""
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    show = launch.console.print_report

    def show_late(*args: Any) -> None:
        time.sleep(2.0)
        show(*args)

    launch.console.print_report = show_late
    sys.argv = ["launch.generate", *words]
    runpy.run_module("launch.generate", run_name="__main__")


def test_the_first_rank_says_how_the_job_went_before_torchrun_ends_it(tmp_path: Path) -> None:
    """A line failed, so every rank ends with 3; torchrun takes the first one's for a fault and ends the others."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "And it", "max_tokens": 2}\nno line\n')
    words = [*WORDS, "input=in.jsonl", "output=out.jsonl", "job.report=report"]
    error = run_as_torchrun(2, tmp_path, generate_with_a_slow_summary, str(tmp_path), words)
    said = last_words(tmp_path, 0)
    assert error is not None and error.get_first_failure()[1].exitcode == 3, said
    (shown,) = (tmp_path / "logs").rglob("0/stdout.log")
    assert "answers: out.jsonl" in shown.read_text(), said
    assert "stopped by" not in said
    assert json.loads((tmp_path / "report" / "metrics.json").read_text())["outcome"] == "some failed"
