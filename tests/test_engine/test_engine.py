"""The loop over a network whose text depends on every cache entry: batching, chunks, caching, preemption, endings."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.engine.engine import Engine, StepError
from moe.engine.parts import Parts
from moe.engine.request import Request, RequestOutput, SamplingParams
from moe.engine.sequence import Sequence
from moe.model.step_input import StepInput
from tests.test_engine.fake_network import NAN_TOKEN, FakeNetwork, expected_tokens, make_parts

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture()
def parts(folder: Path) -> Parts:
    return make_parts(folder)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice([token for token in range(256) if token != NAN_TOKEN]) for _ in range(length)]


def drain(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs, f"{output.request_id} was answered twice"
                outputs[output.request_id] = output
    engine.scheduler.check_idle()
    return outputs


def answer(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(f"r{engine.stats.requests}-{index}", prompt, params))
    return [
        output.outputs[0].token_ids for _, output in sorted(drain(engine).items(), key=lambda each: _index(each[0]))
    ]


def _index(request_id: str) -> int:
    return int(request_id.split("-")[1])


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    "keys",
    [
        {},  # roomy
        {"prefill_chunk": 5, "max_batched_tokens": 12},  # chunks that end inside blocks, mixed with decodes
        {"num_blocks": 12, "block_size": 8},  # natural preemption
        {"force_preempt_every": 3, "prefill_chunk": 7},
        {"block_size": 1, "num_blocks": 512},
        {"max_num_seqs": 1},
    ],
    ids=lambda keys: ",".join(keys) or "roomy",
)
def test_tokens_are_those_of_a_cacheless_run(parts: Parts, engines: Any, keys: dict, prefix_caching: bool) -> None:
    lengths = [1, 3, 16, 17, 31, 32, 33, 40]
    prompts = [prompt_of(length, seed=length % 3) for length in lengths]  # several share prefixes
    engine = engines(parts, prefix_caching=prefix_caching, **keys)
    params = SamplingParams(max_tokens=24, **GREEDY)
    assert answer(engine, prompts, params) == [expected_tokens(prompt, 24) for prompt in prompts]
    assert answer(engine, prompts, params) == [expected_tokens(prompt, 24) for prompt in prompts]  # warm
    stats = engine.stats
    assert (stats.cached_tokens > 0) == prefix_caching
    if ("num_blocks" in keys and keys["num_blocks"] < 64) or "force_preempt_every" in keys:
        assert stats.preemptions >= 1
    if "prefill_chunk" in keys:
        assert stats.split_prompts >= 2 and stats.chunks > len(prompts) * 2 and stats.mixed_steps > 0
    assert stats.output_tokens == 2 * 24 * len(prompts) and stats.requests == 2 * len(prompts)


SAMPLED = {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 5, "ignore_eos": True}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled-with-penalty"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_c08_preempted_requests_keep_their_answer(
    parts: Parts, engines: Any, sampling: dict, prefix_caching: bool
) -> None:
    """4 prompts of 40 tokens, 40 new ones, 12 blocks of 16: 3 blocks each at admission, 5 at the end."""
    prompts = [prompt_of(40, seed=index) for index in range(4)]
    params = SamplingParams(max_tokens=40, **sampling)
    roomy = engines(parts, block_size=16, num_blocks=200, prefix_caching=prefix_caching)
    tight = engines(parts, block_size=16, num_blocks=12, prefix_caching=prefix_caching)
    wanted = answer(roomy, prompts, params)
    got = answer(tight, prompts, params)
    assert got == wanted
    assert [len(tokens) for tokens in got] == [40] * 4
    assert roomy.stats.preemptions == 0 and tight.stats.preemptions >= 1
    assert tight.cache.allocator.num_used == 0
    if not prefix_caching:
        assert tight.stats.replayed_tokens > 0
    if sampling is GREEDY:
        assert got == [expected_tokens(prompt, 40) for prompt in prompts]


@pytest.mark.parametrize("length", [16, 31, 32, 33])
def test_c17_repeats_of_a_cached_prompt(parts: Parts, engines: Any, length: int) -> None:
    prompt, params = prompt_of(length), SamplingParams(max_tokens=20, **GREEDY)
    off, on = (engines(parts, block_size=16, prefix_caching=caching) for caching in (False, True))
    wanted = answer(off, [prompt], params)
    for time in range(3):
        assert answer(on, [prompt], params) == wanted
        computed = on.stats.computed_prompt_tokens
        cached = (length - 1) // 16 * 16
        assert computed == length + time * (length - cached), (
            "at least one token is recomputed, and no more than needed"
        )
    assert answer(on, [prompt] * 3, params) == wanted * 3
    assert wanted == [expected_tokens(prompt, 20)]


def test_c17_generated_blocks_serve_no_prompt_of_the_same_tokens(parts: Parts, engines: Any) -> None:
    """Decode wrote them, in other bits than prefill would have; the same prompt generating them again may have them."""
    engine, prompt = engines(parts, block_size=8), prompt_of(16)
    params = SamplingParams(max_tokens=25, **GREEDY)
    (generated,) = answer(engine, [prompt], params)
    longer = [*prompt, *generated]
    assert answer(engine, [longer], params) == [expected_tokens(longer, 25)]
    assert engine.stats.cached_tokens == 16  # the prompt's own blocks alone


def test_c17_a_prefix_evicted_while_its_request_waits(parts: Parts, engines: Any) -> None:
    """The waiting request's prefix is cached when it comes and gone when its turn comes: it is computed, and right."""
    engine = engines(parts, block_size=16, num_blocks=8, max_num_seqs=1)
    shared, params = prompt_of(48, seed=1), SamplingParams(max_tokens=8, **GREEDY)
    answer(engine, [shared], params)
    big = prompt_of(100, seed=2)  # 7 of 8 blocks: evicts what the next one would find
    engine.add_request(Request("big-0", big, params))
    engine.add_request(Request("late-1", shared, params))
    keys = [
        sequence.known_keys(engine.cache.root, 2) for sequence in engine.scheduler.waiting if sequence.num_prompt == 48
    ]
    assert engine.cache.count(keys[0]) == (2, 2), "the prefix is there when the request arrives"
    outputs = drain(engine)
    assert outputs["late-1"].num_cached_tokens < 32
    assert outputs["late-1"].outputs[0].token_ids == expected_tokens(shared, 8)
    assert outputs["big-0"].outputs[0].token_ids == expected_tokens(big, 8)


