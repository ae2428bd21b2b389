"""A job's rank under torchrun that is killed, a random one in each attempt but the last, after some of its records.

KILLS is how often, or KILLS:RECORDS, each time after so many records of that rank.

torchrun --nproc-per-node 2 --max-restarts 10 tests/restarted_job.py KILLS WORDS...     # one rank
python -m tests.restarted_job KILLS WORDS...      # torchrun's agent and two ranks, forked from one process
"""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from launch import generate
from moe.batch.journal_writer import JournalWriter

RANKS = 2


def rank_main(kills: int, records: int | None, words: list[str]) -> None:
    """This rank's attempt. All ranks draw the same victim."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    draw = random.Random(attempt)
    victim, after = draw.randrange(RANKS), records or draw.randint(1, 3)
    if attempt < kills and int(os.environ["RANK"]) == victim:
        append = JournalWriter.append

        def last(self: JournalWriter, *args: Any) -> None:
            append(self, *args)
            if self.num_records == after:
                os.kill(os.getpid(), signal.SIGKILL)

        JournalWriter.append = last  # type: ignore[method-assign]
    code = generate.main(words)
    if code != generate.OK:
        os._exit(code)


def main() -> None:
    kills, words = int(sys.argv[1].partition(":")[0]), sys.argv[2:]
    records = int(sys.argv[1].partition(":")[2] or 0) or None
    if "RANK" in os.environ:
        rank_main(kills, records, words)
        return
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id="restarted",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=kills,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, rank_main)(kills, records, words)


if __name__ == "__main__":
    main()
