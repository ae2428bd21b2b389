"""Which rows a step gets, who gives way and who comes back, with sequences that need no network."""

from __future__ import annotations

import pytest

from kv_cache.prefix_cache import PrefixCache
from moe.engine.request import Request, SamplingParams
from moe.engine.scheduler import PROMPT_LOGIT_ROWS, Schedule, Scheduler
from moe.engine.sequence import Sequence, Status

SIZE = 4


def make(num_blocks: int = 64, *, prefix_caching: bool = False, **limits: int) -> Scheduler:
    cache = PrefixCache(num_blocks, SIZE, enabled=prefix_caching)
    return Scheduler(cache, **({"max_num_seqs": 8, "max_batched_tokens": 32} | limits))  # pyright: ignore


def add(
    scheduler: Scheduler,
    name: str,
    num_prompt: int,
    max_tokens: int = 50,
    leader: Sequence | None = None,
    **params: int,
) -> Sequence:
    prompt = [hash_of(name, position) for position in range(num_prompt)]
    request = Request(name, prompt, SamplingParams(**params))  # pyright: ignore
    index = 0 if leader is None else 1
    sequence = Sequence(request, index, prompt, max_tokens, scheduler.cache.new_table(), leader)
    scheduler.add(sequence)
    return sequence


def hash_of(name: str, position: int) -> int:
    return (ord(name[0]) * 7 + position * 13) % 251


def run(scheduler: Scheduler) -> Schedule:
    """One step, launched and accepted; every sequence whose newest token was fed gets another."""
    schedule = scheduler.schedule()
    scheduler.advance(schedule)
    accept(scheduler, schedule)
    return schedule


def accept(scheduler: Scheduler, schedule: Schedule) -> None:
    for sequence in schedule.sampled:
        if sequence.finished:
            continue
        scheduler.receive(sequence, len(sequence.output_ids) + 1)
        if len(sequence.output_ids) >= sequence.max_tokens:
            scheduler.finish(sequence)
    scheduler.cache.check()


def shape(schedule: Schedule) -> tuple[list[str], list[tuple[str, int, int]]]:
    decodes = [each.request.request_id for each in schedule.decodes]
    return decodes, [(chunk.sequence.request.request_id, chunk.start, chunk.length) for chunk in schedule.chunks]


def test_decodes_come_first_then_chunks_under_the_budget() -> None:
    scheduler = make(max_batched_tokens=10)
    add(scheduler, "a", 4)
    add(scheduler, "b", 13)
    assert shape(run(scheduler)) == ([], [("a", 0, 4), ("b", 0, 6)])
    assert shape(run(scheduler)) == (["a"], [("b", 6, 7)])  # mixed: one decode row, the rest of b's prompt
    assert shape(run(scheduler)) == (["b", "a"], [])  # the longest first


def test_prefill_chunk_caps_one_request_and_leaves_room_for_others() -> None:
    scheduler = make(max_batched_tokens=10, prefill_chunk=4)
    add(scheduler, "a", 9)
    add(scheduler, "b", 9)
    add(scheduler, "c", 9)
    assert shape(run(scheduler)) == ([], [("a", 0, 4), ("b", 0, 4), ("c", 0, 2)])
    assert shape(run(scheduler)) == ([], [("a", 4, 4), ("b", 4, 4), ("c", 2, 2)])


def test_first_come_first_served_and_never_more_than_max_num_seqs() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 4, max_tokens=2)
    assert shape(run(scheduler))[1] == [("a", 0, 4), ("b", 0, 4)]
    assert shape(run(scheduler)) == (["a", "b"], [])
    assert shape(run(scheduler)) == ([], [("c", 0, 4)])


def test_a_token_budget_below_max_num_seqs_limits_the_running_ones() -> None:
    scheduler = make(max_num_seqs=8, max_batched_tokens=2)
    for name in "abc":
        add(scheduler, name, 1, max_tokens=3)
    for _ in range(9):
        if scheduler.has_unfinished:
            assert run(scheduler).num_tokens <= 2
    assert not scheduler.has_unfinished


