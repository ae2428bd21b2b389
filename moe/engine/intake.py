"""What becomes of a request: whether it can ever run, how long its answer may get, its sequences and their texts.

Knows limits, prompts and texts; knows nothing of queues, steps or devices.
"""

from __future__ import annotations

from kv_cache.prefix_cache import PrefixCache
from moe.engine.answer import Answer, Sample
from moe.engine.memory_plan import MemoryPlan
from moe.engine.parts import Parts
from moe.engine.request import Request
from moe.engine.sequence import Sequence
from moe.engine.stop import TextStream
from moe.engine.tokenizer import check_ids


class Intake:
    """Turns requests into answers that have no token yet."""

    def __init__(self, parts: Parts, plan: MemoryPlan, cache: PrefixCache) -> None:
        self.tokenizer = parts.tokenizer
        self.eos_ids = parts.eos_ids
        self.vocab_size = parts.model.vocab_size
        self.max_model_len = parts.max_model_len
        self.plan = plan
        self.cache = cache

    def answer(self, request: Request, prompt_ids: list[int], max_tokens: int, *, stream: bool) -> Answer:
        """With a sequence for each sample; further ones share the prompt's blocks of the first."""
        answer = Answer(request, prompt_ids, [], streamed=stream)
        for index in range(request.params.n):
            leader = answer.samples[0].sequence if index else None
            sequence = Sequence(request, index, prompt_ids, max_tokens, self.cache.new_table(), leader)
            answer.samples.append(Sample(sequence, self._text_stream(request), self.eos_ids))
        return answer

    def max_tokens(self, request: Request, prompt_ids: list[int]) -> int:
        """How many tokens the request may generate; ValueError where it can never run."""
        params, num_prompt = request.params, len(prompt_ids)
        check_ids(prompt_ids, self.vocab_size)
        params.check_vocab(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop={list(params.stop)!r} needs text, but this model has no tokenizer; use stop_token_ids."
            )
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, but engine.max_model_len={self.max_model_len} must hold the "
                "prompt and at least one new token; shorten the prompt, or set truncate_prompt_tokens."
            )
        # The last token of a sequence is never written to the cache.
        left_in_cache = max(self.plan.capacity_tokens + 1 - num_prompt, 1)
        room = min(self.max_model_len - num_prompt, params.max_tokens or left_in_cache)
        if num_prompt + room - 1 > self.plan.capacity_tokens:
            raise ValueError(
                f"a prompt of {num_prompt} tokens with {room} new ones needs more than the {self.plan.num_blocks} "
                f"blocks of {self.plan.block_size} tokens that the KV cache has; lower max_tokens, or raise "
                "cache.num_blocks."
            )
        return room

    def _text_stream(self, request: Request) -> TextStream | None:
        params = request.params
        if self.tokenizer is None or not params.detokenize:
            return None
        decoder = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        return TextStream(
            decoder,
            tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
