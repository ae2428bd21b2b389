"""Incremental decoding against decoding all ids at once, for random ids of byte-level and piecewise tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from moe.engine.detokenizer import WINDOW_TOKENS, Detokenizer, TokenTexts

PIECES = ["▁", "▁▁", "▁a", "a", "▁b", "é", "€", "▁日本", "😀", ".", "\ufffd", "▁the▁", "x▁", ""]
SPECIAL = ["<s>", "</s>", "<|end|>", "<\uff5cUser\uff5c>"]


def byte_level() -> Tokenizer:
    """All 256 bytes, some tokens of parts of characters, of two characters and a bit, added tokens of both kinds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: at for at, char in enumerate(alphabet)}
    merges = []
    for left, right in (("Ã", "©"), ("ð", "Ł"), ("Ġ", "t"), ("Ġt", "h"), ("h", "Ã"), ("©", "â")):
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    backend = Tokenizer(BPE(vocab, merges))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("日本", normalized=False), AddedToken("é")])
    return backend


def pieces(decoder: decoders.Decoder | None) -> Tokenizer:
    """SentencePiece-like: pieces with "▁", all byte tokens."""
    tokens = ["<unk>", *PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(WordLevel({token: at for at, token in enumerate(tokens)}, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    return backend


def llama(strip: bool) -> decoders.Decoder:
    parts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)


BACKENDS = {
    "byte-level": byte_level(),
    "llama-strips-the-first-space": pieces(llama(strip=True)),
    "gemma-keeps-it": pieces(llama(strip=False)),
    "metaspace-first": pieces(decoders.Metaspace("▁", "first")),
    "metaspace-never": pieces(decoders.Metaspace("▁", "never")),
    "word-piece": pieces(decoders.WordPiece("##", cleanup=False)),
}
TEXTS = {name: TokenTexts(backend) for name, backend in BACKENDS.items()}


def run(texts: TokenTexts, ids: Sequence[int], *, skip: bool) -> tuple[list[str], str]:
    """What each push gave, and what finish gave."""
    detokenizer = Detokenizer(texts, skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.finish()


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_joined_text_is_that_of_decoding_all_at_once(name: str, data: st.DataObject) -> None:
    backend, texts = BACKENDS[name], TEXTS[name]
    size = backend.get_vocab_size()
    some = st.integers(0, size + 1)  # two ids that no token has
    often = st.sampled_from([backend.token_to_id(token) for token in SPECIAL] + list(range(1, min(size, 16))))
    ids = data.draw(st.lists(st.one_of(some, often), max_size=40))
    skip = data.draw(st.booleans())
    shown, rest = run(texts, ids, skip=skip)
    want = backend.decode(ids, skip_special_tokens=skip)
    assert "".join(shown) + rest == want
    # Nothing was shown too early: at every point it begins the final text.
    assert all(want.startswith("".join(shown[:at])) for at in range(len(shown)))


@pytest.mark.parametrize("text", ["hállo wörld", "日本語 😀👩‍👩‍👧 x", "  two  spaces\n\ttab", "\x00\x7f"])
def test_whole_characters_are_shown_at_once_and_parts_never(text: str) -> None:
    ids = BACKENDS["byte-level"].encode(text).ids
    shown, rest = run(TEXTS["byte-level"], ids, skip=True)
    assert "".join(shown) == text and rest == ""
    assert "\ufffd" not in "".join(shown)


def test_an_emoji_of_four_byte_tokens_waits_for_the_last() -> None:
    byte_of = TEXTS["byte-level"].backend.token_to_id
    ids = [byte_of(char) for char in "ðŁĺĢ"]
    shown, _ = run(TEXTS["byte-level"], ids, skip=True)
    assert shown == ["", "", "", "😀"]
    assert run(TEXTS["byte-level"], ids[:3], skip=True) == (["", "", ""], "\ufffd")


def test_byte_fallback_run_waits_for_its_end_but_is_known_tentatively() -> None:
    texts = TEXTS["llama-strips-the-first-space"]
    ids = [texts.backend.token_to_id(token) for token in ("▁a", "<0xC3>", "<0xA9>", "<0xFF>", "a")]
    detokenizer = Detokenizer(texts)
    seen = []
    for token_id in ids:
        seen.append((detokenizer.push(token_id), detokenizer.tentative))
    # The byte FF turns the whole run invalid, also the "é" that was complete.
    assert seen == [("a", ""), ("", ""), ("", "é"), ("", ""), ("\ufffd\ufffd\ufffda", "")]


def test_leading_space_is_stripped_once() -> None:
    texts = TEXTS["llama-strips-the-first-space"]
    ids = [texts.backend.token_to_id(token) for token in ("<s>", "▁", "▁a", "▁b")]
    assert run(texts, ids, skip=True) == (["", "", " a", " b"], "")


class CountingBackend:
    """Counts the ids that are decoded."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str):
        return getattr(self._backend, name)


def test_work_for_a_token_does_not_grow_with_the_text() -> None:
    backend = BACKENDS["llama-strips-the-first-space"]
    texts = TokenTexts(backend)
    counting = CountingBackend(backend)
    texts.backend = counting  # pyright: ignore[reportAttributeAccessIssue]
    num_tokens = 2000
    run(texts, [backend.token_to_id("▁a")] * num_tokens, skip=True)
    assert counting.num_decoded <= num_tokens * (WINDOW_TOKENS + 1)


def test_two_streams_of_one_tokenizer_do_not_mix() -> None:
    texts = TEXTS["byte-level"]
    first, second = Detokenizer(texts), Detokenizer(texts)
    byte_of = texts.backend.token_to_id
    assert first.push(byte_of("Ã")) == "" and second.push(byte_of("a")) == "a"
    assert first.push(byte_of("©")) == "é"


def test_decoder_kind_is_read_from_the_tokenizer() -> None:
    assert TEXTS["byte-level"].byte_level and not TEXTS["gemma-keeps-it"].byte_level
    assert TEXTS["gemma-keeps-it"].byte_fallback and not TEXTS["metaspace-first"].byte_fallback
    assert json.loads(BACKENDS["byte-level"].to_str())["decoder"]["type"] == "ByteLevel"