def test_the_newest_gives_way_returns_first_and_replays() -> None:
    """6 blocks of 4; a and b hold two each and grow: b goes, comes back before c, replays its tokens one a step."""
    scheduler = make(6)
    a, b = add(scheduler, "a", 8, max_tokens=16), add(scheduler, "b", 8, max_tokens=8)
    run(scheduler)
    c = add(scheduler, "c", 4, max_tokens=4)
    while scheduler.num_preemptions == 0:
        run(scheduler)
    assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)
    assert list(scheduler.waiting) == [b, c] and len(b.table) == 0 and b.num_computed == 0
    emitted = list(b.output_ids)
    while b.status is Status.WAITING:
        run(scheduler)
    replays = 0
    while b.num_computed < b.num_tokens - 1:
        assert shape(run(scheduler))[0].count("b") == 1
        replays += 1
    assert b.output_ids[: len(emitted)] == emitted and replays >= len(emitted) - 1
    while scheduler.has_unfinished:
        run(scheduler)
    assert [len(each.output_ids) for each in (a, b, c)] == [16, 8, 4]
    scheduler.check_idle()


def test_admission_leaves_every_running_sequence_a_block_to_grow() -> None:
    scheduler = make(6)
    add(scheduler, "a", 8, max_tokens=16)
    add(scheduler, "b", 8, max_tokens=16)
    add(scheduler, "c", 4, max_tokens=16)
    run(scheduler)
    assert [each.request.request_id for each in scheduler.running] == ["a", "b"]  # c's block would be a's to grow into
    assert scheduler.cache.num_available == 2


def test_never_fits_is_exact() -> None:
    """4 blocks of 4: 17 tokens fit (the last is never written), 18 do not."""
    scheduler = make(4)
    assert not scheduler.never_fits(17) and scheduler.never_fits(18)
    alone = add(scheduler, "a", 4, max_tokens=13)
    while scheduler.has_unfinished:
        run(scheduler)
    assert len(alone.output_ids) == 13 and scheduler.num_preemptions == 0
    with pytest.raises(AssertionError, match="a request too large was not rejected"):
        add(scheduler, "b", 4, max_tokens=14)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forced_preemption_always_ends(every: int, prefix_caching: bool) -> None:
    scheduler = make(16, prefix_caching=prefix_caching, force_preempt_every=every)
    sequences = [add(scheduler, name, 6, max_tokens=9) for name in "abc"]
    for _ in range(500):
        if scheduler.has_unfinished:
            run(scheduler)
    assert [len(each.output_ids) for each in sequences] == [9, 9, 9]
    assert scheduler.num_preemptions > 0
    scheduler.check_idle()


def test_further_samples_share_the_first_ones_prompt() -> None:
    scheduler = make(prefix_caching=True, max_batched_tokens=10)
    first = add(scheduler, "a", 14)
    second = add(scheduler, "a", 14, leader=first)
    other = add(scheduler, "b", 2)
    assert shape(run(scheduler))[1] == [("a", 0, 10)]
    assert shape(run(scheduler))[1] == [("a", 10, 4), ("b", 0, 2)]  # b does not wait behind the second sample
    assert other.status is Status.RUNNING
    assert shape(run(scheduler)) == (["a", "b"], [("a", 12, 2)])
    assert second.num_cached == 12 and second.table.ids[:3] == first.table.ids[:3]


def test_a_leader_that_ended_early_holds_nobody_back() -> None:
    scheduler = make(prefix_caching=True, max_batched_tokens=4)
    first = add(scheduler, "a", 14)
    second = add(scheduler, "a", 14, leader=first)
    run(scheduler)
    scheduler.finish(first)
    assert shape(run(scheduler))[1] == [("a", 4, 4)]  # the one full block of the leader is found
    assert second.num_cached == 4


def test_prompt_logprobs_take_all_rows_a_few_at_a_time() -> None:
    scheduler = make(256, prefix_caching=True, max_batched_tokens=4096)
    warm = add(scheduler, "a", 300, max_tokens=1)
    run(scheduler)
    assert warm.finished
    again = add(scheduler, "a", 300, max_tokens=1, prompt_logprobs=0)
    other = add(scheduler, "a", 300, max_tokens=1)
    schedule = scheduler.schedule()
    assert shape(schedule)[1] == [("a", 0, PROMPT_LOGIT_ROWS), ("a", 296, 4)]
    assert again.num_cached == 0 and other.num_cached == 296


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
def test_c52_finish_in_every_state_gives_everything_back(state: str) -> None:
    scheduler = make(8, prefix_caching=False, max_batched_tokens=6)
    victim = add(scheduler, "a", 10, max_tokens=12)
    if state != "waiting":
        run(scheduler)
    if state in ("decode", "preempted"):
        run(scheduler)
        run(scheduler)
    if state == "preempted":
        scheduler._preempt(victim)
    assert victim.in_prefill == (state != "decode")
    scheduler.finish(victim)
    scheduler.finish(victim)  # a second ending does nothing
    assert scheduler.cache.allocator.num_free == 8 and not scheduler.has_unfinished
    scheduler.check_idle()


