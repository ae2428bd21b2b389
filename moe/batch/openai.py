"""OpenAI's batch form: {"custom_id", "method", "url", "body"} in, OpenAI's batch output lines out.

What becomes of each field of a body is in `openai_fields.py`. Ids are hashes of line number and custom_id, and
`created` is 0, so that the same job writes the same bytes.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate
from typing import Any

from moe.batch.openai_fields import SAMPLING_NAMES, check_fields
from moe.batch.protocol import (
    LineError,
    LineRequest,
    check_chat_options,
    check_known,
    check_messages,
    check_token_ids,
    json_logprob,
    num_tokens,
    short,
    typed,
    without_nulls,
)
from moe.engine.request import CompletionOutput, Logprob, RequestOutput, TokenLogprobs

LINE_FIELDS = frozenset(("custom_id", "method", "url", "body"))
CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"


def is_openai(record: dict[str, Any]) -> bool:
    """Whether a record means to be an OpenAI batch line."""
    return not LINE_FIELDS.isdisjoint(record)


def parse_openai(number: int, record: dict[str, Any]) -> LineRequest:
    """Understand one OpenAI batch record. LineError says what is wrong with it."""
    check_known(record, LINE_FIELDS)
    custom_id, url, body = record.get("custom_id"), record.get("url"), record.get("body")
    if not isinstance(custom_id, str):
        raise LineError(f"custom_id={short(custom_id)} must be a text.")
    if record.get("method") != "POST":
        raise LineError(f"method={short(record.get('method'))} must be POST.")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise LineError(f"url={short(url)} is not served; there are {CHAT_URL} and {COMPLETION_URL}.")
    if not isinstance(body, dict):
        raise LineError(f"body={short(body)} must be an object.")
    body = without_nulls(body)
    check_fields(body, is_chat=url == CHAT_URL)
    model = typed(body, "model", str, "a text")
    parse = _parse_chat if url == CHAT_URL else _parse_completion
    return parse(number, custom_id, body, model)


def openai_answer(line: LineRequest, result: RequestOutput, model: str, num_top: int) -> dict[str, Any]:
    """The output record of a finished line. `num_top`: how many likeliest tokens it asked for at each position."""
    name = _hash(line.number, str(line.id))
    is_chat = line.form == "chat.completion"
    prompt, completion = len(result.prompt_token_ids), num_tokens(result)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": line.form,
        "created": 0,
        "model": line.model or model,
        "choices": [_chat_choice(output, num_top) if is_chat else _text_choice(output) for output in result.outputs],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": result.num_cached_tokens},
        },
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": line.id, "response": response, "error": None}


def openai_error(custom_id: Any, number: int, kind: str, message: str, *, status: int) -> dict[str, Any]:
    """The output record of a line that has no answer, in both places where readers look for it."""
    name = _hash(number, str(custom_id))
    message = f"line {number}: {message}"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": {"code": kind, "message": message},
    }


def _parse_chat(number: int, custom_id: str, body: dict[str, Any], model: str | None) -> LineRequest:
    fields = {name: value for name, value in body.items() if name in SAMPLING_NAMES}
    if "max_completion_tokens" in body:
        if fields.get("max_tokens", body["max_completion_tokens"]) != body["max_completion_tokens"]:
            raise LineError("max_tokens and max_completion_tokens differ; give one of them.")
        fields["max_tokens"] = body["max_completion_tokens"]
    top = typed(body, "top_logprobs", int, "a whole number")
    if typed(body, "logprobs", bool, "true or false"):
        fields["logprobs"] = top or 0
    elif top is not None:
        raise LineError(f"top_logprobs={top} needs logprobs=true.")
    typed(body, "parallel_tool_calls", bool, "true or false")  # no effect: calls stay text in the answer
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise LineError(f"tool_choice={short(choice)}: a call cannot be forced here; give auto or none.")
    if choice == "none":
        body = {name: value for name, value in body.items() if name != "tools"}
    messages, chat = check_messages(body.get("messages")), check_chat_options(body)
    return LineRequest(number, custom_id, "chat.completion", fields, messages=messages, chat=chat, model=model)


def _parse_completion(number: int, custom_id: str, body: dict[str, Any], model: str | None) -> LineRequest:
    fields = {name: value for name, value in body.items() if name in SAMPLING_NAMES}
    if "logprobs" in body:
        fields["logprobs"] = body["logprobs"]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return LineRequest(number, custom_id, "text_completion", fields, prompt=prompt, model=model)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise LineError(f"prompt holds {len(prompt)} prompts; write one line for each.")
    ids = check_token_ids("prompt", prompt)
    return LineRequest(number, custom_id, "text_completion", fields, prompt_token_ids=ids, model=model)


def _chat_choice(output: CompletionOutput, num_top: int) -> dict[str, Any]:
    logprobs = None
    if output.logprobs is not None:
        content = []
        for chosen, entry in zip(output.token_ids, output.logprobs, strict=True):
            # The chosen token is in the entry even where it is not among the likeliest.
            top = sorted(entry.values(), key=lambda value: value.rank)[:num_top]
            content.append({**_token(entry[chosen]), "top_logprobs": [_token(value) for value in top]})
        logprobs = {"content": content, "refusal": None}
    return {
        "index": output.index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
    }


def _text_choice(output: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if output.logprobs is not None:
        chosen = [entry[token_id] for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)]
        tokens = [value.decoded_token or "" for value in chosen]
        offsets = accumulate((len(token) for token in tokens), initial=0)
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [json_logprob(value.logprob) for value in chosen],
            "top_logprobs": [
                _by_text(entry, token_id) for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
            ],
            "text_offset": list(offsets)[: len(tokens)],
        }
    return {"index": output.index, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}


def _by_text(entry: TokenLogprobs, chosen: int) -> dict[str, float]:
    """Tokens by text; of equal texts (pieces of characters) the chosen one counts, then the likeliest."""
    ordered = sorted(entry, key=lambda token_id: (token_id != chosen, entry[token_id].rank))
    by_text: dict[str, float] = {}
    for value in map(entry.__getitem__, ordered):
        by_text.setdefault(value.decoded_token or "", json_logprob(value.logprob))
    return by_text


def _token(value: Logprob) -> dict[str, Any]:
    text = value.decoded_token or ""
    # A piece of a character decodes to U+FFFD, whose bytes are not the token's: OpenAI's null says that none are known.
    encoded = None if "\ufffd" in text else list(text.encode("utf-8"))
    return {"token": text, "logprob": json_logprob(value.logprob), "bytes": encoded}


def _hash(number: int, custom_id: str) -> str:
    return hashlib.blake2b(f"{number}\0{custom_id}".encode(), digest_size=12).hexdigest()
