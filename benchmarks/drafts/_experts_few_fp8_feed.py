"""What asks for weights in the draft experts_few_fp8.py: kernels/experts_few_fp8_feed.py, which also

- fetches the copy engine's description of w13 ahead of the wait, by a copy that nobody reads;
- looks whether all first products are done, while weights are on their way, and says so in its notes (lane 6): who
  multiplies then asks no counter before a second product.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from kernels.experts_few_feed import (
    COLUMNS,
    STAGE_BYTES,
    _note,
    _packed_slots,
    _piece,
    _rows_of_tokens,
    _write_offsets,
)
from kernels.experts_few_fp8_feed import BOX, GROUPS, ROWS, _ask_first, _ask_second, _chosen_slots, _take
from kernels.experts_few_multiply import _APART, _DONE

MOST_SLOTS = gl.constexpr(64)
"""With rows: two counters a lane."""


@gluon.jit
def _fetch_description(w_desc, ring, fetched, STAGES: gl.constexpr):
    """Behind the last stage, where lies what the tensor core reads in vain."""
    mbarrier.expect(fetched, BOX)
    spare = ring[0].index(STAGES * (STAGE_BYTES // BOX))
    tma.async_copy_global_to_shared(w_desc, [0, 0], fetched, spare)


@gluon.jit
def _ask_done(counters_ptr, asks, num_full, per_first):
    """Pieces of first products that are missing, by slot: asked for, not waited for."""
    SLOTS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    number = gl.arange(0, MOST_SLOTS, layout=SLOTS)
    asks &= number < num_full
    done = gl.atomic_add(counters_ptr + _DONE + number * _APART, number * 0, mask=asks, sem="relaxed")
    return gl.where(asks, per_first - done, 0)


@gluon.jit
def _all_done(missing):
    """1: what others have written before they counted is there for whoever reads this."""
    all_done = (gl.max(missing, axis=0) <= 0).to(gl.int32)
    if all_done != 0:
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        asm: gl.constexpr = "fence.acq_rel.gpu; mov.b32 $0, $1;"
        one = gl.inline_asm_elementwise(asm, "=r,r", [lane * 0 + 1], dtype=gl.int32, is_pure=False, pack=1)
        all_done = gl.max(one, axis=0)
    return all_done


@gluon.jit
def feed(
    weights, offsets_ptr, given, fetched,
    STAGES: gl.constexpr, PLACES: gl.constexpr, BLOCK_S: gl.constexpr, CHOICE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Takes pieces until there are no more, notes each for those who multiply, and asks for its weights."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _, undecided, handed, counters_ptr, sizes, _, ring, board = given
    num_slots, num_hidden, width = sizes
    step, turn, asked, all_done = num_slots * 0, num_slots * 0, num_slots * 0, num_slots * 0
    _fetch_description(weights[0][0], ring, fetched, STAGES)
    if CHOICE is None:
        if PDL:
            gdc_wait()
        # Offsets and the first piece are on their way together.
        taken = _take(counters_ptr)
        num_full, number_of, starts, ends = _packed_slots(offsets_ptr, num_slots, BLOCK_S)
        slot_of = gl.arange(0, BLOCK_S, layout=gl.BlockedLayout([BLOCK_S // 32], [32], [1], [0]))
        piece = _piece(taken)
    else:
        piece, asked, num_full, number_of, slot_of = _chosen_slots(
            weights, undecided, handed, counters_ptr, sizes, ring, STAGES, CHOICE, PDL
        )
    mbarrier.wait(fetched, 0)
    per_first, per_second = (num_hidden + COLUMNS - 1) // COLUMNS, (width + ROWS - 1) // ROWS
    num_first, lane = num_full * per_first, gl.arange(0, 32, layout=LANES)
    while piece < num_first + num_full * per_second:
        # The next one is taken while this one is asked for.
        taken, second = _take(counters_ptr), (piece >= num_first).to(gl.int32)
        own = piece - second * num_first
        per = gl.where(second != 0, per_second, per_first)
        number = own // per
        column = (own - number * per) * gl.where(second != 0, ROWS, COLUMNS)
        mine = number_of == number
        slot = gl.max(gl.where(mine, slot_of, 0), axis=0)
        note = gl.where(lane == 0, number + 1, 0) + gl.where(lane == 1, column, 0)
        note += gl.where(lane == 4, second, 0) + gl.where(lane == 5, step, 0) + gl.where(lane == 6, all_done, 0)
        if CHOICE is None:
            note += gl.where(lane == 2, gl.sum(gl.where(mine, starts, 0), axis=0), 0)
            note += gl.where(lane == 3, gl.sum(gl.where(mine, ends, 0), axis=0), 0)
        else:
            note += _rows_of_tokens(handed[2], mine, lane, undecided[2], CHOICE)
        _note(board, turn, note, PLACES)
        missing = _ask_done(counters_ptr, (second != 0) & (all_done == 0), num_full, per_first)
        if second != 0:
            step = _ask_second(weights[1], ring, step, slot, column, sizes, STAGES)
            if all_done == 0:
                all_done = _all_done(missing)
        else:
            # Some of the first piece may have been asked for.
            step += (asked + 511) // 512
            step = _ask_first(weights[0], ring, step, slot, column, asked, width, sizes, STAGES)
            asked = piece * 0
        turn += 1
        piece = _piece(taken)
    for _ in gl.static_range(GROUPS):
        _note(board, turn, gl.zeros([32], gl.int32, LANES), PLACES)
        turn += 1
    if CHOICE is not None:  # noqa: SIM102 (one is known when it is compiled, one is not)
        if gl.program_id(0) == 0:
            # The last pieces are still multiplied.
            _write_offsets(offsets_ptr, handed[2], slot_of, undecided[2], num_slots, BLOCK_S, CHOICE)