def test_c17_a_wholly_cached_prompt_computes_its_last_token() -> None:
    """Prompts of 4, 7, 8 and 9 tokens over blocks of 4, each a second time."""
    for length, cached in ((4, 0), (7, 4), (8, 4), (9, 8)):
        scheduler = make(prefix_caching=True)
        for expected in (0, cached):
            sequence = add(scheduler, "a", length, max_tokens=1)
            schedule = run(scheduler)
            assert shape(schedule)[1] == [("a", expected, length - expected)]
            assert sequence.num_cached == expected


def test_a_resumed_sequence_finds_its_own_generated_blocks() -> None:
    """Its decode-written blocks are still kept: only the newest token is computed again."""
    scheduler = make(32, prefix_caching=True)
    sequence = add(scheduler, "a", 6, max_tokens=20)
    for _ in range(8):
        run(scheduler)
    scheduler._preempt(sequence)
    assert shape(run(scheduler)) == (["a"], [])
    assert sequence.num_computed == 13 and sequence.num_cached == 0


def test_check_idle_names_a_leak() -> None:
    scheduler = make(8)
    table = scheduler.cache.new_table()
    scheduler.cache.extend(table)
    with pytest.raises(AssertionError, match="1 blocks are used although no request is left"):
        scheduler.check_idle()


def test_prompts_of_a_backlog_are_admitted_together() -> None:
    """32 places, a budget of 64: with more waiting than fit, admission waits for 2 free places or 32 prompt tokens."""
    scheduler = make(num_blocks=1000, max_num_seqs=32, max_batched_tokens=64)
    for index in range(32):
        add(scheduler, f"{chr(97 + index % 26)}{index}", 2, max_tokens=5 if index in (3, 9) else 40 + index)
    while any(sequence.in_prefill for sequence in scheduler.running) or len(scheduler.running) < 32:
        run(scheduler)
    for index in range(4):
        add(scheduler, f"x{index}", 3)
    scheduler.running[3].max_tokens = len(scheduler.running[3].output_ids) + 1
    run(scheduler)
    assert len(scheduler.running) == 31
    assert shape(run(scheduler))[1] == [], "one free place and three tokens are not worth a mixed step"
    scheduler.running[8].max_tokens = len(scheduler.running[8].output_ids) + 1
    run(scheduler)
    assert shape(run(scheduler))[1] == [("x0", 0, 3), ("x1", 0, 3)]


def test_a_large_prompt_of_a_backlog_is_worth_a_step_and_so_is_the_last_of_the_queue() -> None:
    scheduler = make(num_blocks=1000, max_num_seqs=32, max_batched_tokens=64)
    for index in range(32):
        add(scheduler, f"a{index}", 2, max_tokens=3 if index == 0 else 40)
    add(scheduler, "big", 40)
    add(scheduler, "last", 2)
    while "big" in [sequence.request.request_id for sequence in scheduler.waiting]:
        run(scheduler)
    assert len(scheduler.running) == 32, "40 tokens of 64 were worth a step at the first free place"
    scheduler.running[5].max_tokens = len(scheduler.running[5].output_ids) + 1
    run(scheduler)
    assert shape(run(scheduler))[1][-1:] == [("last", 0, 2)], "nobody else waits, so there is nothing to wait for"


def launch(scheduler: Scheduler) -> Schedule:
    schedule = scheduler.schedule()
    scheduler.advance(schedule)
    return schedule


def test_a_step_is_scheduled_before_the_last_ones_tokens_are_known() -> None:
    """Three tokens: two steps are launched ahead of what is known, and none behind the one that draws the third."""
    scheduler = make()
    sequence = add(scheduler, "a", 4, max_tokens=3)
    first, second = launch(scheduler), launch(scheduler)
    assert shape(first) == ([], [("a", 0, 4)]) and shape(second) == (["a"], [])
    assert (sequence.in_flight, sequence.num_computed, sequence.output_ids) == (2, 5, [])
    accept(scheduler, first)
    third = launch(scheduler)
    assert shape(third) == (["a"], []) and sequence.output_ids == [1]
    accept(scheduler, second)
    assert scheduler.schedule().num_tokens == 0 and scheduler.waits_for_tokens
    accept(scheduler, third)
    assert sequence.output_ids == [1, 2, 3] and sequence.finished
    scheduler.check_idle()


