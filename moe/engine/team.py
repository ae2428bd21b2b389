"""The ranks of a run, from what torchrun says: brought up, agreed on their settings, watched, and left together.

Knows the environment's values and the config; knows nothing of requests or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import torch

from configs.schema import Config, changed_keys
from configs.torchrun import without_multicast
from expert_parallel.choice import choose
from expert_parallel.faults import FaultWatch
from expert_parallel.group import Ranks, RankValues, bring_up, rank_device

# Keys that may differ between ranks: where files lie is each node's own matter.
PLACES = ("input", "output", "job.report")


class Team:
    """This rank and the others. `close` waits for all, so that nobody leaves a collective that others are still in."""

    def __init__(self, config: Config, environment: Mapping[str, str], say: Callable[[str], None] = print) -> None:
        values = RankValues.of(environment)
        gpu = config.engine.device != "cpu" and torch.cuda.is_available()
        device = rank_device(values, "cuda" if gpu else "cpu", torch.cuda.device_count() if gpu else 0)
        choose(config.parallel.dispatcher, values.world_size, device)  # refuses before anybody waits for anybody
        if gpu:
            torch.cuda.set_device(device)
        without_multicast()
        self.ranks: Ranks = bring_up(values, device, config.parallel.timeout_s, say)
        self.ranks.agree("settings", settings(config))
        self.faults = FaultWatch(self.ranks)
        self._closed = False

    @property
    def rank(self) -> int:
        return self.ranks.everyone.rank

    @property
    def size(self) -> int:
        return self.ranks.everyone.size

    @property
    def closed(self) -> bool:
        """Whether this rank has left, in order or after a fault: no collective may follow."""
        return self._closed

    def close(self) -> None:
        """Leave together, when the devices have done all that others may wait for; every rank calls it, or twice."""
        if self._closed:
            return
        self._closed = True
        if self.ranks.device.type == "cuda":
            # Its last launches may be ones that only the other ranks need, or none.
            torch.cuda.synchronize(self.ranks.device)
        self.ranks.everyone.barrier()
        self.faults.close()
        self.ranks.close()

    def abandon(self, error: BaseException, *, lives_on: bool = False) -> str:
        """Leave after a fault, without waiting for anybody. Returns the first fault of any rank, with its rank.

        Who waits for this rank in a collective is freed when this process ends; where it `lives_on`, now.
        """
        self._closed = True
        told = self.faults.tell(error)
        self.faults.close()
        if lives_on:
            self.ranks.drop()
        return told


def settings(config: Config) -> str:
    """Every key that is not at its default, but for those of files: ranks that differ in one would hang."""
    named = [name for name in changed_keys(config) if name not in PLACES]
    return ", ".join(f"{name}={attrgetter(name)(config)}" for name in named) or "the defaults"
