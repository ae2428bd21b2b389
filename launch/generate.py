"""The main job: a file of prompts in, a file of answers out. `python -m launch.generate`, alone or under torchrun.

Exit codes: 0 every line answered; 1 a fault; 2 a wrong command line, config or file; 3 done, but some lines failed;
130 stopped by the keyboard.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf
from rich.console import Console

from configs.schema import Config
from configs.torchrun import rank_environment
from expert_parallel.faults import end_process
from launch.command_line import compose_config, help_text, parse
from launch.console import ProgressView, print_report, set_up_logging, set_up_rank_logging
from launch.rank_run import answer_in_ranks
from moe.batch.answers import AnswerFile
from moe.batch.job import Job, JobFiles, bad_lines, job_files
from moe.batch.lines import Line, read_lines
from moe.batch.rank_job import part_of
from moe.batch.report import JobReport, Progress
from moe.engine.engine import Engine
from moe.engine.team import Team
from moe.version import __version__

OK, FAULT, USAGE, SOME_FAILED, INTERRUPTED = 0, 1, 2, 3, 130
SHOWN_BAD_LINES = 10
SHOWN_ANSWERS = 3

logger = logging.getLogger("launch.generate")  # __name__ is __main__ under python -m


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        line = parse(words)
        if line.show_help:
            print(help_text("launch.generate"))
            return OK
        config = compose_config(line)
        if line.show_config:
            print(OmegaConf.to_yaml(OmegaConf.structured(config)), end="")
            return OK
        return _run(config, words, rank_environment())
    except ValueError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(config: Config, words: Sequence[str], environment: Mapping[str, str] | None) -> int:
    """Everything after the command line is understood. ValueError: wrong before the first step. `environment`: what
    torchrun says of this rank, where there are several."""
    console = Console(stderr=True)
    rank = 0 if environment is None else int(environment["RANK"])
    set_up_logging(console) if rank == 0 else set_up_rank_logging(console, rank)
    files = job_files(config)
    if config.job.strict or config.job.dry_run:
        code = _check_lines(config, files, silent=rank > 0)
        if code != OK and config.job.strict:
            return USAGE
        if config.job.dry_run:
            return code
    if environment is not None:
        return _answer_in_ranks(config, files, environment, console, words)
    with AnswerFile.open(files.output, overwrite=files.overwrite) as answers:
        engine = Engine(config)
        try:
            return _answer(config, files, engine, answers, console, words)
        finally:
            engine.close()


def _answer(
    config: Config, files: JobFiles, engine: Engine, answers: AnswerFile, console: Console, words: Sequence[str]
) -> int:
    """Run the job on a loaded engine and say how it went."""
    if engine.tokenizer is not None and engine.tokenizer.generation_defaults:
        defaults = ", ".join(f"{name}={value}" for name, value in engine.tokenizer.generation_defaults.items())
        logger.info(
            "chats take %s from the checkpoint's generation_config where neither line nor key says more", defaults
        )
    logger.info("answering %s into %s", files.input, files.output)
    job = Job(config, engine, engine.tokenizer, config.model)
    try:
        with ProgressView(console) as view:

            def show(progress: Progress) -> None:
                view.update(progress, running=len(engine.scheduler.running), waiting=len(engine.scheduler.waiting))

            job.run(files.input, answers, show)
    except KeyboardInterrupt:
        print(f"stopped; {job.lines_written} records are whole in {files.output}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not (isinstance(error, OSError) and error.filename == str(files.output)):
            logger.exception("the job met a fault")
        print(f"error: {error}\n{job.lines_written} records are whole in {files.output}", file=sys.stderr)
        return FAULT
    report = JobReport.of(
        engine.count_experts(),
        model=config.model,
        device=_device_name(engine.parts.device),
        answered=job.lines_read - job.lines_failed,
        failed=job.lines_failed,
        seconds=job.seconds,
    )
    return _conclude(config, files, report, words)


def _answer_in_ranks(
    config: Config, files: JobFiles, environment: Mapping[str, str], console: Console, words: Sequence[str]
) -> int:
    """This rank's part of the job; the first rank says how all of it went."""
    team = Team(config, environment, logger.info)
    try:
        whole = answer_in_ranks(config, files, team, console)
        code = SOME_FAILED if whole.lines_failed else OK
        if team.rank == 0:
            report = JobReport.of(
                whole.stats,
                model=config.model,
                device=f"{team.size} x {_device_name(team.ranks.device)}",
                answered=whole.lines_read - whole.lines_failed,
                failed=whole.lines_failed,
                seconds=whole.seconds,
            )
            code = _conclude(config, files, report, words)
        team.close()
        return code
    except (Exception, KeyboardInterrupt) as error:
        told = team.abandon(error)
        own = told.startswith(f"rank {team.rank}:")
        if own and not isinstance(error, ValueError | KeyboardInterrupt):
            logger.exception("rank %d met a fault", team.rank)
        print(f"error on rank {team.rank}: {'' if own else 'ended by '}{told}", file=sys.stderr)
        print(
            f"records are whole in {part_of(files.output, team.rank).parent}/{files.output.name}.rank-*",
            file=sys.stderr,
        )
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        return USAGE if own and isinstance(error, ValueError) else FAULT


def _conclude(config: Config, files: JobFiles, report: JobReport, words: Sequence[str]) -> int:
    """Say how the job went, on the screen and in job.report."""
    if config.input is None and files.output.is_file():
        _show_answers(files.output)
    print_report(Console(), report)
    print(f"answers: {files.output}")
    if files.report is not None:
        command = shlex.join(["python", "-m", "launch.generate", *words])
        record = {"version": __version__, "command": command, "output": str(files.output), **report.as_dict()}
        try:
            files.report.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"error: job.report={files.report} cannot be written: {error.strerror}", file=sys.stderr)
            return FAULT
    return SOME_FAILED if report.failed else OK


def _check_lines(config: Config, files: JobFiles, *, silent: bool) -> int:
    """Read every line and print what is wrong with it, unless another rank does; no model is loaded."""
    num_lines = num_bad = 0
    for number, reason in bad_lines(files.input, config.job.limit, config.sampling):
        num_lines += 1
        if reason is not None:
            num_bad += 1
            if num_bad <= SHOWN_BAD_LINES and not silent:
                print(f"{files.input}:{number}: {reason}", file=sys.stderr)
    if num_bad > SHOWN_BAD_LINES and not silent:
        print(f"... and {num_bad - SHOWN_BAD_LINES} more", file=sys.stderr)
    if not silent:
        print(f"{num_lines} lines read, {num_bad} of them cannot be run")
    return SOME_FAILED if num_bad else OK


def _show_answers(path: Path) -> None:
    """The demo's first answers, so that there is something to read."""
    with path.open("rb") as file:
        for line in read_lines(file, SHOWN_ANSWERS):
            if isinstance(line, Line) and "text" in line.record:
                print(f"{line.record['id']}: {line.record['text']}")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    exit_code = main()
    if exit_code in (FAULT, USAGE, INTERRUPTED) and rank_environment() is not None:
        # Ending in order would wait for collectives with ranks that are gone.
        end_process("", exit_code)
    sys.exit(exit_code)
