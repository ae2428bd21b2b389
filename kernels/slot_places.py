"""Which expert slot is in which place on the device, decided there: what a call asks for, what comes, what gives way.

Knows slots, places, rows and how often each slot was asked for; knows no weights. A layer has S slots, whose bundles
lie in host memory, and G places for them. All that is known of a layer is in one `Places`. Before a call, and in it:

    guess_ahead    what the call will likely ask for is listed, to be copied (fetch_bundles.py) while others compute
    place_slots    slots with rows are hits, or misses that take the places least likely asked for: a list of copies,
                   and the rows of each place. Where more slots have rows than there are places, the others have their
                   turn in further rounds, with first=False

What was guessed and is not asked for is called off: a copy that has not begun gives its place back to the former slot,
one half done leaves it empty. With f the moving share of steps that asked for a slot, and a the moving share of guesses
that came true, a slot is expected with a + (1 - a) f where it was guessed and (1 - a) f elsewhere, with f where nothing
was. It is worth a copy ahead where that is above one half: a wrong guess costs what a right one saves.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportOptionalOperand=false

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from kernels.checks import assert_dtype, assert_same_device, assert_shape, next_power_of_2, uses_triton

DECAY = 0.98
"""Of the moving shares, each step: half of their weight lies on the last 34 steps."""
FETCH_FROM = 0.5

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

_DECAY, _FETCH_FROM = tl.constexpr(DECAY), tl.constexpr(FETCH_FROM)
_HEADER, _PLACE_PARTS = tl.constexpr(HEADER), tl.constexpr(len(BY_PLACE))
_PLACED, _ASKED = tl.constexpr(STAMPS_AT), tl.constexpr(STAMPS_AT + STAMPS.index("ahead_asked"))
_STEPS = tl.constexpr(1 << 20)  # of what is expected, in a key to sort by; its last bits are a slot or place
_BITS, _KEY = tl.constexpr(10), tl.constexpr((1 << 10) - 1)
_LAST = tl.constexpr(2**31 - 1)


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


def place_slots(places: Places, offsets_S1: Tensor, *, pieces: int, first: bool) -> None:
    """A round of a call whose slots have the rows from offsets[s] to offsets[s + 1]: fills the list of copies and the
    ranges. Every place whose slot has no turn in this round has an empty range, or none of its rows.

    `pieces`: of a bundle, all of which have come when it is there. `place_slots_reference` is the definition.
    """
    assert_shape("offsets_S1", offsets_S1, (places.num_slots + 1,))
    assert_dtype("offsets_S1", offsets_S1, torch.int32)
    assert_same_device(places.numbers, offsets_S1=offsets_S1)
    run = place_slots_triton if uses_triton(offsets_S1) else place_slots_reference
    run(places, offsets_S1, pieces=pieces, first=first)


def guess_ahead(places: Places, expert_ids: Tensor, last_1: Tensor | None = None) -> None:
    """The next call will ask for these logical experts [X, K], of which ids of -1 mean nothing: fills the list of
    copies ahead. `last_1` int32 [1]: rows X from it on mean nothing. `guess_ahead_reference` is the definition."""
    assert_shape("expert_ids", expert_ids, (None, None))
    assert_dtype("expert_ids", expert_ids, torch.int32)
    assert expert_ids.is_contiguous(), f"expert_ids has strides {expert_ids.stride()}"
    assert_same_device(places.numbers, expert_ids=expert_ids, last_1=last_1)
    (guess_ahead_triton if uses_triton(expert_ids) else guess_ahead_reference)(places, expert_ids, last_1)


# One program each, for a layer. numbers_ptr int32, shares_ptr fp32, counts_ptr int64: see `Places`; offsets_ptr int32
# [S + 1]; ids_ptr int32 [num_ids], TOP_K a row; last_ptr int32 [1] or None.
# Slots and places come as whole tiles, BLOCK_S and BLOCK_G long, of which those past S and G are masked. What a tile
# of one kind wrote is read by one of the other behind a barrier.


@triton.jit
def _count(ptr, amount):
    tl.store(ptr, tl.load(ptr) + amount)


@triton.jit
def _add_up(counts_ptr):
    """The times of the call before, by its stamps, which are set to zero; nothing if that is done."""
    stamps_ptr = counts_ptr + _PLACED
    placed, begun, ended = tl.load(stamps_ptr), tl.load(stamps_ptr + 1), tl.load(stamps_ptr + 2)
    asked, ahead_begun, ahead_ended = tl.load(stamps_ptr + 3), tl.load(stamps_ptr + 4), tl.load(stamps_ptr + 5)
    if placed > 0:
        times_ptr = counts_ptr + _PLACED - 5
        own = tl.where(ended > 0, ended - begun, 0)
        ahead = tl.where(ahead_ended > 0, ahead_ended - ahead_begun, 0)
        rest = max(ahead_ended - placed, 0)
        waited = tl.where(ended > 0, ended - max(placed, ahead_ended), 0)
        _count(times_ptr, own + ahead)
        _count(times_ptr + 1, rest + max(waited, 0))
        _count(times_ptr + 2, own + max(ahead - max(placed - asked, 0), 0))
        start = tl.where(ahead > 0, ahead_begun, begun)
        if (tl.load(times_ptr + 3) == 0) & (own + ahead > 0):
            tl.store(times_ptr + 3, start)
        tl.store(times_ptr + 4, max(tl.load(times_ptr + 4), max(ended, ahead_ended)))
        tl.store(stamps_ptr + tl.arange(0, 8), tl.zeros((8,), tl.int64), mask=tl.arange(0, 8) < 6)


@triton.jit
def _judge_guesses(
    offsets_ptr, numbers_ptr, counts_ptr, pieces, S: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Calls off what was guessed and has no rows, as far as that has not come."""
    slot_at_ptr, j = numbers_ptr + _HEADER, tl.arange(0, BLOCK_G)
    ahead_ptr = slot_at_ptr + G + j
    place_of_ptr = slot_at_ptr + (_PLACE_PARTS + 2) * G
    listed = j < tl.load(numbers_ptr + 1)
    slot = tl.load(ahead_ptr, mask=listed, other=0)
    place = tl.load(ahead_ptr + G, mask=listed, other=0)
    former = tl.load(ahead_ptr + 2 * G, mask=listed, other=-1)
    used = listed & (tl.load(offsets_ptr + slot + 1) > tl.load(offsets_ptr + slot))
    vain = listed & (used == 0)
    there = tl.load(ahead_ptr + 5 * G, mask=listed, other=0, volatile=True) >= pieces
    # One step in which it is seen whether the copy has begun, and after which it will not.
    state = tl.atomic_max(ahead_ptr + 4 * G, tl.full((BLOCK_G,), 2, tl.int32), mask=vain)
    never = vain & (state == 0)
    lost = never | (vain & (there == 0))
    tl.store(place_of_ptr + slot, -1, mask=lost)
    tl.store(slot_at_ptr + place, tl.where(never, former, -1), mask=lost)
    tl.store(place_of_ptr + former, place, mask=never & (former >= 0))
    _count(counts_ptr + 2, tl.sum(used.to(tl.int32), axis=0))
    _count(counts_ptr + 3, tl.sum((vain & (state > 0)).to(tl.int32), axis=0))
    _count(counts_ptr + 7, tl.sum((used | (vain & there)).to(tl.int32), axis=0))
    tl.store(numbers_ptr + 2, 0)


