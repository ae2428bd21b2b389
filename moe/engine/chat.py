"""Chat messages to the text of a prompt: checks, the checkpoint's template, and markers inside contents.

Knows messages and a transformers tokenizer's template; knows nothing of the engine. Text of a message that looks like
a control token (`<|im_end|>`, `</s>`) would close its turn and forge another one. It is taken out before the template
runs, behind marks that no text holds, and `Rendered` says where it belongs; the tokenizer puts it back as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

# Pairs of private-use characters to build marks from; the first pair that a request does not hold is used.
MARK_CHARS = tuple((chr(base), chr(base + 1)) for base in range(0x10FF00, 0x10FF40, 2))


class Rendered(NamedTuple):
    """The template's text; `plain` maps each mark in it to the text of a message that must not be a control token."""

    text: str
    plain: dict[str, str]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template: str | None,
    template_kwargs: Mapping[str, Any],
    control_tokens: Sequence[str],
) -> Rendered:
    """Fill the template (None: the checkpoint's). `control_tokens` in what the caller gave are marked."""
    given = {"messages": check_messages(messages), "tools": _plain_tools(tools), "kwargs": dict(template_kwargs)}
    given, plain = _mark(given, control_tokens)
    for name in ("tokenize", "conversation", "chat_template", "return_tensors", "return_dict", "padding", "truncation"):
        if name in given["kwargs"]:
            raise ValueError(f"chat_template_kwargs has {name!r}, which is no variable of a template; leave it out.")
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in given["kwargs"]:
            raise ValueError(f"chat_template_kwargs has {name!r}, which is given beside it; give it there alone.")
    try:
        text = tokenizer.apply_chat_template(
            given["messages"],
            tools=given["tools"],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **given["kwargs"],
        )
    except Exception as error:  # a template is a program of the checkpoint's: whatever it raises is about this line
        raise ValueError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error
    assert isinstance(text, str), "one conversation renders to one text"
    return Rendered(text=text, plain=plain)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the messages with lists of text parts joined by newlines; ValueError names the message at fault.

    What asks for an answer must be there: templates put nothing in the place of a content that is missing, or misspelt.
    """
    # Concrete types first: asking an abstract one takes ten times as long.
    if not isinstance(messages, (list, Sequence)) or isinstance(messages, (str, bytes)) or not messages:
        raise ValueError(f"messages={messages!r} must be a list of at least one message.")
    checked = []
    for at, message in enumerate(messages):
        if not isinstance(message, (dict, Mapping)) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{at}] must be an object with a role (a string).")
        content = message.get("content")
        if content is None and message["role"] != "assistant":  # who may call tools instead
            raise ValueError(f"messages[{at}] of role {message['role']!r} has no content; it has {', '.join(message)}.")
        if isinstance(content, (list, tuple)):
            content = "\n".join(_part_text(at, part) for part in content)
        elif content is not None and not isinstance(content, str):
            raise ValueError(f"messages[{at}].content={content!r} must be a string or a list of text parts.")
        checked.append({**message, "content": content} if "content" in message else dict(message))
    return checked


def read_template(value: str) -> str:
    """A template given as a file's name or as its text: text is what holds a `{`."""
    if "{" in value:
        return value
    path = Path(value)
    if not path.is_file():
        raise ValueError(f"job.chat_template={value!r} is neither a file nor a template (which holds '{{{{' or '{{%').")
    return path.read_text(encoding="utf-8")


def _part_text(at: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind == "text":
        raise ValueError(f"messages[{at}].content has a part of type 'text' whose text is no string.")
    raise ValueError(f"messages[{at}].content has a part of type {kind!r}; only text parts are supported.")


def _plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if tools is None or (isinstance(tools, Sequence) and not tools):
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise ValueError(f"tools={tools!r} must be a list of tool descriptions.")
    for at, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools[{at}] must be an object with type and function.")
    return list(tools)


def _mark(given: dict[str, Any], control_tokens: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """`given` with every control token in its strings (keys too) replaced by a mark, and the text of each mark."""
    found = [text for text in _strings(given) if any(token in text for token in control_tokens)]
    if not found:
        return given, {}
    everything = "".join(_strings(given))
    free = [pair for pair in MARK_CHARS if not any(char in everything for char in pair)]
    if not free:
        raise ValueError("the messages hold every private-use character that could mark their control tokens.")
    left, right = free[0]
    pattern = re.compile("|".join(re.escape(token) for token in sorted(control_tokens, key=len, reverse=True)))
    plain: dict[str, str] = {}

    def mark(match: re.Match[str]) -> str:
        name = f"{left}{control_tokens.index(match.group())}{right}"
        plain[name] = match.group()
        return name

    return _mapped(given, lambda text: pattern.sub(mark, text)), plain


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _strings(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _strings(part)]
    return []


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(part, change) for part in value]
    return value
