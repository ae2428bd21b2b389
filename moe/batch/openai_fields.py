"""Which fields an OpenAI body may have beside its sampling parameters, and what becomes of each: honoured, accepted
without effect, accepted at one value alone, or refused with the way out. None is dropped in silence.

The names are those of OpenAI's API, current and deprecated, and of vLLM's server. Knows names; parses no prompt.
"""

from __future__ import annotations

from typing import Any

from moe.batch.protocol import SAMPLING_FIELDS, LineError, check_known, short

# Sampling parameters of the same name; what the others mean in a body differs from one form to the other.
SAMPLING_NAMES = SAMPLING_FIELDS - {"logprobs", "prompt_logprobs", "detokenize"}
CHAT_NAMES = frozenset(
    (
        "messages",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "chat_template_kwargs",
        "continue_final_message",
        "add_generation_prompt",
    )
)
COMPLETION_NAMES = frozenset(("prompt", "logprobs", "response_format"))
# They concern a server, a stream or a bill, and no token of an answer.
NO_EFFECT = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_salt",
        "request_id",
        "session_id",
        "stream_options",
        "stream_interval",
        "return_mm_kwargs",
    )
)
# Accepted at the value that asks for nothing; any other is refused.
ONLY_AT: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none",),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "truncation_side": ("left",),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "priority": (0,),
    "watermarking": (False,),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "documents": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (0,),
}
TEXT = {"type": "text"}
CONSTRAINED = "answers cannot be constrained to a grammar or a schema"
IN_TEMPLATE = "hand it to the chat template, as a key of chat_template_kwargs"
IN_PLAIN = "it is in the answers to lines of the plain form"
TEXT_ALONE = "text is all that goes in and out"
# Why, or what to do instead. A field that is in none of these tables is unknown.
REFUSED = {
    "stream": "a batch has no stream",
    "functions": "give tools, whose calls stay text in the answer",
    "function_call": "give tools, whose calls stay text in the answer",
    "modalities": TEXT_ALONE,
    "audio": TEXT_ALONE,
    "mm_processor_kwargs": TEXT_ALONE,
    "media_io_kwargs": TEXT_ALONE,
    "prompt_embeds": "give text or token ids",
    "prediction": "there is no speculation",
    "web_search_options": "there is no search",
    "verbosity": "say it in the messages",
    "reasoning_effort": IN_TEMPLATE,
    "documents": IN_TEMPLATE,
    "chat_template": "one template serves a job: job.chat_template",
    "structured_outputs": CONSTRAINED,
    "guided_json": CONSTRAINED,
    "guided_regex": CONSTRAINED,
    "guided_choice": CONSTRAINED,
    "guided_grammar": CONSTRAINED,
    "guided_decoding_backend": CONSTRAINED,
    "guided_whitespace_pattern": CONSTRAINED,
    "structural_tag": CONSTRAINED,
    "allowed_token_ids": "logit_bias can favour tokens",
    "bad_words": "logit_bias can keep tokens out",
    "prompt_logprobs": IN_PLAIN,
    "return_token_ids": IN_PLAIN,
    "return_tokens_as_token_ids": IN_PLAIN,
    "truncation_side": "the last truncate_prompt_tokens tokens are kept",
    "priority": "all lines of a job are answered",
    "best_of": "give n, and choose among the answers",
    "logprob_token_ids": "",
    "logits_processors": "",
    "repetition_detection": "",
    "kv_transfer_params": "",
    "ec_transfer_params": "",
    "vllm_xargs": "",
}
# What is accepted or refused by its value, or always refused.
_BY_VALUE = frozenset(ONLY_AT) | frozenset(REFUSED) | {"best_of", "add_special_tokens"}
_EITHER = SAMPLING_NAMES | NO_EFFECT | ONLY_AT.keys() | REFUSED.keys() | {"model", "add_special_tokens"}
CHAT_KNOWN, COMPLETION_KNOWN = _EITHER | CHAT_NAMES, _EITHER | COMPLETION_NAMES


def check_fields(body: dict[str, Any], *, is_chat: bool) -> None:
    """LineError for the first field that is unknown, or that asks for what is not offered. Null asks for nothing."""
    check_known(body, CHAT_KNOWN if is_chat else COMPLETION_KNOWN, " in body")
    if not _BY_VALUE.isdisjoint(body):
        _check_values(body, is_chat=is_chat)
    kind = body.get("response_format", TEXT)
    if kind is not TEXT and (not isinstance(kind, dict) or kind.get("type") != "text"):
        raise LineError(f"response_format={short(kind)} is not offered: {CONSTRAINED}; leave it out.")


def _check_values(body: dict[str, Any], *, is_chat: bool) -> None:
    """Of fields that are accepted at some values alone; few lines have any."""
    neutral = {**ONLY_AT, "best_of": (1, body.get("n", 1)), "add_special_tokens": (not is_chat,)}
    for name, value in body.items():
        if name not in _BY_VALUE:
            continue
        if not any(value == good and type(value) in (type(good), float) for good in neutral.get(name, ())):
            why = REFUSED.get(name)
            raise LineError(f"{name}={short(value)} is not offered{f': {why}' if why else ''}; leave it out.")
