"""Prompts and parameters in every form that people hold them in, made into one form; ValueError says what is wrong.

Knows texts, token ids, dicts and lists of them; knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe.engine.request import SamplingParams

# A prompt: text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as a dict.
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class PromptIds:
    """A prompt ready for the engine."""

    token_ids: list[int]
    text: str | None


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt, or several, as a list. An empty list is a list of no prompts."""
    if isinstance(prompts, str | Mapping) or (_is_ids(prompts) and bool(prompts)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ValueError(f"prompts={prompts!r} must be a text, a list of token ids, a dict, or a list of these.")
    return list(prompts)


def prompt_ids(prompt: Prompt, index: int, encode: Callable[[str], list[int]]) -> PromptIds:
    """Token ids of a prompt in any form; ValueError names its place in the list. `encode` a text."""
    given: object = prompt
    text: str | None = None
    if isinstance(prompt, Mapping):
        known = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
        if not known or set(prompt) - {"prompt", "prompt_token_ids"}:
            raise ValueError(f"prompts[{index}] has keys {sorted(prompt)}; give prompt, prompt_token_ids or both.")
        text = prompt.get("prompt")
        given = prompt[known[-1]]
        if known[-1] == "prompt_token_ids" and isinstance(given, str):
            raise ValueError(f"prompts[{index}] has prompt_token_ids={given!r}, a text; give it as prompt.")
    if isinstance(given, str):
        return PromptIds(encode(given), given)
    if not _is_ids(given):
        raise ValueError(f"prompts[{index}]={given!r} must be a text, a list of token ids, or a dict with one of them.")
    return PromptIds([int(token_id) for token_id in given], text)  # pyright: ignore[reportGeneralTypeIssues]


def listed_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One for each of `count` prompts."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    given: Sequence[object] = params if isinstance(params, Sequence) else [params]
    listed: list[SamplingParams] = []
    for at, each in enumerate(given):
        if not isinstance(each, SamplingParams):
            raise ValueError(f"params[{at}]={each!r} must be SamplingParams.")
        listed.append(each)
    if len(listed) != count:
        raise ValueError(f"params has {len(listed)} entries for {count} prompts; give one for all, or one for each.")
    return listed


def _is_ids(value: object) -> bool:
    """A sequence of whole numbers; the empty one counts (and is rejected by the engine, as a prompt without tokens)."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        return False
    return all(isinstance(each, int) and not isinstance(each, bool) for each in value)