def test_c40_and_c23_the_length_limit(folder: Path, engines: Any) -> None:
    """Limit 64: 60 tokens get 4 new ones, 63 get one, 64 and 65 are rejected, and no position past 63 is ever run."""
    seen: list[int] = []
    network = FakeNetwork(before_forward=lambda step: seen.append(int(step.positions_T.max())))
    engine = engines(make_parts(folder, network, max_model_len=64), num_blocks=200)
    for length in (10, 60, 63, 64, 65):
        engine.add_request(Request(str(length), prompt_of(length), SamplingParams(max_tokens=20, **GREEDY)))
    outputs = drain(engine)
    ends = {name: (len(each.outputs[0].token_ids), each.outputs[0].finish_reason) for name, each in outputs.items()}
    assert ends == {
        "10": (20, "length"),
        "60": (4, "length"),
        "63": (1, "length"),
        "64": (0, "error"),
        "65": (0, "error"),
    }
    for length in (64, 65):
        error = outputs[str(length)].error
        assert error is not None and f"the prompt has {length} tokens, but engine.max_model_len=64" in error
    assert [name for name, each in outputs.items() if each.rejected] == ["64", "65"]
    assert max(seen) == 62  # the 64th token is never fed back
    assert engine.stats.failed_requests == 2 and engine.stats.requests == 5


def test_c40_positions_past_the_table_are_caught_on_the_host(parts: Parts, engines: Any) -> None:
    engine = engines(parts)
    engine.runner.limits = replace(
        engine.runner.limits, max_model_len=20
    )  # as if the scheduler had forgotten the limit
    engine.add_request(Request("far", prompt_of(18), SamplingParams(max_tokens=10, **GREEDY)))
    with pytest.raises(
        StepError, match=r"position 20 was scheduled, the position table ends at 20; requests: \['far'\]"
    ):
        drain(engine)


