"""Both line forms: what is understood, what is refused and in which words, and which parameter wins."""

from __future__ import annotations

import math
from typing import Any

import pytest

from configs.schema import SamplingConfig
from moe.batch.lines import dump_line
from moe.batch.openai import openai_answer, parse_openai
from moe.batch.openai_fields import CHAT_KNOWN, COMPLETION_KNOWN, NO_EFFECT, ONLY_AT, REFUSED
from moe.batch.plain import parse_plain, plain_answer
from moe.batch.protocol import ChatOptions, LineError, LineParams, LineRequest, resolve_params
from moe.engine.request import CompletionOutput, Logprob, Request, RequestOutput, SamplingParams

HI = [{"role": "user", "content": "hi"}]


def chat_line(**body: Any) -> LineRequest:
    body = {"model": "m", "messages": HI} | body
    return parse_openai(3, {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body})


def completion_line(**body: Any) -> LineRequest:
    return parse_openai(3, {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body})


def test_plain_sources() -> None:
    assert parse_plain(1, {"id": "a", "prompt": "x"}).prompt == "x"
    assert parse_plain(1, {"id": "a", "prompt_token_ids": [1, 2]}).prompt_token_ids == [1, 2]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert parse_plain(1, {"messages": parts}).messages == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize("line_id", ["a", "1", 1, 1.5, True, ["x"], {"k": 1}, "x" * 300])
def test_ids_keep_their_type(line_id: Any) -> None:
    assert parse_plain(7, {"id": line_id, "prompt": "x"}).id == line_id
    assert type(parse_plain(7, {"id": line_id, "prompt": "x"}).id) is type(line_id)


