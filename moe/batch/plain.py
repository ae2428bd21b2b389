"""The plain line form, {"id", "prompt" | "messages" | "prompt_token_ids", sampling parameters...}, and its answers."""

from __future__ import annotations

from typing import Any

from moe.batch.protocol import (
    SAMPLING_FIELDS,
    LineError,
    LineId,
    LineRequest,
    check_chat_options,
    check_known,
    check_messages,
    check_token_ids,
    json_logprob,
    num_tokens,
    typed,
)
from moe.engine.request import CompletionOutput, RequestOutput, TokenLogprobs

SOURCES = ("prompt", "messages", "prompt_token_ids")
CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
PLAIN_FIELDS = frozenset(("id", *SOURCES, *CHAT_FIELDS, *SAMPLING_FIELDS))


def plain_id(number: int, record: dict[str, Any]) -> LineId:
    """The line's id with its JSON type; a line without one has its line number."""
    return record.get("id") if record.get("id") is not None else number


def parse_plain(number: int, record: dict[str, Any]) -> LineRequest:
    """Understand one plain record. LineError says what is wrong with it."""
    check_known(record, PLAIN_FIELDS)
    fields = {name: value for name, value in record.items() if value is not None}
    sources = [name for name in SOURCES if name in fields]
    if len(sources) != 1:
        has = f"this line has {' and '.join(sources)}" if sources else "this line has none"
        raise LineError(f"exactly one of prompt, messages and prompt_token_ids is needed; {has}.")
    line, source = LineRequest(number, fields.pop("id", number), "plain", fields), sources[0]
    value = fields.pop(source)
    if source == "messages":
        line.messages, line.chat = check_messages(value), check_chat_options(record)
        for name in CHAT_FIELDS:
            fields.pop(name, None)
        return line
    for name in CHAT_FIELDS:
        if name in fields:
            raise LineError(f"{name} belongs to messages; this line has {source}.")
    if source == "prompt":
        line.prompt = typed(record, source, str, "a text")
    else:
        line.prompt_token_ids = check_token_ids(source, value)
    return line


def plain_answer(line: LineRequest, result: RequestOutput) -> dict[str, Any]:
    """The output record of a finished line. With n > 1 the samples stand in `outputs`, else at the top."""
    samples = [_sample(output) for output in result.outputs]
    answer = {
        "id": line.id,
        "line": line.number,
        **({"outputs": samples} if len(samples) > 1 else samples[0]),
        "prompt_tokens": len(result.prompt_token_ids),
        "completion_tokens": num_tokens(result),
        "cached_tokens": result.num_cached_tokens,
    }
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None if entry is None else _candidates(entry) for entry in result.prompt_logprobs]
    return answer


def plain_error(line_id: LineId, number: int, kind: str, message: str) -> dict[str, Any]:
    """The output record of a line that has no answer."""
    return {"id": line_id, "line": number, "error": {"type": kind, "message": message}}


def _sample(output: CompletionOutput) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        sample["logprobs"] = [
            {"token_id": chosen, "logprob": json_logprob(entry[chosen].logprob), "top": _candidates(entry)}
            for chosen, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
    return sample


def _candidates(entry: TokenLogprobs) -> list[dict[str, Any]]:
    """All tokens of one position that have a log-probability, likeliest first."""
    ordered = sorted(entry.items(), key=lambda item: item[1].rank)
    return [
        {
            "token_id": token_id,
            "token": value.decoded_token,
            "logprob": json_logprob(value.logprob),
            "rank": value.rank,
        }
        for token_id, value in ordered
    ]
