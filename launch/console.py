"""What a person sees of a job: a moving bar on a terminal, plain lines elsewhere, a table at the end.

Everything but the table and the answers shown goes to standard error. Knows progress records and reports, no engine.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from moe.batch.report import JobReport, Progress

OURS = ("configs", "expert_parallel", "kernels", "kv_cache", "launch", "moe", "router")
PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.2

logger = logging.getLogger(__name__)


def stand_in_for_closed_streams() -> None:
    """Where this process was started without standard output or error (`>&-`, some schedulers), the null device stands
    for it; also under its number, which a file of the job's would get otherwise, and with it all that is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def set_up_logging(console: Console, *, quiet: bool = False) -> None:
    """Our own messages from INFO up (`quiet`: WARNING), other libraries' from WARNING up; above the moving line where
    there is one."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, show_level=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.INFO)


def set_up_rank_logging(console: Console, rank: int) -> None:
    """Of a rank that is not the first: warnings alone, with its number; the first speaks for all."""
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class ProgressView:
    """Shows a running job. Use as a context manager; `update` may be called as often as one likes.

    `total`: gives the number of lines in all once that is known. `resumed`: those that earlier runs have done.
    `num_ranks`: lines and tokens are of all ranks, what runs and waits is of the first.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        total: Callable[[], int | None] = lambda: None,
        resumed: int = 0,
        num_ranks: int = 1,
    ) -> None:
        live = console.is_terminal and not quiet
        self._quiet, self._total, self._resumed, self._num_ranks = quiet, total, resumed, num_ranks
        self._every_s = LIVE_EVERY_S if live else PLAIN_EVERY_S
        self._bar = None
        if live:
            words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=False))
            self._bar = Bar(BarColumn(bar_width=20), TaskProgressColumn(), words, console=console, expand=True)
            self._task = self._bar.add_task("starting", total=None)
        self._shown_at = time.monotonic()
        self._shown_tokens = 0

    def update(self, progress: Progress, *, running: int, waiting: int) -> None:
        """Show the numbers, unless the last ones are still fresh. tokens/s is that of the time in between."""
        now = time.monotonic()
        if self._quiet or (elapsed := now - self._shown_at) < self._every_s:
            return
        rate = (progress.output_tokens - self._shown_tokens) / elapsed
        self._shown_at, self._shown_tokens = now, progress.output_tokens
        total = self._total()
        text = progress_line(progress, rate, running=running, waiting=waiting, total=total, resumed=self._resumed)
        if self._num_ranks > 1:
            text += " on rank 0"
        if self._bar is not None:
            self._bar.update(self._task, total=total, completed=self._resumed + progress.lines_done, description=text)
        else:
            logger.info(text)

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def progress_line(
    progress: Progress, rate: float, *, running: int, waiting: int, total: int | None = None, resumed: int = 0
) -> str:
    """One line of progress. The time left follows from this run's lines so far.

    >>> progress_line(Progress(9, 4, 1, 100, 0.25, 2.0), 50.0, running=3, waiting=2)
    '4 lines done (1 failed), 50 tokens/s, 3 running, 2 waiting, KV cache 25 %'
    >>> progress_line(Progress(9, 4, 0, 100, 0.25, 2.0), 50.0, running=3, waiting=2, total=3000, resumed=100)
    '104 of about 3,000 lines done, 50 tokens/s, about 24 min left, 3 running, 2 waiting, KV cache 25 %'
    """
    done = resumed + progress.lines_done
    parts = [f"{done:,} lines done" if total is None else f"{done:,} of about {max(total, done):,} lines done"]
    if progress.lines_failed:
        parts[0] += f" ({progress.lines_failed:,} failed)"
    parts.append(f"{rate:,.0f} tokens/s")
    if total is not None and progress.lines_done and total > done:
        parts.append(f"about {_time_left((total - done) * progress.seconds / progress.lines_done)} left")
    parts += [f"{running} running", f"{waiting} waiting", f"KV cache {progress.kv_use:.0%}".replace("%", " %")]
    return ", ".join(parts)


def _time_left(seconds: float) -> str:
    """Two digits are more than is known."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def print_report(console: Console, report: JobReport) -> None:
    """The summary table."""
    print_rows(console, report.rows())


def print_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    """A table of names and values."""
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
