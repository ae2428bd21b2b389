"""What ranks remember of earlier attempts of their launch."""

# torch.distributed lists its stores nowhere.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist

from launch.crew import Several, Single


def test_an_attempt_knows_whether_one_before_it_has_begun() -> None:
    """One that was refused (job.resume=never beside an unfinished run) has not, and the next is refused as well."""
    torchruns = dist.HashStore()

    def crew(attempt: int, *, agent_has_store: bool = True) -> Several:
        ranks = SimpleNamespace(
            values=SimpleNamespace(agent_has_store=agent_has_store),
            store=dist.PrefixStore(f"attempt-{attempt}", torchruns),
            everyone=SimpleNamespace(rank=0, size=2),
        )
        return Several(cast(Any, ranks), lambda: None)

    assert not crew(0).begun_before() and not crew(1).begun_before()
    crew(2).say_begun()
    assert crew(3).begun_before() and crew(4).begun_before()
    # Where the store dies with each attempt, that this is a restart is all that is known.
    assert crew(5, agent_has_store=False).begun_before() and Single().begun_before()
