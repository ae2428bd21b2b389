"""What asks for weights in the launch of experts_few.py: one warp of a program, which takes pieces and fills a ring.
No launcher.

Knows slots, pieces and the copy engine; knows nothing of what is computed. A piece of the first product is COLUMNS of a
slot's h: as many rows of gate and of up. A piece of the second product is ROWS of a slot's w2. All pieces of the first
product, slot by slot, come before those of the second.

Each piece takes the next stages of the ring, one at least, and the next place on a board, where its note stands: who
multiplies it reads there what it is.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

GROUPS = gl.constexpr(2)
"""Of four warps that multiply, piece by piece in turn. One group, us a layer where two take the second number: qwen3 1
row 54.8, 47.9, 4 rows 124.5, 94.1; dsv2-lite 1 row 74.4, 67.7."""

AHEAD = gl.constexpr(4)
"""Stages of a program that are on their way at most: what is asked for together comes together, and so the first of it
late. qwen3 with 3, 4 and 6, us a layer: 1 row 48.0, 47.9, -, 4 rows 94.2, 94.1, 94.5, 8 rows 145.4, 144.8, 145.5;
before the bound there was, 8 rows took 156."""

STAGE_BYTES = gl.constexpr(16384)
BOXES = gl.constexpr(8)
"""Of a stage: 16 rows by 64 columns each."""

COLUMNS, ROWS = gl.constexpr(16), gl.constexpr(64)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _wait_for_turn(step, full, empty, STAGES: gl.constexpr):
    """Until the stage is free, and few enough are on their way."""
    if AHEAD < STAGES:
        before = step - AHEAD
        mbarrier.wait(full.index((before + STAGES) % STAGES), before // STAGES & 1, pred=before >= 0)
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)


@gluon.jit
def _ask_first(w_desc, ring, step, row, up_row, width, STAGES: gl.constexpr):
    """Rows `row` on of gate and `up_row` on of up, in stages of 256 columns."""
    ws, full, empty = ring
    for first in range(0, width, 256):
        stage = step % STAGES
        ready = full.index(stage)
        _wait_for_turn(step, full, empty, STAGES)
        mbarrier.expect(ready, STAGE_BYTES)
        for c in gl.static_range(4):
            box = stage * BOXES + c * 2
            tma.async_copy_global_to_shared(w_desc, [row, first + c * 64], ready, ws.index(box))
            tma.async_copy_global_to_shared(w_desc, [up_row, first + c * 64], ready, ws.index(box + 1))
        step += 1
    return step


@gluon.jit
def _ask_second(w_desc, ring, step, row, width, STAGES: gl.constexpr):
    """Rows `row` on, in stages of 128 columns."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ws, full, empty = ring
    for first in range(0, width, 128):
        stage = step % STAGES
        ready = full.index(stage)
        _wait_for_turn(step, full, empty, STAGES)
        mbarrier.expect(ready, STAGE_BYTES)
        for c in gl.static_range(2):
            box = ws.index(stage * BOXES + c * 4)._reinterpret(ws.dtype, [64, 64], SWIZZLED)
            tma.async_copy_global_to_shared(w_desc, [row, first + c * 64], ready, box)
        step += 1
    return step


@gluon.jit
def feed(
    weights, counters_ptr, sizes, ring, board,
    STAGES: gl.constexpr, PLACES: gl.constexpr, BLOCK_S: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Takes pieces until there are no more, notes each for those who multiply, and asks for its weights."""
    SLOTS: gl.constexpr = gl.BlockedLayout([BLOCK_S // 32], [32], [1], [0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    w13_desc, w2_desc, offsets_ptr = weights
    num_slots, num_hidden, num_columns = sizes
    notes, noted = board
    if PDL:
        gdc_wait()
    s = gl.arange(0, BLOCK_S, layout=SLOTS)
    starts = gl.load(offsets_ptr + s, mask=s < num_slots, other=0)
    ends = gl.load(offsets_ptr + s + 1, mask=s < num_slots, other=0)
    piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
    # Slots with rows, numbered.
    here = (ends > starts).to(gl.int32)
    until = gl.associative_scan(here, 0, _add)
    num_full = gl.sum(here, axis=0)
    per_first, per_second = (num_hidden + COLUMNS - 1) // COLUMNS, (num_columns + ROWS - 1) // ROWS
    num_first = num_full * per_first
    lane = gl.arange(0, 32, layout=LANES)
    step, turn = piece * 0, piece * 0
    while piece < num_first + num_full * per_second:
        second = (piece >= num_first).to(gl.int32)
        own = piece - second * num_first
        per = gl.where(second != 0, per_second, per_first)
        number = own // per
        column = (own - number * per) * gl.where(second != 0, ROWS, COLUMNS)
        slot = gl.sum((until <= number).to(gl.int32), axis=0)
        start = gl.sum(gl.where(s == slot, starts, 0), axis=0)
        end = gl.sum(gl.where(s == slot, ends, 0), axis=0)
        note = gl.where(lane == 0, number + 1, 0) + gl.where(lane == 1, column, 0) + gl.where(lane == 2, start, 0)
        note += gl.where(lane == 3, end, 0) + gl.where(lane == 4, second, 0) + gl.where(lane == 5, step, 0)
        # The place is free: the piece that many turns ago has left the ring.
        notes.index(turn % PLACES).store(note)
        mbarrier.arrive(noted.index(turn % PLACES), count=1)
        turn += 1
        if second != 0:
            step = _ask_second(w2_desc, ring, step, slot * num_columns + column, num_hidden, STAGES)
        else:
            row = slot * 2 * num_hidden + column
            step = _ask_first(w13_desc, ring, step, row, row + num_hidden, num_columns, STAGES)
        piece = gl.atomic_add(counters_ptr, 1, sem="relaxed")
    for _ in gl.static_range(GROUPS):
        notes.index(turn % PLACES).store(gl.zeros([32], gl.int32, LANES))
        mbarrier.arrive(noted.index(turn % PLACES), count=1)
        turn += 1
