"""Ranks with random numbers of requests, or none: nobody hangs, nobody leaves early, each text is that of one rank.

The fake network meets the other ranks in each forward, as experts would, and looks whether all were told the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.schema import CacheConfig, Config, EngineConfig, ParallelConfig
from expert_parallel.group import ExpertGroup, Ranks, RankValues
from moe.engine.engine import Engine
from moe.engine.llm import LLM
from moe.engine.request import Request, RequestOutput, SamplingParams
from moe.model.step_input import StepInput
from tests.ranks import run_ranks, world
from tests.test_engine.fake_network import NAN_TOKEN, FakeNetwork, expected_tokens, make_engine, make_parts
from tests.test_engine.test_llm_ranks import as_torchrun, free_port, texts

TRIALS = {2: 6, 3: 4, 8: 2}  # by the number of ranks


class Meeting:
    """Before each forward of each rank: all are there, and were told what is true of all of them."""

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group
        self.num_steps = 0

    def __call__(self, step: StepInput) -> None:
        assert step.of_all is not None, "a step of several ranks that knows nothing of the others"
        self.num_steps += 1
        told = (step.of_all.most_rows, step.of_all.has_prefill)
        own = torch.tensor([self.num_steps, step.token_ids_T.shape[0], step.prefill is not None, *told])
        everyone = own.new_empty(self.group.size, len(own))
        self.group.all_gather(everyone.view(-1), own)
        number, rows, prefill, most_rows, has_prefill = everyone.T
        assert set(number.tolist()) == {self.num_steps}, f"ranks are in steps {number.tolist()}"
        assert set(most_rows.tolist()) == {int(rows.max())}, f"told {most_rows.tolist()} of {rows.tolist()} rows"
        assert set(has_prefill.tolist()) == {int(prefill.max())}, f"told {has_prefill.tolist()} of {prefill.tolist()}"


@dataclass(frozen=True)
class Asked:
    """A request, the step of its rank in which it comes, and the number of steps after which it is aborted."""

    arrival: int
    prompt: tuple[int, ...]
    params: SamplingParams
    aborted: int | None = None


def draw(rng: random.Random) -> Asked:
    more: dict[str, Any] = rng.choice(
        [{}, {}, {}, {"repetition_penalty": 1.3}, {"logprobs": 1}, {"top_k": 5, "temperature": 0.9}, {"n": 2}]
    )
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": rng.randint(1, 14), "seed": rng.randrange(9)} | more))
    prompt = [rng.choice(range(8, 250)) for _ in range(rng.choice([1, 2, 5, 30]))]
    if rng.random() < 0.1:
        prompt += [NAN_TOKEN, 9]  # ends with an error
    aborted = rng.randrange(8) if rng.random() < 0.15 else None
    return Asked(rng.choice([0, 0, 0, rng.randrange(20)]), tuple(prompt), params, aborted)


def ranked_engine(group: ExpertGroup, **keys: Any) -> tuple[Engine, Meeting]:
    meeting = Meeting(group)
    values = RankValues(group.rank, group.size, group.rank, group.size, "127.0.0.1", 1, agent_has_store=False)
    ranks = Ranks(values, torch.device("cpu"), dist.HashStore(), timedelta(seconds=60), group, lambda text: None)
    parts = replace(make_parts(None, FakeNetwork(before_forward=meeting)), ranks=ranks)
    return make_engine(parts, **keys), meeting


def answer(engine: Engine, requests: list[Asked]) -> tuple[dict[str, RequestOutput], int]:
    """In step with the others, until none of them has work. Outputs, and how many steps that took."""
    found: dict[str, RequestOutput] = {}
    engine.expects_more = True
    engine.join()
    calls = 0
    while engine.has_unfinished:
        for number, asked in enumerate(requests):
            if asked.arrival == calls:
                engine.add_request(Request(str(number), list(asked.prompt), asked.params))
            if asked.aborted is not None and asked.arrival + asked.aborted == calls:
                engine.abort(str(number))
        engine.expects_more = any(asked.arrival > calls for asked in requests)
        found |= {output.request_id: output for output in engine.step()}
        calls += 1
    engine.scheduler.check_idle()
    return found, calls


def alone(requests: list[Asked], **keys: Any) -> dict[str, RequestOutput]:
    engine = make_engine(make_parts(None), **keys)
    for number, asked in enumerate(requests):
        engine.add_request(Request(str(number), list(asked.prompt), asked.params))
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        found |= {output.request_id: output for output in engine.step()}
    engine.close()
    return found


def random_trials(rank: int, num_ranks: int, seed: int) -> list[int]:
    """In each trial every rank has 0 to 4 requests. Returns how many steps were launched."""
    counts = []
    for trial in range(TRIALS[num_ranks]):
        rng = random.Random(1000 * seed + trial)  # the same on all ranks
        keys = {
            "max_num_seqs": rng.choice([1, 3, 32]),
            "max_batched_tokens": rng.choice([7, 64]),
            "prefill_chunk": rng.choice([None, 3]),
            "overlap": rng.random() < 0.8,
            "force_preempt_every": rng.choice([0, 0, 3]),
        }
        of_ranks = [[draw(rng) for _ in range(rng.choice([0, 0, 1, 2, 4]))] for _ in range(num_ranks)]
        requests = of_ranks[rank]
        engine, meeting = ranked_engine(world(rank, num_ranks), **keys)
        try:
            found, _ = answer(engine, requests)
        finally:
            engine.close()
        expected = alone(requests)
        assert found.keys() == expected.keys()
        for name, output in found.items():
            asked, quiet = requests[int(name)], expected[name]
            for got, wanted in zip(output.outputs, quiet.outputs, strict=True):
                if asked.aborted is None and quiet.error is None:
                    assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)
                else:
                    shared = min(len(got.token_ids), len(wanted.token_ids))
                    assert got.token_ids[:shared] == wanted.token_ids[:shared]
            assert asked.aborted is not None or (output.error is None) == (quiet.error is None)
        counts.append(meeting.num_steps)
    return counts


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_random_numbers_of_requests(num_ranks: int) -> None:
    counts = run_ranks(random_trials, num_ranks, num_ranks, timeout_s=200.0)
    assert all(of_rank == counts[0] for of_rank in counts), "ranks left at different steps"
    assert max(counts[0]) > 5


SHORT_AND_LONG = ((2, 400), (1, 40), (31, 40), (32, 40), (33, 40))


def one_short_one_long(rank: int, num_ranks: int) -> list[tuple[int, int]]:
    counts = []
    for short, long in SHORT_AND_LONG:
        for short_rank in range(num_ranks):
            engine, meeting = ranked_engine(world(rank, num_ranks))
            length = short if rank == short_rank else long
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            try:
                found, calls = answer(engine, [Asked(0, (20 + rank,), params)])
            finally:
                engine.close()
            assert len(found["0"].outputs[0].token_ids) == length
            if long < 400:
                assert found["0"].outputs[0].token_ids == expected_tokens([20 + rank], length)
            counts.append((calls - long, meeting.num_steps - long))
    return counts


def test_C01_a_rank_whose_answers_are_short_stays_until_the_long_one_is_done() -> None:
    first, second = run_ranks(one_short_one_long, 2, timeout_s=200.0)
    assert all(num_steps == 0 and calls <= 3 for calls, num_steps in first + second), "more steps than the long one has"


KINDS = (
    {"dispatcher": "all_to_all", "row_cap": 128},
    {"dispatcher": "all_gather", "row_cap": 128, "overlap": "halves", "overlap_rows": 100},
    {"overlap": "halves", "overlap_rows": 2},
)
UNEVEN = [list(range(300)), [5]]


def uneven_config(model: str, parallel: dict[str, Any]) -> Config:
    return Config(
        model=model,
        engine=EngineConfig(device="cpu", max_batched_tokens=512),
        cache=CacheConfig(num_blocks=64),
        parallel=ParallelConfig(timeout_s=60, **parallel),
    )


def answer_uneven(rank: int, num_ranks: int, port: int, model: str) -> list[Any]:
    results = []
    for number, parallel in enumerate(KINDS):
        as_torchrun(rank, num_ranks, port + number)
        with LLM(config=uneven_config(model, parallel)) as llm:
            results.append(texts(llm.generate(UNEVEN, PARAMS)))
    return results


PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(("model", "num_ranks"), [("demo", 2), ("demo-deepseek", 3)])
def test_C22_300_rows_beside_one_in_rounds_and_in_halves(model: str, num_ranks: int) -> None:
    """With three ranks and two prompts, one rank has no row at all."""
    with LLM(config=uneven_config(model, {})) as llm:
        expected = texts(llm.generate(UNEVEN, PARAMS))
    for of_rank in run_ranks(answer_uneven, num_ranks, free_port(), model, joined=False, timeout_s=240.0):
        assert of_rank == [expected] * len(KINDS)
