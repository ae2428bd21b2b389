"""A step is launched while the one before it runs: in which order, and that nobody can tell from the answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.engine.engine import Engine, StepError
from moe.engine.in_flight import InFlight
from moe.engine.request import Request, RequestOutput, SamplingParams
from moe.model.step_input import StepInput
from tests.test_engine.fake_network import FakeNetwork, expected_tokens, make_parts
from tests.test_engine.test_engine_random import ENGINES, asked, run

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does, in order: launches and reads of ids, numbered as the steps are."""
    log: list[str] = []
    numbers: dict[int, int] = {}
    launch, token_ids = engine.runner.launch, InFlight.token_ids

    def launched(*args: Any) -> InFlight:
        step = launch(*args)
        numbers[id(step)] = len(numbers) + 1
        log.append(f"launch {numbers[id(step)]}")
        kept.append(step)
        return step

    def read(step: InFlight) -> list[int]:
        log.append(f"read {numbers[id(step)]}")
        return token_ids(step)

    kept: list[InFlight] = []  # ids of objects are theirs alone only while they live
    monkeypatch.setattr(engine.runner, "launch", launched)
    monkeypatch.setattr(InFlight, "token_ids", read)
    return log


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    engine.scheduler.check_idle()
    return outputs


def test_the_next_step_is_launched_before_ids_are_read(
    folder: Path, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(make_parts(folder))
    log = watch(engine, monkeypatch)
    engine.add_request(Request("a", [1, 2, 3], SamplingParams(max_tokens=4, **GREEDY)))
    assert finish(engine)["a"].outputs[0].token_ids == expected_tokens([1, 2, 3], 4)
    # The fourth token ends the text by count: no row too many is launched behind it.
    assert log == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3", "read 4"]


def test_switched_off_every_step_is_read_first(folder: Path, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(make_parts(folder), overlap=False)
    log = watch(engine, monkeypatch)
    engine.add_request(Request("a", [1, 2, 3], SamplingParams(max_tokens=3, **GREEDY)))
    finish(engine)
    assert log == ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        ({"repetition_penalty": 1.2}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"presence_penalty": 0.5}, True),
        ({"min_tokens": 3}, False),  # a matter of their number
        ({"logit_bias": {5: 2.0}}, False),
        ({"top_k": 5, "temperature": 1.0}, False),
        ({"logprobs": 2}, False),
        ({"prompt_logprobs": 2}, False),
        ({"stop": ["zzz"]}, False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_only_penalties_hold_a_step_back(
    folder: Path, engines: Any, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], waits: bool
) -> None:
    engine = engines(make_parts(folder))
    log = watch(engine, monkeypatch)
    wanted: dict[str, Any] = {"max_tokens": 3, **GREEDY, **params}
    engine.add_request(Request("a", [1, 2, 3], SamplingParams(**wanted)))
    finish(engine)
    assert (log.index("read 1") < log.index("launch 2")) == waits
    assert (log.index("read 2") < log.index("launch 3")) == waits


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_row_too_many_changes_nothing(folder: Path, engines: Any, prefix_caching: bool) -> None:
    """A text ends by its third token's id while the row behind it runs: in a new block, whose content nobody finds."""
    engine = engines(make_parts(folder), block_size=4, num_blocks=8, prefix_caching=prefix_caching)
    prompt = [11, 12, 13, 14, 15, 16]
    free = expected_tokens(prompt, 4)
    params = SamplingParams(max_tokens=20, stop_token_ids=[free[2]], **GREEDY)
    for _ in range(3):
        engine.add_request(Request("a", prompt, params))
        engine.add_request(Request("b", [9], SamplingParams(max_tokens=9, **GREEDY)))
        outputs = finish(engine)
        assert outputs["a"].outputs[0].token_ids == free[:3] and outputs["a"].outputs[0].stop_reason == free[2]
        assert outputs["b"].outputs[0].token_ids == expected_tokens([9], 9)
    allocator = engine.cache.allocator
    assert allocator.num_used == 0 and allocator.num_free + allocator.num_kept == 8
    # Of a: the prompt's own block, and the one that two generated tokens fill. The third is never written for good.
    assert allocator.num_kept == (2 + 2 if prefix_caching else 0)
    assert engine.stats.output_tokens == 3 * 12 and engine.stats.requests == 6


def test_an_id_may_come_again_while_a_row_too_many_runs(folder: Path, engines: Any) -> None:
    engine = engines(make_parts(folder))
    (eos,) = engine.parts.eos_ids
    ends = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={eos: 100.0})
    engine.add_request(Request("same", [1, 2], ends))
    (first,) = engine.step()
    assert first.outputs[0].token_ids == [eos] and not engine.has_unfinished
    engine.add_request(Request("same", [3, 4], SamplingParams(max_tokens=3, **GREEDY)))
    assert finish(engine)["same"].outputs[0].token_ids == expected_tokens([3, 4], 3)


