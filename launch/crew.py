"""The ranks of a job as the job sees them: one, or several that share what they must. Knows ranks; nothing of jobs."""

# torch.distributed lists its stores nowhere.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from expert_parallel.group import Ranks

_POLL_S = 0.05
_BEGUN = "a job has begun"


class Crew(Protocol):
    """This rank and the others. All ranks make the same calls in the same order."""

    rank: int
    size: int
    ranks: Ranks | None

    def gather(self, own: Any) -> list[Any]:
        """One object of every rank, in rank order."""
        ...

    def counter(self, name: str) -> Callable[[int], int]:
        """A counter of all ranks: adds to it, and returns what it is then."""
        ...

    def begun_before(self) -> bool:
        """Whether an earlier attempt of this launch has called `say_begun`; True where only a restart is known of."""
        ...

    def say_begun(self) -> None:
        """What was there before the launch is dealt with. The first rank says so."""
        ...

    def wait_for_first(self, stage: str) -> None:
        """The first rank comes to `stage` and says so; the others wait for that, however long it takes. Each stage's
        name is used once. RuntimeError where a rank meets a fault instead."""
        ...


class Single(Crew):
    """One process, which shares nothing."""

    rank, size, ranks = 0, 1, None

    def gather(self, own: Any) -> list[Any]:
        return [own]

    def counter(self, name: str) -> Callable[[int], int]:
        totals: Counter[str] = Counter()

        def add(number: int) -> int:
            totals[name] += number
            return totals[name]

        return add

    def begun_before(self) -> bool:
        return True

    def say_begun(self) -> None:
        pass

    def wait_for_first(self, stage: str) -> None:
        pass


class Several(Crew):
    """Ranks of torchrun. Counters are in their store. `told` gives the first fault of any rank."""

    def __init__(self, ranks: Ranks, told: Callable[[], str | None]) -> None:
        self.ranks = self._ranks = ranks
        self._told = told
        self.rank, self.size = ranks.everyone.rank, ranks.everyone.size
        # The ranks' store is of this attempt alone, a part of torchrun's own, which lives as long as the launch.
        shared = ranks.values.agent_has_store and isinstance(ranks.store, dist.PrefixStore)
        self._launch: dist.Store | None = None
        if shared:
            self._launch = ranks.store.underlying_store  # pyright: ignore[reportAttributeAccessIssue]

    def gather(self, own: Any) -> list[Any]:
        return self._ranks.everyone.gather_objects(own)

    def counter(self, name: str) -> Callable[[int], int]:
        store = self._ranks.store
        return lambda number: store.add(name, number)

    def begun_before(self) -> bool:
        return self._launch is None or self._launch.add(_BEGUN, 0) > 0

    def say_begun(self) -> None:
        if self._launch is not None:
            self._launch.add(_BEGUN, 1)

    def wait_for_first(self, stage: str) -> None:
        store, key = self._ranks.store, f"first rank: {stage}"
        if self.rank == 0:
            store.set(key, "here")
        while not store.check([key]):
            if (fault := self._told()) is not None:
                raise RuntimeError(fault)
            time.sleep(_POLL_S)
