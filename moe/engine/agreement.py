"""What all ranks agree on before each step: one small exchange. Knows counts; knows nothing of requests or tensors.

Ranks run their own requests and share the experts, so each launch of a step is a launch on every rank, in the same
order; a rank without rows joins with none. The n-th launch of a rank meets the n-th of the others, however many each
makes before it reads results: what is launched ahead on one may be launched after reading on another. All of what
shapes the collectives of a step comes from here, never from one rank's own view. Ranks stop together: when none has
work left or expects any.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from expert_parallel.group import ExpertGroup
from moe.engine.scheduler import Schedule
from moe.model.step_input import StepOfAll


class Agreement(NamedTuple):
    """The same on every rank: of each number the largest, of each yes or no whether any rank says yes."""

    unfinished: bool  # some rank has work left, in flight or to come
    most_rows: int  # 0: nobody has a row, nothing is launched
    has_prefill: bool
    wants_logits: bool  # more is asked of some row than a token drawn from its raw logits
    num_seqs: int  # sequences that wait or run, which decides what graphs are captured
    max_kv_len: int  # of decode rows; 0 where one rank decides alone
    of_all: StepOfAll | None  # for the network; None: there is no other rank
    stop: int = 0  # not 0: some rank wants to stop, with this reason; no further step is launched


class InStep(Protocol):
    """How a rank comes to an agreement."""

    def agree(
        self, schedule: Schedule, *, unfinished: bool, wants_logits: bool, num_seqs: int, stop: int = 0
    ) -> Agreement: ...

    def anyone(self, answer: bool) -> bool:
        """Whether any rank says yes."""
        ...


class Alone(InStep):
    """One rank agrees with itself."""

    def agree(
        self, schedule: Schedule, *, unfinished: bool, wants_logits: bool, num_seqs: int, stop: int = 0
    ) -> Agreement:
        return Agreement(unfinished, schedule.num_tokens, bool(schedule.chunks), wants_logits, num_seqs, 0, None, stop)

    def anyone(self, answer: bool) -> bool:
        return answer


class Together(InStep):
    """Ranks of a group, over host memory: the device is not waited for."""

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group

    def agree(
        self, schedule: Schedule, *, unfinished: bool, wants_logits: bool, num_seqs: int, stop: int = 0
    ) -> Agreement:
        kv_len = max((each.num_computed + 1 for each in schedule.decodes), default=0)
        own = (unfinished, schedule.num_tokens, bool(schedule.chunks), wants_logits, num_seqs, kv_len, stop)
        anyone, most_rows, has_prefill, logits, most_seqs, longest, stop = self._largest(own)
        of_all = StepOfAll(most_rows, bool(has_prefill))
        return Agreement(bool(anyone), most_rows, bool(has_prefill), bool(logits), most_seqs, longest, of_all, stop)

    def anyone(self, answer: bool) -> bool:
        return bool(self._largest((answer,))[0])

    def _largest(self, own: tuple[int, ...]) -> list[int]:
        numbers = torch.tensor(own, dtype=torch.int64)
        everyone = numbers.new_empty(self.group.size * len(own))
        self.group.all_gather(everyone, numbers)
        return everyone.view(self.group.size, -1).amax(dim=0).tolist()
