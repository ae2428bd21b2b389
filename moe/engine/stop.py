"""Where generated text ends: stop strings inside tokens and across them, and the stream of text that may be shown.

Knows text, characters and a detokenizer; knows nothing of vocabularies, prompts or the engine. Only generated text is
pushed, so a stop string that would begin in the prompt is never found.

Which match counts, whatever pieces the text came in: the one that is complete first, reading character by character; of
several that end at the same character the longest, which is the one that starts first. In "ABCDEF", "DE" wins over "E"
(same end), and "D" wins over "DE" (complete one character earlier).

Which ids are kept: every token up to and including the one that completed the stop, although part of its text is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StopMatch:
    """A stop string and where it begins, in characters from the start of the generated text."""

    stop: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.stop)


class StopFinder:
    """Searches text that arrives in pieces; the work for a piece does not grow with the text before it."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere; SamplingParams rejects it"
        self._stops = tuple(stops)
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._tail = ""  # the last `_keep` characters: what a later match can still begin in
        self._seen = 0

    def push(self, text: str, *, armed: bool = True) -> StopMatch | None:
        """The match that counts and ends inside this piece, or None. A piece that is not armed can only begin one."""
        match = self.peek(text) if armed else None
        window = self._tail + text
        self._seen += len(text)
        self._tail = window[max(0, len(window) - self._keep) :] if self._keep else ""
        return match

    def peek(self, text: str) -> StopMatch | None:
        """What `push` would find."""
        window = self._tail + text
        base, old = self._seen - len(self._tail), len(self._tail)
        matches = []
        for stop in self._stops:
            at = window.find(stop, max(0, old - len(stop) + 1))  # ends past the old text
            if at >= 0:
                matches.append((at + len(stop), at, stop))
        if not matches:
            return None
        _, at, stop = min(matches)
        return StopMatch(stop=stop, start=base + at)

    def num_held(self) -> int:
        """How many of the last characters are the beginning of a stop string, and so must not be shown yet."""
        for size in range(len(self._tail), 0, -1):
            ending = self._tail[len(self._tail) - size :]
            if any(len(stop) > size and stop.startswith(ending) for stop in self._stops):
                return size
        return 0


class TokenDecoder(Protocol):
    """What TextStream asks of a detokenizer."""

    @property
    def tentative(self) -> str: ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """Tokens in, showable text out, and the stop string that ended it.

    `push` and `finish` return the text that became showable; joined they are `text`. Once `match` is set the text is
    final and nothing more may be pushed. The token that ends a sequence by its id (EOS, stop_token_ids) is pushed only
    if its text is wanted (include_stop_str_in_output).
    """

    def __init__(
        self, decoder: TokenDecoder, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._decoder = decoder
        self._finder = StopFinder(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens  # a stop that is complete earlier does not count
        self._num_tokens = 0
        self._shown: list[str] = []
        self._num_shown = 0
        self._held = ""
        self._finished = False
        self.match: StopMatch | None = None

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token_id: int) -> str:
        assert not self._finished, "a token was pushed after the text had ended"
        self._num_tokens += 1
        piece = self._decoder.push(token_id)
        if self._finder is None:  # nothing is ever held back
            if piece:
                self._shown.append(piece)
            return piece
        return self._accept(piece)

    def finish(self) -> str:
        """The sequence ended for another reason: what was held back is shown (or ends in a stop after all)."""
        if self._finished:
            return ""
        new = self._accept(self._decoder.finish())
        if self.match is None:
            new += self._show(len(self._held))
        self._finished = True
        return new

    def _accept(self, piece: str) -> str:
        self._held += piece
        if self._finder is None:
            return self._show(len(self._held))
        armed = self._num_tokens >= self._min_tokens
        self.match = self._finder.push(piece, armed=armed)
        if self.match is None and armed and (tentative := self._decoder.tentative):
            # If the text ended here it would end so; a stop in it ends the text, which makes it true.
            self.match = self._finder.peek(tentative)
            self._held += tentative if self.match else ""
        if self.match is None:
            return self._show(len(self._held) - self._finder.num_held())
        self._finished = True
        end = self.match.end if self._include_stop else self.match.start
        assert end >= self._num_shown, "part of a stop string had already been shown"
        return self._show(end - self._num_shown)

    def _show(self, num_chars: int) -> str:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        if text:
            self._shown.append(text)
            self._num_shown += len(text)
        return text
