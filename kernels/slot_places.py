"""Which expert slot is in which place on the device, decided there: what a call asks for, what comes, what gives way.

Knows the tables of slot_tables.py and rows; knows no weights. Slots with rows are hits, or misses that take the places
of those least often asked for: a list of copies, and the rows of each place. Where more slots have rows than there are
places, the others have their turn in further rounds, with first=False. What was guessed (slot_guesses.py) and is not
asked for is called off: a copy that has not begun gives its place back to the former slot, one half done leaves it
empty.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportOptionalOperand=false

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from kernels.checks import assert_dtype, assert_same_device, assert_shape, uses_triton
from kernels.slot_tables import (
    BITS,
    BY_PLACE,
    HEADER,
    KEY,
    LAST,
    STAMPS_AT,
    STEPS,
    Places,
    add_up,
    by_expectation,
    count,
    launch_options,
)

DECAY = 0.98
"""Of the moving shares, each step: half of their weight lies on the last 34 steps."""

_DECAY = tl.constexpr(DECAY)
_HEADER, _PLACE_PARTS, _PLACED = tl.constexpr(HEADER), tl.constexpr(len(BY_PLACE)), tl.constexpr(STAMPS_AT)


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


# One program, for a layer. numbers_ptr int32, shares_ptr fp32, counts_ptr int64: see `Places`; offsets_ptr int32
# [S + 1]. Slots and places come as whole tiles, BLOCK_S and BLOCK_G long, of which those past S and G are masked. What
# a tile of one kind wrote is read by one of the other behind a barrier.


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
    count(counts_ptr + 2, tl.sum(used.to(tl.int32), axis=0))
    count(counts_ptr + 3, tl.sum((vain & (state > 0)).to(tl.int32), axis=0))
    count(counts_ptr + 7, tl.sum((used | (vain & there)).to(tl.int32), axis=0))
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
        add_up(counts_ptr)
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
        count(counts_ptr, tl.sum(needed.to(tl.int32), axis=0) - num_misses)
        count(counts_ptr + 1, num_misses)
        count(counts_ptr + 4, num_right)
        count(counts_ptr + 5, num_guessed)
    tl.debug_barrier()

    # Places in the order in which they are best given up, empty ones first.
    slot = tl.load(slot_at_ptr + p, mask=in_p, other=-1)
    held = slot >= 0
    if FIRST:
        begin = tl.load(offsets_ptr + slot, mask=held, other=0)
        stays = tl.load(offsets_ptr + slot + 1, mask=held, other=0) > begin
    else:
        stays = tl.load(waiting_ptr + slot, mask=held, other=0) != 0
    expected = (tl.load(shares_ptr + slot, mask=held, other=0.0) * STEPS).to(tl.int32)
    key = tl.where(held, expected + 1, 0) << BITS
    key = tl.sort(tl.where(in_p & (stays == 0), key | p, LAST))
    num = min(num_misses, tl.sum((key < LAST).to(tl.int32), axis=0))
    taken, place = p < num, key & KEY
    former = tl.load(slot_at_ptr + place, mask=taken, other=-1)
    tl.store(fetch_ptr + G + p, place, mask=taken)
    tl.store(place_of_ptr + former, -1, mask=former >= 0)
    tl.store(numbers_ptr, num)
    count(counts_ptr + 6, num)
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


def place_slots_triton(places: Places, offsets_S1: Tensor, *, pieces: int, first: bool) -> None:
    """`place_slots` as one launch."""
    _place_slots_kernel[(1,)](
        offsets_S1,
        places.numbers,
        places.shares_S1,
        places.counts,
        pieces,
        **launch_options(places, FIRST=first),
    )


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
    free = by_expectation(slot_at.tolist(), shares_S1[:-1], [not each for each in needed.tolist()])
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
