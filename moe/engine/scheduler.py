"""What runs in the next step: continuous batching, first come first served, under a token budget.

Knows sequences, blocks and limits; knows nothing of tensors, sampling or text. Deterministic: no clock, no chance.

A step holds one row for every decoding sequence, then chunks of prompts with what the budget leaves; admission binds
the blocks of all tokens known of a sequence, so only decoding can run out of them. Then the newest running sequence
gives way: it goes back to the front of the queue and gets its cache back later (see sequence.py). A new one is admitted
only if every running sequence can still grow by one block, so that admission and preemption do not chase each other; a
sequence alone always fits, or `never_fits` rejected it. With a backlog, prompts wait until several can be admitted in
one step (`_gathers`); once all that waits has a place, the longest answers begin first (order.py). All endings and
preemptions give blocks back in `_release`.

A step is scheduled before the ids of the step in front of it are known, from counts alone. So a sequence may get a row
too many: the one after a token that ends its text. That row is dropped, and writes only to a block that no other step
reads: a block becomes findable when the host knows all its tokens, and a block that is given back is written by later
steps alone, which the device runs later. A sequence whose tokens are not all known is not admitted again before they
are.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from kv_cache.prefix_cache import BlockKey, PrefixCache
from moe.engine.order import longest_first
from moe.engine.sequence import Sequence, Status

# With a backlog, prompts are admitted once they fill a half of a step's budget or a sixteenth of the places is free. Of
# the 846 steps of bench workload w1 199 held a prompt without this; with it 50 of 854 do.
GATHER_BUDGET_PARTS = 2
GATHER_PLACE_PARTS = 16
_length = attrgetter("num_computed")
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
    """One step: a row for each of `decodes`, the longest first, then the rows of `chunks`.

    `sampled`: the sequences whose next token this step draws, in order; `sampled_decodes` are those rows among the
    decodes (all others replay a known token), then come the chunks that end at their sequence's newest token.
    `admitted`: the sequences that begin to run with this step.
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    sampled_decodes: list[int] = field(default_factory=list)
    num_second_chunks: int = 0  # chunks that show that a prompt took more than one

    def find_sampled(self) -> None:
        """Fill `sampled` and `sampled_decodes`, before the step is launched."""
        self.sampled_decodes = [
            row
            for row, each in enumerate(self.decodes)  # needs_token, without a call for each of a thousand rows
            if each.num_computed + 1 == each.num_prompt + len(each.output_ids) + each.in_flight
        ]
        all_drawn = len(self.sampled_decodes) == len(self.decodes)
        self.sampled = list(self.decodes) if all_drawn else [self.decodes[row] for row in self.sampled_decodes]
        self.sampled += [chunk.sequence for chunk in self.chunks if chunk.sequence.needs_token(chunk.end)]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(chunk.sequence for chunk in self.chunks)]

    @property
    def request_ids(self) -> list[str]:
        return list({sequence.request.request_id: None for sequence in self.sequences})


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
        self._places = list(range(self.max_num_seqs))[::-1]
        self._newcomers = False  # since the queue was last ordered

    def never_fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens has no room even alone. Its last token is never written to the cache."""
        return _blocks(num_tokens - 1, self.cache.block_size) > self.cache.allocator.num_blocks

    def add(self, sequence: Sequence) -> None:
        assert not self.never_fits(sequence.num_prompt + sequence.max_tokens), "a request too large was not rejected"
        sequence.arrived_at, self._newcomers = self._num_steps, True
        self.waiting.append(sequence)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def schedule(self, *, more_to_come: bool = False) -> Schedule:
        """The next step; empty where nothing is left, or nothing can be done before tokens in flight are known.

        `more_to_come`: what waits is not all that there is to do."""
        self._num_steps += 1
        if self.force_preempt_every and self._num_steps % self.force_preempt_every == 0:
            self._preempt_for_test()
        schedule = Schedule()
        preemptions = self.num_preemptions
        running, size = Status.RUNNING, self.cache.block_size
        for sequence in list(self.running):
            computed = sequence.num_computed
            if sequence.status is not running or computed < sequence.num_prompt or sequence.ends_in_flight:
                continue
            if computed < len(sequence.table.ids) * size or self._grow(sequence):
                schedule.decodes.append(sequence)
        budget = self.max_batched_tokens - len(schedule.decodes)
        begun = [sequence for sequence in self.running if sequence.in_prefill]
        if self._newcomers and not more_to_come and len(self.waiting) <= self.max_num_seqs - len(self.running):
            self.waiting, self._newcomers = deque(longest_first(self.waiting)), False
        logit_rows = PROMPT_LOGIT_ROWS
        for sequence in begun:
            if budget > 0:
                budget, logit_rows = self._plan_chunk(schedule, sequence, budget, logit_rows)
        if self.num_preemptions == preemptions:  # otherwise who gave way would come straight back
            self._admit(schedule, budget, logit_rows)
        # Programs of attention begin in the order of the rows: those that end last are then short.
        schedule.decodes.sort(key=_length, reverse=True)
        schedule.find_sampled()
        assert schedule.num_tokens or self.waits_for_tokens or not self.has_unfinished, "no progress, work is left"
        return schedule

    @property
    def waits_for_tokens(self) -> bool:
        """Whether any sequence has a token in flight."""
        return any(sequence.in_flight for sequence in (*self.running, *self.waiting))

    def advance(self, schedule: Schedule) -> None:
        """The step is launched: all behind it find its rows in the cache. Blocks full of known tokens can be found."""
        for sequence in schedule.sampled:
            sequence.in_flight += 1
        for sequence in schedule.decodes:
            sequence.num_computed += 1
        if len(schedule.sampled_decodes) < len(schedule.decodes):
            for sequence in schedule.decodes:  # replayed tokens are known; of drawn ones `receive` takes care
                self._commit(sequence)
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            schedule.num_second_chunks += sequence.prompt_chunks == 1
            sequence.prompt_chunks += 1
            sequence.num_computed += chunk.length
            if sequence.wants_prompt_rows:
                sequence.num_prompt_rows = chunk.end
            self._commit(sequence)

    def receive(self, sequence: Sequence, token_id: int) -> None:
        """The token that a launched step drew. Its own position is not in the cache, or written by a row too many."""
        if (sequence.num_prompt + len(sequence.output_ids)) // self.cache.block_size > sequence.num_committed:
            self._commit(sequence)
        sequence.receive(token_id)

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
        if not self.waiting or self._gathers(schedule):
            return
        held_back: list[Sequence] = []
        computing = {self._next_key(each) for each in self.running if each.num_computed < each.num_prompt}
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            if self._waits(sequence) or self._is_computed(sequence, computing):
                held_back.append(sequence)
            elif (sequence.wants_prompt_rows and logit_rows <= 0) or not self._bind(sequence):
                held_back.append(sequence)
                break
            else:
                schedule.admitted.append(sequence)
                if sequence.in_prefill:
                    budget, logit_rows = self._plan_chunk(schedule, sequence, budget, logit_rows)
                    computing.add(self._next_key(sequence))
                else:
                    schedule.decodes.append(sequence)
                    budget -= 1
        self.waiting.extendleft(reversed(held_back))

    def _waits(self, sequence: Sequence) -> bool:
        """One that gave way comes back when its tokens are known. Further samples of a request come in once the first
        has written the prompt's blocks, which they then share."""
        if sequence.in_flight:
            return True
        leader = sequence.leader
        shares = self.cache.enabled and sequence.num_prompt > self.cache.block_size
        return shares and leader is not None and not leader.finished and leader.in_prefill

    def _next_key(self, sequence: Sequence) -> BlockKey | None:
        """The block of its prompt that a running sequence writes next, for all to find; None where there is none."""
        index = sequence.num_committed
        if not self.cache.enabled or index >= sequence.num_prompt // self.cache.block_size:
            return None
        return sequence.known_keys(self.cache.root, index + 1)[index]

    def _is_computed(self, sequence: Sequence, computing: set[BlockKey | None]) -> bool:
        """Whether the first block that the cache lacks is being computed for another: after that step it is found."""
        if not computing:
            return False
        keys = self._wanted_keys(sequence)
        found, _ = self.cache.count(keys)
        return found < len(keys) and keys[found] in computing

    def _wanted_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of the blocks that it may share. The newest token is always computed: its row gives the next logits."""
        if not self.cache.enabled or sequence.wants_prompt_rows:
            return []
        return sequence.known_keys(self.cache.root, (sequence.num_tokens - 1) // self.cache.block_size)

    def _bind(self, sequence: Sequence) -> bool:
        """Bind blocks for all known tokens and start running; False, and nothing changed, where they do not fit."""
        size = self.cache.block_size
        num_blocks = _blocks(sequence.num_tokens, size)
        keys = self._wanted_keys(sequence)
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
        sequence.place = self._places.pop()
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
            sequence.num_prompt_rows = 0  # the prompt is computed from its first position again
            sequence.prompt_logprobs.clear()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _preempt_for_test(self) -> None:
        """The newest running sequence that gained a token since it was admitted: any other might never advance."""
        for sequence in reversed(self.running):
            if len(sequence.output_ids) > sequence.outputs_when_admitted:
                self._preempt(sequence)
                return

    def _commit(self, sequence: Sequence) -> None:
        """Make blocks findable that are full of tokens which the host knows and a launched step writes."""
        known = sequence.num_prompt + len(sequence.output_ids)
        num_full = min(sequence.num_computed, known) // self.cache.block_size
        if num_full <= sequence.num_committed or not self.cache.enabled or sequence.status is not Status.RUNNING:
            return
        keys = sequence.known_keys(self.cache.root, num_full)
        for index in range(sequence.num_committed, num_full):
            self.cache.commit(sequence.table, index, keys[index])
        sequence.num_committed = num_full

    def _release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """The one way back for blocks, whatever ends or interrupts a sequence."""
        self.cache.release(sequence.table, forget=forget)
        sequence.num_computed = sequence.num_committed = 0
        if sequence.place >= 0:
            self._places.append(sequence.place)
            sequence.place = -1


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
