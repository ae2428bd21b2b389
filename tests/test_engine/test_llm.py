"""The Python API: forms of prompts, order, streams, aborts, closing; over a network whose text is known."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moe
from configs.schema import CacheConfig, Config, EngineConfig, JobConfig, SamplingConfig
from moe import LLM, CompletionOutput, RequestOutput, SamplingParams
from moe.engine.engine import StepError
from moe.model.step_input import StepInput
from tests.test_engine.fake_network import FakeNetwork, expected_tokens, make_parts

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def make(folder: Path | None, network: FakeNetwork | None = None, **options: Any) -> LLM:
    return LLM("fake", parts=make_parts(folder, network), **({"num_blocks": 128} | options))


@pytest.fixture()
def llm(folder: Path) -> Iterator[LLM]:
    with make(folder) as made:
        yield made
        made.engine.scheduler.check_idle()


def test_the_public_face() -> None:
    assert moe.__version__.count(".") == 2
    assert {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput"} <= set(moe.__all__)
    assert (moe.RequestOutput, moe.CompletionOutput) == (RequestOutput, CompletionOutput)
    assert (Path(moe.__file__).parent / "py.typed").is_file()


def test_prompts_in_every_form_give_the_same_answer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = "In the beginning"
    ids = tokenizer.encode_prompt(text)
    forms: list[Any] = [
        text,
        ids,
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt": text, "prompt_token_ids": ids},
    ]
    outputs = llm.generate(forms, PARAMS)
    wanted = expected_tokens(ids, 6)
    assert [output.outputs[0].token_ids for output in outputs] == [wanted] * 5
    assert all(output.outputs[0].text == tokenizer.decode(wanted) for output in outputs)
    assert [output.prompt for output in outputs] == [text, None, text, None, text]
    for form in (text, ids, tuple(ids), {"prompt_token_ids": ids}):  # one prompt, not in a list
        (output,) = llm.generate(form, PARAMS)
        assert output.outputs[0].token_ids == wanted and output.finished and output.prompt_token_ids == ids
    assert llm.generate([], PARAMS) == []


def test_results_keep_the_order_of_the_prompts(llm: LLM) -> None:
    """The first ends last, and each has params of its own."""
    prompts = [[1, 2], [3], [4, 5, 6]]
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (20, 1, 5)]
    outputs = llm.generate(prompts, params, progress=True)
    assert [output.outputs[0].token_ids for output in outputs] == [
        expected_tokens(prompt, each.max_tokens or 0) for prompt, each in zip(prompts, params, strict=True)
    ]


def test_wrong_arguments_raise_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="params has 2 entries for 1 prompts"):
        llm.generate(["a"], [PARAMS, PARAMS])
    with pytest.raises(ValueError, match=r"prompts\[1\]=3\.5 must be a text"):
        llm.generate(["a", 3.5], PARAMS)  # pyright: ignore
    with pytest.raises(ValueError, match=r"prompts\[0\] has keys \['text'\]"):
        llm.generate({"text": "a"}, PARAMS)
    assert llm.engine.stats.requests == 0 and llm.engine.stats.steps == 0


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (5, PARAMS, "prompts=5 must be a text"),
        (None, PARAMS, "prompts=None must be a text"),
        ({"prompt_token_ids": "5 6"}, PARAMS, r"prompts\[0\] has prompt_token_ids='5 6', a text; give it as prompt"),
        ("a", {"temperature": 0}, r"params\[0\]=\{'temperature': 0\} must be SamplingParams"),
        (["a", "b"], [PARAMS, 3], r"params\[1\]=3 must be SamplingParams"),
    ],
)
def test_arguments_of_another_kind_are_named(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)


def test_chats_and_streams_of_another_kind_are_named(llm: LLM) -> None:
    calls: tuple[tuple[Any, str], ...] = (
        (lambda: llm.chat(5, PARAMS), "messages=5 must be a conversation"),  # pyright: ignore
        (lambda: llm.chat("hi"), "messages='hi' must be a conversation"),  # pyright: ignore
        (lambda: llm.chat({"role": "user"}), "messages={'role': 'user'} must be a conversation"),  # pyright: ignore
        (lambda: llm.generate(b"hi"), "prompts=b'hi' must be a text"),  # pyright: ignore
        (lambda: llm.stream("a", {"n": 2}), r"params\[0\]=\{'n': 2\} must be SamplingParams"),  # pyright: ignore
    )
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_the_api_checks_and_closes_its_config(folder: Path) -> None:
    """The checks of the command line, before anything is loaded: no parts are given, and no model of that name is."""
    for options, message in (
        ({"max_num_seqs": 0}, r"engine\.max_num_seqs=0 is out of range"),
        ({"prefill_chunk": 17000}, r"engine\.prefill_chunk=17000 exceeds engine\.max_batched_tokens=16384"),
        ({"block_size": 24}, r"cache\.block_size=24 is no power of two"),
        ({"dtype": "fp16"}, "dtype='fp16' is unknown"),
        ({"device": "tpu"}, r"engine\.device='tpu' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM("no such model", **options)  # pyright: ignore[reportArgumentType]
    with make(folder) as llm, pytest.raises(AttributeError, match="is frozen"):
        llm.config.engine.max_num_seqs = 3


def test_a_config_stands_alone_and_holds_nothing_unread(folder: Path) -> None:
    parts = make_parts(folder)
    with pytest.raises(ValueError, match=r"but model, engine\.max_num_seqs, cache\.num_blocks came beside it"):
        LLM("fake", config=Config(), num_blocks=8, max_num_seqs=3, parts=parts)
    unread = Config(sampling=SamplingConfig(temperature=0.0, seed=5), job=JobConfig(limit=3), output="x")
    with pytest.raises(ValueError, match=r"sets output, sampling\.temperature, job\.limit, which LLM would ignore"):
        LLM(config=unread, parts=parts)
    config = Config(model="fake", cache=CacheConfig(num_blocks=8), sampling=SamplingConfig(seed=5))
    with LLM(config=config, parts=parts) as llm:
        assert llm.memory_plan.num_blocks == 8


def test_a_prompt_that_cannot_run_is_an_error_in_its_place(llm: LLM) -> None:
    good, bad, last = llm.generate([[1, 2], [1] * 600, [3]], PARAMS)
    assert bad.error is not None and "600 tokens, but engine.max_model_len=512" in bad.error
    assert bad.outputs[0].finish_reason == "error"
    assert good.error is None and last.outputs[0].token_ids == expected_tokens([3], 6)


def test_chats_go_through_the_template_and_take_its_defaults(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "generation_defaults", {"temperature": 0.0, "max_tokens": 3})
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.render_chat(messages)
    (output,) = llm.chat(messages, SamplingParams(ignore_eos=True))
    assert output.prompt_token_ids == ids and output.outputs[0].token_ids == expected_tokens(ids, 3)
    two = llm.chat([messages, messages], SamplingParams(ignore_eos=True, max_tokens=4))
    assert [each.outputs[0].token_ids for each in two] == [expected_tokens(ids, 4)] * 2
    bare = tokenizer.render_chat(messages, add_generation_prompt=False)
    (output,) = llm.chat(messages, SamplingParams(ignore_eos=True), add_generation_prompt=False)
    assert output.prompt_token_ids == bare != ids


def test_a_stream_is_cumulative_and_ends_finished(llm: LLM) -> None:
    outputs = list(llm.stream([1, 2, 3], PARAMS))
    wanted = expected_tokens([1, 2, 3], 6)
    assert [output.outputs[0].token_ids for output in outputs] == [wanted[:count] for count in range(1, 7)]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    texts = [output.outputs[0].text for output in outputs]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == llm.get_tokenizer().decode(wanted)


def test_streams_read_in_turns_and_a_batch_between_them(llm: LLM) -> None:
    first, second = llm.stream([1], PARAMS), llm.stream([2], PARAMS)
    last: dict[int, RequestOutput] = {}
    for turn, (one, other) in enumerate(zip(first, second, strict=True)):
        last = {1: one, 2: other}
        if turn == 2:
            assert llm.generate([[3]], PARAMS)[0].outputs[0].token_ids == expected_tokens([3], 6)
    for token, output in last.items():
        assert output.outputs[0].token_ids == expected_tokens([token], 6)


def test_leaving_a_stream_early_gives_its_blocks_back(llm: LLM) -> None:
    for output in llm.stream([1] * 40, PARAMS):
        assert len(output.outputs[0].token_ids) == 1
        break
    assert llm.engine.cache.allocator.num_used == 0 and llm.engine.num_unfinished == 0


def test_an_id_that_a_stream_chose_is_not_given_to_another_call(llm: LLM) -> None:
    stream = llm.stream([1, 2], PARAMS, request_id="request-1")
    next(stream)
    outputs = llm.generate([[3], [4]], PARAMS)
    assert [output.request_id for output in outputs] == ["request-0", "request-2"]
    assert list(stream)[-1].finished


def test_abort_from_the_loop_and_from_another_thread(llm: LLM) -> None:
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    outputs = []
    for output in llm.stream([1], long, request_id="mine"):
        outputs.append(output)
        if len(outputs) == 3:
            assert llm.abort("mine")
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].outputs[0].token_ids == expected_tokens([1], 3)
    assert not llm.abort("mine") and not llm.abort("never was")

    started = threading.Event()

    def stop() -> None:
        started.wait(10)
        assert llm.abort("other")

    thread = threading.Thread(target=stop)
    thread.start()
    for output in llm.stream([2], long, request_id="other"):
        started.set()
        time.sleep(0.005)  # the lock is free between two outputs
        last = output
    thread.join()
    assert last.outputs[0].finish_reason == "abort"
    with pytest.raises(ValueError, match="request_id='twice' is already being answered"):
        held = llm.stream([1], long, request_id="twice")
        next(held)
        next(llm.stream([1], long, request_id="twice"))
    held.close()


def test_threads_share_one_engine(llm: LLM) -> None:
    answers: dict[int, list[int]] = {}

    def ask(token: int) -> None:
        answers[token] = llm.generate([[token, token]], PARAMS)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(token,)) for token in range(20, 28)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {token: expected_tokens([token, token], 6) for token in range(20, 28)}


def test_seeds_make_draws_repeatable(folder: Path) -> None:
    """An explicit seed gives the same text always; without one, the LLM's seed and the request's number decide."""
    drawn = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    seeded = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, seed=11)
    runs = []
    for seed in (0, 0, 1):
        with make(folder, seed=seed) as llm:
            outputs = llm.generate([[1], [1]], drawn) + llm.generate([[1], [1]], seeded)
            runs.append([output.outputs[0].token_ids for output in outputs])
    assert runs[0] == runs[1] and runs[0][:2] != runs[2][:2]
    assert runs[0][0] != runs[0][1], "two requests draw independently"
    assert runs[0][2] == runs[0][3] == runs[2][2]


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = make(folder)
    watchdog = llm.engine.watchdog
    open_stream = llm.stream([1], PARAMS)
    next(open_stream)
    llm.close()
    llm.close()
    assert not watchdog.alive
    calls: list[Any] = [
        lambda: llm.generate(["a"]),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.stream("a"),
        lambda: llm.abort("a"),
        llm.get_tokenizer,
        llm.stats,
        lambda: next(open_stream),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()


def test_an_llm_that_is_dropped_leaves_no_thread(folder: Path) -> None:
    """As in a notebook, where a second one takes the name of the first."""
    llm = make(folder)
    llm.generate([1], PARAMS)
    thread = llm.engine.watchdog._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_modes_of_the_calling_thread_change_nothing() -> None:
    """Made in inference mode, asked outside of it; asked under autocast, whose keys a later call would find cached."""
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1)
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 16, "max_model_len": 64}
    with LLM("demo", **options) as plain:
        expected = plain.generate(["In the beginning"], params)[0].outputs
    with torch.inference_mode():
        llm = LLM("demo", **options)
    with llm:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert llm.generate(["In the beginning"], params)[0].outputs == expected
            assert torch.is_autocast_enabled("cpu")
        assert llm.generate(["In the beginning"], params)[0].outputs == expected
    with torch.autocast("cpu", dtype=torch.bfloat16), LLM("demo", **options) as llm:
        assert llm.generate(["In the beginning"], params)[0].outputs == expected


def test_the_default_dtype_of_the_process_changes_nothing() -> None:
    """As numerical code sets it: what an engine makes says its dtype."""
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1)
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 16, "max_model_len": 64}
    for model in ("demo", "demo-deepseek"):
        with LLM(model, **options) as plain:
            expected = plain.generate(["In the beginning"], params)[0].outputs
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            try:
                with LLM(model, **options) as llm:
                    assert llm.generate(["In the beginning"], params)[0].outputs == expected, dtype
            finally:
                torch.set_default_dtype(torch.float32)


def test_a_failed_step_reaches_the_caller(folder: Path) -> None:
    def fail(step: StepInput) -> None:
        raise RuntimeError("CUDA error")

    message = r"stage 'forward' failed for requests request-0: RuntimeError: CUDA"
    with make(folder, FakeNetwork(before_forward=fail)) as llm, pytest.raises(StepError, match=message):
        llm.generate([[1]], PARAMS)


def test_a_hanging_step_names_its_request_and_stage(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(cache=CacheConfig(num_blocks=8), engine=EngineConfig(step_timeout_s=0.15))
    network = FakeNetwork(before_forward=lambda step: time.sleep(0.5 if step.num_decode == 0 else 0.0))
    with LLM(config=config, parts=make_parts(folder, network)) as llm, caplog.at_level(logging.ERROR):
        llm.generate([[1]], PARAMS)
        time.sleep(0.3)  # idle: no alarm
        assert llm.engine.watchdog.num_hangs == 1
    assert "stage 'forward'" in caplog.text and "requests: request-0" in caplog.text


def test_without_a_tokenizer_ids_go_in_and_come_out() -> None:
    with make(None) as llm:
        (output,) = llm.generate([[1, 2]], PARAMS)
        assert output.outputs[0].token_ids == expected_tokens([1, 2], 6) and output.outputs[0].text == ""
        with pytest.raises(ValueError, match="model='fake' has no tokenizer"):
            llm.generate(["text"], PARAMS)
        (output,) = llm.generate([[1, 2]], SamplingParams(stop=["x"]))
        assert output.error is not None and "this model has no tokenizer" in output.error


def test_the_counters_and_the_plan_are_there(llm: LLM) -> None:
    llm.generate([[1] * 40, [1] * 40], PARAMS)
    stats = llm.stats()
    report = stats.as_dict()
    assert report["output_tokens"] == 12 and report["prompt_tokens"] == 80 and report["requests"] == 2
    assert 0 < stats.kv_peak_use < 1 and stats.kv_blocks_total == 128 and len(stats.ttft_seconds) == 2
    assert stats.ttft_median is not None and stats.tokens_per_second > 0
    assert "128 KV blocks of 16 tokens (by cache.num_blocks)" in llm.memory_plan.table()
    stats.reset()
    assert stats.output_tokens == 0 and stats.kv_blocks_total == 128


@pytest.mark.gpu
def test_the_demo_fits_its_plan_on_a_gpu() -> None:
    """The cache is sized from what is left after the largest steps; a full batch then runs within it."""
    free, total = torch.cuda.mem_get_info()
    if free < 0.6 * total:
        pytest.skip("other processes hold the GPU's memory")
    with LLM(model="demo", device="cuda", memory_fraction=0.5, max_num_seqs=64) as llm:
        plan = llm.memory_plan
        assert plan.total_bytes is not None and plan.workspace_bytes > 0
        outputs = llm.generate(["In the beginning"] * 64, SamplingParams(max_tokens=32, seed=1))
        assert all(output.error is None and output.outputs[0].text for output in outputs)
        used = torch.cuda.max_memory_allocated()
    assert used <= plan.total_bytes * 0.5
