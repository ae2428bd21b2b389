"""Which lines of a job are done, and where their records lie. Eighteen bytes a line, whatever the records' size.

Knows journals and numbers of lines. The record of a later run stands over that of an earlier one, so a line has one
record whatever was answered twice.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count
from pathlib import Path

from moe.batch.journal import JournalReader, Place
from moe.batch.lines import BadLine, Line, content_of

OPEN, ANSWERED, FIRST_KIND = 0, 1, 2
"""States of a line. FIRST_KIND + i: it has an error record of the i-th kind."""
OFFSET_BITS = 44
"""Of a place: 16 TiB of one journal, and a million journals."""


def line_digest(line: Line | BadLine) -> int:
    """What tells this line from another with its number: a checksum of all that was read of it."""
    if isinstance(line, Line):
        return zlib.crc32(content_of(line.record)) if line.checksum is None else line.checksum
    return zlib.crc32(f"{line.reason} {line.record!r}".encode("utf-8", "surrogatepass"))


class Ledger:
    """The done lines of a job by number. `seen`: lines of the input so far; of those, `kept` were done before."""

    def __init__(self) -> None:
        self.seen = self.kept = 0
        self._kind_names: list[str] = []
        self._states = bytearray()
        self._in_input = bytearray()
        self._digests = array("I")
        self._places = array("Q")
        self._sizes = array("I")

    @property
    def num_done(self) -> int:
        return len(self._states) - self._states.count(OPEN)

    @property
    def num_failed(self) -> int:
        return self.num_done - self._states.count(ANSWERED)

    @property
    def kinds(self) -> Counter[str]:
        """Error records by kind."""
        return Counter({name: self._states.count(FIRST_KIND + i) for i, name in enumerate(self._kind_names)})

    def read(self, journals: Sequence[Path]) -> int:
        """Take in what journals hold, given from the earliest run to the latest. Returns how many lines are damaged."""
        damaged = 0
        for index, path in enumerate(journals):
            reader = JournalReader(path)
            for entry in reader:
                number = entry.number
                if number >= len(self._states):
                    self._grow(number)
                self._states[number] = ANSWERED if not entry.failed else self._state_of(entry.kind)
                self._digests[number] = entry.digest
                self._places[number] = index << OFFSET_BITS | entry.offset
                self._sizes[number] = entry.size
            damaged += reader.damaged
        return damaged

    def forget_failed(self) -> None:
        """Lines with an error record are open again."""
        self._states = self._states.translate(bytes((OPEN, ANSWERED)).ljust(256, bytes((OPEN,))))

    def pending(self, lines: Iterable[Line | BadLine]) -> Iterator[Line | BadLine]:
        """Those lines that are not done, in the same order. One that is done, but read otherwise, is not."""
        for line in lines:
            number = line.number
            self.seen += 1
            if number >= len(self._in_input):
                self._in_input.extend(bytes(max(1024, number + 1 - len(self._in_input))))
            self._in_input[number] = 1
            if number < len(self._states) and self._states[number] != OPEN:
                if self._digests[number] == line_digest(line):
                    self.kept += 1
                    continue
                self._states[number] = OPEN
            yield line

    def places(self, seen: Ledger) -> Iterator[Place]:
        """Of each record in the order of the input. `seen`: the ledger that has read the input: lines that it did not
        meet are left out."""
        return self._places_of(map(min, self._states, seen._in_input))

    def failed_of(self, seen: Ledger) -> int:
        """How many of the lines that `seen` has met in the input have an error record."""
        return sum(wanted and state >= FIRST_KIND for state, wanted in zip(self._states, seen._in_input))

    def failed_places(self) -> Iterator[Place]:
        """Of the error records that stand, in the order of the input."""
        return self._places_of(state >= FIRST_KIND for state in self._states)

    def kind_of(self, number: int) -> str:
        """Of the error record of a line."""
        return self._kind_names[self._states[number] - FIRST_KIND]

    def for_ranks(self) -> Ledger:
        """What other ranks need of it: which lines are done, not where."""
        other = Ledger()
        other._kind_names, other._states, other._digests = self._kind_names, self._states, self._digests
        return other

    def _places_of(self, wanted: Iterable[int]) -> Iterator[Place]:
        """Of the lines for which `wanted`, in the order of their numbers, says so."""
        mask = (1 << OFFSET_BITS) - 1
        for number in compress(count(), wanted):
            place = self._places[number]
            yield number, place >> OFFSET_BITS, place & mask, self._sizes[number]

    def _grow(self, number: int) -> None:
        """Make room for a line of that number."""
        more = max(1024, number + 1 - len(self._states), len(self._states) // 8)
        self._states.extend(bytes(more))
        for numbers in (self._digests, self._places, self._sizes):
            numbers.frombytes(bytes(more * numbers.itemsize))

    def _state_of(self, kind: str) -> int:
        if kind not in self._kind_names:
            self._kind_names.append(kind)
        return FIRST_KIND + self._kind_names.index(kind)
