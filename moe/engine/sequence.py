"""One sample of one request while it lives: its tokens, its blocks, how far the network has come with it.

Knows tokens, positions and block keys; knows nothing of scheduling order, tensors or text.

    positions   0 ............ num_prompt ............ num_tokens
                | prompt: prefill  | generated: decode |
    computed    0 .... num_computed: the KV cache holds these

A position's kind depends on the prompt's length alone. After a preemption the prompt is prefilled again and the
generated tokens are replayed, one forced token a decode step, so the cache gets the bits it had.

A step is scheduled while the one before it runs. What counts here is what was launched: `num_computed` positions are in
the cache for every step behind them, and the sequence has `in_flight` more tokens than the host knows: one when a step
is scheduled, two between a launch and the arrival of the step in front of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kv_cache.block_table import BlockTable
from kv_cache.prefix_cache import BlockKey, block_key
from moe.engine.penalties import TokenCounts
from moe.engine.request import Request, TokenLogprobs


class Status(Enum):
    """Waiting sequences hold no blocks: new ones, and those that had to give way."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Sample `index` of `request`. `max_tokens`: the most it may generate, all limits taken together."""

    request: Request
    index: int
    prompt_ids: list[int]
    max_tokens: int
    table: BlockTable
    leader: Sequence | None = None  # the first sample of the request, whose prompt blocks the others share
    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    in_flight: int = 0  # tokens that launched steps draw, whose ids only the device knows
    num_committed: int = 0  # leading blocks that the prefix cache knows
    num_cached: int = 0  # prompt tokens found in the prefix cache when first admitted
    outputs_when_admitted: int = 0
    times_admitted: int = 0
    arrived_at: int = 0  # the scheduler's steps when it was queued
    prompt_chunks: int = 0  # prefill chunks run since it was admitted
    place: int = -1  # where the device keeps its block table and newest token while it runs
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_prompt_rows: int = 0  # prompt positions whose log-probabilities are computed or being computed
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    counts: TokenCounts | None = None
    num_prompt: int = field(init=False)
    plain_from: int = field(init=False)  # see SamplingParams
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt_ids)
        self.plain_from = self.request.params.plain_from
        self.seed = self.request.seed_of(self.index)

    @property
    def num_tokens(self) -> int:
        """Tokens that the host knows."""
        return self.num_prompt + len(self.output_ids)

    @property
    def num_drawn(self) -> int:
        """Tokens generated, the one in flight included."""
        return len(self.output_ids) + self.in_flight

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < self.num_prompt

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether logits of prompt rows are still owed; such a prompt is computed in full, whatever is cached."""
        wanted = self.index == 0 and self.request.params.prompt_logprobs is not None
        return wanted and self.num_prompt_rows < self.num_prompt

    @property
    def ends_in_flight(self) -> bool:
        """Whether the token being drawn is the last it may have, so that it is not scheduled again."""
        return len(self.output_ids) + self.in_flight >= self.max_tokens

    def needs_token(self, num_computed: int) -> bool:
        """Whether the row of position num_computed - 1 must be sampled: it is the newest token's."""
        return num_computed == self.num_prompt + len(self.output_ids) + self.in_flight

    def receive(self, token_id: int) -> None:
        """The first token in flight is known now."""
        assert self.in_flight > 0, f"{self.request.request_id} got a token that no step drew for it"
        self.in_flight -= 1
        self.output_ids.append(token_id)

    def token_at(self, position: int) -> int:
        """Token of a position; the next one to feed is token_at(num_computed)."""
        if position < self.num_prompt:
            return self.prompt_ids[position]
        return self.output_ids[position - self.num_prompt]

    def token_counts(self) -> TokenCounts | None:
        """How often each token occurs, kept from step to step; None where no penalty asks for it."""
        if not self.request.params.penalizes:
            return None
        if self.counts is None:
            self.counts = TokenCounts(self.prompt_ids)
        self.counts.extend(self.output_ids[self.counts.num_output :])
        return self.counts

    def known_keys(self, root: BlockKey, num_blocks: int) -> list[BlockKey]:
        """Keys of the first `num_blocks` blocks, all full of known tokens; computed once each."""
        size = self.table.block_size
        assert num_blocks * size <= self.num_tokens, "a block with unknown tokens has no key"
        for index in range(len(self.keys), num_blocks):
            start, stop = index * size, (index + 1) * size
            prompt_part = self.prompt_ids[start:stop]
            output_part = self.output_ids[max(0, start - self.num_prompt) : max(0, stop - self.num_prompt)]
            parent = self.keys[-1] if self.keys else root
            self.keys.append(block_key(parent, prompt_part + output_part, len(prompt_part)))
        return self.keys[:num_blocks]
