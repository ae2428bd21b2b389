"""What asks for weights in the launch of experts_few_fp8.py: experts_few_feed.py, whose pieces and board these are,
with weights in fp8 and their scales.

A stage has 32 rows by 512 columns of a first product, or 64 by 256 of a second. The scales of its blocks come with it,
a few copies of four bytes: so who multiplies never waits for a scale, which no cache has. A stage is there when its
bytes are, and all lanes' copies.
No launcher.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from kernels.experts_few_feed import (
    AHEAD,
    COLUMNS,
    STAGE_BYTES,
    _note,
    _note_slot,
    _packed_slots,
    _piece,
    _slot_of_best,
    _slots_of_experts,
    _slots_with_rows,
    _wait_for_turn,
    _write_offsets,
)

GROUPS = gl.constexpr(3)
"""Of four warps that multiply, piece by piece in turn. Pieces are half as many bytes as in bf16, and what a group does
before and after its sums takes as long: two would be late."""

BOX = gl.constexpr(2048)
"""Bytes of 16 rows by 128 columns."""

SCALES = gl.constexpr(8)
"""Of a stage at most."""

ROWS, STEPS = gl.constexpr(64), gl.constexpr(2)
"""Of a piece of the second product: rows of w2, and steps of 128 columns of them in a stage."""

LANES_THERE = gl.constexpr(33)
"""Who arrives where a stage fills: the copy engine's bytes are announced by one, and each lane says when its scales
have come."""


@gluon.jit
def _take(counters_ptr):
    """As there, but each lane has an address of its own: for one address ptxas joins the lanes' atomics to one and
    hands the answer round at once (ATOMG, then SHFL), so that the warp waits for it here."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return gl.atomic_add(counters_ptr + lane, lane * 0 + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def _ask_scales(ss, ready, stage, scale_ptr, block, up_blocks, group, num_groups, PARTS: gl.constexpr, K: gl.constexpr):
    """Of K blocks from `group` on, of `block`'s row of them, and, of two parts, of the row `up_blocks` behind it."""
    SOME: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 1], [0, 1])
    i = gl.arange(0, SCALES, gl.SliceLayout(1, SOME))[:, None]
    row, k = block + i // K * up_blocks, group + i % K
    # Zero where there is no block: it has zeros for weights, too.
    mask = (i < PARTS * K) & (k < num_groups)
    async_copy.async_copy_global_to_shared(ss.index(stage), scale_ptr + row * num_groups + k, mask=mask)
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _ask_first(weights, ring, step, slot, column, begin, end, sizes, STAGES: gl.constexpr):
    """COLUMNS rows of gate and of up, columns from `begin` to `end`, in stages of 512."""
    w_desc, scale_ptr = weights
    _, num_hidden, width = sizes
    ws, ss, full, empty = ring
    row, blocks = slot * 2 * num_hidden + column, (num_hidden + 127) // 128
    block, num_groups = slot * 2 * blocks + column // 128, (width + 127) // 128
    for first in range(begin, end, 512):
        stage = step % STAGES
        ready = full.index(stage)
        _wait_for_turn(step, full, empty, STAGES)
        mbarrier.expect(ready, STAGE_BYTES)
        for c in gl.static_range(4):
            box = stage * (STAGE_BYTES // BOX) + c * 2
            tma.async_copy_global_to_shared(w_desc, [row, first + c * 128], ready, ws.index(box))
            tma.async_copy_global_to_shared(w_desc, [row + num_hidden, first + c * 128], ready, ws.index(box + 1))
        _ask_scales(ss, ready, stage, scale_ptr, block, blocks, first // 128, num_groups, 2, 4)
        step += 1
    return step


@gluon.jit
def _ask_second(weights, ring, step, slot, column, sizes, STAGES: gl.constexpr):
    """ROWS rows, in stages of 256 columns."""
    BOXED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    w_desc, scale_ptr = weights
    _, num_hidden, width = sizes
    ws, ss, full, empty = ring
    row, block = slot * width + column, slot * ((width + 127) // 128) + column // 128
    num_groups = (num_hidden + 127) // 128
    for first in range(0, num_hidden, STEPS * 128):
        stage = step % STAGES
        ready = full.index(stage)
        _wait_for_turn(step, full, empty, STAGES)
        mbarrier.expect(ready, STAGE_BYTES)
        for c in gl.static_range(STEPS):
            box = ws.index(stage * (STAGE_BYTES // BOX) + c * (ROWS // 16))._reinterpret(ws.dtype, [ROWS, 128], BOXED)
            tma.async_copy_global_to_shared(w_desc, [row, first + c * 128], ready, box)
        _ask_scales(ss, ready, stage, scale_ptr, block, 0, first // 128, num_groups, 1, STEPS)
        step += 1
    return step


@gluon.jit
def _chosen_slots(
    weights, undecided, handed, counters_ptr, sizes, ring,
    STAGES: gl.constexpr, CHOICE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As there: (first piece, columns of it that are asked for already, slots with rows, the number and slot of each
    expert)."""
    TOP_K: gl.constexpr = CHOICE[2]
    num_slots, num_hidden, width = sizes
    keys, keys_there, choices, choices_there = handed
    expert, slot_of, in_order = _slots_of_experts(undecided, num_slots, CHOICE)
    if PDL:
        gdc_wait()
    asked, piece = num_slots * 0, _piece(_take(counters_ptr))
    per_first = (num_hidden + COLUMNS - 1) // COLUMNS
    number = piece // per_first
    mbarrier.wait(keys_there, 0)
    if in_order & (number < TOP_K):
        slot = _slot_of_best(keys, number, expert, slot_of, CHOICE)
        asked = gl.minimum(width, AHEAD * 512)
        column = (piece - number * per_first) * COLUMNS
        _ask_first(weights[0], ring, num_slots * 0, slot, column, 0, asked, sizes, STAGES)
    mbarrier.wait(choices_there, 0)
    num_full, number_of = _slots_with_rows(choices, undecided[2], in_order, CHOICE)
    return piece, asked, num_full, number_of, slot_of


@gluon.jit
def feed(
    weights, offsets_ptr, given,
    STAGES: gl.constexpr, PLACES: gl.constexpr, BLOCK_S: gl.constexpr, CHOICE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Takes pieces until there are no more, notes each for those who multiply, and asks for its weights."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _, undecided, handed, counters_ptr, sizes, _, ring, board = given
    num_slots, num_hidden, width = sizes
    step, turn, asked = num_slots * 0, num_slots * 0, num_slots * 0
    if CHOICE is None:
        if PDL:
            gdc_wait()
        # Offsets and the first piece are on their way together.
        taken = _take(counters_ptr)
        num_full, number_of, starts, ends = _packed_slots(offsets_ptr, num_slots, BLOCK_S)
        slot_of = gl.arange(0, BLOCK_S, layout=gl.BlockedLayout([BLOCK_S // 32], [32], [1], [0]))
        piece, packed = _piece(taken), (starts, ends)
    else:
        packed = None
        piece, asked, num_full, number_of, slot_of = _chosen_slots(
            weights, undecided, handed, counters_ptr, sizes, ring, STAGES, CHOICE, PDL
        )
    per_first, per_second = (num_hidden + COLUMNS - 1) // COLUMNS, (width + ROWS - 1) // ROWS
    num_first = num_full * per_first
    while piece < num_first + num_full * per_second:
        # The next one is taken while this one is asked for.
        taken, second = _take(counters_ptr), (piece >= num_first).to(gl.int32)
        own = piece - second * num_first
        per = gl.where(second != 0, per_second, per_first)
        number = own // per
        column = (own - number * per) * gl.where(second != 0, ROWS, COLUMNS)
        slot = _note_slot(
            board, turn, number, column, second, step, number_of, slot_of, packed, handed, undecided, PLACES, CHOICE
        )
        if second != 0:
            step = _ask_second(weights[1], ring, step, slot, column, sizes, STAGES)
        else:
            # Some of the first piece may have been asked for.
            step += (asked + 511) // 512
            step = _ask_first(weights[0], ring, step, slot, column, asked, width, sizes, STAGES)
            asked = num_slots * 0
        turn += 1
        piece = _piece(taken)
    for _ in gl.static_range(GROUPS):
        _note(board, turn, gl.zeros([32], gl.int32, LANES), PLACES)
        turn += 1
    if CHOICE is not None:  # noqa: SIM102 (one is known when it is compiled, one is not)
        if gl.program_id(0) == 0:
            # The last pieces are still multiplied.
            _write_offsets(offsets_ptr, handed[2], slot_of, undecided[2], num_slots, BLOCK_S, CHOICE)