class HeldGraphs:
    """Stands for graphs that hold collectives."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("failed", [False, True])
def test_graphs_are_freed_before_the_ranks_part(parts: Parts, engines: Any, failed: bool) -> None:
    """Else NCCL would wait for ever; after a fault nobody may wait for the device, and nobody parts in order."""
    engine = engines(parts)
    engine.graphs = graphs = HeldGraphs()
    if failed:
        engine._failure = StepError("forward", [], ArithmeticError())
    engine.conclude()
    engine.close()
    assert graphs.closed == (0 if failed else 1)


def test_truncation_keeps_the_last_tokens(parts: Parts, engines: Any) -> None:
    engine, prompt = engines(parts), prompt_of(30)
    engine.add_request(Request("cut", prompt, SamplingParams(max_tokens=5, truncate_prompt_tokens=9, **GREEDY)))
    output = drain(engine)["cut"]
    assert output.prompt_token_ids == prompt[-9:]
    assert output.outputs[0].token_ids == expected_tokens(prompt[-9:], 5)


def test_requests_that_can_never_run_are_answered_at_once(parts: Parts, engines: Any) -> None:
    engine = engines(parts, num_blocks=4, block_size=16)
    cases = {
        "large": (prompt_of(40), {"max_tokens": 26}, "needs more than the 4 blocks of 16 tokens"),
        "empty": ([], {}, "the prompt has no tokens"),
        "alien": ([1, 5000], {}, "prompt_token_ids[1]=5000 is outside the model's vocabulary of 288 ids"),
        "bias": ([1], {"logit_bias": {999: 1.0}}, "logit_bias has id 999"),
    }
    for name, (prompt, params, _) in cases.items():
        engine.add_request(Request(name, prompt, SamplingParams(**params)))
    outputs = {output.request_id: output for output in engine.step()}  # one call, no network needed
    for name, (_, _, message) in cases.items():
        error = outputs[name].error
        assert error is not None and message in error
        assert outputs[name].outputs[0].finish_reason == "error" and outputs[name].finished
    assert not engine.has_unfinished and engine.stats.steps == 0


def test_without_max_tokens_the_cache_is_the_limit(parts: Parts, engines: Any) -> None:
    """4 blocks of 16 hold 64 tokens; one more is generated and never stored."""
    engine = engines(parts, num_blocks=4, block_size=16)
    engine.add_request(Request("long", prompt_of(10), SamplingParams(**GREEDY)))
    output = drain(engine)["long"].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (55, "length")
    assert output.token_ids == expected_tokens(prompt_of(10), 55)


def test_c14_nan_ends_its_request_and_no_other(parts: Parts, engines: Any) -> None:
    engine = engines(parts)
    prompts = {"good": prompt_of(20), "bad": [*prompt_of(10), NAN_TOKEN], "also": prompt_of(5)}
    for name, prompt in prompts.items():
        engine.add_request(Request(name, prompt, SamplingParams(max_tokens=10, **GREEDY)))
    outputs = drain(engine)
    bad = outputs["bad"]
    assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].token_ids == [] and bad.outputs[0].text == ""
    assert bad.error is not None and "position 11 hold NaN or infinity" in bad.error
    for name in ("good", "also"):
        assert outputs[name].error is None
        assert outputs[name].outputs[0].token_ids == expected_tokens(prompts[name], 10)


@pytest.mark.parametrize("n", [1, 2])
def test_c14_what_a_nan_request_wrote_serves_nobody_else(parts: Parts, engines: Any, n: int) -> None:
    """Its blocks are full and known before the logits show NaN; a healthy one that shares some of them is unharmed."""
    engine, prefix = engines(parts, block_size=4), prompt_of(12)
    healthy, bad = [*prefix, 1, 2], [*prefix, *prompt_of(8, seed=1), NAN_TOKEN, *prompt_of(7, seed=2)]
    engine.add_request(Request("long", healthy, SamplingParams(max_tokens=30, **GREEDY)))
    engine.step()
    engine.add_request(Request("bad", bad, SamplingParams(max_tokens=5, n=n, **GREEDY)))
    for _ in range(2):  # the first is a step that was on its way already
        engine.step()
    assert engine.stats.failed_requests == 1 and len(engine.scheduler.running) == 1
    probe = engine.scheduler  # what a request of the same beginnings would find now
    for tokens in (bad, healthy):
        sequence = Sequence(Request("probe", tokens), 0, tokens, 1, engine.cache.new_table())
        assert engine.cache.count(sequence.known_keys(probe.cache.root, len(tokens) // 4)) == (0, 0)
    assert drain(engine)["long"].outputs[0].token_ids == expected_tokens(healthy, 30)
    assert engine.cache.allocator.num_used == 0
    assert answer(engine, [healthy], SamplingParams(max_tokens=9, **GREEDY)) == [expected_tokens(healthy, 9)]


def test_c14_nan_in_a_prompt_row_alone_ends_the_request_that_asked_for_it(folder: Path, engines: Any) -> None:
    """No token's row is touched, so only prompt_logprobs would carry the NaN, into a record that cannot hold it."""

    class NanAt(FakeNetwork):
        def forward(self, step: StepInput, kv_caches: Any) -> Tensor:
            logits_BV = super().forward(step, kv_caches)
            logits_BV[step.positions_T[step.logits_rows_B] == 3] = torch.nan
            return logits_BV

    engine = engines(make_parts(folder, NanAt()))
    for name, top in (("plain", None), ("asked", 0)):
        params = SamplingParams(max_tokens=4, prompt_logprobs=top, **GREEDY)
        engine.add_request(Request(name, prompt_of(9), params))
    outputs = drain(engine)
    assert outputs["plain"].outputs[0].token_ids == expected_tokens(prompt_of(9), 4)
    error = outputs["asked"].error
    assert not outputs["asked"].rejected, "it ran, and failed on the way"
    assert error is not None and "a prompt position hold NaN" in error and outputs["asked"].outputs[0].token_ids == []