@triton.jit
def _place_slots_kernel(
    offsets_ptr,
    numbers_ptr,
    shares_ptr,
    counts_ptr,
    pieces,
    S: tl.constexpr,
    G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    FIRST: tl.constexpr,
    TIMED: tl.constexpr,
):
    if TIMED:
        _add_up(counts_ptr)
    slot_at_ptr = numbers_ptr + _HEADER
    fetch_ptr, ranges_ptr = slot_at_ptr + 7 * G, slot_at_ptr + _PLACE_PARTS * G
    place_of_ptr = ranges_ptr + 2 * G
    waiting_ptr, guessed_ptr, row_of_ptr = place_of_ptr + S, place_of_ptr + 2 * S, place_of_ptr + 3 * S
    s, p = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_G)
    in_s, in_p = s < S, p < G
    if FIRST:
        if tl.load(numbers_ptr + 2) != 0:
            _judge_guesses(offsets_ptr, numbers_ptr, counts_ptr, pieces, S, G, BLOCK_G)
        tl.debug_barrier()
        start = tl.load(offsets_ptr + s, mask=in_s, other=0)
        needed = tl.load(offsets_ptr + s + 1, mask=in_s, other=0) > start
    else:
        needed = tl.load(waiting_ptr + s, mask=in_s, other=0) != 0
    miss = needed & (tl.load(place_of_ptr + s, mask=in_s, other=0) < 0)
    num_misses = tl.sum(miss.to(tl.int32), axis=0)
    if FIRST:
        guessed = tl.load(guessed_ptr + s, mask=in_s, other=0) != 0
        num_guessed, num_right = tl.sum(guessed.to(tl.int32), axis=0), tl.sum((guessed & needed).to(tl.int32), axis=0)
        if num_guessed > 0:
            right = num_right.to(tl.float32) / num_guessed.to(tl.float32)
            tl.store(shares_ptr + S, tl.load(shares_ptr + S) * _DECAY + right * (1 - _DECAY))
        share = tl.load(shares_ptr + s, mask=in_s, other=0.0) * _DECAY + needed.to(tl.float32) * (1 - _DECAY)
        tl.store(shares_ptr + s, share, mask=in_s)
        tl.store(guessed_ptr + s, 0, mask=in_s)
        _count(counts_ptr, tl.sum(needed.to(tl.int32), axis=0) - num_misses)
        _count(counts_ptr + 1, num_misses)
        _count(counts_ptr + 4, num_right)
        _count(counts_ptr + 5, num_guessed)
    tl.debug_barrier()

    # Places in the order in which they are best given up, empty ones first.
    slot = tl.load(slot_at_ptr + p, mask=in_p, other=-1)
    held = slot >= 0
    if FIRST:
        begin = tl.load(offsets_ptr + slot, mask=held, other=0)
        stays = tl.load(offsets_ptr + slot + 1, mask=held, other=0) > begin
    else:
        stays = tl.load(waiting_ptr + slot, mask=held, other=0) != 0
    expected = (tl.load(shares_ptr + slot, mask=held, other=0.0) * _STEPS).to(tl.int32)
    key = tl.where(held, expected + 1, 0) << _BITS
    key = tl.sort(tl.where(in_p & (stays == 0), key | p, _LAST))
    num = min(num_misses, tl.sum((key < _LAST).to(tl.int32), axis=0))
    taken, place = p < num, key & _KEY
    former = tl.load(slot_at_ptr + place, mask=taken, other=-1)
    tl.store(fetch_ptr + G + p, place, mask=taken)
    tl.store(place_of_ptr + former, -1, mask=former >= 0)
    tl.store(numbers_ptr, num)
    _count(counts_ptr + 6, num)
    tl.debug_barrier()

    turn = tl.cumsum(miss.to(tl.int32), axis=0) - 1
    comes = miss & (turn < num)
    to = tl.load(fetch_ptr + G + turn, mask=comes, other=0)
    row = tl.load(row_of_ptr + s, mask=comes, other=0)
    tl.store(slot_at_ptr + to, s, mask=comes)
    tl.store(place_of_ptr + s, to, mask=comes)
    tl.store(fetch_ptr + turn, row, mask=comes)
    tl.debug_barrier()

    slot = tl.load(slot_at_ptr + p, mask=in_p, other=-1)
    has_turn = slot >= 0
    if not FIRST:
        has_turn = has_turn & (tl.load(waiting_ptr + slot, mask=has_turn, other=0) != 0)
    tl.store(ranges_ptr + 2 * p, tl.load(offsets_ptr + slot, mask=has_turn, other=0), mask=in_p)
    tl.store(ranges_ptr + 2 * p + 1, tl.load(offsets_ptr + slot + 1, mask=has_turn, other=0), mask=in_p)
    tl.debug_barrier()
    tl.store(waiting_ptr + s, (miss & (turn >= num)).to(tl.int32), mask=in_s)
    if TIMED:
        tl.store(counts_ptr + _PLACED, globaltimer())


