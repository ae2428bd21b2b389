"""What becomes of a request: whether it can ever run, how long its answer may get, its sequences and their texts.

Knows limits, prompts and texts; knows nothing of queues, steps or devices.
"""

from __future__ import annotations

from kv_cache.prefix_cache import PrefixCache
from moe.engine.answer import Answer, Sample
from moe.engine.memory_plan import MemoryPlan
from moe.engine.parts import Parts
from moe.engine.request import Request, SamplingParams
from moe.engine.sequence import Sequence
from moe.engine.stop import TextStream
from moe.engine.tokenizer import check_ids


def longest_answer(
    params: SamplingParams, prompt_ids: list[int], vocab_size: int, max_model_len: int, plan: MemoryPlan | None
) -> int:
    """How many tokens may follow the prompt; ValueError where it can never run. `plan` None: the cache's size is not
    known yet, and not looked at."""
    num_prompt = len(prompt_ids)
    check_ids(prompt_ids, vocab_size)
    params.check_vocab(vocab_size)
    if num_prompt >= max_model_len:
        raise ValueError(
            f"the prompt has {num_prompt} tokens, but engine.max_model_len={max_model_len} must hold the "
            "prompt and at least one new token; shorten the prompt, or set truncate_prompt_tokens."
        )
    left = max_model_len - num_prompt
    if plan is None:
        return min(left, params.max_tokens or left)
    # The last token of a sequence is never written to the cache.
    room = min(left, params.max_tokens or max(plan.capacity_tokens + 1 - num_prompt, 1))
    if num_prompt + room - 1 > plan.capacity_tokens:
        raise ValueError(
            f"a prompt of {num_prompt} tokens with {room} new ones needs more than the {plan.num_blocks} "
            f"blocks of {plan.block_size} tokens that the KV cache has; lower max_tokens, or raise "
            "cache.num_blocks."
        )
    return room


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
        params = request.params
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop={list(params.stop)!r} needs text, but this model has no tokenizer; use stop_token_ids."
            )
        return longest_answer(params, prompt_ids, self.vocab_size, self.max_model_len, self.plan)

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
