"""One rank's way through a job: its engine, its part of the lines, and on the first rank the whole file at the end."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import torch
from rich.console import Console

from configs.schema import Config
from launch.console import ProgressView
from moe.batch.answers import AnswerFile
from moe.batch.job import JobFiles
from moe.batch.rank_job import RankJob, merge_parts, part_of, refuse_old_parts
from moe.batch.report import Progress
from moe.engine.engine import Engine
from moe.engine.stats import EngineStats
from moe.engine.team import Team
from router.load import balancedness

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankReport:
    """What one rank, or all together, did of a job."""

    stats: EngineStats
    lines_read: int
    lines_failed: int
    seconds: float


def answer_in_ranks(config: Config, files: JobFiles, team: Team, console: Console) -> RankReport:
    """Answer this rank's lines, in step with the others. Returns the report of all when the output is whole."""
    ranks = team.ranks
    if team.rank == 0:
        refuse_old_parts(files.output, overwrite=files.overwrite)
        with AnswerFile.open(files.output, overwrite=files.overwrite):
            pass  # it can be written; it is, when all is done
    ranks.meet("output")
    with AnswerFile.open(part_of(files.output, team.rank), overwrite=True) as part:
        engine = Engine(config, ranks=ranks)
        try:
            own = _answer(config, files, team, engine, part, console)
        finally:
            engine.close()
    reports = ranks.everyone.gather_objects(own)  # and every part is whole
    if team.rank == 0:
        num_records = merge_parts([part_of(files.output, rank) for rank in range(team.size)], files.output)
        logger.info("lines of each rank: %s", ", ".join(str(each.lines_read) for each in reports))
        assert num_records == sum(each.lines_read for each in reports), f"{num_records} records of as many lines"
    ranks.everyone.barrier()
    stats = EngineStats.of_ranks([each.stats for each in reports])
    counts_LE = torch.tensor(stats.expert_counts)
    stats.expert_balance = balancedness(counts_LE) if bool(counts_LE.any()) else None
    return RankReport(
        stats,
        sum(each.lines_read for each in reports),
        sum(each.lines_failed for each in reports),
        max(each.seconds for each in reports),
    )


def _answer(
    config: Config, files: JobFiles, team: Team, engine: Engine, part: AnswerFile, console: Console
) -> RankReport:
    store = team.ranks.store
    job = RankJob(config, engine, engine.tokenizer, config.model, lambda: store.add("lines", 1) - 1)
    logger.info("answering %s into %s on %d ranks", files.input, files.output, team.size)
    with contextlib.ExitStack() as stack:
        view = stack.enter_context(ProgressView(console)) if team.rank == 0 else None

        def show(progress: Progress) -> None:
            if view is not None:
                view.update(progress, running=len(engine.scheduler.running), waiting=len(engine.scheduler.waiting))

        job.run(files.input, part, show)
    return RankReport(engine.count_experts(), job.lines_read, job.lines_failed, job.seconds)