@pytest.mark.parametrize("record", [{"prompt": "x"}, {"id": None, "prompt": "x"}])
def test_a_line_without_id_has_its_number(record: dict[str, Any]) -> None:
    assert parse_plain(7, record).id == 7


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "exactly one of prompt, messages and prompt_token_ids is needed; this line has none."),
        ({"prompt": "x", "messages": HI}, "this line has prompt and messages"),
        ({"prompt": 17}, "prompt=17 must be a text."),
        ({"prompt": True}, "prompt=true must be a text."),
        ({"prompt": "x", "temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"prompt": "x", "temperature": "hot"}, "temperature='hot' must be a number"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens=0 is out of range"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens=1.5 must be a whole number"),
        ({"prompt": "x", "stop": [""]}, "empty string"),
        ({"prompt": "x", "stop": "a", "detokenize": False}, "needs text"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens=9 exceeds max_tokens=3"),
        ({"prompt_token_ids": []}, "prompt_token_ids=[] must be a non-empty list"),
        ({"prompt_token_ids": [1, -2]}, "prompt_token_ids has -2, which is no token id"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids has true"),
        ({"messages": []}, "messages=[] must be a list of at least one message"),
        ({"messages": ["x"]}, "messages[0] must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text parts"),
        ({"messages": HI, "tools": {}}, "tools={} must be a list"),
        ({"messages": HI, "tools": ["x"]}, 'tools[0]="x" must be an object'),
        ({"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"messages": HI, "chat_template_kwargs": 3}, "chat_template_kwargs=3 must be an object"),
        ({"prompt": "x", "tools": [{}]}, "tools belongs to messages; this line has prompt."),
    ],
)
def test_plain_refusals(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(LineError) as caught:
        resolve_params(parse_plain(1, record), SamplingConfig(), {})
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_chat_options_of_both_forms() -> None:
    options = {"tools": [{"type": "function"}], "chat_template_kwargs": {"thinking": True}}
    expected = ChatOptions([{"type": "function"}], {"thinking": True}, False, True)
    plain = parse_plain(1, {"messages": HI, "continue_final_message": True, **options})
    assert plain.chat == expected
    assert chat_line(continue_final_message=True, **options).chat == expected
    assert chat_line(**options).chat.add_generation_prompt
    assert chat_line(tool_choice="none", **options).chat.tools is None


def test_openai_body_fields_become_parameters() -> None:
    line = chat_line(
        max_completion_tokens=9, temperature=0.5, top_p=0.9, n=2, stop="x", seed=4, presence_penalty=1, min_p=0.1,
        frequency_penalty=-1, logit_bias={"5": 2}, logprobs=True, top_logprobs=3, top_k=7, repetition_penalty=1.2,
        min_tokens=1, ignore_eos=True, stop_token_ids=[2], truncate_prompt_tokens=8, user="u", stream=False,
        response_format={"type": "text"}, tools=None, metadata={},
    )  # fmt: skip
    params = resolve_params(line, SamplingConfig(), {})
    assert (params.max_tokens, params.temperature, params.top_p, params.n, params.stop) == (9, 0.5, 0.9, 2, ("x",))
    assert (params.seed, params.presence_penalty, params.frequency_penalty, params.min_p) == (4, 1, -1, 0.1)
    assert (params.logit_bias, params.logprobs, params.top_k, params.repetition_penalty) == ({5: 2.0}, 3, 7, 1.2)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (1, True, (2,))
    assert params.truncate_prompt_tokens == 8
    assert completion_line(prompt="x", logprobs=2).fields["logprobs"] == 2
    assert chat_line(logprobs=True).fields["logprobs"] == 0


def test_openai_completion_prompts() -> None:
    assert completion_line(prompt="x").prompt == "x"
    assert completion_line(prompt=["x"]).prompt == "x"
    assert completion_line(prompt=[1, 2]).prompt_token_ids == [1, 2]
    assert completion_line(prompt=[[1, 2]]).prompt_token_ids == [1, 2]
    with pytest.raises(LineError, match="prompt holds 2 prompts; write one line for each"):
        completion_line(prompt=["a", "b"])
    with pytest.raises(LineError, match="prompt=null must be a non-empty list"):
        completion_line()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"stream": True}, "stream=true is not offered: a batch has no stream; leave it out."),
        ({"temprature": 1}, "unknown field 'temprature' in body; did you mean 'temperature'?"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "differ; give one of them"),
        ({"top_logprobs": 3}, "top_logprobs=3 needs logprobs=true"),
        ({"response_format": {"type": "json_object"}}, "answers cannot be constrained to a grammar or a schema"),
        ({"tool_choice": "required"}, 'tool_choice="required": a call cannot be forced'),
        ({"messages": None}, "must be a list of at least one message"),
        ({"temperature": 3, "top_p": 7}, "top_p=7 is out of range"),
        ({"model": 5}, "model=5 must be a text"),
    ],
)
def test_openai_refusals(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(LineError) as caught:
        resolve_params(chat_line(**body), SamplingConfig(), {})
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"custom_id": 5}, "custom_id=5 must be a text"),
        ({"method": "GET"}, 'method="GET" must be POST'),
        ({"url": "/v1/embeddings"}, 'url="/v1/embeddings" is not served'),
        ({"body": []}, "body=[] must be an object"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_openai_envelope_refusals(change: dict[str, Any], reason: str) -> None:
    record = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | change
    with pytest.raises(LineError) as caught:
        parse_openai(1, record)
    assert reason in str(caught.value)


CURRENT_CHAT = """
messages model modalities verbosity reasoning_effort max_completion_tokens frequency_penalty presence_penalty
web_search_options top_logprobs response_format audio store stream stop logit_bias logprobs max_tokens n
prediction seed stream_options service_tier temperature top_p tools tool_choice parallel_tool_calls user
metadata safety_identifier prompt_cache_key prompt_cache_retention function_call functions
"""
CURRENT_COMPLETION = """
model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
stream_options suffix temperature top_p user
"""
SERVER_EXTRA = """
use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids
return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt
kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget
"""
CHAT_EXTRA = """
include_reasoning add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
media_io_kwargs mm_processor_kwargs return_prompt_text
"""


def test_every_field_of_the_apis_is_known_by_name() -> None:
    """As of November 2026: what is not offered says so, and is never taken for a misspelling."""
    for known, listed in (
        (CHAT_KNOWN, CURRENT_CHAT + " " + SERVER_EXTRA + " " + CHAT_EXTRA),
        (COMPLETION_KNOWN, CURRENT_COMPLETION + " " + SERVER_EXTRA + " prompt_embeds response_format"),
    ):
        assert set(listed.split()) <= known


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_fields_of_servers_have_no_effect(name: str) -> None:
    assert chat_line(**{name: {"any": "thing"}}) == chat_line()


@pytest.mark.parametrize("name", sorted(ONLY_AT))
def test_fields_that_ask_for_nothing_are_accepted_and_others_refused(name: str) -> None:
    for value in (*ONLY_AT[name], None):
        assert chat_line(**{name: value}) == chat_line()
        assert completion_line(prompt="x", **{name: value}) == completion_line(prompt="x")
    for line in (lambda **body: chat_line(**body), lambda **body: completion_line(prompt="x", **body)):
        with pytest.raises(LineError, match=rf"^{name}=\[7\] is not offered(: .+)?; leave it out\.$"):
            line(**{name: [7]})


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - ONLY_AT.keys() - {"best_of"}))
def test_fields_that_are_not_offered_are_named(name: str) -> None:
    for value in ({"type": "x"}, "high", 1, [], False):
        with pytest.raises(LineError, match=f"^{name}=.* is not offered"):
            chat_line(**{name: value})
    assert chat_line(**{name: None}) == chat_line()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"priority": False}, "priority=false is not offered"),  # false is no 0
        ({"echo": 0}, "echo=0 is not offered"),
        ({"length_penalty": 0.5}, "length_penalty=0.5 is not offered"),
        ({"reasoning_effort": "high"}, "as a key of chat_template_kwargs; leave it out."),
        ({"response_format": "json"}, 'response_format="json" is not offered'),
        ({"response_format": {}}, "response_format={} is not offered"),
        ({"best_of": 4, "n": 2}, "best_of=4 is not offered: give n, and choose among the answers"),
        ({"prompt": "x"}, "unknown field 'prompt' in body"),
        ({"add_special_tokens": True}, "add_special_tokens=true is not offered"),
    ],
)
def test_values_beside_the_neutral_ones(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(LineError) as caught:
        chat_line(**body)
    assert reason in str(caught.value)


def test_values_that_mean_the_same_as_leaving_a_field_out() -> None:
    assert (
        chat_line(length_penalty=1.0, best_of=1, add_special_tokens=False, response_format={"type": "text"})
        == chat_line()
    )
    assert chat_line(best_of=2, n=2).fields == {"n": 2}
    assert completion_line(prompt="x", add_special_tokens=True, best_of=1).fields == {}
    with pytest.raises(LineError, match="unknown field 'messages' in body"):
        completion_line(prompt="x", messages=HI)


def test_line_over_command_line_over_generation_config_over_neutral() -> None:
    sampling = SamplingConfig(temperature=0.5, top_k=10, stop=["S"])
    defaults = {"temperature": 0.1, "top_k": 1, "top_p": 0.8}
    chat = parse_plain(1, {"messages": HI, "temperature": 0.9})
    params = resolve_params(chat, sampling, defaults)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.9, 10, 0.8, None)
    assert params.stop == ("S",)
    plain = parse_plain(1, {"prompt": "x", "top_k": None})  # null is "not set"
    params = resolve_params(plain, sampling, defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 10, None)
    assert resolve_params(parse_plain(1, {"prompt": "x", "stop": []}), sampling, {}).stop == ()
    assert resolve_params(plain, SamplingConfig(include_stop=True), {}).include_stop_str_in_output


