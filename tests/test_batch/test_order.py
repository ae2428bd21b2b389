"""The order of a job's lines: equal beginnings together, long answers first, nothing lost, the same everywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.prefix_cache import PrefixCache
from moe.batch.lines import BadLine, InputFault, Line
from moe.batch.order import RUN_CHARS, RUN_LINES, STEP_CHARS, in_job_order, in_runs, prompt_parts, shared_chars
from moe.engine.request import Request, SamplingParams
from moe.engine.scheduler import Scheduler
from moe.engine.sequence import Sequence

A, B, C = ("abc"[i] * (2 * STEP_CHARS) for i in range(3))
LONG = "t" * RUN_CHARS


def lines_of(*records: dict[str, Any]) -> list[Line]:
    return [Line(number, record, num_bytes=100) for number, record in enumerate(records, 1)]


def prefix_order(lines: list[Line | BadLine] | list[Line], window: int = 1000, window_bytes: int = 10**9) -> list[int]:
    return [line.number for line in in_job_order(lines, order="prefix", window=window, window_bytes=window_bytes)]


def test_equal_beginnings_come_together_and_long_answers_first() -> None:
    lines = lines_of(
        {"prompt": A + "x", "max_tokens": 5},
        {"prompt": B + "x", "max_tokens": 9},
        {"prompt": A + "y", "max_tokens": 7},
        {"prompt": B + "y", "max_tokens": 1},
        {"prompt": "alone", "max_tokens": 8},
        {"prompt": A + "z", "max_tokens": 6},
    )
    assert prefix_order(lines) == [2, 4, 5, 3, 6, 1]  # b: 9 and 1, alone: 8, a: 7, 6, 5


def test_groups_are_nested() -> None:
    """A beginning of a beginning: the inner pairs stay together inside of the outer group."""
    lines = lines_of(
        {"prompt": A + B + "1", "max_tokens": 1},
        {"prompt": A + C + "1", "max_tokens": 4},
        {"prompt": A + B + "2", "max_tokens": 5},
        {"prompt": C + "1", "max_tokens": 3},
        {"prompt": A + C + "2", "max_tokens": 2},
        {"prompt": A, "max_tokens": 6},
    )
    assert prefix_order(lines) == [6, 3, 1, 2, 5, 4]


def test_without_anything_in_common_the_longest_work_is_first_and_ties_keep_the_files_order() -> None:
    lines = lines_of(
        {"prompt": "q" * 30, "max_tokens": 4},
        {"prompt": "r" * 30, "max_tokens": 4},
        {"prompt": "s" * 31, "max_tokens": 4},
        {"prompt": "u"},  # may take as long as the model allows
        {"prompt": "v", "max_tokens": 5},
    )
    assert prefix_order(lines) == [4, 5, 3, 1, 2]


def test_every_form_of_a_prompt_has_a_beginning() -> None:
    system = {"role": "system", "content": A}
    ids = list(range(2 * STEP_CHARS))
    body = {"custom_id": "x", "method": "POST", "url": "u"}
    lines = lines_of(
        {"messages": [system, {"role": "user", "content": "one"}], "max_tokens": 1},
        {"prompt_token_ids": [*ids, 5], "max_tokens": 1},
        {**body, "body": {"prompt": A + "1", "max_tokens": 1}},
        {**body, "body": {"messages": [system, {"role": "user", "content": "two"}], "max_completion_tokens": 9}},
        {**body, "body": {"prompt": [*ids, 6], "max_tokens": 7}},
        {"prompt": A + "2", "max_tokens": 8},
    )
    assert prefix_order(lines) == [4, 1, 6, 3, 5, 2]
    shared = shared_chars(prompt_parts(lines[0]), prompt_parts(lines[3]))
    assert shared == len("system") + len(A) + len("user")


def test_file_order_holds_nothing() -> None:
    taken = []

    def endless() -> Iterator[Line]:
        for number in range(1, 10**9):
            taken.append(number)
            yield Line(number, {})

    ordered = in_job_order(endless(), order="file", window=5, window_bytes=5)
    assert [next(ordered).number for _ in range(3)] == [1, 2, 3] == taken


@pytest.mark.parametrize(("window", "window_bytes"), [(4, 10**9), (1000, 400)])
def test_a_window_is_bounded_by_lines_and_by_bytes_and_the_next_is_read_line_by_line(
    window: int, window_bytes: int
) -> None:
    taken = 0

    def reading() -> Iterator[Line]:
        nonlocal taken
        for number in range(1, 13):
            taken += 1
            yield Line(number, {"prompt": "p", "max_tokens": number}, num_bytes=100)

    ordered = in_job_order(reading(), order="prefix", window=window, window_bytes=window_bytes)
    seen = []
    for at, line in enumerate(ordered, 1):
        seen.append(line.number)
        assert taken <= min(12, 4 + at), "more than a line was read for a line"
    assert seen == [4, 3, 2, 1, 8, 7, 6, 5, 12, 11, 10, 9]


def test_a_fault_of_the_input_comes_after_the_lines_before_it() -> None:
    def cut_off() -> Iterator[Line]:
        yield from lines_of({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
        raise InputFault("cut off")

    for order, window in (("file", 1), ("prefix", 2), ("prefix", 100)):
        seen = []
        with pytest.raises(InputFault, match="cut off"):
            for line in in_job_order(cut_off(), order=order, window=window, window_bytes=10**6):
                seen.append(line.number)
        assert sorted(seen) == [1, 2, 3]


prompts = st.text(alphabet="ab", max_size=6).map(lambda text: "".join(char * STEP_CHARS for char in text))
values = st.none() | st.booleans() | st.integers() | st.floats() | prompts | st.lists(st.integers() | prompts)
messages = st.lists(st.fixed_dictionaries({"role": prompts, "content": values}) | values, max_size=3)
fields = st.fixed_dictionaries(
    {},
    optional={"prompt": values, "prompt_token_ids": values, "messages": messages | values, "max_tokens": values},
)
records = fields | st.fixed_dictionaries({"body": fields | values})


@given(st.lists(records | st.none()), st.integers(1, 8), st.integers(1, 2000))
def test_any_lines_come_out_once_each_and_only_within_their_window(
    held: list[dict[str, Any] | None], window: int, window_bytes: int
) -> None:
    lines: list[Line | BadLine] = [
        BadLine(number, "bad") if record is None else Line(number, record, num_bytes=number * 37 % 500)
        for number, record in enumerate(held, 1)
    ]
    first, again = (prefix_order(lines, window, window_bytes) for _ in range(2))
    assert first == again and sorted(first) == list(range(1, len(lines) + 1))
    for place, number in enumerate(first):
        assert abs(place + 1 - number) < window


@given(st.lists(prompts, min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_the_order_shares_as_much_as_any_could(texts: list[str], chance: random.Random) -> None:
    """Steps of a beginning that the line before does not have must be computed: no shuffle needs fewer."""
    lines = lines_of(*({"prompt": text, "max_tokens": chance.randrange(3)} for text in texts))

    def computed(order: list[int]) -> int:
        parts = [prompt_parts(lines[number - 1]) for number in order]
        shared = [shared_chars(before, after) // STEP_CHARS for before, after in pairwise(parts)]
        return sum(len(text) // STEP_CHARS for text in texts) - sum(shared)

    ours = computed(prefix_order(lines))
    for _ in range(20):
        other = list(range(1, len(lines) + 1))
        chance.shuffle(other)
        assert ours <= computed(other)


def runs_of(lines: list[Line], num_ranks: int, chance: random.Random) -> list[list[int]]:
    """Line numbers of each rank, all drawing from one counter in random turns."""
    counter = 0

    def claim() -> int:
        nonlocal counter
        counter += 1
        return counter - 1

    readers = [in_runs(iter(lines), claim) for _ in range(num_ranks)]
    got: list[list[int]] = [[] for _ in readers]
    open_ranks = list(range(num_ranks))
    while open_ranks:
        rank = chance.choice(open_ranks)
        line = next(readers[rank], None)
        if line is None:
            open_ranks.remove(rank)
        else:
            got[rank].append(line.number)
    return got


@pytest.mark.parametrize("seed", range(5))
def test_ranks_get_every_line_once_and_lines_that_begin_alike_in_runs(seed: int) -> None:
    chance = random.Random(seed)
    lines = lines_of(*({"prompt": (LONG + str(at // 20) * 300 if at < 60 else "s") + str(at)} for at in range(75)))
    got = runs_of(lines, 3, chance)
    assert sorted(number for rank in got for number in rank) == list(range(1, 76))
    owner = {number: rank for rank, numbers in enumerate(got) for number in numbers}
    changes = sum(owner[number] != owner[number + 1] for number in range(1, 60))
    assert changes <= -(-60 // RUN_LINES)  # the three groups share a beginning too, so runs go on across them
    assert all(numbers == sorted(numbers) for numbers in got)


def test_lines_with_nothing_in_common_are_claimed_one_by_one() -> None:
    got = runs_of(lines_of(*({"prompt": str(at)} for at in range(12))), 1, random.Random(0))
    assert got == [list(range(1, 13))]
    claims = iter([0, 3, 4, 99])
    assert [
        line.number for line in in_runs(lines_of(*({"prompt": str(at)} for at in range(12))), lambda: next(claims))
    ] == [
        1,
        4,
        5,
    ]


class Counted:
    """The engine's own scheduler and prefix cache over a network that computes nothing: what would be computed."""

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        self.scheduler = Scheduler(PrefixCache(num_blocks, 16), max_num_seqs=max_num_seqs, max_batched_tokens=1024)
        self.prefill_tokens = self.steps = 0

    def run(self, lines: Iterator[Line | BadLine]) -> Counted:
        scheduler = self.scheduler
        more = True
        while more or scheduler.has_unfinished:
            while more and len(scheduler.waiting) < 8:
                line = next(lines, None)
                more = line is not None
                if line is not None and line.record is not None:
                    self._add(line.number, line.record)
            schedule = scheduler.schedule()
            scheduler.advance(schedule)
            self.steps += 1
            self.prefill_tokens += sum(chunk.length for chunk in schedule.chunks)
            for sequence in schedule.sampled:
                scheduler.receive(sequence, 1)
                if len(sequence.output_ids) >= sequence.max_tokens:
                    scheduler.finish(sequence)
        scheduler.check_idle()
        return self

    def _add(self, number: int, record: dict[str, Any]) -> None:
        ids, max_tokens = record["prompt_token_ids"], record["max_tokens"]
        request = Request(str(number), ids, SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(Sequence(request, 0, ids, max_tokens, self.scheduler.cache.new_table()))


def interleaved(num_templates: int, num_lines: int) -> list[Line]:
    """Lines of templates that take turns, each with a question of its own."""
    chance = random.Random(0)
    templates = [[chance.randrange(1000) for _ in range(320)] for _ in range(num_templates)]
    return lines_of(
        *(
            {
                "prompt_token_ids": templates[at % num_templates] + [chance.randrange(1000) for _ in range(24)],
                "max_tokens": chance.choice((2, 4, 40)),
            }
            for at in range(num_lines)
        )
    )


def counted(lines: list[Line], order: str, num_blocks: int, max_num_seqs: int = 16) -> Counted:
    ordered = in_job_order(iter(lines), order=order, window=8192, window_bytes=1 << 25)
    return Counted(num_blocks, max_num_seqs).run(ordered)


def test_fifty_templates_that_take_turns_cost_far_less_prefill() -> None:
    """The cache holds a third of the templates: by the file's order none is still there when it comes again."""
    lines = interleaved(50, 500)
    by_file, by_prefix = (counted(lines, order, num_blocks=20 * 22) for order in ("file", "prefix"))
    every_token = 500 * 344
    assert by_file.prefill_tokens > 0.9 * every_token
    assert (
        by_prefix.prefill_tokens < 1.1 * (50 * 320 + 500 * 24) and 2 * by_prefix.prefill_tokens < by_file.prefill_tokens
    )


def test_where_the_cache_holds_every_template_the_order_costs_nothing() -> None:
    lines = interleaved(50, 500)
    by_file, by_prefix = (counted(lines, order, num_blocks=4000) for order in ("file", "prefix"))
    assert by_prefix.prefill_tokens <= by_file.prefill_tokens


def test_the_tail_is_short_where_long_answers_begin_first() -> None:
    lines = lines_of(*({"prompt_token_ids": [at], "max_tokens": 200 if at % 40 == 39 else 5} for at in range(400)))
    by_file, by_prefix = (counted(lines, order, num_blocks=1000) for order in ("file", "prefix"))
    assert by_prefix.steps < 0.8 * by_file.steps