def test_samples_share_the_prompt_and_differ_by_seed(parts: Parts, engines: Any) -> None:
    engine, prompt = engines(parts, block_size=8), prompt_of(33)
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    engine.add_request(Request("many", prompt, params))
    output = drain(engine)["many"]
    assert [each.index for each in output.outputs] == [0, 1, 2]
    tokens = [each.token_ids for each in output.outputs]
    assert len({tuple(each) for each in tokens}) == 3
    assert engine.stats.computed_prompt_tokens == 33 + 2 * 1 and engine.stats.cached_tokens == 64
    alone = engines(parts, block_size=8, prefix_caching=False)
    alone.add_request(Request("one", prompt, SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)))
    assert drain(alone)["one"].outputs[0].token_ids == tokens[0], "the first sample is the one of n=1"


def test_eos_stop_ids_and_stop_strings_end_a_text(parts: Parts, engines: Any) -> None:
    assert parts.tokenizer is not None
    engine, prompt = engines(parts), prompt_of(12, seed=4)
    free = expected_tokens(prompt, 30)
    text = parts.tokenizer.decode(free, skip_special_tokens=True)
    stop = text[6:9]
    asked = {
        "id": {"stop_token_ids": [free[5]]},
        "string": {"stop": stop},
        "included": {"stop": [stop], "include_stop_str_in_output": True},
        "late": {"stop_token_ids": [free[5]], "min_tokens": 30},
    }
    for name, params in asked.items():
        engine.add_request(Request(name, prompt, SamplingParams(**({"max_tokens": 30} | GREEDY | params))))
    outputs = {name: output.outputs[0] for name, output in drain(engine).items()}
    first = free.index(free[5])
    assert (outputs["id"].token_ids, outputs["id"].stop_reason) == (free[: first + 1], free[5])
    assert outputs["id"].finish_reason == "stop"
    assert outputs["string"].text == text[: text.index(stop)] and outputs["string"].stop_reason == stop
    assert outputs["included"].text == text[: text.index(stop) + 3]
    assert outputs["late"].finish_reason == "length" and free[5] not in outputs["late"].token_ids
    assert len(outputs["late"].token_ids) == 30


def test_eos_ends_unless_ignored(folder: Path, engines: Any) -> None:
    """The union of ids counts: the tokenizer's own eos is the only one here."""
    parts = make_parts(folder)
    (eos,) = parts.eos_ids
    engine = engines(parts)
    params = {"temperature": 0.0, "max_tokens": 6}
    engine.add_request(Request("plain", prompt_of(5), SamplingParams(logit_bias={eos: 100.0}, **params)))
    engine.add_request(Request("on", prompt_of(5), SamplingParams(logit_bias={eos: 100.0}, ignore_eos=True, **params)))
    outputs = {name: output.outputs[0] for name, output in drain(engine).items()}
    assert (outputs["plain"].token_ids, outputs["plain"].finish_reason, outputs["plain"].text) == ([eos], "stop", "")
    assert outputs["plain"].stop_reason is None
    assert outputs["on"].token_ids == [eos] * 6 and outputs["on"].finish_reason == "length"


def test_streamed_outputs_grow_to_the_answer(parts: Parts, engines: Any) -> None:
    engine = engines(parts)
    engine.add_request(Request("s", prompt_of(9), SamplingParams(max_tokens=8, **GREEDY)), stream=True)
    texts: list[str] = []
    sizes: list[int] = []
    while engine.has_unfinished:
        for output in engine.step():
            texts.append(output.outputs[0].text)
            sizes.append(len(output.outputs[0].token_ids))
    assert sizes == list(range(1, 9))
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))


