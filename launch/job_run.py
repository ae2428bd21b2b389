"""One rank's way through a job: what earlier runs left, its engine, its part of the lines, and on the first rank the
whole output at the end. One rank or several: the same way.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from rich.console import Console

from configs.schema import Config
from launch.console import ProgressView
from launch.crew import Crew
from launch.job_progress import CrewProgress, LineCount
from launch.stop_signals import StopSignals
from moe.batch.fingerprint import job_fingerprint
from moe.batch.job import Job
from moe.batch.job_files import JobFiles
from moe.batch.journal import Header
from moe.batch.journal_writer import JournalWriter
from moe.batch.lines import BadLine, Line
from moe.batch.monitor import ErrorLog, Monitor
from moe.batch.order import in_runs
from moe.batch.output import put_together
from moe.batch.output_lock import output_lock
from moe.batch.report import JobReport, Progress
from moe.batch.resume import Start, begin_run, kept_errors, made_from
from moe.batch.run_files import Mark
from moe.batch.sources import job_lines
from moe.engine.engine import Engine
from moe.engine.stats import EngineStats
from router.load import balancedness

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankEnd:
    """What one rank did of a job."""

    stats: EngineStats
    lines_done: int
    errors: ErrorLog
    seconds: float
    stopped: int
    device: str


@dataclass(frozen=True)
class JobEnd:
    """How all ranks together ended. `stopped`: the reason, where lines are left. `whole`: the output was there before.
    `report`: of what this run did; None where `whole` says it all."""

    report: JobReport | None = None
    stopped: int = 0
    whole: Mark | None = None


class JobRun:
    """A job on one rank; `run` does it all, and `num_done` says how far it came, also after a fault."""

    def __init__(self, config: Config, files: JobFiles, crew: Crew, monitor: Monitor, stop: StopSignals) -> None:
        self._config = config
        self._files = files
        self._crew = crew
        self._monitor = monitor
        self._stop = stop
        self._start = Start()
        self._journal: JournalWriter | None = None

    @property
    def num_done(self) -> int:
        """Lines whose records this rank knows to be in journals: of earlier runs, and its own."""
        return self._start.ledger.num_done + (self._journal.num_records if self._journal is not None else 0)

    def run(self, console: Console, *, restarted: bool) -> JobEnd:
        """Answer this rank's lines, in step with the others; the output is whole when it returns without a stop.
        `restarted`: torchrun has started the ranks again after a fault."""
        with output_lock(self._files.run) if self._crew.rank == 0 else contextlib.nullcontext():
            return self._run(console, restarted=restarted)

    def _run(self, console: Console, *, restarted: bool) -> JobEnd:
        fingerprint = self._begin(restarted=restarted)
        if self._start.whole is not None:
            return JobEnd(whole=self._start.whole)
        pending = self._start.ledger.pending(job_lines(self._config, self._files.source))
        first = next(pending, None)
        end = self._idle() if first is None else self._answer(chain([first], pending), fingerprint, console)
        ends: list[RankEnd] = self._crew.gather(end)  # and every journal is whole
        for other in ends:
            if other is not end and self._crew.rank == 0:
                self._monitor.errors.merge(other.errors)
        stopped = max(each.stopped for each in ends)
        ledger, failed = self._start.ledger, sum(each.errors.counts.total() for each in ends)
        if not stopped and self._crew.rank == 0:
            failed = put_together(self._files.run, made_from(fingerprint, self._config.job), ledger)
            if len(ends) > 1:
                logger.info("lines of each rank: %s", ", ".join(str(each.lines_done) for each in ends))
        self._crew.wait_for_first("output")
        num_done = ledger.num_done + sum(each.lines_done for each in ends)
        return JobEnd(self._report(ends, num_done if stopped else ledger.seen, failed), stopped)

    def _begin(self, *, restarted: bool) -> dict[str, str]:
        """Look at what is there, on the first rank alone; the others hear of it."""
        found: tuple[Start, dict[str, str]] | None = None
        if self._crew.rank == 0:
            files, job = self._files, self._config.job
            fingerprint = job_fingerprint(self._config, files.source.identity())
            start = begin_run(
                files.run,
                fingerprint,
                job,
                overwrite=files.overwrite,
                restarted=restarted and self._crew.begun_before(),
                rereadable=files.source.rereadable,
            )
            self._crew.say_begun()
            for note in kept_errors(files.run, start.ledger):
                self._monitor.error(note)
            found = (Start(start.run, start.ledger.for_ranks(), start.whole), fingerprint)
        self._crew.wait_for_first("begin")
        self._start, fingerprint = self._crew.gather(found)[0]
        return fingerprint

    def _idle(self) -> RankEnd:
        """Nothing is left to answer: no model is needed."""
        logger.info("every line is done")
        return RankEnd(EngineStats(), 0, ErrorLog(), 0.0, 0, "none")

    def _answer(self, lines: Iterator[Line | BadLine], fingerprint: dict[str, str], console: Console) -> RankEnd:
        """This rank's part of the lines, to its journal."""
        crew, config, kept = self._crew, self._config, self._start.ledger.num_failed
        header = Header(self._start.run, crew.rank, fingerprint)
        count_errors = crew.counter("errors")
        self._journal = open_journal(self._files, header)
        with self._journal as journal:
            engine = Engine(config, ranks=crew.ranks)
            try:
                claims = crew.counter("claims")
                if crew.size > 1:
                    lines = in_runs(lines, lambda: claims(1) - 1)
                job = Job(
                    config,
                    engine,
                    engine.tokenizer,
                    config.model,
                    on_error=self._monitor.error,
                    count_errors=lambda number: count_errors(number) + kept,
                )
                self._say_start(engine)
                self._run_job(job, engine, lines, journal, console)
                engine.conclude()
                stats = engine.count_experts()
            finally:
                engine.close()
        device = device_name(engine.parts.device)
        return RankEnd(stats, job.lines_written, self._monitor.errors, job.seconds, job.stopped, device)

    def _run_job(
        self, job: Job, engine: Engine, lines: Iterator[Line | BadLine], journal: JournalWriter, console: Console
    ) -> None:
        crew, first = self._crew, self._crew.rank == 0
        count = LineCount(self._files.source.paths if first else (), self._config.job.limit)
        crew_progress = CrewProgress(crew)
        view = ProgressView(
            console,
            quiet=self._config.job.quiet,
            total=lambda: count.total,
            resumed=self._start.ledger.num_done,
            num_ranks=crew.size,
        )
        with contextlib.ExitStack() as stack:
            if first:
                stack.enter_context(view)

            def show(progress: Progress) -> None:
                self._monitor.lines_total = count.total
                self._monitor.step(progress)
                progress = crew_progress.of_all(progress)
                if first:
                    view.update(progress, running=len(engine.scheduler.running), waiting=len(engine.scheduler.waiting))

            stack.enter_context(self._stop.gently())
            # What is there by now stays to the end. A full pass of the collector over it would hold the device up for a
            # quarter of a second, every few ten thousand lines.
            gc.freeze()
            stack.callback(gc.unfreeze)
            job.run(lines, journal, show, lambda: self._stop.wanted)

    def _say_start(self, engine: Engine) -> None:
        """What is known now that the model is loaded."""
        config, crew = self._config, self._crew
        if engine.tokenizer is not None and engine.tokenizer.generation_defaults:
            defaults = ", ".join(f"{name}={value}" for name, value in engine.tokenizer.generation_defaults.items())
            logger.info(
                "chats take %s from the checkpoint's generation_config where neither line nor key says more", defaults
            )
        where = f" on {crew.size} ranks" if crew.size > 1 else ""
        logger.info("answering %s into %s%s", self._files.source.name, self._files.output, where)
        device = device_name(engine.parts.device)
        self._monitor.start(
            model=config.model,
            device=device if crew.size == 1 else f"{crew.size} x {device}",
            lines_resumed=self._start.ledger.num_done,
            plan=engine.plan,
            ranks=crew.size,
        )

    def _report(self, ends: list[RankEnd], lines: int, failed: int) -> JobReport:
        """Of all ranks; lines that earlier runs have done count as well."""
        stats = EngineStats.of_ranks([each.stats for each in ends])
        counts_LE = torch.tensor(stats.expert_counts)
        stats.expert_balance = balancedness(counts_LE) if bool(counts_LE.any()) else None
        device = ends[0].device
        return JobReport.of(
            stats,
            model=self._config.model,
            device=device if len(ends) == 1 else f"{len(ends)} x {device}",
            answered=lines - failed,
            failed=failed,
            seconds=max(each.seconds for each in ends),
        )


def open_journal(files: JobFiles, header: Header) -> JournalWriter:
    """A new journal beside the output, which proves that records can be written. ValueError where they cannot."""
    path = files.run.journal_path(header.run, header.rank)
    try:
        return JournalWriter(path, header)
    except OSError as error:
        folder = path.parent
        hint = "; make that folder first" if isinstance(error, FileNotFoundError) else ""
        if isinstance(error, FileExistsError):
            hint = "; another run towards this output has just begun"
        raise ValueError(
            f"output={files.output} cannot be written: {error.strerror or error} (in {folder}){hint}."
        ) from error


def device_name(device: torch.device) -> str:
    """What a person calls it: the card's model, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
