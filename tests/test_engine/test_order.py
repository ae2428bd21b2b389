"""In which order prompts that all have a place begin, that nobody is forgotten, and what it gains."""

from __future__ import annotations

import random

import pytest

from kv_cache.prefix_cache import PrefixCache
from moe.engine.order import longest_first
from moe.engine.request import Request, SamplingParams
from moe.engine.scheduler import Scheduler
from moe.engine.sequence import Sequence

SIZE = 16


def make(*, max_num_seqs: int = 64, budget: int = 8192, blocks: int = 4096) -> Scheduler:
    cache = PrefixCache(blocks, SIZE, enabled=False)
    return Scheduler(cache, max_num_seqs=max_num_seqs, max_batched_tokens=budget)


def sample(name: str, num_prompt: int, max_tokens: int | None, scheduler: Scheduler | None = None) -> Sequence:
    cache = (scheduler or make()).cache
    request = Request(name, [1] * num_prompt, SamplingParams(max_tokens=max_tokens))
    sequence = Sequence(request, 0, [1] * num_prompt, max_tokens or 7000, cache.new_table())
    if scheduler is not None:
        scheduler.add(sequence)
    return sequence


def run(scheduler: Scheduler, *, more_to_come: bool = False) -> list[tuple[str, int]]:
    """One step, launched and accepted: (name, tokens) of each chunk."""
    schedule = scheduler.schedule(more_to_come=more_to_come)
    scheduler.advance(schedule)
    for sequence in schedule.sampled:
        scheduler.receive(sequence, 1)
        if len(sequence.output_ids) >= sequence.max_tokens:
            scheduler.finish(sequence)
    return [(chunk.sequence.request.request_id, chunk.length) for chunk in schedule.chunks]


def names(sequences: list[Sequence]) -> list[str]:
    return [each.request.request_id for each in sequences]


def test_the_longest_answer_comes_first_and_equal_ones_as_they_came() -> None:
    samples = [sample("a", 5, 10), sample("b", 9, 30), sample("c", 5, 10), sample("d", 5, 20)]
    assert names(longest_first(samples)) == ["b", "d", "a", "c"]


def test_an_answer_of_any_length_counts_as_long_whatever_the_cache_leaves_it() -> None:
    samples = [sample("r", 5, 500), sample("x", 5, None), sample("y", 5, None)]
    assert names(longest_first(samples)) == ["x", "y", "r"]


def test_nobody_is_overtaken_for_ever() -> None:
    short = sample("short", 5, 10)
    for steps, first in ((89, "long"), (90, "short"), (500, "short")):
        late = sample("long", 5, 100)
        late.arrived_at = steps
        assert longest_first([short, late])[0].request.request_id == first


def test_who_gave_way_comes_before_all_others() -> None:
    samples = [sample("a", 5, 50), sample("b", 5, 10), sample("c", 5, 5)]
    samples[1].times_admitted = samples[2].times_admitted = 1
    assert names(longest_first(samples)) == ["b", "c", "a"]


def test_prompts_are_put_in_order_once_all_have_a_place() -> None:
    scheduler = make(max_num_seqs=3)
    sample("first", 100, 400, scheduler)
    assert run(scheduler) == [("first", 100)]
    for name, max_tokens in (("a", 100), ("b", 200), ("c", 300)):  # one too many
        sample(name, 3000, max_tokens, scheduler)
    assert run(scheduler) == [("a", 3000), ("b", 3000)]
    for _ in range(2):
        scheduler.finish(scheduler.running[-1])
    sample("d", 3000, 350, scheduler)
    assert run(scheduler) == [("d", 3000), ("c", 3000)]


def test_prompts_come_as_they_stand_where_more_may_come() -> None:
    scheduler = make()
    for name, max_tokens in (("a", 100), ("b", 200)):
        sample(name, 3000, max_tokens, scheduler)
    assert run(scheduler, more_to_come=True) == [("a", 3000), ("b", 3000)]


@pytest.mark.parametrize("seed", range(4))
def test_no_answer_ends_later_than_the_longest_would_alone(seed: int) -> None:
    r = random.Random(seed)
    lengths = [(r.randint(16, 64), r.randint(8, 100)) for _ in range(60)] + [(50, 128)]
    steps = {}
    for in_order in (True, False):
        scheduler = make(budget=512)
        for index, (prompt, output) in enumerate(lengths):
            sample(f"s{index}", prompt, output, scheduler)
        steps[in_order], computed = 0, 0
        while scheduler.has_unfinished:
            computed += sum(length for _, length in run(scheduler, more_to_come=not in_order))
            steps[in_order] += 1
        scheduler.check_idle()
        assert computed == sum(prompt for prompt, _ in lengths)
    assert steps[True] == 128 < steps[False]
