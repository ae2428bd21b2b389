"""Workloads are the published ones, and the recorder says what the steps were, by an engine small enough to follow."""

from __future__ import annotations

import pytest

from launch import bench_engine
from launch.bench_engine import EngineBench, Prompt, recorded_steps, run_prompts
from launch.command_line import compose_config, parse
from launch.roofline import Ceilings
from moe.engine.engine import Engine
from moe.engine.request import RequestOutput


@pytest.fixture(scope="module")
def engine():
    words = ["load_format=dummy", "cache.prefix_caching=false", "engine.device=cpu", "cache.num_blocks=64"]
    engine = Engine(compose_config(parse([*words, "model=demo", "engine.max_model_len=128"])))
    yield engine
    engine.close()


def test_w1_has_the_published_totals() -> None:
    prompts = bench_engine.throughput_prompts(1000)
    assert len(prompts) == 512
    assert sum(len(prompt.token_ids) for prompt in prompts) == 288_251
    assert sum(prompt.num_outputs for prompt in prompts) == 136_648
    assert prompts[0].token_ids == bench_engine.throughput_prompts(1000)[0].token_ids


def test_the_recorder_sees_each_step(engine: Engine) -> None:
    model = engine.parts.model
    steps = recorded_steps(engine, [Prompt([3, 4, 5], 3), Prompt([6, 7, 8, 9, 10], 2)], "recorder")
    assert [step.chunks for step in steps] == [((0, 3), (0, 5)), (), ()]
    assert [step.decode_lens for step in steps] == [(), (6, 4), (5,)]
    assert [step.logits_rows for step in steps] == [2, 2, 1]
    top_k, sparse = model.moe.rule.top_k, sum(model.sparse_layers)
    assert steps[2].experts_hit == top_k * sparse  # one row
    assert top_k * sparse <= steps[1].experts_hit <= 2 * top_k * sparse
    assert "schedule" not in vars(engine.scheduler), "the recorder left its wrapper behind"


def test_outputs_are_random_ids_whatever_the_weights_say(engine: Engine) -> None:
    """Forty draws hardly repeat, and a second pass draws the same: seeds are the requests' own."""
    first, second = (_output_ids(engine, f"random-{turn}") for turn in range(2))
    assert first == second and len(first) == 40
    assert len(set(first)) > 30


def _output_ids(engine: Engine, name: str) -> list[int]:
    """Of one request: what the engine's steps hand out while the bench runs it."""
    ids: list[int] = []
    step = engine.step

    def observed() -> list[RequestOutput]:
        outputs = step()
        for output in outputs:
            ids.extend(output.outputs[0].token_ids)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", observed)
        run_prompts(engine, [Prompt([3, 4, 5], 40)], name)
    return ids


def test_figures_of_all_three(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "throughput_prompts", lambda vocab: [Prompt([1, 2, 3, 4], 3)] * 3)
    monkeypatch.setattr(bench_engine, "even_prompts", lambda vocab, n, *_: [Prompt([5, 6, 7], 3)] * n)
    baselines = {"w2": {"demo": {"2": {"vllm": 2.0, "target": 1e9}}}}
    # Rates that no CPU comes near, however little else it does: every step is over its floor.
    bench = EngineBench(engine, "demo", Ceilings(1e12, 1e12, "test"), baselines)
    throughput, *kinds = bench.throughput(None, 2)
    assert len(throughput.samples) == 2 and throughput.higher_is_better
    # Three chunks of four tokens, then two steps of three rows: three steps, nine outputs.
    assert throughput.extra["steps"] == 3 and throughput.floor is not None
    assert throughput.over_floor is not None and 0 < throughput.over_floor < 1
    assert [(each.name, each.extra["steps"], each.extra["rows"]) for each in kinds] == [
        ("prefill", 1.0, 12.0),
        ("decode, to 8 rows", 2.0, 3.0),
    ]
    # What the steps take is what the pass takes but for its beginning and its end; their floors are the pass's floor.
    assert throughput.seconds is not None and sum(each.extra["s"] for each in kinds) <= throughput.seconds * 1.001
    floors = sum(each.extra["s"] - each.extra["s over"] for each in kinds)
    assert floors == pytest.approx(9 / throughput.floor)
    assert all(each.over_floor is not None and each.over_floor > 1 for each in kinds)
    (decode,) = bench.decode([2], 1)
    assert decode.peers == {"vllm": 2.0} and decode.meets_target
    assert len(decode.samples) == 2 and decode.floor is not None and decode.value > decode.floor
    assert bench.prefill(2, 1).value > 0


def test_a_step_that_holds_part_of_a_batch_is_no_sample(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of unequal lengths stand for those that began in an earlier prefill step."""
    prompts = [Prompt([5, 6], 6), Prompt([5, 6], 3)]
    monkeypatch.setattr(bench_engine, "even_prompts", lambda *_: prompts)
    (decode,) = EngineBench(engine, "demo", Ceilings(1e9, 1e9, "test"), {}).decode([2], 1)
    assert len(decode.samples) == 2
