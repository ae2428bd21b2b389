"""The order in which lines are answered: those that begin alike one after another, the longest work first.

Knows lines and their prompts; knows nothing of tokens, engines or files. Lines are rearranged inside consecutive
windows, bounded by lines and by bytes, and by nothing but what the lines hold: every rank, and a job that is resumed,
sees the same sequence. While one window is handed out the next is read, a line for a line, so no reader waits long.

    file order    a1 b1 c1 a2 b2 c2 a3 ...                  (a, b, c: prompts with a beginning in common)
    prefix        a2 a1 a3 | c1 c2 ... | b1 ...             in a group, and among groups, long answers come first

A beginning in common is computed once while its blocks are in the prefix cache; a long answer that starts last would
keep a GPU busy for itself alone. Groups are nested: a common beginning of two lines inside a larger group keeps them
together there.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from moe.batch.lines import BadLine, InputFault, Line

ORDERS = ("auto", "file", "prefix")
# Characters of one step of a common beginning, about a cache block of 16 tokens; a token id counts for so many.
STEP_CHARS, ID_CHARS = 64, 4
# Lines of a rank's claim: few enough that a short file is dealt out evenly, and enough that a beginning is computed by
# few ranks. Lines make a run where they share so many characters.
RUN_LINES, RUN_CHARS = 8, 4 * STEP_CHARS
UNBOUNDED = 1 << 62  # the work of a line that does not bound its answer

Rank = tuple[int, int, int]
Parts = tuple[Any, ...]  # a tag, then texts, or a tag and one list of ids: equal beginnings mean equal prompts so far


def in_job_order(
    lines: Iterable[Line | BadLine], *, order: str, window: int, window_bytes: int
) -> Iterator[Line | BadLine]:
    """All lines, each once. order="file": as they come, nothing held; "prefix": windows of up to `window` lines and
    about `window_bytes` of records are rearranged, two of them held at a time.

    A fault of the input is raised after the lines before it.
    """
    assert order in ("file", "prefix"), f"order {order!r} was not resolved"
    if order == "file":
        yield from lines
        return
    ahead = _Window(iter(lines), window, window_bytes)
    while batch := ahead.take():
        arranged = _arranged(batch)
        del batch  # handed-out lines are given up one by one
        arranged.reverse()
        while arranged:
            ahead.read()
            yield arranged.pop()
    if ahead.fault is not None:
        raise ahead.fault


def in_runs(lines: Iterable[Line | BadLine], claim: Callable[[], int]) -> Iterator[Line | BadLine]:
    """The lines of those runs whose number (from 0) `claim` gives: it is called when a line is asked for and the run
    before is used up, and gives larger numbers every time.

    A run: up to RUN_LINES neighbours that begin alike, so that one rank computes their beginning, and one alone
    where neighbours differ. Depends on the lines alone.
    """
    wanted, run, length = claim(), -1, 0
    before: Parts = ()
    for line in lines:
        parts = prompt_parts(line)
        if run < 0 or length >= RUN_LINES or shared_chars(before, parts) < RUN_CHARS:
            run, length = run + 1, 0
            if run > wanted:
                wanted = claim()
        before, length = parts, length + 1
        if run == wanted:
            yield line


class _Window:
    """The window that is being filled; how far it goes depends on its lines alone."""

    def __init__(self, lines: Iterator[Line | BadLine], window: int, window_bytes: int) -> None:
        self.fault: InputFault | None = None
        self._lines = lines
        self._window = window
        self._window_bytes = window_bytes
        self._batch: list[Line | BadLine] = []
        self._num_bytes = 0
        self._ended = False

    def read(self) -> bool:
        """Read one more line; False where the window is full or the input at its end."""
        if self._ended or len(self._batch) >= self._window or self._num_bytes >= self._window_bytes:
            return False
        try:
            line = next(self._lines, None)
        except InputFault as error:
            self.fault, line = error, None
        if line is None:
            self._ended = True
            return False
        self._batch.append(line)
        self._num_bytes += line.num_bytes
        return True

    def take(self) -> list[Line | BadLine]:
        """The window, read to its end; the next begins empty."""
        while self.read():
            pass
        batch, self._batch, self._num_bytes = self._batch, [], 0
        return batch


class _Group:
    """Lines that share `depth` steps of their beginnings, as inner groups and single lines, each with its rank: most
    tokens first, then the longest prompt, then the number of its first line. `rank` is the group's own."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.rank: Rank = (0, 0, 0)
        self.members: list[tuple[Rank, _Group | Line]] = []

    def add(self, rank: Rank, member: _Group | Line) -> None:
        first = rank[2] if not self.members else min(self.rank[2], rank[2])
        tokens, chars, _ = min(self.rank, rank) if self.members else rank
        self.rank = (tokens, chars, first)
        self.members.append((rank, member))


