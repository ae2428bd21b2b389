"""Token ids in, text out, one token at a time: the only incremental decoder, used on every path.

Knows the decoder of a `tokenizers` tokenizer; knows nothing of prompts, stops or the engine. The joined text equals
decoding all ids at once, whatever the ids; only text that no later token can change is handed out. The work for a token
does not grow with the number of tokens before it.

Two kinds of decoder exist. *Byte level* (GPT-2, Qwen, DeepSeek, Llama 3): each token is some bytes, the text is their
UTF-8 with invalid parts replaced, so a few bytes may wait for the rest of their character. *Piecewise* (SentencePiece's
"▁", WordPiece): a token's text depends on whether it is the first, so each is decoded after a window of the tokens
before it; and a run of byte-fallback tokens (<0xE2>) is replaced as a whole if any of its bytes is invalid, so a run
waits for the token after it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

import tokenizers
from tokenizers import pre_tokenizers

# A window of a piecewise decoder is cut back to its last token when it is as long as this.
WINDOW_TOKENS = 8


class TokenTexts:
    """What all detokenizers of one tokenizer share: the kind of its decoder and the bytes or text of a token."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        kinds = [part["type"] for part in _parts(decoder)]
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self.special_tokens = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        self._byte_of_char = _byte_of_char() if self.byte_level else {}
        self._bytes: dict[int, bytes] = {}
        self._whole: tuple[dict[int, str | None], dict[int, str | None]] = ({}, {})

    def token(self, token_id: int, *, skip_special_tokens: bool) -> str | None:
        """The token's own string; None if it has no text: an id the tokenizer lacks, or a special token skipped."""
        token = self.backend.id_to_token(token_id)
        return None if token is None or (skip_special_tokens and token in self.special_tokens) else token

    def whole(self, token_id: int, *, skip_special_tokens: bool) -> str | None:
        """The text of a byte-level token whose bytes are whole characters, so that it is the same behind any other
        whole ones; None where they are not. Looked up once a token."""
        known = self._whole[skip_special_tokens]
        if token_id not in known:
            token = self.token(token_id, skip_special_tokens=skip_special_tokens)
            try:
                known[token_id] = "" if token is None else self.bytes_of(token_id, token).decode("utf-8")
            except UnicodeDecodeError:
                known[token_id] = None
        return known[token_id]

    def bytes_of(self, token_id: int, token: str) -> bytes:
        """Bytes of a byte-level token. One with a character outside the byte alphabet stands for its own UTF-8."""
        known = self._bytes.get(token_id)
        if known is None:
            try:
                known = bytes(self._byte_of_char[char] for char in token)
            except KeyError:
                known = token.encode("utf-8")
            self._bytes[token_id] = known
        return known


class Detokenizer:
    """Incremental decoding of one sequence: `push` gives the text that became stable, `finish` what was waiting."""

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool = True) -> None:
        self._texts = texts
        self._skip = skip_special_tokens
        self._decoder = _ByteLevel(texts) if texts.byte_level else _Piecewise(texts)

    def push(self, token_id: int) -> str:
        if self._decoder.stands_alone:
            text = self._texts.whole(token_id, skip_special_tokens=self._skip)
            if text is not None:
                return text
        token = self._texts.token(token_id, skip_special_tokens=self._skip)
        return "" if token is None else self._decoder.push(token_id, token)

    @property
    def tentative(self) -> str:
        """Whole characters after the stable text that hold if the sequence ends here; a later token can change them."""
        return self._decoder.tentative

    def finish(self) -> str:
        return self._decoder.finish()


class _ByteLevel:
    """At most 3 bytes wait: the beginning of a character. `stands_alone`: none do."""

    tentative = ""
    stands_alone = True

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, token: str) -> str:
        text = self._utf8.decode(self._texts.bytes_of(token_id, token))
        self.stands_alone = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        self.stands_alone = True
        return self._utf8.decode(b"", final=True)


class _Piecewise:
    """The window is tokens whose text is handed out, except for a run of byte tokens at its end."""

    stands_alone = False

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were handed out
        self._run = bytearray()  # of the byte tokens at the window's end

    def push(self, token_id: int, token: str) -> str:
        byte = _fallback_byte(token) if self._texts.byte_fallback else None
        self._window.append(token_id)
        if byte is not None:
            self._run.append(byte)
            return ""
        self._run.clear()
        text = self._decode()
        if text.endswith("\ufffd") and not self._texts.byte_fallback:
            return ""  # a decoder that joins bytes in its own way: the rest of a character may follow
        new, self._shown = text[self._shown :], len(text)
        if len(self._window) >= WINDOW_TOKENS and token:
            # A token that is not the first keeps its leading space: the last one is the first of the next window.
            self._window = [token_id]
            self._shown = len(self._decode())
        return new

    @property
    def tentative(self) -> str:
        try:
            return self._run.decode("utf-8")
        except UnicodeDecodeError:
            return ""

    def finish(self) -> str:
        text = self._decode()
        new, self._shown = text[self._shown :], len(text)
        self._run.clear()
        return new

    def _decode(self) -> str:
        return self._texts.backend.decode(self._window, skip_special_tokens=False)


def _parts(decoder: dict) -> Iterator[dict]:
    """The decoders of a (nested) sequence."""
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    elif decoder:
        yield decoder


def _fallback_byte(token: str) -> int | None:
    """<0x0A> is byte 10."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    chars.update({chr(256 + n): byte for n, byte in enumerate(others)})
    assert set(chars) == set(pre_tokenizers.ByteLevel.alphabet()), "the byte alphabet differs from tokenizers' own"
    return chars