def test_a_block_is_found_when_its_tokens_are_known_and_not_by_a_row_too_many() -> None:
    """Blocks of 4, a prompt of 6: positions 6 and 7 are generated. The text ends with the second of them."""
    scheduler = make(prefix_caching=True)
    sequence = add(scheduler, "a", 6, max_tokens=20)
    first, second = launch(scheduler), launch(scheduler)  # the second writes position 6
    assert sequence.num_committed == 1
    accept(scheduler, first)
    third = launch(scheduler)  # it writes position 7, whose token is not known
    assert sequence.num_computed == 8 and sequence.num_committed == 1
    accept(scheduler, second)
    scheduler.finish(sequence)
    accept(scheduler, third)  # for nobody
    assert scheduler.cache.allocator.num_kept == 1 and sequence.output_ids == [1, 2]
    scheduler.check_idle()


def test_who_gives_way_with_a_token_in_flight_returns_when_it_is_known() -> None:
    scheduler = make(force_preempt_every=3)
    sequence = add(scheduler, "a", 4, max_tokens=6)
    first, second = launch(scheduler), launch(scheduler)
    accept(scheduler, first)
    assert scheduler.schedule().num_tokens == 0, "it was preempted, and its second token is still being drawn"
    assert sequence.status is Status.WAITING and sequence.in_flight == 1 and sequence.place == -1
    accept(scheduler, second)
    again = launch(scheduler)
    assert shape(again)[1] == [("a", 0, 4)] and again.sampled == [] and sequence.output_ids == [1, 2]
    assert again.admitted == [sequence] and sequence.place >= 0


def test_places_are_handed_out_once() -> None:
    scheduler = make(max_num_seqs=3)
    for name in "abcd":
        add(scheduler, name, 4, max_tokens=2)
    launched = launch(scheduler)
    places = [sequence.place for sequence in scheduler.running]
    assert sorted(places) == [0, 1, 2] and launched.admitted == scheduler.running
    ended = scheduler.running[1]
    place = ended.place
    scheduler.finish(ended)
    again = launch(scheduler)
    assert [sequence.place for sequence in again.admitted] == [place]
    assert launch(scheduler).admitted == []


def test_prompts_that_begin_alike_wait_for_the_one_that_computes_the_beginning() -> None:
    """Without that, all of a step would compute it, since a block is found only by later steps."""
    scheduler = make(prefix_caching=True, max_batched_tokens=64)
    first, other = add(scheduler, "a", 13), add(scheduler, "b", 9)
    again, longer = add(scheduler, "a", 13), add(scheduler, "a", 18)
    assert shape(run(scheduler))[1] == [("a", 0, 13), ("b", 0, 9)]  # nobody else is held up
    assert shape(run(scheduler)) == (["a", "b"], [("a", 12, 1), ("a", 12, 6)])
    assert [each.num_cached for each in (first, other, again, longer)] == [0, 0, 12, 12]


def test_a_prompt_in_chunks_is_waited_for_until_all_that_is_shared_is_there() -> None:
    scheduler = make(prefix_caching=True, max_batched_tokens=10)
    add(scheduler, "a", 25)
    add(scheduler, "a", 25)
    chunks = [shape(run(scheduler))[1] for _ in range(4)]
    assert chunks == [[("a", 0, 10)], [("a", 10, 10)], [("a", 20, 5)], [("a", 24, 1)]]


def test_nobody_waits_for_a_prompt_that_ended_or_gave_way() -> None:
    scheduler = make(prefix_caching=True, max_batched_tokens=10)
    first = add(scheduler, "a", 25)
    second = add(scheduler, "a", 25)
    run(scheduler)
    scheduler.finish(first)
    run(scheduler)
    assert second.num_cached == 8 and second.num_computed == 18


def test_without_a_prefix_cache_nobody_waits() -> None:
    scheduler = make(max_batched_tokens=64)
    add(scheduler, "a", 13)
    add(scheduler, "a", 13)
    assert len(shape(run(scheduler))[1]) == 2