def _arranged(batch: Sequence[Line | BadLine]) -> list[Line | BadLine]:
    """The lines of one window: bad ones, which cost nothing, then the groups."""
    arranged: list[Line | BadLine] = [line for line in batch if isinstance(line, BadLine)]
    keyed = [(_parts(line.record), line) for line in batch if isinstance(line, Line)]
    keyed.sort(key=itemgetter(0))
    stack: list[_Group | Line] = [_grouped(keyed)]
    while stack:
        member = stack.pop()
        if isinstance(member, _Group):
            ordered = sorted(member.members, key=itemgetter(0), reverse=True)
            stack += [inner for _, inner in ordered]
        else:
            arranged.append(member)
    return arranged


def _grouped(keyed: Sequence[tuple[Parts, Line]]) -> _Group:
    """The tree of common beginnings of lines sorted by their parts, built from what neighbours share."""
    open_groups = [_Group(0)]  # each inside the one before it
    before: Parts = ()
    waiting: tuple[Rank, Line] | None = None  # for what it shares with the next
    for parts, line in keyed:
        depth = shared_chars(before, parts) // STEP_CHARS
        before = parts
        if waiting is not None:
            if open_groups[-1].depth < depth:
                open_groups.append(_Group(depth))
            open_groups[-1].add(*waiting)
        _close(open_groups, depth)
        waiting = (-_most_tokens(line.record), -_num_chars(parts), line.number), line
    if waiting is not None:
        open_groups[-1].add(*waiting)
    _close(open_groups, 0)
    return open_groups[0]


def _close(open_groups: list[_Group], depth: int) -> None:
    """End the groups that share more than `depth`; the last one left shares at most so much."""
    while open_groups[-1].depth > depth:
        ended = open_groups.pop()
        if open_groups[-1].depth < depth:
            open_groups.append(_Group(depth))
        open_groups[-1].add(ended.rank, ended)


def _most_tokens(record: dict[str, Any]) -> int:
    """The most tokens that the line's answer may have, as far as the line itself says."""
    body = record.get("body")
    fields = body if isinstance(body, dict) else record
    tokens = fields.get("max_completion_tokens", fields.get("max_tokens"))
    return tokens if isinstance(tokens, int) and tokens >= 0 else UNBOUNDED


def prompt_parts(line: Line | BadLine) -> Parts:
    """What the line's prompt consists of, in the order in which a model would read it; nothing of a bad line."""
    return _parts(line.record) if isinstance(line, Line) else ()


def _parts(record: dict[str, Any]) -> Parts:
    body = record.get("body")
    fields = body if isinstance(body, dict) else record
    prompt = fields.get("prompt", fields.get("prompt_token_ids"))
    if isinstance(prompt, str):
        return "text", prompt
    if isinstance(prompt, list) and _are_ids(prompt):
        return "ids", prompt
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return ()
    parts = ["chat", *(_text(fields[name]) for name in ("tools", "chat_template_kwargs") if name in fields)]
    for message in messages:
        if isinstance(message, dict):
            parts += [_text(message.get("role")), _text(message.get("content"))]
        else:
            parts.append(_text(message))
    return tuple(parts)


def _are_ids(prompt: list[Any]) -> bool:
    try:
        array("q", prompt)
    except (TypeError, OverflowError):
        return False
    return True


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def shared_chars(parts: Parts, other: Parts) -> int:
    """How long the common beginning of two prompts is, in characters."""
    if not parts or not other or parts[0] != other[0]:
        return 0
    size = ID_CHARS if parts[0] == "ids" else 1
    total = 0
    for mine, theirs in zip(parts[1:], other[1:]):
        if mine != theirs:
            return total + size * _common(mine, theirs)
        total += size * len(mine)
    return total


def _common(mine: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Length of the common beginning, by halving: comparing slices costs less than a loop over characters."""
    low, high = 0, min(len(mine), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if mine[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _num_chars(parts: Parts) -> int:
    if len(parts) == 2:
        return len(parts[1]) * (ID_CHARS if parts[0] == "ids" else 1)
    return sum(map(len, parts[1:]))
