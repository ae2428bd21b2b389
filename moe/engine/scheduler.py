"""What runs in the next step: continuous batching, first come first served, under a token budget.

Knows sequences, blocks and limits; knows nothing of tensors, sampling or text. Deterministic: no clock, no chance.

A step holds one row for every decoding sequence, then chunks of prompts with what the budget leaves; admission binds
the blocks of all tokens known of a sequence, so only decoding can run out of them. Then the newest running sequence
gives way: it goes back to the front of the queue and gets its cache back later (see sequence.py). A new one is admitted
only if every running sequence can still grow by one block, so that admission and preemption do not chase each other; a
sequence alone always fits, or `never_fits` rejected it. With a backlog, prompts wait until several can be admitted in
one step (`_gathers`). All endings and preemptions give blocks back in `_release`.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from kv_cache.prefix_cache import PrefixCache
from moe.engine.sequence import Sequence, Status

# With a backlog, prompts are admitted once they fill a half of a step's budget or a sixteenth of the places is free. Of
# the 846 steps of bench workload w1 199 held a prompt without this; with it 50 of 854 do.
GATHER_BUDGET_PARTS = 2
GATHER_PLACE_PARTS = 16
# Rows of logits that prompt_logprobs may ask of one step; a row of a large vocabulary takes half a megabyte.
PROMPT_LOGIT_ROWS = 256


@dataclass(frozen=True)
class Chunk:
    """Prompt positions start : start + length of a sequence."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass
class Schedule:
    """One step: a row for each of `decodes`, then the rows of `chunks`."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(chunk.sequence for chunk in self.chunks)]

    @property
    def request_ids(self) -> list[str]:
        return list(dict.fromkeys(sequence.request.request_id for sequence in self.sequences))


class Scheduler:
    """Queues of waiting and running sequences over one PrefixCache."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        prefill_chunk: int | None = None,
        force_preempt_every: int = 0,
    ) -> None:
        self.cache = cache
        self.max_batched_tokens = max_batched_tokens
        # A decoding sequence takes one token of every step's budget, so no more can run than the budget has.
        self.max_num_seqs = min(max_num_seqs, max_batched_tokens)
        self.prefill_chunk = prefill_chunk or max_batched_tokens
        self.force_preempt_every = force_preempt_every
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._num_steps = 0

    def never_fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens has no room even alone. Its last token is never written to the cache."""
        return _blocks(num_tokens - 1, self.cache.block_size) > self.cache.allocator.num_blocks

    def add(self, sequence: Sequence) -> None:
        assert not self.never_fits(sequence.num_prompt + sequence.max_tokens), "a request too large was not rejected"
        self.waiting.append(sequence)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Schedule:
        """The next step; empty only where nothing is unfinished."""
        self._num_steps += 1
        if self.force_preempt_every and self._num_steps % self.force_preempt_every == 0:
            self._preempt_for_test()
        schedule = Schedule()
        preemptions = self.num_preemptions
        for sequence in list(self.running):
            if sequence.status is Status.RUNNING and not sequence.in_prefill and self._grow(sequence):
                schedule.decodes.append(sequence)
        budget = self.max_batched_tokens - len(schedule.decodes)
        logit_rows = PROMPT_LOGIT_ROWS
        for sequence in self.running:
            if sequence.in_prefill and budget > 0:
                budget, logit_rows = self._plan_chunk(schedule, sequence, budget, logit_rows)
        if self.num_preemptions == preemptions:  # otherwise who gave way would come straight back
            self._admit(schedule, budget, logit_rows)
        assert schedule.decodes or schedule.chunks or not self.has_unfinished, "no progress although work is left"
        return schedule

    def advance(self, schedule: Schedule) -> None:
        """The step has run: its rows are in the cache, and blocks that are full now can be found."""
        for sequence in schedule.decodes:
            self._computed(sequence, 1)
        for chunk in schedule.chunks:
            chunk.sequence.prompt_chunks += 1
            self._computed(chunk.sequence, chunk.length)

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """End a sequence, whatever its state and whatever the reason; ending twice does nothing.

        `forget`: what it left in the cache is not to be found again.
        """
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence, forget=forget)
        sequence.status = Status.FINISHED

    def check_idle(self) -> None:
        """With nothing left to do every block is free or kept; an AssertionError says what is not."""
        self.cache.check()
        used = self.cache.allocator.num_used
        assert self.has_unfinished or used == 0, f"{used} blocks are used although no request is left"

    def _gathers(self, schedule: Schedule) -> bool:
        """Whether admission waits for more room. A step with a prompt in it costs every decoding sequence more than a
        step without, so while others queue a prompt is not admitted for itself alone."""
        free = self.max_num_seqs - len(self.running)
        if schedule.chunks or not schedule.decodes or len(self.waiting) <= free:
            return False
        if free >= max(1, self.max_num_seqs // GATHER_PLACE_PARTS):
            return False
        admissible = itertools.islice(self.waiting, free)
        return sum(sequence.num_prompt for sequence in admissible) < self.max_batched_tokens // GATHER_BUDGET_PARTS

    def _admit(self, schedule: Schedule, budget: int, logit_rows: int) -> None:
        if self._gathers(schedule):
            return
        held_back: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            if self._waits_for_leader(sequence):
                held_back.append(sequence)
            elif (sequence.wants_prompt_rows and logit_rows <= 0) or not self._bind(sequence):
                held_back.append(sequence)
                break
            elif sequence.in_prefill:
                budget, logit_rows = self._plan_chunk(schedule, sequence, budget, logit_rows)
            else:
                schedule.decodes.append(sequence)
                budget -= 1
        self.waiting.extendleft(reversed(held_back))

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """Further samples come in once the first has written the prompt's blocks, which they then share."""
        leader = sequence.leader
        shares = self.cache.enabled and sequence.num_prompt > self.cache.block_size
        return shares and leader is not None and not leader.finished and leader.in_prefill

    def _bind(self, sequence: Sequence) -> bool:
        """Bind blocks for all known tokens and start running; False, and nothing changed, where they do not fit."""
        size = self.cache.block_size
        num_blocks = _blocks(sequence.num_tokens, size)
        keys: list[bytes] = []
        if self.cache.enabled and not sequence.wants_prompt_rows:
            # The newest token is always computed: its row gives the next token's logits.
            keys = sequence.known_keys(self.cache.root, (sequence.num_tokens - 1) // size)
        found, kept = self.cache.count(keys)
        if num_blocks - found + len(self.running) > self.cache.num_available - kept:
            return False
        bound = self.cache.bind(sequence.table, keys, num_blocks)
        assert bound is not None, "blocks were counted as available and are not"
        sequence.num_committed = bound
        sequence.num_computed = bound * size
        if sequence.times_admitted == 0:
            sequence.num_cached = sequence.num_computed
        sequence.times_admitted += 1
        sequence.outputs_when_admitted = len(sequence.output_ids)
        sequence.prompt_chunks = 0
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        return True

    def _plan_chunk(self, schedule: Schedule, sequence: Sequence, budget: int, logit_rows: int) -> tuple[int, int]:
        """Give a prompt its next chunk; returns what is left of both budgets."""
        length = min(sequence.num_prompt - sequence.num_computed, self.prefill_chunk, budget)
        if sequence.wants_prompt_rows:
            length = min(length, logit_rows)
            logit_rows -= length
        if length > 0:
            schedule.chunks.append(Chunk(sequence, sequence.num_computed, length))
        return budget - length, logit_rows

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more position; False where the sequence itself had to give way."""
        while sequence.num_computed >= sequence.table.capacity:
            if self.cache.extend(sequence.table):
                continue
            victim = self.running[-1]
            assert len(self.running) > 1, "a sequence alone ran out of blocks although it was found to fit"
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        if sequence.wants_prompt_rows:
            sequence.prompt_logprobs.clear()  # the prompt is computed from its first position again
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _preempt_for_test(self) -> None:
        """The newest running sequence that gained a token since it was admitted: any other might never advance."""
        for sequence in reversed(self.running):
            if len(sequence.output_ids) > sequence.outputs_when_admitted:
                self._preempt(sequence)
                return

    def _computed(self, sequence: Sequence, length: int) -> None:
        if sequence.status is not Status.RUNNING:
            return  # it ended while the step ran: its blocks are given back
        sequence.num_computed += length
        assert sequence.num_computed <= sequence.num_tokens, "more positions computed than there are tokens"
        if not self.cache.enabled:
            return
        num_full = sequence.num_computed // self.cache.block_size
        if num_full == sequence.num_committed:
            return
        keys = sequence.known_keys(self.cache.root, num_full)
        for index in range(sequence.num_committed, num_full):
            self.cache.commit(sequence.table, index, keys[index])
        sequence.num_committed = num_full

    def _release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """The one way back for blocks, whatever ends or interrupts a sequence."""
        self.cache.release(sequence.table, forget=forget)
        sequence.num_computed = sequence.num_committed = 0


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
