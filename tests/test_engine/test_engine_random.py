"""Random schedules over the fake network: whatever is asked, aborted and evicted, each text is that of a quiet run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.engine.request import Request, RequestOutput, SamplingParams
from tests.test_engine.fake_network import NAN_TOKEN, make_engine, make_parts

# Prompts are cut out of these, so that prefixes are shared, at block ends and elsewhere.
STEMS = [[random.Random(seed).choice(range(8, 256)) for _ in range(60)] for seed in range(3)]


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 20))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)) if draw(st.booleans()) else 0,
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([None, 5])),
        repetition_penalty=draw(st.sampled_from([None, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        stop=draw(st.sampled_from([(), ("e",), ("a", "ab")])),
        stop_token_ids=draw(st.sampled_from([(), (20, 30, 40)])),
        logit_bias=draw(st.sampled_from([None, None, None, {NAN_TOKEN: 100.0}])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        seed=draw(st.integers(0, 5)),
    )


@st.composite
def asked(draw: st.DrawFn) -> tuple[int, list[int], SamplingParams, int | None]:
    """When it comes, the prompt, how it is sampled, and after how many further steps it is aborted."""
    stem = draw(st.sampled_from(STEMS))
    prompt = stem[: draw(st.integers(1, 40))] + draw(st.sampled_from([[], [], [], [1], [1, 2], [NAN_TOKEN, 3]]))
    aborted = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)))
    return draw(st.integers(0, 25)), prompt, draw(sampling()), aborted


ENGINES = st.fixed_dictionaries(
    {
        "prefix_caching": st.booleans(),
        "block_size": st.sampled_from([1, 4, 16]),
        "spare_tokens": st.sampled_from([0, 0, 20, 200]),  # cache beyond what the largest request needs
        "max_num_seqs": st.sampled_from([1, 3, 32]),
        "max_batched_tokens": st.sampled_from([2, 7, 64]),
        "prefill_chunk": st.sampled_from([None, 1, 2]),
        "force_preempt_every": st.sampled_from([0, 0, 2, 3]),
    }
)


def run(folder: Path, requests: list[Any], keys: dict[str, Any]) -> tuple[dict[str, RequestOutput], Any]:
    """Submit and abort at the given steps, and step until nothing is left; every invariant is checked on the way."""
    largest = max(len(prompt) + params.max_tokens for _, prompt, params, _ in requests)
    num_blocks = -(-(largest + keys.pop("spare_tokens")) // keys["block_size"])
    engine = make_engine(make_parts(folder), num_blocks=num_blocks, **keys)
    outputs: dict[str, RequestOutput] = {}
    # A token of progress in each step, replays and evictions included: far fewer steps than this are ever needed.
    most_steps = 200 + 60 * sum((len(prompt) + params.max_tokens) * params.n for _, prompt, params, _ in requests)
    try:
        for step in range(most_steps):
            for number, (arrival, prompt, params, aborted) in enumerate(requests):
                if arrival == step:
                    engine.add_request(Request(str(number), prompt, params))
                if aborted is not None and arrival + aborted == step:
                    engine.abort(str(number))
            for output in engine.step():
                assert output.finished and output.request_id not in outputs, "answered twice, or unfinished"
                outputs[output.request_id] = output
            engine.cache.check()
            if step > 40 and not engine.has_unfinished:
                break
        assert not engine.has_unfinished, f"work is left after {most_steps} steps: {len(outputs)} answers"
        engine.scheduler.check_idle()
        assert engine.cache.allocator.num_used == 0 and engine.num_unfinished == 0
        return outputs, engine.stats
    finally:
        engine.close()


def quiet(folder: Path, prompt: list[int], params: SamplingParams, number: int) -> RequestOutput:
    """The same request alone, with room for everything and no cache of prefixes."""
    keys = {"prefix_caching": False, "block_size": 16, "spare_tokens": 2000}
    outputs, _ = run(folder, [(0, prompt, params, None)], keys)
    return replace(outputs["0"], request_id=str(number))


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(requests=st.lists(asked(), min_size=1, max_size=8), keys=ENGINES)
def test_every_text_is_that_of_a_quiet_run(folder: Path, requests: list[Any], keys: dict[str, Any]) -> None:
    outputs, _ = run(folder, requests, dict(keys))
    assert sorted(outputs, key=int) == [str(number) for number in range(len(requests))]
    for number, (_, prompt, params, aborted) in enumerate(requests):
        got, alone = outputs[str(number)], quiet(folder, prompt, params, number)
        ended = {sample.finish_reason for sample in got.outputs}
        if "abort" in ended:
            assert aborted is not None
            for sample, whole in zip(got.outputs, alone.outputs, strict=True):
                if alone.error is None:
                    assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
                    assert whole.text.startswith(sample.text)
        elif alone.error is not None:
            assert got.error == alone.error or params.n > 1  # of several samples, whichever fails first is named
            assert got.error is not None
        else:
            assert replace(got, num_cached_tokens=0) == replace(alone, num_cached_tokens=0)
