"""What a layer's next call will likely ask for, listed to be copied before it comes; decided on the device.

Knows the tables of slot_tables.py and logical experts; knows no weights. With f the moving share of steps that asked
for a slot, and a the moving share of guesses that came true (slot_places.py keeps both), a slot is expected with
a + (1 - a) f where it was guessed and (1 - a) f elsewhere, with f where nothing was. It is worth a copy ahead where
that is above one half: a wrong guess costs what a right one saves.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportOptionalOperand=false

from __future__ import annotations

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
    STAMPS,
    STAMPS_AT,
    STEPS,
    Places,
    add_up,
    by_expectation,
    count,
    launch_options,
)

FETCH_FROM = 0.5

_FETCH_FROM = tl.constexpr(FETCH_FROM)
_HEADER, _PLACE_PARTS = tl.constexpr(HEADER), tl.constexpr(len(BY_PLACE))
_ASKED = tl.constexpr(STAMPS_AT + STAMPS.index("ahead_asked"))


def guess_ahead(places: Places, expert_ids: Tensor, last_1: Tensor | None = None) -> None:
    """The next call will ask for these logical experts [X, K], of which ids of -1 mean nothing: fills the list of
    copies ahead. `last_1` int32 [1]: rows X from it on mean nothing. `guess_ahead_reference` is the definition."""
    assert_shape("expert_ids", expert_ids, (None, None))
    assert_dtype("expert_ids", expert_ids, torch.int32)
    assert expert_ids.is_contiguous(), f"expert_ids has strides {expert_ids.stride()}"
    assert_same_device(places.numbers, expert_ids=expert_ids, last_1=last_1)
    (guess_ahead_triton if uses_triton(expert_ids) else guess_ahead_reference)(places, expert_ids, last_1)


# One program, for a layer. numbers_ptr int32, shares_ptr fp32, counts_ptr int64: see `Places`; ids_ptr int32 [num_ids],
# TOP_K a row; last_ptr int32 [1] or None. Tiles and barriers as in slot_places.py.


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
        add_up(counts_ptr)
    slot_at_ptr, p, s = numbers_ptr + _HEADER, tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    ahead_ptr = slot_at_ptr + G
    place_of_ptr = slot_at_ptr + (_PLACE_PARTS + 2) * G
    guessed_ptr, row_of_ptr, expert_of_ptr = place_of_ptr + 2 * S, place_of_ptr + 3 * S, place_of_ptr + 4 * S
    in_s, in_p = s < S, p < G
    if tl.load(numbers_ptr + 2) != 0:  # the call that they were for never came
        num_before = tl.load(numbers_ptr + 1)
        count(counts_ptr + 3, num_before)
        count(counts_ptr + 7, num_before)
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
    unlikely = STEPS - (expected * STEPS).to(tl.int32)
    order = tl.sort(tl.where(missing, (unlikely << BITS) | s, LAST)) & KEY
    tl.debug_barrier()

    slot = tl.load(slot_at_ptr + p, mask=in_p, other=-1)
    held = slot >= 0
    there = tl.load(guessed_ptr + slot, mask=held, other=0)
    expected = tl.where(there != 0, trust, 0.0) + (1 - trust) * tl.load(shares_ptr + slot, mask=held, other=0.0)
    key = tl.where(held, (expected * STEPS).to(tl.int32) + 1, 0) << BITS
    key = tl.sort(tl.where(in_p & ((expected <= _FETCH_FROM) | (held == 0)), key | p, LAST))
    num = min(tl.sum(missing.to(tl.int32), axis=0), tl.sum((key < LAST).to(tl.int32), axis=0))
    taken, place = p < num, key & KEY
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


def guess_ahead_triton(places: Places, expert_ids: Tensor, last_1: Tensor | None) -> None:
    """`guess_ahead` as one launch."""
    _guess_ahead_kernel[(1,)](
        expert_ids,
        last_1,
        places.numbers,
        places.shares_S1,
        places.counts,
        expert_ids.numel(),
        **launch_options(places, TOP_K=expert_ids.shape[1]),
    )


def guess_ahead_reference(places: Places, expert_ids: Tensor, last_1: Tensor | None) -> None:
    """The definition, one slot after another."""
    slot_at, place_of, numbers = places.part("slot_at"), places.part("place_of"), places.numbers
    if numbers[2]:
        places.counts[[3, 7]] += numbers[1]
    ids = expert_ids if last_1 is None else expert_ids[: int(last_1)]
    guessed = torch.isin(places.part("expert_of"), ids)
    places.part("guessed").copy_(guessed)
    trust = places.shares_S1[-1] if guessed.any() else places.shares_S1.new_zeros(())
    expected_S = torch.where(guessed, trust, 0.0) + (1 - trust) * places.shares_S1[:-1]
    steps = (expected_S * STEPS.value).int().tolist()
    missing = ((expected_S > FETCH_FROM) & (place_of < 0)).nonzero()[:, 0].tolist()
    free = by_expectation(slot_at.tolist(), expected_S, (expected_S <= FETCH_FROM).tolist())
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