def test_layers_that_contradict_each_other_fail_the_line() -> None:
    line = parse_plain(1, {"prompt": "x", "max_tokens": 3})
    with pytest.raises(LineError, match="min_tokens=9 exceeds max_tokens=3"):
        resolve_params(line, SamplingConfig(min_tokens=9), {})


def test_seeds_depend_on_job_seed_and_id_alone() -> None:
    def seed(number: int, line_id: Any, job: int = 0, **fields: Any) -> int:
        line = parse_plain(number, {"id": line_id, "prompt": "x", **fields})
        params = LineParams(SamplingConfig(seed=job), {})
        return params.seed_of(line, params.of(line))

    assert seed(1, "a") == seed(99, "a")
    different = [seed(1, "a"), seed(1, "b"), seed(1, "a", job=1), seed(1, 1), seed(1, "1"), seed(1, True), seed(1, 1.5)]
    assert len(set(different)) == len(different)
    assert seed(1, "a", seed=5) == 5
    # The same on every machine: a frozen value. It changes only if answers of old jobs may change.
    assert seed(1, "a") == 4_430_979_875_597_297_393
    request = Request("line-1", [1], SamplingParams(n=3), seed=7)
    assert len({request.seed_of(index) for index in range(3)}) == 3 and request.seed_of(0) == 7


