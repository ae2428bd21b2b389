"""From a line to what it asks for, and from what became of it to its record; both in the form that the line has.

Knows both forms by their own files; knows nothing of files or engines.
"""

from __future__ import annotations

from typing import Any

from moe.batch.lines import BadLine, Line
from moe.batch.openai import is_openai, openai_answer, openai_error, parse_openai
from moe.batch.plain import parse_plain, plain_answer, plain_error, plain_id
from moe.batch.protocol import LineError, LineRequest
from moe.engine.request import RequestOutput

# Kinds of error records: never sent to the model; failed there; took longer than job.line_timeout_s.
INVALID, FAILED, TIMEOUT = "invalid_line", "request_failed", "timeout"
ENDED = ("stop", "length")  # how a sample ends that is an answer
# Of OpenAI records: clients send a line again after the last two, not after the first.
BAD_REQUEST, SERVER_FAULT, TIMED_OUT = 400, 500, 504


def parse(line: Line | BadLine) -> LineRequest:
    """Understand a line of either form; LineError with the reason otherwise."""
    if isinstance(line, BadLine):
        raise LineError(line.reason)
    return (parse_openai if is_openai(line.record) else parse_plain)(line.number, line.record)


def line_id(line: Line | BadLine) -> Any:
    """The line's own id, as far as it could be read; a plain line without one has its number."""
    record = line.record
    if record is None:
        return None
    return record.get("custom_id") if is_openai(record) else plain_id(line.number, record)


def error_record(line: Line | BadLine, kind: str, message: str, *, status: int = BAD_REQUEST) -> dict[str, Any]:
    """The error record of a line. `status`: what an OpenAI record says of it. With several inputs the record also says
    which of them the line is from."""
    message = " ".join(message.split())
    if line.record is not None and is_openai(line.record):
        if line.origin is not None:
            message = f"{line.origin}: {message}"
        return openai_error(line_id(line), line.number, kind, message, status=status)
    record = plain_error(line_id(line), line.number, kind, message)
    if line.origin is not None:
        record["error"]["origin"] = line.origin
    return record


def answer_record(line: LineRequest, result: RequestOutput, model: str, num_top: int) -> dict[str, Any]:
    """The record of an answered line. `num_top`: how many likeliest tokens it asked for at each position."""
    if line.form == "plain":
        return plain_answer(line, result)
    return openai_answer(line, result, model, num_top)


def fault_of(result: RequestOutput) -> str | None:
    """Why a finished request has no answer; None where it has one."""
    if result.error is not None:
        return result.error
    for output in result.outputs:
        if output.finish_reason not in ENDED:
            reasons = {str(each.finish_reason) for each in result.outputs}
            return f"the request ended with {', '.join(sorted(reasons))}"
    return None


def error_of(record: dict[str, Any]) -> tuple[Any, str]:
    """Id and message of an error record of either form."""
    return record["custom_id"] if "custom_id" in record else record["id"], record["error"]["message"]
