"""The main job: a file of prompts in, a file of answers out. `python -m launch.generate`, alone or under torchrun.

Exit codes: 0 every line answered; 1 the job failed; 2 a wrong command line, config or file; 3 done, but some lines
failed; 130 and 143 stopped by SIGINT (Ctrl-C) and SIGTERM. After 1, 130 and 143 the same command goes on.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until the job has handlers of its own, Ctrl-C ends the imports below without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from configs.schema import Config
from configs.torchrun import rank_environment
from expert_parallel.faults import end_process
from expert_parallel.group import RankValues, refuse
from launch.check_lines import check_lines, dry_run
from launch.command_line import compose_config, help_text, parse
from launch.console import print_report, set_up_logging, set_up_rank_logging, stand_in_for_closed_streams
from launch.crew import Several, Single
from launch.job_run import JobEnd, JobRun
from launch.stop_signals import Interrupted, StopSignals, signal_name
from moe.batch.job import TOO_MANY_ERRORS
from moe.batch.job_files import JobFiles, job_files
from moe.batch.lines import InputFault, Line, read_lines
from moe.batch.monitor import Monitor
from moe.batch.report import JobReport
from moe.batch.resume import unfinished
from moe.engine.team import Team

OK, FAULT, USAGE, SOME_FAILED, BY_SIGNAL = 0, 1, 2, 3, 128
SHOWN_ANSWERS = 3
STDOUT = 1
FIRST_SPEAKS_S = 10.0
"""A busy machine starts one process so much later than another."""

logger = logging.getLogger("launch.generate")  # __name__ is __main__ under python -m


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    rank = int(os.environ.get("RANK", "0"))
    stand_in_for_closed_streams()
    try:
        line = parse(words)
        if line.show_help:
            print(help_text("launch.generate"))
            return OK
        config = compose_config(line)
        if line.show_config:
            print(OmegaConf.to_yaml(OmegaConf.structured(config)), end="")
            return OK
        started = "TORCHELASTIC_RUN_ID" in os.environ
        with StopSignals(echoes=started, speaks=rank == 0, last=argv is None) as stop:
            return _run(config, words, rank_environment(), stop)
    except ValueError as error:
        return _refused(str(error), rank)
    except Interrupted as stopped:
        if rank == 0:
            print(f"stopped by {signal_name(stopped.number)}", file=sys.stderr)
        return BY_SIGNAL + stopped.number


def _run(config: Config, words: Sequence[str], environment: Mapping[str, str] | None, stop: StopSignals) -> int:
    """Everything after the command line is understood. ValueError: wrong before the first step. `environment`: what
    torchrun says of this rank, where there are several."""
    console = Console(stderr=True)
    rank = 0 if environment is None else int(environment["RANK"])
    set_up_logging(console, quiet=config.job.quiet) if rank == 0 else set_up_rank_logging(console, rank)
    files = job_files(config)
    if config.job.strict and not check_lines(config, files.source, silent=rank > 0):
        _leave_it_to_the_first(rank)
        return USAGE
    if config.job.dry_run:
        return OK if rank > 0 or dry_run(config, files.source) else SOME_FAILED
    if environment is not None and not files.source.rereadable:
        raise ValueError("input=- is read once, by one rank; give a file, or start one rank.")
    try:
        team = None if environment is None else Team(config, environment, logger.info)
    except RuntimeError as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr)
        return FAULT
    crew = Single() if team is None else Several(team.ranks, team.faults.told)
    monitor = Monitor(config, words, rank=rank)
    job = JobRun(config, files, crew, monitor, stop)
    try:
        end = job.run(console, restarted=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
        with stop.ending():
            code = _conclude(config, files, end, monitor) if rank == 0 else _code_of(end)
            # torchrun ends all ranks as soon as one has ended with 3, say: not before the first has said how it went.
            crew.wait_for_first("last words")
            if team is not None:
                team.close()
        return code
    except (Exception, KeyboardInterrupt) as error:
        with stop.ending():
            return _report_fault(error, team, files, job, monitor)


def _refused(text: str, rank: int) -> int:
    """A fault before ranks have met. Most of these all ranks meet, and the first says it; what is one rank's own (a
    file that is missing on its node) that rank says itself, also to those who wait for it."""
    with contextlib.suppress(ValueError):  # the environment itself may be the fault
        if (environment := rank_environment()) is not None:
            refuse(RankValues.of(environment), text)
    _leave_it_to_the_first(rank)
    print(f"error{f' on rank {rank}' if rank else ''}: {text}", file=sys.stderr)
    return USAGE


def _leave_it_to_the_first(rank: int) -> None:
    """torchrun ends all ranks as soon as one ends, and that must not be before the first has said why."""
    if rank:
        time.sleep(FIRST_SPEAKS_S)


def _report_fault(error: BaseException, team: Team | None, files: JobFiles, job: JobRun, monitor: Monitor) -> int:
    """Say what ended the job, on which rank, and how to go on."""
    told, own, where = str(error), True, ""
    if team is not None:
        told = team.abandon(error)
        own = told.startswith(f"rank {team.rank}:")
        where = f" on rank {team.rank}"
    known = isinstance(error, ValueError | KeyboardInterrupt | OSError)  # their texts say it all
    if own and not known:
        logger.exception("the job met a fault%s", where)
    print(f"error{where}: {'' if own else 'ended by '}{told}", file=sys.stderr)
    if team is None or team.rank == 0:
        # A file that was mended is another input, and whoever mended it knows that its lines are the same.
        mended = isinstance(error, InputFault) and files.source.rereadable
        _say_how_to_go_on(files, job.num_done, " with job.resume=force" if mended else "")
    monitor.finish(None, outcome="fault", fault=f"{'' if own else 'ended by '}{told}" or type(error).__name__)
    if isinstance(error, KeyboardInterrupt):
        return BY_SIGNAL + (error.number if isinstance(error, Interrupted) else signal.SIGINT)
    return USAGE if own and isinstance(error, ValueError) else FAULT


def _say_how_to_go_on(files: JobFiles, num_done: int, also: str = "") -> None:
    """Where there is something to go on from: not where a run was refused, or ended before its first record."""
    if num_done and unfinished(files.run):
        print(
            f"{num_done:,} records are whole in {files.run.base}.journal-*; the same command{also} goes on from there",
            file=sys.stderr,
        )


def _conclude(config: Config, files: JobFiles, end: JobEnd, monitor: Monitor) -> int:
    """Say how the job went, on the screen and in its report."""
    code = _code_of(end)
    if end.whole is not None:
        with _shown():
            if not config.job.quiet:
                print(
                    f"nothing to do: {files.output} is complete, {end.whole.lines:,} lines, {end.whole.failed:,} of "
                    "them with an error record (job.overwrite=true makes it again)"
                )
        return code
    report = end.report
    assert report is not None, "a job that was not complete before has a report"
    if end.stopped:
        _say_stop(config, files, end, report)
        monitor.finish(report, outcome="stopped")
        return code
    monitor.finish(report, outcome="some failed" if report.failed else "complete")
    with _shown():
        if not config.job.quiet:
            if config.input is None and files.output.suffix == ".jsonl" and files.output.is_file():
                _show_answers(files.output)
            print_report(Console(), report)
            print(f"answers: {', '.join(str(files.run.shown(final)) for final in files.run.finals)}")
    return code


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Around what is only shown. Where its reader has gone, as `| head` does, or its disk is full, the job is whole all
    the same, and its exit code says so."""
    try:
        yield
        sys.stdout.flush()
    except (OSError, SystemExit) as error:  # rich makes the second of a broken pipe
        if not isinstance(error, BrokenPipeError | SystemExit):
            logger.warning("the summary cannot be shown: %s", error.strerror or error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python's own flush at the end would fail as well


def _say_stop(config: Config, files: JobFiles, end: JobEnd, report: JobReport) -> None:
    if end.stopped == TOO_MANY_ERRORS:
        print(
            f"error: {report.failed:,} lines failed, more than job.max_errors={config.job.max_errors}; raise it, or "
            "mend what fails and give job.retry_errors=true",
            file=sys.stderr,
        )
    else:
        print(f"stopped by {signal_name(end.stopped)}", file=sys.stderr)
    _say_how_to_go_on(files, report.lines)


def _code_of(end: JobEnd) -> int:
    """The exit code of a job that came to an end of its own or by a stop."""
    if end.stopped:
        return FAULT if end.stopped == TOO_MANY_ERRORS else BY_SIGNAL + end.stopped
    failed = end.whole.failed if end.whole is not None else end.report.failed if end.report is not None else 0
    return SOME_FAILED if failed else OK


def _show_answers(path: Path) -> None:
    """The demo's first answers, so that there is something to read."""
    with path.open("rb") as file:
        for line in read_lines(file, SHOWN_ANSWERS):
            if isinstance(line, Line) and "text" in line.record:
                print(f"{line.record['id']}: {line.record['text']}")


if __name__ == "__main__":
    exit_code = main()
    if exit_code not in (OK, SOME_FAILED) and rank_environment() is not None:
        # Ending in order would wait for collectives with ranks that are gone.
        end_process("", exit_code)
    sys.exit(exit_code)