def result(n: int = 1, *, logprobs: bool = False) -> RequestOutput:
    entry = {65: Logprob(-0.25, 2, "A"), 66: Logprob(-0.125, 1, "B")}
    outputs = [
        CompletionOutput(index, "A", [65], "stop", "x", logprobs=[entry] if logprobs else None) for index in range(n)
    ]
    return RequestOutput("r", "p", [1, 2, 3], outputs, True, 2)


def test_plain_answer() -> None:
    line = parse_plain(4, {"id": 1, "prompt": "x"})
    sample = {"text": "A", "token_ids": [65], "finish_reason": "stop", "stop_reason": "x"}
    counts = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 2}
    assert plain_answer(line, result()) == {"id": 1, "line": 4, **sample, **counts}
    two = plain_answer(line, result(2))
    assert two == {"id": 1, "line": 4, "outputs": [sample, sample], **counts | {"completion_tokens": 2}}
    top = [{"token_id": 66, "token": "B", "logprob": -0.125, "rank": 1}]
    top += [{"token_id": 65, "token": "A", "logprob": -0.25, "rank": 2}]
    assert plain_answer(line, result(logprobs=True))["logprobs"] == [{"token_id": 65, "logprob": -0.25, "top": top}]


def test_openai_chat_answer() -> None:
    answer = openai_answer(chat_line(), result(2, logprobs=True), "job-model", 2)
    assert set(answer) == {"id", "custom_id", "response", "error"}
    assert answer["custom_id"] == "c" and answer["error"] is None and answer["id"].startswith("batch_req_")
    assert answer["response"]["status_code"] == 200
    body = answer["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "m"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "A", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    chosen = body["choices"][0]["logprobs"]["content"][0]
    assert (chosen["token"], chosen["logprob"], chosen["bytes"]) == ("A", -0.25, [65])
    assert [each["token"] for each in chosen["top_logprobs"]] == ["B", "A"]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer == openai_answer(chat_line(), result(2, logprobs=True), "job-model", 2)  # ids are hashes, not chance


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_openai_chats_list_as_many_likely_tokens_as_asked(num_top: int) -> None:
    """The chosen token comes beside them: it is listed only if it is one of them."""
    body = openai_answer(chat_line(), result(logprobs=True), "job-model", num_top)["response"]["body"]
    (position,) = body["choices"][0]["logprobs"]["content"]
    assert position["token"] == "A"
    assert [each["token"] for each in position["top_logprobs"]] == ["B", "A"][:num_top]


def test_openai_chats_claim_no_bytes_for_a_piece_of_a_character() -> None:
    """It decodes to U+FFFD, whose own bytes would put another text together than the model's."""
    entry = {65: Logprob(-0.25, 1, "\ufffd"), 66: Logprob(-0.5, 2, "é")}
    answered = RequestOutput("r", "p", [1], [CompletionOutput(0, "A", [65], "stop", logprobs=[entry])], True)
    body = openai_answer(chat_line(), answered, "job-model", 2)["response"]["body"]
    (position,) = body["choices"][0]["logprobs"]["content"]
    assert position["bytes"] is None
    assert [each["bytes"] for each in position["top_logprobs"]] == [None, [195, 169]]


def test_openai_completions_keep_the_chosen_token_among_equal_texts() -> None:
    """Pieces of characters share one text, and the listing goes by texts: token_logprobs must not contradict it."""
    entry = {65: Logprob(-0.5, 2, "\ufffd"), 66: Logprob(-0.25, 1, "\ufffd"), 67: Logprob(-2.0, 3, "\ufffd")}
    answered = RequestOutput("r", "p", [1], [CompletionOutput(0, "A", [65], "stop", logprobs=[entry])], True)
    logprobs = openai_answer(completion_line(prompt="x"), answered, "job-model", 2)["response"]["body"]["choices"][0][
        "logprobs"
    ]
    assert logprobs["token_logprobs"] == [-0.5] and logprobs["top_logprobs"] == [{"\ufffd": -0.5}]


def test_minus_infinity_is_a_number_that_json_has() -> None:
    entry = {65: Logprob(-0.25, 1, "A"), 66: Logprob(-math.inf, 2, "B")}
    outputs = [CompletionOutput(0, "A", [65], "stop", None, logprobs=[entry])]
    answered = RequestOutput("r", "p", [1], outputs, True, prompt_logprobs=[None, entry])
    plain = plain_answer(parse_plain(1, {"prompt": "x"}), answered)
    assert plain["prompt_logprobs"][1][1]["logprob"] == plain["logprobs"][0]["top"][1]["logprob"] == -9999.0
    records = [plain, *(openai_answer(line, answered, "m", 2) for line in (chat_line(), completion_line(prompt="x")))]
    assert all(b"-9999.0" in dump_line(record) for record in records)


def test_openai_completion_answer() -> None:
    body = openai_answer(completion_line(prompt="x"), result(logprobs=True), "job-model", 2)["response"]["body"]
    assert body["object"] == "text_completion" and body["model"] == "job-model"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "A",
            "finish_reason": "stop",
            "logprobs": {
                "tokens": ["A"],
                "token_logprobs": [-0.25],
                "top_logprobs": [{"A": -0.25, "B": -0.125}],
                "text_offset": [0],
            },
        }
    ]


