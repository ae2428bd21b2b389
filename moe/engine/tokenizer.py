"""Text and chats to token ids and back, through transformers' AutoTokenizer. No model class, remote code or pad token.

Knows the checkpoint's tokenizer, its chat template and the ids that end a text; knows nothing of sampling or the loop.

Start token. A plain prompt gets what the tokenizer adds of itself; a prompt that already begins with the start token
(as text, "<s>hi") keeps that one alone. A chat gets what its template writes, and nothing is added: the ids equal
`apply_chat_template(tokenize=True)`. In both, a doubled start token becomes one.

Control tokens. In a plain prompt their text means the token: it is the caller's own raw text. In a chat, text inside a
message, tool or template variable stays plain text (see chat.py), unless `allow_special_in_content` is set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moe.engine import chat
from moe.engine.detokenizer import Detokenizer, TokenTexts
from moe.model.checkpoint_file import is_named, read_small

EOS = "eos_token_id"
# generation_config's name of a sampling default, and ours.
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# What else it may say of an answer's tokens, and nothing here does; beside null, zero and empty, what asks for nothing.
_NOT_HONOURED: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("min_new_tokens", "min_length", "stop_strings", "bad_words_ids", "sequence_bias"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty"), ()),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "top_h", "penalty_alpha", "dola_layers"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "force_words_ids"), ()),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
}


class Tokenizer:
    """The tokenizer of the checkpoint in `folder`, or of `tokenizer_folder` with the model's end-of-sequence ids.

    `chat_template` (a file or a text) replaces the checkpoint's.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        tokenizer_folder: Path | str | None = None,
        chat_template: str | None = None,
        allow_special_in_content: bool = False,
    ) -> None:
        self.folder = Path(folder)
        source = Path(tokenizer_folder) if tokenizer_folder is not None else self.folder
        try:
            self.hf: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds; the folder is what the user can act on
            raise ValueError(
                f"no tokenizer could be read from {source}: {type(error).__name__}: {error}; "
                "give the folder of one as tokenizer="
            ) from error
        backend = getattr(self.hf, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ValueError(
                f"the tokenizer of {source} has no tokenizer.json form, which is needed to decode as it runs."
            )
        self.texts = TokenTexts(backend)
        self.control_tokens = tuple(sorted(self.texts.special_tokens))
        self._template = chat.read_template(chat_template) if chat_template is not None else None
        self._allow_special = allow_special_in_content
        self._plain: _PlainEncoder | None = None
        self._token_texts: dict[int, str] = {}  # no larger than the vocabulary
        config = _read_json(self.folder / "config.json")
        generation = _read_json(self.folder / "generation_config.json")
        self.eos_ids = _eos_ids(config, generation, self.hf)
        self.generation_defaults = _generation_defaults(generation)
        # Of generation_config, what chats do not get; whoever makes an engine says so.
        self.not_honoured = {
            name: generation[name]
            for name, neutral in _NOT_HONOURED.items()
            if generation.get(name) and generation[name] not in neutral
        }

    @property
    def bos_id(self) -> int | None:
        bos = self.hf.bos_token_id
        return bos if isinstance(bos, int) else None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None or bool(self.hf.chat_template)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain prompt; see the rule on the start token above."""
        if not isinstance(text, str):
            raise ValueError(f"prompt={text!r} must be a string; give token ids as prompt_token_ids.")
        return self._one_bos(self._encode(text, add_special_tokens=True))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Not verbose: transformers would warn of the tokenizer's own longest text, which is not the engine's."""
        with _characters_of(text):
            return self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat. ValueError: no template, a template that refuses, messages of the wrong form.

        `add_generation_prompt` None: yes, unless the final message is to be continued.
        """
        if not self.has_chat_template:
            raise ValueError(
                f"messages need a chat template and the checkpoint {self.folder} has none; "
                "give one as job.chat_template=, or send prompts."
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message=True conflicts with add_generation_prompt=True: the first goes on with the "
                "last message, the second begins a new one; set one of them."
            )
        rendered = chat.render(
            self.hf,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=self._template,
            template_kwargs=chat_template_kwargs or {},
            control_tokens=() if self._allow_special else self.control_tokens,
        )
        if not rendered.plain:
            return self._one_bos(self._encode(rendered.text, add_special_tokens=False))
        if self._plain is None:
            self._plain = _PlainEncoder(self.texts.backend)
        with _characters_of(rendered.text):
            return self._one_bos(self._plain.encode(rendered))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, exactly as a Detokenizer gives it in pieces."""
        return self.texts.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special ones included; kept, since a few come again and again."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self.texts, skip_special_tokens=skip_special_tokens)

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_id
        first = 0
        while bos is not None and ids[first : first + 2] == [bos, bos]:
            first += 1
        return ids[first:]


class _PlainEncoder:
    """A twin of a tokenizer whose control tokens go by private names, so that their usual text is plain text to it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        state = json.loads(backend.to_str())
        state.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        self._twin = tokenizers.Tokenizer.from_str(json.dumps(state))
        self._alias: dict[str, str] = {}
        self._id_of: dict[int, int] = {}
        # An unknown character's token may come from any text.
        unknown = state["model"].get("unk_token")
        self._control_ids = {i for i, token in added.items() if token.special and token.content != unknown}
        for token_id, token in sorted(added.items()):
            name = token.content
            if token.special:
                name = self._alias[token.content] = f"\U0010fffc{token_id}\U0010fffd"
            twin = tokenizers.AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            (self._twin.add_special_tokens if token.special else self._twin.add_tokens)([twin])
            twin_id = self._twin.token_to_id(name)
            assert isinstance(twin_id, int), f"the twin lost the token {name!r}"
            self._id_of[twin_id] = token_id

    def encode(self, rendered: chat.Rendered) -> list[int]:
        """Ids of the rendered text: control tokens where the template wrote them, plain text at the marks."""
        text = rendered.text
        for content in sorted(self._alias, key=len, reverse=True):
            text = text.replace(content, self._alias[content])
        for mark, plain in rendered.plain.items():
            text = text.replace(mark, plain)
        ids = self._twin.encode(text, add_special_tokens=False).ids
        forged = [i for i in ids if i not in self._id_of and i in self._control_ids]
        if forged:
            raise ValueError(
                f"a message holds the text of control token id {forged[0]}, which this tokenizer cannot encode as "
                "plain text; remove it from the message."
            )
        return [self._id_of.get(i, i) for i in ids]


@contextmanager
def _characters_of(text: str) -> Iterator[None]:
    """ValueError where encoding failed for what is no character; Python's texts may hold such, a line's may not."""
    try:
        yield
    except TypeError:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds half of a surrogate pair, {text[error.start]!r} at place {error.start}, which is no "
                "character; read the bytes it came from with errors='replace'."
            ) from None
        raise


def truncate_prompt(ids: Sequence[int], truncate_prompt_tokens: int | None) -> list[int]:
    """The last `truncate_prompt_tokens` ids, start token or not; None keeps all."""
    return list(ids) if truncate_prompt_tokens is None else list(ids[-truncate_prompt_tokens:])


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for an empty prompt and for ids the model has no row for."""
    if len(ids) == 0:
        raise ValueError("the prompt has no tokens; give at least one.")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return  # a fifth of the time of looking at each by itself, which many long prompts would wait for
    for at, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"prompt_token_ids[{at}]={token_id!r} is no token id.")
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"prompt_token_ids[{at}]={token_id} is outside the model's vocabulary of {vocab_size} ids; "
                "does the tokenizer belong to this model?"
            )


def _eos_ids(config: dict, generation: dict, hf: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The union of all sources: each file may list one id, several or none, and they disagree in real checkpoints."""
    found: set[int] = set()
    files = {"config.json": config, "generation_config.json": generation, "the tokenizer": {EOS: hf.eos_token_id}}
    for file, said in files.items():
        value = said.get(EOS)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
            raise ValueError(f"{file}: {EOS}={value!r} must be a token id or a list of token ids.")
        found.update(ids)
    return tuple(sorted(found))


def _generation_defaults(generation: dict) -> dict[str, Any]:
    """Sampling fields that generation_config sets; `do_sample: false`, written out, means greedy."""
    defaults = {
        ours: generation[theirs] for theirs, ours in GENERATION_FIELDS.items() if generation.get(theirs) is not None
    }
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _read_json(path: Path) -> dict:
    """An absent file is an empty object."""
    if not is_named(path):
        return {}
    text = read_small(path)
    try:
        value = json.loads(text)
    except ValueError as error:  # both bad JSON and bad UTF-8
        raise ValueError(f"{path} of {len(text)} bytes is not JSON ({error}); fetch it again.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not an object of fields; fetch it again.")
    return value
