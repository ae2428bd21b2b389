"""A line's prompt as token ids. Knows lines and what a tokenizer offers; knows nothing of checkpoints or engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moe.batch.protocol import LineRequest


class BatchTokenizer(Protocol):
    """What a job asks of a tokenizer."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...

    def encode_prompt(self, text: str) -> list[int]: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


def prompt_ids(line: LineRequest, tokenizer: BatchTokenizer | None) -> list[int]:
    """The ids of the prompt, by the rules of the tokenizer. ValueError where it cannot be encoded."""
    if line.prompt_token_ids is not None:
        return line.prompt_token_ids
    if tokenizer is None:
        raise ValueError("this model has no tokenizer; give prompt_token_ids, or another tokenizer as tokenizer=.")
    if line.prompt is not None:
        return tokenizer.encode_prompt(line.prompt)
    assert line.messages is not None, f"line {line.number} has nothing to encode"
    return tokenizer.render_chat(
        line.messages,
        line.chat.tools,
        add_generation_prompt=line.chat.add_generation_prompt,
        continue_final_message=line.chat.continue_final_message,
        chat_template_kwargs=line.chat.template_kwargs,
    )