def test_kept_params_are_those_of_each_line_alone() -> None:
    """Values that are equal and not the same (1, 1.0, true), lines of both kinds, more kinds than are kept."""
    sampling, defaults = SamplingConfig(top_p=0.9), {"temperature": 0.5}
    of_job = LineParams(sampling, defaults)
    values: list[dict[str, Any]] = [
        {},
        {"temperature": 1},
        {"temperature": 1.0},
        {"ignore_eos": True},
        {"stop": ["a"]},
        {"stop": "a"},
        {"seed": 4},
    ]
    values += [{"max_tokens": number} for number in range(1, 300)] + [{"logit_bias": {"3": 1.5}}, {"n": 2, "top_k": 3}]
    for number, fields in enumerate([*values, *values], start=1):
        for source in ({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}):
            line = parse_plain(number, {"id": f"id-{number}", **source, **fields})
            assert of_job.of(line) == resolve_params(line, sampling, defaults), fields
    with pytest.raises(LineError, match="temperature=True must be a number"):
        of_job.of(parse_plain(1, {"prompt": "x", "temperature": True}))
    with pytest.raises(LineError, match=r"max_tokens=1\.0 must be a whole number"):
        of_job.of(parse_plain(1, {"prompt": "x", "max_tokens": 1.0}))
    with pytest.raises(LineError, match="ignore_eos=1 must be true or false"):
        of_job.of(parse_plain(1, {"prompt": "x", "ignore_eos": 1}))
