"""How many prompt tokens a step takes when all that waits has a place, and in which order prompts then come.

Knows prompts' lengths and how many tokens answers may still get; knows nothing of blocks or budgets.

A step that decodes reads most of the weights, whatever else it does, and waits for memory; prompt tokens beside its
rows are multiplied meanwhile. A step of prompts alone waits for the multipliers. So prompts are not computed as early
as possible, but as late as lets every answer end no later than the longest one that runs already:

    steps left of the longest that runs   |<------------------- R ------------------->|
    an answer of m tokens                 | P tokens before it |<--------- m -------->|    P / (R - m) tokens a step

Prompts come in the order of their answers' lengths, the longest first: then they leave each other the most room. Both
go by the `max_tokens` that a request asks for. An answer that ends earlier leaves R shorter, and the prompts of the
next step are more; one that asks for no number waits for nobody, and nobody waits because of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe.engine.sequence import Sequence as Sample

# Never fewer: up to about so many tokens a step's products take little longer than the weights they read. Reckoned from
# the times of single steps on an H200, not measured: bench workload w1 gains 8, 9 and 3 % on qwen3, dsv2-lite and
# mixtral with 1024, and 6, 6 and 2 % with 2048.
LEAST_TOKENS = 1024
# What an answer that may be of any length counts as when prompts are put in order.
ANY_LENGTH = 4096


def longest_first(waiting: Iterable[Sample]) -> list[Sample]:
    """Those that gave way first, as they are; then by how long they may take, and how many steps they have waited.

    So nobody is overtaken for ever: who comes so many steps later goes first only if it may take longer by more.
    """
    samples = list(waiting)
    again = [each for each in samples if each.times_admitted]
    return again + sorted((each for each in samples if not each.times_admitted), key=_start_by)


def _start_by(sample: Sample) -> int:
    return sample.arrived_at - (sample.max_tokens if _is_bounded(sample) else ANY_LENGTH)


def _is_bounded(sample: Sample) -> bool:
    return sample.request.params.max_tokens is not None


def spread_tokens(decoding: Sequence[Sample], prompts: Iterable[Sample], most: int) -> int:
    """Prompt tokens for the next step, at most `most`: what `prompts`, computed in this order, need on average so that
    each of their answers ends with the longest of `decoding`. All at once where nothing is decoded."""
    if not decoding:
        return most
    steps = max((each.max_tokens - each.num_drawn for each in decoding if _is_bounded(each)), default=0)
    wanted, tokens = LEAST_TOKENS, 0
    for each in prompts:
        tokens += each.num_prompt - each.num_computed
        room = steps - each.max_tokens + each.num_drawn if _is_bounded(each) else 0
        wanted = max(wanted, -(-tokens // max(room, 1)))
        if wanted >= most:
            return most
    return wanted
