"""Prompts spread over steps: in which order they come, how many tokens a step takes, and that nobody is forgotten."""

from __future__ import annotations

import random

import pytest

from kv_cache.prefix_cache import PrefixCache
from moe.engine import spread
from moe.engine.request import Request, SamplingParams
from moe.engine.scheduler import Scheduler
from moe.engine.sequence import Sequence, Status
from moe.engine.spread import LEAST_TOKENS, longest_first, spread_tokens

SIZE = 16


def make(*, spreads: bool = True, max_num_seqs: int = 64, budget: int = 8192, blocks: int = 4096) -> Scheduler:
    cache = PrefixCache(blocks, SIZE, enabled=False)
    return Scheduler(cache, max_num_seqs=max_num_seqs, max_batched_tokens=budget, spreads=spreads)


def sample(name: str, num_prompt: int, max_tokens: int | None, scheduler: Scheduler | None = None) -> Sequence:
    cache = (scheduler or make()).cache
    request = Request(name, [1] * num_prompt, SamplingParams(max_tokens=max_tokens))
    sequence = Sequence(request, 0, [1] * num_prompt, max_tokens or 7000, cache.new_table())
    if scheduler is not None:
        scheduler.add(sequence)
    return sequence


def run(scheduler: Scheduler, *, more_to_come: bool = False) -> tuple[int, list[tuple[str, int]]]:
    """One step, launched and accepted: decoding rows, and (name, tokens) of each chunk."""
    schedule = scheduler.schedule(more_to_come=more_to_come)
    scheduler.advance(schedule)
    for sequence in schedule.sampled:
        scheduler.receive(sequence, 1)
        if len(sequence.output_ids) >= sequence.max_tokens:
            scheduler.finish(sequence)
    return len(schedule.decodes), [(chunk.sequence.request.request_id, chunk.length) for chunk in schedule.chunks]


def test_the_longest_answer_comes_first_and_equal_ones_as_they_came() -> None:
    samples = [sample("a", 5, 10), sample("b", 9, 30), sample("c", 5, 10), sample("d", 5, 20)]
    assert [each.request.request_id for each in longest_first(samples)] == ["b", "d", "a", "c"]


def test_nobody_is_overtaken_for_ever() -> None:
    short = sample("short", 5, 10)
    for steps, first in ((89, "long"), (90, "short"), (500, "short")):
        late = sample("long", 5, 100)
        late.arrived_at = steps
        assert longest_first([short, late])[0].request.request_id == first


def test_who_gave_way_comes_before_all_others() -> None:
    samples = [sample("a", 5, 50), sample("b", 5, 10), sample("c", 5, 5)]
    samples[1].times_admitted = samples[2].times_admitted = 1
    assert [each.request.request_id for each in longest_first(samples)] == ["b", "c", "a"]


def test_tokens_of_a_step_by_hand() -> None:
    """500 steps are left. 30,000 tokens may take 500 - 490 of them: 3,000 a step; what comes behind has more room."""
    runs, first = sample("r", 5, 500), sample("a", 30_000, 490)
    assert spread_tokens([runs], [first], 8192) == 3000
    assert spread_tokens([runs], [first, sample("b", 20_000, 480)], 8192) == 3000
    assert spread_tokens([runs], [first, sample("b", 50_000, 480)], 8192) == 4000
    assert spread_tokens([runs], [sample("a", 4000, 490)], 8192) == LEAST_TOKENS
    assert spread_tokens([runs], [sample("a", 4000, 490)], 500) == 500  # never above the budget


def test_a_longer_answer_than_any_that_runs_does_not_wait() -> None:
    runs = sample("r", 5, 500)
    runs.in_flight = 1
    assert spread_tokens([runs], [sample("a", 6000, 499)], 8192) == 6000
    assert spread_tokens([runs], [sample("a", 6000, 9999)], 8192) == 6000
    assert spread_tokens([runs], [sample("a", 60_000, 9999)], 8192) == 8192


def test_an_answer_of_any_length_waits_for_nobody_and_nobody_for_it() -> None:
    runs, endless = sample("r", 5, 500), sample("x", 5, None)
    assert spread_tokens([runs], [sample("a", 6000, None)], 8192) == 6000
    assert spread_tokens([endless], [sample("a", 6000, 10)], 8192) == 6000
    assert spread_tokens([endless, runs], [sample("a", 6000, 10)], 8192) == LEAST_TOKENS
    names = [each.request.request_id for each in longest_first([runs, endless, sample("y", 5, None)])]
    assert names == ["x", "y", "r"]


def test_without_anything_to_decode_the_whole_budget_is_taken() -> None:
    assert spread_tokens([], [sample("a", 6000, 10)], 8192) == 8192


def test_prompts_are_spread_once_all_have_a_place() -> None:
    scheduler = make(max_num_seqs=3)
    sample("long", 100, 400, scheduler)
    assert run(scheduler) == (0, [("long", 100)])
    for name in "abc":  # one too many
        sample(name, 3000, 200, scheduler)
    assert run(scheduler)[1] == [("a", 3000), ("b", 3000)]
    scheduler.finish(scheduler.running[1])
    for _ in range(2):
        run(scheduler)
    sample("d", 3000, 300, scheduler)
    assert not any(each.status is Status.WAITING for each in scheduler.running)
    scheduler.finish(scheduler.running[1])
    scheduler.finish(scheduler.running[1])
    assert run(scheduler)[1] == [("d", LEAST_TOKENS)]


@pytest.mark.parametrize(("spreads", "more_to_come"), [(False, False), (True, True)])
def test_prompts_come_as_they_stand_where_that_is_not_asked_or_more_may_come(spreads: bool, more_to_come: bool) -> None:
    scheduler = make(spreads=spreads)
    sample("long", 100, 400, scheduler)
    run(scheduler, more_to_come=more_to_come)
    sample("a", 3000, 100, scheduler)
    sample("b", 3000, 200, scheduler)
    assert run(scheduler, more_to_come=more_to_come)[1] == [("a", 3000), ("b", 3000)]


def test_all_answers_end_with_the_longest_and_every_step_holds_a_prompt_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps are those of the longest answer alone, and prompts take part in most of them, no more than needed."""
    monkeypatch.setattr(spread, "LEAST_TOKENS", 40)
    r = random.Random(3)
    lengths = [(r.randint(16, 64), r.randint(8, 128)) for _ in range(60)]
    lengths[7] = (50, 128)
    steps, mixed = {}, {}
    for spreads in (True, False):
        scheduler = make(spreads=spreads, budget=512)
        for index, (prompt, output) in enumerate(lengths):
            sample(f"s{index}", prompt, output, scheduler)
        chunks = []
        while scheduler.has_unfinished:
            chunks.append(sum(length for _, length in run(scheduler)[1]))
        scheduler.check_idle()
        assert sum(chunks) == sum(prompt for prompt, _ in lengths)
        steps[spreads], mixed[spreads] = len(chunks), sum(map(bool, chunks))
    assert steps[True] == 128 <= steps[False]
    assert mixed[True] > 3 * mixed[False]