def test_a_fault_of_one_text_ends_that_request(parts: Parts, engines: Any) -> None:
    engine = engines(parts)
    for name in ("good", "bad"):
        engine.add_request(
            Request(name, prompt_of(9), SamplingParams(max_tokens=8, n=2 if name == "bad" else 1, **GREEDY))
        )
    stream = engine._answers._open["bad"].samples[1].stream
    assert stream is not None
    stream.push = lambda token_id: 1 // 0  # pyright: ignore
    outputs = drain(engine)
    assert outputs["bad"].error == "ZeroDivisionError: integer division or modulo by zero"
    assert {each.finish_reason for each in outputs["bad"].outputs} == {"error"}
    assert outputs["good"].outputs[0].token_ids == expected_tokens(prompt_of(9), 8)


def test_a_failed_step_names_stage_and_requests(folder: Path, engines: Any) -> None:
    def fail(step: object) -> None:
        raise RuntimeError("device-side assert")

    engine = engines(make_parts(folder, FakeNetwork(before_forward=fail)))
    engine.add_request(Request("one", [1, 2], SamplingParams()))
    engine.add_request(Request("two", [3], SamplingParams()))
    message = r"stage 'forward' failed for requests one, two: RuntimeError: device-side assert"
    with pytest.raises(StepError, match=message) as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(StepError, match=message):  # the engine is of no further use, and says the same
        engine.add_request(Request("three", [3], SamplingParams()))
    with pytest.raises(StepError, match=message):
        engine.step()


def test_duplicate_ids_are_refused(parts: Parts, engines: Any) -> None:
    engine = engines(parts)
    engine.add_request(Request("same", [1], SamplingParams()))
    with pytest.raises(ValueError, match="request_id='same' is already being answered"):
        engine.add_request(Request("same", [1], SamplingParams()))


def test_abort_answers_with_what_was_there(parts: Parts, engines: Any) -> None:
    engine = engines(parts)
    engine.add_request(Request("a", prompt_of(9), SamplingParams(max_tokens=50, **GREEDY)))
    for _ in range(4):
        engine.step()
    assert engine.abort("a") and not engine.abort("a") and not engine.abort("unknown")
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == expected_tokens(prompt_of(9), 4) and output.outputs[0].text
    assert not engine.has_unfinished
    engine.scheduler.check_idle()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_c52_two_thousand_requests_with_every_ending(parts: Parts, engines: Any, prefix_caching: bool) -> None:
    """64 blocks; normal ends, stop strings, NaN in mid-decode, aborts while waiting, running and preempted."""
    rng = random.Random(7)
    engine = engines(
        parts, block_size=4, num_blocks=64, prefix_caching=prefix_caching, max_num_seqs=24, prefill_chunk=6
    )
    prompts = [prompt_of(16, seed=seed) for seed in range(12)]
    endings: dict[str, int] = {}
    aborted_states: set[str] = set()
    for wave in range(20):
        for number in range(100):
            kind = rng.randrange(5)
            prompt = prompts[rng.randrange(12)][: rng.randrange(1, 16)]
            params: dict[str, Any] = {"max_tokens": rng.randrange(2, 20), "temperature": 0.0}
            if kind == 0:
                params["stop"] = [chr(rng.randrange(97, 123))]
            elif kind == 1 and rng.random() < 0.3:  # NaN in mid-decode: the bias makes the token, the next row meets it
                params["logit_bias"] = {NAN_TOKEN: 100.0}
            elif kind == 2:
                prompt = [*prompt, NAN_TOKEN] if rng.random() < 0.3 else prompt
            elif kind == 3:
                params["n"] = 2
            engine.add_request(Request(f"{wave}-{number}", prompt, SamplingParams(**params)))
        done: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            for output in engine.step():
                assert output.request_id not in done
                done[output.request_id] = output
                reason = str(output.outputs[0].finish_reason)
                endings[reason] = endings.get(reason, 0) + 1
            for state, queue in (("waiting", list(engine.scheduler.waiting)), ("running", engine.scheduler.running)):
                if queue and rng.random() < 0.05:
                    sequence = rng.choice(queue)
                    aborted_states.add("preempted" if state == "waiting" and sequence.output_ids else state)
                    assert engine.abort(sequence.request.request_id)
            preempted = [each for each in engine.scheduler.waiting if each.output_ids]
            if preempted and rng.random() < 0.2:
                aborted_states.add("preempted")
                engine.abort(preempted[0].request.request_id)
        assert len(done) == 100
        engine.scheduler.check_idle()
        allocator = engine.cache.allocator
        assert allocator.num_used == 0 and allocator.num_free + allocator.num_kept == 64
        if not prefix_caching:
            assert allocator.num_free == 64
    assert engine.stats.requests == 2000 and engine.stats.preemptions > 0
    assert endings.keys() == {"stop", "length", "error", "abort"} and min(endings.values()) >= 20, endings
    assert aborted_states == {"waiting", "running", "preempted"}
