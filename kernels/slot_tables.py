"""What is known on the device of a layer's expert slots: which is where, what is to be copied, what was counted.

Knows how tables lie, and how the times of a call add up; decides nothing. A layer has S slots, whose bundles lie in
host memory, and G places for them. All that is known of it is in one `Places`. Before a call of the layer, and in it:

    slot_guesses.py     what the call will likely ask for is listed, to be copied while others compute
    slot_places.py      slots with rows are hits, or misses that take others' places: a list of copies, rows by place
    fetch_bundles.py    copies what is listed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import next_power_of_2

COUNTS = ("hits", "misses", "fetched_and_used", "fetched_in_vain", "guessed_right", "guessed", "fetched", "ahead")
"""Slots; `fetched`: copied for a call that waited; `ahead`: listed before it and copied whole."""
TIMES = ("busy", "stall", "due", "first", "last")
"""Nanoseconds of the GPU's clock: in which bundles were on their way; in which calls waited for them; what was left of
each list's time when the work between its order and its use was done; of the first list's start and the last one's
end."""
STAMPS = ("placed", "begun", "ended", "ahead_asked", "ahead_begun", "ahead_ended")
"""Of the last call, which is added up when the next one comes."""
STAMPS_AT = len(COUNTS) + len(TIMES)
"""Where they begin among a layer's counts."""

# Numbers of a layer: the lengths of both lists, and whether the one of guesses is to be judged; then
HEADER = 4
BY_PLACE = (
    "slot_at",  # the slot in each place, or -1
    *("ahead_slot", "ahead_place", "ahead_former", "ahead_row"),  # the guessed; whose place it was; row of the bundle
    *("ahead_state", "ahead_pieces"),  # 0 listed, 1 begun, 2 called off; the pieces of its bundle that came
    *("fetch_row", "fetch_place"),  # what a call fetches
)
# start and end of each place's rows, in pairs; then
BY_SLOT = (
    "place_of",  # or -1
    "waiting",  # 1: has rows, and its turn in a further round
    "guessed",  # 1: for the next call
    "row_of",  # of its bundle in host memory
    "expert_of",  # the logical expert behind it, or -2
)

STEPS = tl.constexpr(1 << 20)
"""Of what is expected of a slot, in a key to sort by; the key's last bits are a slot or place."""
BITS, KEY = tl.constexpr(10), tl.constexpr((1 << 10) - 1)
LAST = tl.constexpr(2**31 - 1)
_STAMPS, _TIMES = tl.constexpr(STAMPS_AT), tl.constexpr(len(COUNTS))


@dataclass(frozen=True)
class Places:
    """Of one layer. numbers int32 [numbers_length]; shares fp32 [S + 1], f of each slot and a; counts int64: COUNTS,
    TIMES, STAMPS."""

    numbers: Tensor
    shares_S1: Tensor
    counts: Tensor
    num_slots: int
    num_places: int

    def part(self, name: str) -> Tensor:
        """A view of `numbers`, by the names above; `ranges` int32 [G, 2]."""
        S, G = self.num_slots, self.num_places
        if name in BY_PLACE:
            begin, size = HEADER + BY_PLACE.index(name) * G, G
        elif name == "ranges":
            return self.numbers[HEADER + len(BY_PLACE) * G :][: 2 * G].view(G, 2)
        else:
            begin, size = HEADER + (len(BY_PLACE) + 2) * G + BY_SLOT.index(name) * S, S
        return self.numbers[begin : begin + size]


def numbers_length(num_slots: int, num_places: int) -> int:
    """Of `Places.numbers`."""
    return HEADER + (len(BY_PLACE) + 2) * num_places + len(BY_SLOT) * num_slots


# What programs of one layer share. counts_ptr int64: `Places.counts`.


@triton.jit
def count(ptr, amount):
    tl.store(ptr, tl.load(ptr) + amount)


@triton.jit
def add_up(counts_ptr):
    """The times of the call before, by its stamps, which are set to zero; nothing if that is done."""
    stamps_ptr = counts_ptr + _STAMPS
    placed, begun, ended = tl.load(stamps_ptr), tl.load(stamps_ptr + 1), tl.load(stamps_ptr + 2)
    asked, ahead_begun, ahead_ended = tl.load(stamps_ptr + 3), tl.load(stamps_ptr + 4), tl.load(stamps_ptr + 5)
    if placed > 0:
        times_ptr = counts_ptr + _TIMES
        own = tl.where(ended > 0, ended - begun, 0)
        ahead = tl.where(ahead_ended > 0, ahead_ended - ahead_begun, 0)
        rest = max(ahead_ended - placed, 0)
        waited = tl.where(ended > 0, ended - max(placed, ahead_ended), 0)
        count(times_ptr, own + ahead)
        count(times_ptr + 1, rest + max(waited, 0))
        count(times_ptr + 2, own + max(ahead - max(placed - asked, 0), 0))
        start = tl.where(ahead > 0, ahead_begun, begun)
        if (tl.load(times_ptr + 3) == 0) & (own + ahead > 0):
            tl.store(times_ptr + 3, start)
        tl.store(times_ptr + 4, max(tl.load(times_ptr + 4), max(ended, ahead_ended)))
        tl.store(stamps_ptr + tl.arange(0, 8), tl.zeros((8,), tl.int64), mask=tl.arange(0, 8) < 6)


def launch_options(places: Places, **others: Any) -> dict[str, Any]:
    """Of a kernel that takes a layer's tables in one program."""
    S, G = places.num_slots, places.num_places
    assert max(S, G) < 1 << BITS.value, f"{S} slots and {G} places: a key has room for {1 << BITS.value}"
    blocks = {"BLOCK_S": max(16, next_power_of_2(S)), "BLOCK_G": max(16, next_power_of_2(G))}
    return {"S": S, "G": G, "TIMED": places.numbers.is_cuda, "num_warps": 4} | blocks | others


def by_expectation(slot_at: list[int], expected_S: Tensor, may_go: list[bool]) -> list[int]:
    """Places that may be taken: empty ones, then those whose slots are expected least."""
    steps = (expected_S * STEPS.value).int().tolist()
    keys = [(steps[slot] if slot >= 0 else -1, place) for place, slot in enumerate(slot_at) if slot < 0 or may_go[slot]]
    return [place for _, place in sorted(keys)]
