"""What a person sees of a job: a moving line on a terminal, plain lines elsewhere, a table at the end.

Everything but the table and the answers shown goes to standard error. Knows progress records and reports, no engine.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.status import Status
from rich.table import Table

from moe.batch.report import JobReport, Progress

OURS = ("configs", "expert_parallel", "kernels", "kv_cache", "launch", "moe", "router")
PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.2

logger = logging.getLogger(__name__)


def set_up_logging(console: Console) -> None:
    """Our own messages from INFO up, other libraries' from WARNING up; above the moving line where there is one."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, show_level=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)


def set_up_rank_logging(console: Console, rank: int) -> None:
    """Of a rank that is not the first: warnings alone, with its number; the first speaks for all."""
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class ProgressView:
    """Shows a running job. Use as a context manager; `update` may be called as often as one likes."""

    def __init__(self, console: Console) -> None:
        self._every_s = LIVE_EVERY_S if console.is_terminal else PLAIN_EVERY_S
        self._status = Status("starting", console=console) if console.is_terminal else None
        self._shown_at = time.monotonic()
        self._shown_tokens = 0

    def update(self, progress: Progress, *, running: int, waiting: int) -> None:
        """Show the numbers, unless the last ones are still fresh. tokens/s is that of the time in between."""
        now = time.monotonic()
        if (elapsed := now - self._shown_at) < self._every_s:
            return
        rate = (progress.output_tokens - self._shown_tokens) / elapsed
        self._shown_at, self._shown_tokens = now, progress.output_tokens
        text = progress_line(progress, rate, running=running, waiting=waiting)
        if self._status is not None:
            self._status.update(text)
        else:
            logger.info(text)

    def __enter__(self) -> ProgressView:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()


def progress_line(progress: Progress, rate: float, *, running: int, waiting: int) -> str:
    """One line of progress.

    >>> progress_line(Progress(9, 4, 1, 100, 0.25, 2.0), 50.0, running=3, waiting=2)
    '4 lines done (1 failed), 50 tokens/s, 3 running, 2 waiting, KV cache 25 %'
    """
    failed = f" ({progress.lines_failed} failed)" if progress.lines_failed else ""
    return (
        f"{progress.lines_done} lines done{failed}, {rate:,.0f} tokens/s, {running} running, {waiting} waiting, "
        f"KV cache {progress.kv_use:.0%}".replace("%", " %")
    )


def print_report(console: Console, report: JobReport) -> None:
    """The summary table."""
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in report.rows():
        table.add_row(name, value)
    console.print(table)
