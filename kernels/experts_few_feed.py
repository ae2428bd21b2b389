"""What asks for weights in the launch of experts_few.py: one warp of a program, which takes pieces and fills a ring.
No launcher.

Knows slots, pieces and the copy engine; knows nothing of what is computed. A piece of the first product is COLUMNS of a
slot's h: as many rows of gate and of up. A piece of the second product is ROWS of a slot's w2, 64 or 32; of 32, a stage
has 256 columns, as of a first product. All pieces of the first product, slot by slot, come before those of the second.
The slots with rows are found in the offsets of packed rows, or, where the router has chosen nothing, in what
experts_few_choose.py hands over.

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

from kernels.experts_few_choose import LOWEST, row_of_table

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

COLUMNS = gl.constexpr(16)
"""Of h: a piece of a first product."""

SHARED = gl.constexpr(64)
"""The number of the shared experts, above all slots' numbers. Their pieces come before those of slots."""


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
def _ask_first(w_desc, ring, step, row, up_row, begin, width, STAGES: gl.constexpr):
    """Rows `row` on of gate and `up_row` on of up, columns from `begin` on, in stages of 256."""
    ws, full, empty = ring
    for first in range(begin, width, 256):
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
def _ask_second(w_desc, ring, step, row, width, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """ROWS rows from `row` on, in stages of STAGE_BYTES."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    CHUNKS: gl.constexpr = 128 // ROWS
    ws, full, empty = ring
    for first in range(0, width, CHUNKS * 64):
        stage = step % STAGES
        ready = full.index(stage)
        _wait_for_turn(step, full, empty, STAGES)
        mbarrier.expect(ready, STAGE_BYTES)
        for c in gl.static_range(CHUNKS):
            box = ws.index(stage * BOXES + c * (BOXES // CHUNKS))._reinterpret(ws.dtype, [ROWS, 64], SWIZZLED)
            tma.async_copy_global_to_shared(w_desc, [row, first + c * 64], ready, box)
        step += 1
    return step


@gluon.jit
def _numbered(here, first):
    """The places that are `here`, numbered from `first` on; -1 for the others."""
    return gl.where(here != 0, first - 1 + gl.associative_scan(here, 0, _add), -1)


@gluon.jit
def _take(counters_ptr):
    """Takes the next piece: by one lane, whose answer is waited for where it is looked at, a scalar's at once. us a
    layer, so and taken while the piece before is asked for / when that has been: qwen3 1 row 45.6 / 45.9, 4 rows 93.0 /
    93.1, dsv2-lite 1 row 68.3 / 68.4."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return gl.atomic_add(counters_ptr + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def _piece(taken):
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(gl.where(lane == 0, taken, 0), axis=0)


@gluon.jit
def _note(board, turn, note, PLACES: gl.constexpr):
    """The place is free: the piece that many turns ago has left the ring."""
    notes, noted = board
    notes.index(turn % PLACES).store(note)
    mbarrier.arrive(noted.index(turn % PLACES), count=1)


@gluon.jit
def _note_shared(board, turn, column, second, step, num_tokens, PLACES: gl.constexpr):
    """Row t is that of token t."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    note = gl.where(lane == 0, SHARED + 1, 0) + gl.where(lane == 1, column, 0) + gl.where(lane == 4, second, 0)
    note += gl.where(lane == 5, step, 0) + gl.where((lane >= 8) & (lane < 8 + num_tokens), lane - 7, 0)
    _note(board, turn, note, PLACES)


@gluon.jit
def _shared_first(s13_desc, counters_ptr, sizes, ring, board, num_tokens, STAGES: gl.constexpr, PLACES: gl.constexpr):
    """The pieces that are no one's choice: (the first piece behind them, next step, next turn)."""
    _, _, num_columns, num_shared, _ = sizes
    step, turn, piece = num_tokens * 0, num_tokens * 0, _piece(_take(counters_ptr))
    while piece * COLUMNS < num_shared:
        taken, column = _take(counters_ptr), piece * COLUMNS
        _note_shared(board, turn, column, 0, step, num_tokens, PLACES)
        turn += 1
        step = _ask_first(s13_desc, ring, step, column, num_shared + column, 0, num_columns, STAGES)
        piece = _piece(taken)
    return piece - (num_shared + COLUMNS - 1) // COLUMNS, step, turn


@gluon.jit
def _packed_slots(offsets_ptr, num_slots, BLOCK_S: gl.constexpr):
    """(slots with rows, the number, start and end of each slot)."""
    SLOTS: gl.constexpr = gl.BlockedLayout([BLOCK_S // 32], [32], [1], [0])
    s = gl.arange(0, BLOCK_S, layout=SLOTS)
    starts = gl.load(offsets_ptr + s, mask=s < num_slots, other=0)
    ends = gl.load(offsets_ptr + s + 1, mask=s < num_slots, other=0)
    here = (ends > starts).to(gl.int32)
    return gl.sum(here, axis=0), _numbered(here, 0), starts, ends


@gluon.jit
def _slots_of_experts(undecided, num_slots, CHOICE: gl.constexpr):
    """(experts, the slot of each or -1, whether each has one and the first row is real). Older than the router's
    launch, which does not write it."""
    NUM_EXPERTS: gl.constexpr = CHOICE[0]
    expert = gl.arange(0, CHOICE[5], layout=gl.BlockedLayout([CHOICE[5] // 32], [32], [1], [0]))
    real_ptr, slot_of_ptr = undecided[0][2], undecided[0][3]
    slot_of = gl.load(slot_of_ptr + expert, mask=expert < NUM_EXPERTS, other=-1)
    slot_of = gl.where(slot_of < num_slots, slot_of, -1)
    in_order = gl.min(gl.where(expert < NUM_EXPERTS, slot_of, 0), axis=0) >= 0
    if real_ptr is not None:
        in_order = in_order & (gl.load(real_ptr) != 0)
    return expert, slot_of, in_order


@gluon.jit
def _slot_of_best(keys, number, expert, slot_of, CHOICE: gl.constexpr):
    """Of the first row's experts, best first, the slot of the one with this number."""
    key = row_of_table(keys, 0, gl.BlockedLayout([CHOICE[5] // 32], [32], [1], [0]))
    first = number * 0
    for _ in range(number + 1):
        first = gl.min(gl.where(key == gl.max(key, axis=0), expert, 0x7FFFFFFF), axis=0)
        key = gl.where(expert == first, LOWEST, key)
    return gl.max(gl.where(expert == first, slot_of, -1), axis=0)


@gluon.jit
def _slots_with_rows(choices, num_tokens, in_order, CHOICE: gl.constexpr):
    """(how many, the number of each expert's). The experts of the first row come first, best first: so the slot of the
    first piece is mostly known long before all rows have chosen."""
    EXPERTS: gl.constexpr = gl.BlockedLayout([CHOICE[5] // 32], [32], [1], [0])
    choice = row_of_table(choices, 0, EXPERTS)
    here = (choice >= 0).to(gl.int32)
    for t in range(1, num_tokens):
        here = here | (row_of_table(choices, t, EXPERTS) >= 0).to(gl.int32)
    num_full = gl.sum(here, axis=0)
    ahead = in_order & (choice >= 0)
    later = gl.where(ahead, 0, here)
    return num_full, gl.where(ahead, choice, _numbered(later, num_full - gl.sum(later, axis=0)))


@gluon.jit
def _chosen_slots(
    w13_desc, undecided, handed, counters_ptr, sizes, ring, piece,
    STAGES: gl.constexpr, CHOICE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """(first piece, columns of it that are asked for already, slots with rows, the number and slot of each expert)."""
    TOP_K: gl.constexpr = CHOICE[2]
    num_slots, num_hidden, num_columns, _, _ = sizes
    keys, keys_there, choices, choices_there = handed
    expert, slot_of, in_order = _slots_of_experts(undecided, num_slots, CHOICE)
    asked = num_slots * 0
    if piece is None:
        if PDL:
            gdc_wait()
        piece = _piece(_take(counters_ptr))
        per_first = (num_hidden + COLUMNS - 1) // COLUMNS
        number = piece // per_first
        column = (piece - number * per_first) * COLUMNS
        mbarrier.wait(keys_there, 0)
        if in_order & (number < TOP_K):
            row = _slot_of_best(keys, number, expert, slot_of, CHOICE) * 2 * num_hidden + column
            asked = gl.minimum(num_columns, AHEAD * 256)
            _ask_first(w13_desc, ring, num_slots * 0, row, row + num_hidden, 0, asked, STAGES)
    mbarrier.wait(choices_there, 0)
    num_full, number_of = _slots_with_rows(choices, undecided[2], in_order, CHOICE)
    return piece, asked, num_full, number_of, slot_of


@gluon.jit
def _rows_of_tokens(choices, mine, lane, num_tokens, CHOICE: gl.constexpr):
    """In the lanes from 8 on: the row of each token whose choice is `mine`, plus one; else zero. Row t * K + k is that
    of choice k of token t."""
    TOP_K: gl.constexpr = CHOICE[2]
    EXPERTS: gl.constexpr = gl.BlockedLayout([CHOICE[5] // 32], [32], [1], [0])
    rows = lane * 0
    for t in range(num_tokens):
        choice = gl.max(gl.where(mine, row_of_table(choices, t, EXPERTS), -1), axis=0)
        rows = gl.where((lane == 8 + t) & (choice >= 0), t * TOP_K + choice + 1, rows)
    return rows


@gluon.jit
def _note_slot(
    board, turn, number, column, second, step, number_of, slot_of, packed, handed, undecided,
    PLACES: gl.constexpr, CHOICE: gl.constexpr,
):  # fmt: skip
    """The slot with this number among those with rows, whose piece is noted."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    mine = number_of == number
    slot = gl.max(gl.where(mine, slot_of, 0), axis=0)
    note = gl.where(lane == 0, number + 1, 0) + gl.where(lane == 1, column, 0)
    note += gl.where(lane == 4, second, 0) + gl.where(lane == 5, step, 0)
    if CHOICE is None:
        starts, ends = packed
        note += gl.where(lane == 2, gl.sum(gl.where(mine, starts, 0), axis=0), 0)
        note += gl.where(lane == 3, gl.sum(gl.where(mine, ends, 0), axis=0), 0)
    else:
        note += _rows_of_tokens(handed[2], mine, lane, undecided[2], CHOICE)
    _note(board, turn, note, PLACES)
    return slot


@gluon.jit
def _write_offsets(offsets_ptr, choices, slot_of, num_tokens, num_slots, BLOCK_S: gl.constexpr, CHOICE: gl.constexpr):
    """How many rows go to the slots before each, for who counts them."""
    TOP_K: gl.constexpr = CHOICE[2]
    EXPERTS: gl.constexpr = gl.BlockedLayout([CHOICE[5] // 32], [32], [1], [0])
    s = gl.arange(0, 2 * BLOCK_S, layout=gl.BlockedLayout([BLOCK_S // 16], [32], [1], [0]))
    rows = s * 0
    for t in range(num_tokens):
        choice = row_of_table(choices, t, EXPERTS)
        for k in range(TOP_K):
            own = gl.max(gl.where(choice == k, slot_of, -1), axis=0)
            rows += ((own >= 0) & (own < s)).to(gl.int32)
    gl.store(offsets_ptr + s, rows, mask=s <= num_slots)


@gluon.jit
def feed(
    weights, offsets_ptr, undecided, handed, counters_ptr, sizes, ring, board, num_tokens, ROWS: gl.constexpr,
    STAGES: gl.constexpr, PLACES: gl.constexpr, BLOCK_S: gl.constexpr, CHOICE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Takes pieces until there are no more, notes each for those who multiply, and asks for its weights."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    w13_desc, w2_desc, s13_desc, s2_desc = weights
    num_slots, num_hidden, num_columns, num_shared, _ = sizes
    step, turn, piece = num_tokens * 0, num_tokens * 0, None
    if s13_desc is not None:
        if PDL:
            gdc_wait()
        piece, step, turn = _shared_first(s13_desc, counters_ptr, sizes, ring, board, num_tokens, STAGES, PLACES)
    if CHOICE is None:
        if piece is None:
            if PDL:
                gdc_wait()
            piece = _piece(_take(counters_ptr))
        num_full, number_of, starts, ends = _packed_slots(offsets_ptr, num_slots, BLOCK_S)
        slot_of = gl.arange(0, BLOCK_S, layout=gl.BlockedLayout([BLOCK_S // 32], [32], [1], [0]))
        asked, packed = piece * 0, (starts, ends)
    else:
        packed = None
        piece, asked, num_full, number_of, slot_of = _chosen_slots(
            w13_desc, undecided, handed, counters_ptr, sizes, ring, piece, STAGES, CHOICE, PDL
        )
    per_first, per_second = (num_hidden + COLUMNS - 1) // COLUMNS, (num_columns + ROWS - 1) // ROWS
    num_first = num_full * per_first
    begin = num_first
    if s13_desc is not None:
        begin += per_second
    while piece < begin + num_full * per_second:
        # The next one is taken while this one is asked for.
        taken, second = _take(counters_ptr), (piece >= num_first).to(gl.int32)
        if (piece >= num_first) & (piece < begin):
            if s2_desc is not None:
                column = (piece - num_first) * ROWS
                _note_shared(board, turn, column, 1, step, num_tokens, PLACES)
                step = _ask_second(s2_desc, ring, step, column, num_shared, ROWS, STAGES)
        else:
            own = piece - second * begin
            per = gl.where(second != 0, per_second, per_first)
            number = own // per
            column = (own - number * per) * gl.where(second != 0, ROWS, COLUMNS)
            slot = _note_slot(
                board, turn, number, column, second, step, number_of, slot_of, packed, handed, undecided, PLACES, CHOICE
            )
            if second != 0:
                step = _ask_second(w2_desc, ring, step, slot * num_columns + column, num_hidden, ROWS, STAGES)
            else:
                row = slot * 2 * num_hidden + column
                # Some of the first piece may have been asked for.
                step += (asked + 255) // 256
                step = _ask_first(w13_desc, ring, step, row, row + num_hidden, asked, num_columns, STAGES)
                asked = num_slots * 0
        turn += 1
        piece = _piece(taken)
        if s13_desc is not None:
            piece -= (num_shared + COLUMNS - 1) // COLUMNS
    for _ in gl.static_range(GROUPS):
        _note(board, turn, gl.zeros([32], gl.int32, LANES), PLACES)
        turn += 1
    if CHOICE is not None:  # noqa: SIM102 (one is known when it is compiled, one is not)
        if gl.program_id(0) == 0:
            # The last pieces are still multiplied.
            _write_offsets(offsets_ptr, handed[2], slot_of, undecided[2], num_slots, BLOCK_S, CHOICE)
