"""What one line asks for, whichever of the two forms it has, and the sampling parameters that follow for it.

The plain form is in `plain.py`, OpenAI's batch form in `openai.py`. Knows records; knows nothing of files or engines.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec

from configs.schema import SamplingConfig
from moe.batch.lines import content_of
from moe.engine import chat
from moe.engine.request import RequestOutput, SamplingParams, Seeds

LineId = Any  # any JSON value; it comes back as it went in
# Stands for minus infinity, which JSON lacks; OpenAI's own value.
LOWEST_LOGPROB = -9999.0
KEPT_PARAMS, KEPT_BYTES = 256, 1000
SAMPLING_FIELDS = frozenset(item.name for item in fields(SamplingParams))
CHAT_FIELDS = dict.fromkeys(("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")).keys()


class LineError(ValueError):
    """A line that cannot be run. The text is the reason in the line's error record."""


@dataclass(frozen=True)
class ChatOptions:
    """How a chat template is applied."""

    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


DEFAULT_CHAT = ChatOptions()


class LineRequest(msgspec.Struct, gc=False):  # made for each line of a job; JSON's values know no cycles
    """One line, understood: exactly one of prompt, prompt_token_ids and messages is set.

    `fields` are the sampling parameters that the line itself sets to more than null, under SamplingParams' names;
    LineParams proves them.
    """

    number: int
    id: LineId
    form: Literal["plain", "chat.completion", "text_completion"]
    fields: dict[str, Any]
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    chat: ChatOptions = DEFAULT_CHAT
    model: str | None = None  # as the OpenAI body names it; comes back in the answer


class LineParams:
    """The parameters of each line of a job: line over command line over generation_config (chats only) over neutral
    values. A line without a seed gets one that follows from the job's seed and its id alone, not from its place.

    Most lines of a job ask for the same, so what was last asked for is kept.
    """

    def __init__(self, sampling: SamplingConfig, generation_defaults: Mapping[str, Any]) -> None:
        self._seeds = Seeds(sampling.seed)
        self._defaults = generation_defaults
        self._command_line = command_line_layer(sampling)
        self._kept: tuple[dict[bytes, SamplingParams], ...] = ({}, {})  # of prompts, of chats

    def of(self, line: LineRequest) -> SamplingParams:
        """LineError where the line's own parameters do not go with the command line's."""
        is_chat, key = line.messages is not None, content_of(line.fields)
        kept = self._kept[is_chat]
        params = kept.get(key)
        if params is None:
            try:
                layers = self._defaults if is_chat else {}, self._command_line, line.fields
                params = SamplingParams.from_layers(*layers)
            except (ValueError, TypeError) as error:
                raise LineError(str(error)) from error
            if len(key) <= KEPT_BYTES:
                if len(kept) >= KEPT_PARAMS:
                    kept.clear()
                kept[key] = params
        return params

    def seed_of(self, line: LineRequest, params: SamplingParams) -> int:
        """Of the line's first sample; the engine derives those of further samples from it and their index."""
        if params.seed is not None:
            return params.seed
        return self._seeds.of(line.id if type(line.id) in (str, int) else json.dumps(line.id))


def resolve_params(
    line: LineRequest, sampling: SamplingConfig, generation_defaults: Mapping[str, Any]
) -> SamplingParams:
    """The parameters of one line without the seed that follows from its id; of many, see LineParams."""
    return LineParams(sampling, generation_defaults).of(line)


def command_line_layer(sampling: SamplingConfig) -> dict[str, Any]:
    """The job's own sampling keys under SamplingParams' names; the job seed is no line's seed and stays out."""
    layer = {item.name: getattr(sampling, item.name) for item in fields(sampling) if item.name != "seed"}
    layer["include_stop_str_in_output"] = layer.pop("include_stop")
    return layer


def check_known(record: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    """Raise LineError for the first key that is not known, with the nearest one that is."""
    if known.issuperset(record):
        return
    names = sorted(known)
    for name in record:
        if name not in known:
            found = difflib.get_close_matches(name, names, n=1)
            guess = f"did you mean {found[0]!r}?" if found else f"known are {', '.join(names)}."
            raise LineError(f"unknown field {name!r}{where}; {guess}")


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """A copy without the fields that are null, which ask for nothing."""
    if None in record.values():
        return {name: value for name, value in record.items() if value is not None}
    return record.copy()


def typed(record: Mapping[str, Any], name: str, kind: type | tuple[type, ...], words: str) -> Any:
    """The field's value, None where it is missing or null; LineError where it is of another kind."""
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise LineError(f"{name}={short(value)} must be {words}.")
    return value


def check_token_ids(name: str, value: object) -> list[int]:
    """A non-empty list of token ids; whether they exist in the vocabulary is the engine's question."""
    if not isinstance(value, list) or not value:
        raise LineError(f"{name}={short(value)} must be a non-empty list of token ids.")
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise LineError(f"{name} has {short(token_id)}, which is no token id.")
    return value


def check_messages(value: Any) -> list[dict[str, Any]]:
    """The messages as a chat template takes them, by the rule of the engine's own chats."""
    try:
        return chat.check_messages(value)
    except ValueError as error:
        raise LineError(str(error)) from error


def check_chat_options(record: Mapping[str, Any]) -> ChatOptions:
    """What a line with messages says of CHAT_FIELDS."""
    if CHAT_FIELDS.isdisjoint(record):
        return DEFAULT_CHAT
    tools = typed(record, "tools", list, "a list of tool objects")
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise LineError(f"tools[{index}]={short(tool)} must be an object.")
    continued = bool(typed(record, "continue_final_message", bool, "true or false"))
    added = typed(record, "add_generation_prompt", bool, "true or false")
    if continued and added:
        raise LineError("continue_final_message=true and add_generation_prompt=true exclude each other; set one.")
    kwargs = typed(record, "chat_template_kwargs", dict, "an object") or {}
    return ChatOptions(tools or None, kwargs, not continued if added is None else added, continued)


def num_tokens(result: RequestOutput) -> int:
    """Tokens of all samples."""
    return sum([len(output.token_ids) for output in result.outputs])


def json_logprob(value: float) -> float:
    """A log-probability as JSON can hold it."""
    assert value == value, "a request whose logits hold NaN ends with an error before it has a log-probability"
    return max(value, LOWEST_LOGPROB)


def short(value: object) -> str:
    """A value for an error message, never longer than a line of it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
