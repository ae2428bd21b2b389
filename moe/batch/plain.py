"""The plain line form, {"id", "prompt" | "messages" | "prompt_token_ids", sampling parameters...}, and its answers."""

from __future__ import annotations

from typing import Any

from moe.batch.protocol import (
    CHAT_FIELDS,
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
    without_nulls,
)
from moe.engine.request import CompletionOutput, RequestOutput, TokenLogprobs

IDS = "prompt_token_ids"
SOURCES = ("prompt", "messages", IDS)
PLAIN_FIELDS = frozenset(("id", *SOURCES, *CHAT_FIELDS, *SAMPLING_FIELDS))


def plain_id(number: int, record: dict[str, Any]) -> LineId:
    """The line's id with its JSON type; a line without one has its line number."""
    return record.get("id") if record.get("id") is not None else number


def parse_plain(number: int, record: dict[str, Any]) -> LineRequest:
    """Understand one plain record. LineError says what is wrong with it."""
    check_known(record, PLAIN_FIELDS)
    fields = without_nulls(record)
    line = LineRequest(number, fields.pop("id", number), "plain", fields)
    prompt, messages, ids = fields.pop("prompt", None), fields.pop("messages", None), fields.pop(IDS, None)
    if (prompt is None) + (messages is None) + (ids is None) != 2:
        given = [name for name in SOURCES if record.get(name) is not None]
        has = f"this line has {' and '.join(given)}" if given else "this line has none"
        raise LineError(f"exactly one of prompt, messages and prompt_token_ids is needed; {has}.")
    if messages is not None:
        line.messages, line.chat = check_messages(messages), check_chat_options(fields)
        for name in CHAT_FIELDS:
            fields.pop(name, None)
        return line
    if not CHAT_FIELDS.isdisjoint(fields):
        name, source = next(name for name in CHAT_FIELDS if name in fields), "prompt" if ids is None else IDS
        raise LineError(f"{name} belongs to messages; this line has {source}.")
    if ids is not None:
        line.prompt_token_ids = check_token_ids(IDS, ids)
    else:
        line.prompt = typed(record, "prompt", str, "a text")
    return line


def plain_answer(line: LineRequest, result: RequestOutput) -> dict[str, Any]:
    """The output record of a finished line. With n > 1 the samples stand in `outputs`, else at the top."""
    answer: dict[str, Any] = {"id": line.id, "line": line.number}
    if len(result.outputs) > 1:
        answer["outputs"] = [_add_sample({}, output) for output in result.outputs]
    else:
        _add_sample(answer, result.outputs[0])
    answer["prompt_tokens"] = len(result.prompt_token_ids)
    answer["completion_tokens"] = num_tokens(result)
    answer["cached_tokens"] = result.num_cached_tokens
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None if entry is None else _candidates(entry) for entry in result.prompt_logprobs]
    return answer


def plain_error(line_id: LineId, number: int, kind: str, message: str) -> dict[str, Any]:
    """The output record of a line that has no answer."""
    return {"id": line_id, "line": number, "error": {"type": kind, "message": message}}


def _add_sample(record: dict[str, Any], output: CompletionOutput) -> dict[str, Any]:
    """The record with what a sample says."""
    record["text"] = output.text
    record["token_ids"] = output.token_ids
    record["finish_reason"] = output.finish_reason
    record["stop_reason"] = output.stop_reason
    if output.logprobs is not None:
        record["logprobs"] = [
            {"token_id": chosen, "logprob": json_logprob(entry[chosen].logprob), "top": _candidates(entry)}
            for chosen, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
    return record


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