def test_what_came_before_a_failed_launch_is_answered(folder: Path, engines: Any) -> None:
    """The third launch fails while the second step, which ends a request, is in flight."""
    calls: list[int] = []

    def fail(step: StepInput) -> None:
        calls.append(step.num_decode)
        if len(calls) == 3:
            raise RuntimeError("launch failed")

    engine = engines(make_parts(folder, FakeNetwork(before_forward=fail)))
    engine.add_request(Request("short", [1], SamplingParams(max_tokens=2, **GREEDY)))
    engine.add_request(Request("long", [2], SamplingParams(max_tokens=9, **GREEDY)))
    assert engine.step() == []
    (short,) = engine.step()
    assert short.outputs[0].token_ids == expected_tokens([1], 2)
    with pytest.raises(StepError, match="stage 'forward' failed for requests long: RuntimeError: launch failed"):
        engine.step()


def test_a_fault_that_shows_when_waiting_names_the_step_that_ran(
    folder: Path, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(make_parts(folder))
    engine.add_request(Request("early", [1], SamplingParams(max_tokens=1, **GREEDY)))

    def fault(step: InFlight) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(InFlight, "wait", fault)
    engine.add_request(Request("both", [2], SamplingParams(max_tokens=9, **GREEDY)))
    with pytest.raises(StepError, match="stage 'wait' failed for requests both, early: RuntimeError: an illegal"):
        engine.step()


def test_nan_in_one_row_while_the_next_runs(folder: Path, engines: Any) -> None:
    """The row behind it takes id -1 for its token, on the device."""
    fed: list[int] = []

    class NanAt(FakeNetwork):
        def forward(self, step: StepInput, kv_caches: Any) -> Tensor:
            fed.extend(step.token_ids_T[step.positions_T == 6].tolist())
            logits_BV = super().forward(step, kv_caches)
            logits_BV[step.positions_T[step.logits_rows_B] == 5] = torch.nan
            return logits_BV

    engine = engines(make_parts(folder, NanAt()))
    engine.add_request(Request("bad", [1, 2, 3], SamplingParams(max_tokens=9, **GREEDY)))
    engine.add_request(Request("good", [4], SamplingParams(max_tokens=5, **GREEDY)))
    outputs = finish(engine)
    assert outputs["bad"].outputs[0].token_ids == expected_tokens([1, 2, 3], 3) and fed == [0]
    assert outputs["bad"].error == "the model's logits for position 6 hold NaN or infinity; no token was drawn."
    assert outputs["good"].outputs[0].token_ids == expected_tokens([4], 5)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(requests=st.lists(asked(), min_size=2, max_size=8), keys=ENGINES)
def test_overlapped_answers_are_those_of_one_step_after_another(
    folder: Path, requests: list[Any], keys: dict[str, Any]
) -> None:
    """Ids, texts, reasons, log-probabilities and errors. Aborts come at a step, so they are left out here."""
    requests = [(arrival, prompt, params, None) for arrival, prompt, params, _ in requests]
    one, one_stats = run(folder, requests, keys | {"overlap": False})
    other, other_stats = run(folder, requests, keys | {"overlap": True})
    assert one.keys() == other.keys()
    for name in one:
        got, want = (replace(each[name], num_cached_tokens=0) for each in (other, one))
        if want.error is None:
            assert got == want
        else:  # the record of a failed one may hold NaN; of several samples, whichever fails first is named
            assert got.error == want.error or (got.error and len(want.outputs) > 1)
            assert len(want.outputs) > 1 or got.outputs[0].token_ids == want.outputs[0].token_ids
    for name in ("requests", "failed_requests", "prompt_tokens"):
        assert getattr(one_stats, name) == getattr(other_stats, name), name
    if not any(output.error for output in one.values()):
        assert one_stats.output_tokens == other_stats.output_tokens
