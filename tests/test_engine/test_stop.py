"""Stop strings inside tokens and across them, and what of the text may be shown when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel

from moe.engine.detokenizer import Detokenizer, TokenTexts
from moe.engine.stop import StopFinder, StopMatch, TextStream


class Pieces:
    """A decoder whose token i is pieces[i]."""

    tentative = ""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return ""


def stream_of(pieces: Sequence[str], stops: Sequence[str], **options) -> tuple[TextStream, list[str], int]:
    """The stream after the pieces up to the stop, what each push showed, and how many tokens were used."""
    stream = TextStream(Pieces(pieces), stops, **options)
    shown: list[str] = []
    for token_id in range(len(pieces)):
        shown.append(stream.push(token_id))
        if stream.match:
            return stream, shown, token_id + 1
    shown.append(stream.finish())
    return stream, shown, len(pieces)


def word_level(words: Sequence[str]) -> TokenTexts:
    """A tokenizer whose tokens are whole words, joined without spaces."""
    backend = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoders.Fuse()
    return TokenTexts(backend)


@pytest.mark.parametrize(("include_stop", "text"), [(False, "ABC"), (True, "ABCDE")])
def test_C19_stop_inside_a_token(include_stop: bool, text: str) -> None:
    """Case C19: token 'DEF', stop ['DE'], forced output A B C DEF."""
    texts = word_level(["A", "B", "C", "DEF"])
    stream = TextStream(Detokenizer(texts), ["DE"], include_stop=include_stop)
    for token_id in range(4):
        stream.push(token_id)
    assert stream.text == text
    assert stream.match == StopMatch("DE", 3)


def test_C19_stop_across_three_tokens_is_never_shown_in_part() -> None:
    stream, shown, used = stream_of(["say E", "N", "D now"], ["END"])
    assert shown == ["say ", "", ""] and stream.text == "say " and used == 3
    stream, shown, _ = stream_of(["say E", "N", "OUGH"], ["END"])
    assert shown == ["say ", "", "ENOUGH", ""] and stream.match is None


def test_C19_stop_that_begins_in_the_prompt_is_not_one() -> None:
    """The prompt ends with 'D'; only the generated 'E', then a whole 'DE', are pushed."""
    stream, _, used = stream_of(["E", "x", "D", "E"], ["DE"])
    assert stream.text == "Ex" and used == 4


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        pytest.param(["AB", "CDEF"], ["E", "CDE"], "AB", "CDE", id="same-end-the-longer"),
        pytest.param(["AB", "CDEF"], ["CDE", "D"], "ABC", "D", id="complete-first"),
        pytest.param(["AB", "CDEF"], ["CD", "CDE"], "AB", "CD", id="one-begins-the-other"),
        pytest.param(["xEF", "DE"], ["DE", "EF"], "x", "EF", id="earliest-in-the-text"),
        pytest.param(["ab", "ab", "ac"], ["abac"], "ab", "abac", id="overlap-with-itself"),
    ],
)
def test_C19_two_stops_the_earliest_in_the_text_wins(pieces, stops, text, stop) -> None:
    for cut in (pieces, list("".join(pieces)), ["".join(pieces)]):
        for order in (stops, stops[::-1]):
            stream, shown, _ = stream_of(cut, order)
            assert stream.text == text == "".join(shown)
            assert stream.match is not None and stream.match.stop == stop


@pytest.mark.parametrize("include_stop", [False, True])
def test_C19_stop_split_over_two_byte_tokens(include_stop: bool) -> None:
    """'é' is the bytes C3 A9: byte-level tokens, and byte-fallback tokens, which could still turn invalid."""
    byte_level = Tokenizer(BPE({"c": 0, "a": 1, "f": 2, "Ã": 3, "©": 4}, []))
    byte_level.decoder = decoders.ByteLevel()
    fallback = Tokenizer(WordLevel({"c": 0, "a": 1, "f": 2, "<0xC3>": 3, "<0xA9>": 4}, unk_token="c"))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for backend in (byte_level, fallback):
        stream = TextStream(Detokenizer(TokenTexts(backend)), ["é"], include_stop=include_stop)
        for token_id in range(5):
            assert stream.match is None
            stream.push(token_id)
        assert stream.match == StopMatch("é", 3)
        assert stream.text == ("café" if include_stop else "caf")


def test_stops_before_min_tokens_do_not_count() -> None:
    stream, _, used = stream_of(["a.", "b.", "c", ".d"], ["."], min_tokens=3)
    assert stream.text == "a.b.c" and used == 4
    stream, _, used = stream_of(["a", "b", "c", "d"], ["bc"], min_tokens=3)  # begun before, complete at the third
    assert stream.text == "a" and used == 3


def test_finish_shows_what_was_held_and_only_once() -> None:
    stream, shown, _ = stream_of(["abc", "EN"], ["END"])
    assert shown == ["abc", "", "EN"] and stream.finish() == "" and stream.text == "abcEN"


def test_a_token_after_the_end_is_our_fault() -> None:
    stream, _, _ = stream_of(["a."], ["."])
    with pytest.raises(AssertionError, match="after the text had ended"):
        stream.push(0)


def first_match(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The rule itself, character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return StopMatch(longest, end - len(longest))
    return None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=10),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_any_cut_gives_the_rules_match_and_leaks_nothing(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    want = first_match(text, stops)
    stream, shown, _ = stream_of(pieces, stops, include_stop=include)
    assert stream.match == want
    final = text if want is None else text[: want.end if include else want.start]
    assert "".join(shown) == stream.text == final
    # What is held back is no more than it must be.
    finder = StopFinder(stops)
    finder.push(text)
    held = finder.num_held()
    assert held == max(
        (n for n in range(len(text) + 1) for s in stops if n < len(s) and text.endswith(s[:n])), default=0
    )
