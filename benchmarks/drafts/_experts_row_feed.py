"""What asks for weights in the launch of experts_row.py: kernels/experts_few_feed.py for one row, whose experts are
chosen here, with pieces of 32 or 64 rows of w2 (ROWS): of 32, a stage has 256 columns, as of a first product. No
launcher.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.dependent_launch import wait_for_inputs
from kernels.experts_few_feed import (
    BOXES,
    COLUMNS,
    GROUPS,
    STAGE_BYTES,
    _ask_first,
    _chosen_slots,
    _note,
    _note_shared,
    _piece,
    _rows_of_tokens,
    _shared_first,
    _take,
    _wait_for_turn,
    _write_offsets,
)


@gluon.jit
def _ask_second(w_desc, ring, step, row, width, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Rows `row` on, in stages of 16 KiB."""
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
def feed(
    weights, offsets_ptr, undecided, handed, counters_ptr, sizes, ring, board, ROWS: gl.constexpr,
    STAGES: gl.constexpr, PLACES: gl.constexpr, BLOCK_S: gl.constexpr, CHOICE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Takes pieces until there are no more, notes each for those who multiply, and asks for its weights."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    w13_desc, w2_desc, s13_desc, s2_desc = weights
    num_slots, num_hidden, num_columns, num_shared, _ = sizes
    num_tokens = undecided[2]
    step, turn, piece, per_shared = num_tokens * 0, num_tokens * 0, None, num_tokens * 0
    if s13_desc is not None:
        wait_for_inputs(PDL)
        piece, step, turn = _shared_first(s13_desc, counters_ptr, sizes, ring, board, num_tokens, STAGES, PLACES)
        per_shared = (num_shared + COLUMNS - 1) // COLUMNS
    piece, asked, num_full, number_of, slot_of = _chosen_slots(
        w13_desc, undecided, handed, counters_ptr, sizes, ring, piece, STAGES, CHOICE, PDL
    )
    per_first, per_second = (num_hidden + COLUMNS - 1) // COLUMNS, (num_columns + ROWS - 1) // ROWS
    num_first, lane = num_full * per_first, gl.arange(0, 32, layout=LANES)
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
            mine = number_of == number
            slot = gl.max(gl.where(mine, slot_of, 0), axis=0)
            note = gl.where(lane == 0, number + 1, 0) + gl.where(lane == 1, column, 0)
            note += gl.where(lane == 4, second, 0) + gl.where(lane == 5, step, 0)
            note += _rows_of_tokens(handed[2], mine, lane, num_tokens, CHOICE)
            _note(board, turn, note, PLACES)
            if second != 0:
                step = _ask_second(w2_desc, ring, step, slot * num_columns + column, num_hidden, ROWS, STAGES)
            else:
                row = slot * 2 * num_hidden + column
                # Some of the first piece may have been asked for.
                step += (asked + 255) // 256
                step = _ask_first(w13_desc, ring, step, row, row + num_hidden, asked, num_columns, STAGES)
                asked = piece * 0
        turn += 1
        piece = _piece(taken) - per_shared
    for _ in gl.static_range(GROUPS):
        _note(board, turn, gl.zeros([32], gl.int32, LANES), PLACES)
        turn += 1
    if gl.program_id(0) == 0:
        # The last pieces are still multiplied.
        _write_offsets(offsets_ptr, handed[2], slot_of, num_tokens, num_slots, BLOCK_S, CHOICE)