@triton.jit
def _guess_ahead_kernel(
    ids_ptr,
    last_ptr,
    numbers_ptr,
    shares_ptr,
    counts_ptr,
    num_ids,
    S: tl.constexpr,
    G: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TIMED: tl.constexpr,
):
    if TIMED:
        _add_up(counts_ptr)
    slot_at_ptr, p, s = numbers_ptr + _HEADER, tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    ahead_ptr = slot_at_ptr + G
    place_of_ptr = slot_at_ptr + (_PLACE_PARTS + 2) * G
    guessed_ptr, row_of_ptr, expert_of_ptr = place_of_ptr + 2 * S, place_of_ptr + 3 * S, place_of_ptr + 4 * S
    in_s, in_p = s < S, p < G
    if tl.load(numbers_ptr + 2) != 0:  # the call that they were for never came
        num_before = tl.load(numbers_ptr + 1)
        _count(counts_ptr + 3, num_before)
        _count(counts_ptr + 7, num_before)
    if last_ptr is not None:
        num_ids = min(num_ids, tl.load(last_ptr) * TOP_K)
    expert = tl.load(expert_of_ptr + s, mask=in_s, other=-2)
    guessed = tl.zeros((BLOCK_S,), tl.int32)
    i = tl.arange(0, 32)
    for at in range(0, num_ids, 32):
        ids = tl.load(ids_ptr + at + i, mask=at + i < num_ids, other=-1)
        guessed = guessed | tl.max((expert[:, None] == ids[None, :]).to(tl.int32), axis=1)
    tl.store(guessed_ptr + s, guessed, mask=in_s)
    trust = tl.where(tl.max(guessed, axis=0) > 0, tl.load(shares_ptr + S), 0.0)
    expected = tl.where(guessed != 0, trust, 0.0) + (1 - trust) * tl.load(shares_ptr + s, mask=in_s, other=0.0)
    missing = in_s & (expected > _FETCH_FROM) & (tl.load(place_of_ptr + s, mask=in_s, other=0) < 0)
    unlikely = _STEPS - (expected * _STEPS).to(tl.int32)
    order = tl.sort(tl.where(missing, (unlikely << _BITS) | s, _LAST)) & _KEY
    tl.debug_barrier()

    slot = tl.load(slot_at_ptr + p, mask=in_p, other=-1)
    held = slot >= 0
    there = tl.load(guessed_ptr + slot, mask=held, other=0)
    expected = tl.where(there != 0, trust, 0.0) + (1 - trust) * tl.load(shares_ptr + slot, mask=held, other=0.0)
    key = tl.where(held, (expected * _STEPS).to(tl.int32) + 1, 0) << _BITS
    key = tl.sort(tl.where(in_p & ((expected <= _FETCH_FROM) | (held == 0)), key | p, _LAST))
    num = min(tl.sum(missing.to(tl.int32), axis=0), tl.sum((key < _LAST).to(tl.int32), axis=0))
    taken, place = p < num, key & _KEY
    former = tl.load(slot_at_ptr + place, mask=taken, other=-1)
    tl.store(ahead_ptr + s, order, mask=s < num)
    tl.store(ahead_ptr + G + p, place, mask=taken)
    tl.store(ahead_ptr + 2 * G + p, former, mask=taken)
    tl.store(ahead_ptr + 4 * G + p, 0, mask=taken)
    tl.store(ahead_ptr + 5 * G + p, 0, mask=taken)
    tl.store(place_of_ptr + former, -1, mask=former >= 0)
    tl.debug_barrier()
    slot = tl.load(ahead_ptr + p, mask=taken, other=0)
    tl.store(slot_at_ptr + place, slot, mask=taken)
    tl.store(place_of_ptr + slot, place, mask=taken)
    tl.store(ahead_ptr + 3 * G + p, tl.load(row_of_ptr + slot, mask=taken, other=0), mask=taken)
    tl.store(numbers_ptr + 1, num)
    tl.store(numbers_ptr + 2, 1)
    if TIMED:
        tl.store(counts_ptr + _ASKED, globaltimer())


def place_slots_triton(places: Places, offsets_S1: Tensor, *, pieces: int, first: bool) -> None:
    """`place_slots` as one launch."""
    _place_slots_kernel[(1,)](
        offsets_S1,
        places.numbers,
        places.shares_S1,
        places.counts,
        pieces,
        **_sizes(places, FIRST=first),
    )


def guess_ahead_triton(places: Places, expert_ids: Tensor, last_1: Tensor | None) -> None:
    """`guess_ahead` as one launch."""
    _guess_ahead_kernel[(1,)](
        expert_ids,
        last_1,
        places.numbers,
        places.shares_S1,
        places.counts,
        expert_ids.numel(),
        **_sizes(places, TOP_K=expert_ids.shape[1]),
    )


def _sizes(places: Places, **others: Any) -> dict[str, Any]:
    S, G = places.num_slots, places.num_places
    assert max(S, G) < 1 << _BITS.value, f"{S} slots and {G} places: a key has room for {1 << _BITS.value}"
    blocks = {"BLOCK_S": max(16, next_power_of_2(S)), "BLOCK_G": max(16, next_power_of_2(G))}
    return {"S": S, "G": G, "TIMED": places.numbers.is_cuda, "num_warps": 4} | blocks | others


def place_slots_reference(places: Places, offsets_S1: Tensor, *, pieces: int, first: bool) -> None:
    """The definition, one slot after another."""
    slot_at, place_of, waiting = places.part("slot_at"), places.part("place_of"), places.part("waiting")
    guessed, shares_S1, counts = places.part("guessed"), places.shares_S1, places.counts
    ends = offsets_S1.tolist()
    has_rows = [start < end for start, end in pairwise(ends)]
    if first and places.numbers[2]:
        _judge_guesses_reference(places, has_rows, pieces)
    needed = torch.tensor(has_rows) if first else waiting != 0
    misses = (needed & (place_of < 0)).nonzero()[:, 0].tolist()
    if first:
        if guessed.any():
            right = needed[guessed != 0].float().mean()
            shares_S1[-1] = DECAY * shares_S1[-1] + (1 - DECAY) * right
        shares_S1[:-1] = DECAY * shares_S1[:-1] + (1 - DECAY) * needed.float()
        num_right = int((needed & (guessed != 0)).sum())
        counts[:6] += torch.tensor([int(needed.sum()) - len(misses), len(misses), 0, 0, num_right, int(guessed.sum())])
        guessed.zero_()
    free = _by_expectation(slot_at.tolist(), shares_S1[:-1], [not each for each in needed.tolist()])
    pairs = list(zip(misses, free))
    for number, (slot, place) in enumerate(pairs):
        if slot_at[place] >= 0:
            place_of[slot_at[place]] = -1
        slot_at[place], place_of[slot] = slot, place
        places.part("fetch_row")[number], places.part("fetch_place")[number] = places.part("row_of")[slot], place
    places.numbers[0] = len(pairs)
    counts[6] += len(pairs)
    for place, slot in enumerate(slot_at.tolist()):
        has_turn = slot >= 0 and (first or bool(waiting[slot]))
        places.part("ranges")[place] = offsets_S1[slot : slot + 2] if has_turn else 0
    waiting.zero_()
    waiting[misses[len(pairs) :]] = 1


def _judge_guesses_reference(places: Places, has_rows: list[bool], pieces: int) -> None:
    slot_at, place_of = places.part("slot_at"), places.part("place_of")
    state, counts = places.part("ahead_state"), places.counts
    num_listed = int(places.numbers[1])
    lists = [places.part(f"ahead_{name}")[:num_listed].tolist() for name in ("slot", "place", "former", "pieces")]
    for number, (slot, place, former, come) in enumerate(zip(*lists)):
        begun = bool(state[number])
        counts[7] += has_rows[slot] or come >= pieces
        counts[2] += has_rows[slot]
        if has_rows[slot]:
            continue
        counts[3] += begun
        state[number] = 2
        if not begun or come < pieces:
            place_of[slot] = -1
            slot_at[place] = -1 if begun else former
            if not begun and former >= 0:
                place_of[former] = place
    places.numbers[2] = 0


def guess_ahead_reference(places: Places, expert_ids: Tensor, last_1: Tensor | None) -> None:
    """The definition, one slot after another."""
    slot_at, place_of, numbers = places.part("slot_at"), places.part("place_of"), places.numbers
    if numbers[2]:
        places.counts[[3, 7]] += numbers[1]
    ids = expert_ids if last_1 is None else expert_ids[: int(last_1)]
    guessed = torch.isin(places.part("expert_of"), ids)
    places.part("guessed").copy_(guessed)
    trust = places.shares_S1[-1] if guessed.any() else torch.zeros(())
    expected_S = torch.where(guessed, trust, 0.0) + (1 - trust) * places.shares_S1[:-1]
    steps = (expected_S * _STEPS.value).int().tolist()
    missing = ((expected_S > FETCH_FROM) & (place_of < 0)).nonzero()[:, 0].tolist()
    free = _by_expectation(slot_at.tolist(), expected_S, (expected_S <= FETCH_FROM).tolist())
    pairs = list(zip(sorted(missing, key=lambda slot: (-steps[slot], slot)), free))
    for number, (slot, place) in enumerate(pairs):
        former = int(slot_at[place])
        if former >= 0:
            place_of[former] = -1
        slot_at[place], place_of[slot] = slot, place
        row = int(places.part("row_of")[slot])
        for name, value in zip(BY_PLACE[1:7], (slot, place, former, row, 0, 0)):
            places.part(name)[number] = value
    numbers[1], numbers[2] = len(pairs), 1


def _by_expectation(slot_at: list[int], expected_S: Tensor, may_go: list[bool]) -> list[int]:
    """Places that may be taken: empty ones, then those whose slots are expected least."""
    steps = (expected_S * _STEPS.value).int().tolist()
    keys = [(steps[slot] if slot >= 0 else -1, place) for place, slot in enumerate(slot_at) if slot < 0 or may_go[slot]]
    return [place for _, place in sorted(keys)]
