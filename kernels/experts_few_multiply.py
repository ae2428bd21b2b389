"""What multiplies in the launch of experts_few.py: groups of four warps, which take the noted pieces in turn. No
launcher.

Knows slots, pieces and the ring that experts_few_feed.py fills; asks for no weights. All rows of x lie in shared
memory, as the eight columns of the tensor core's smallest tile, and are multiplied with every piece of a first product:
sums that are no row of the slot are not written. Rows of h come there when their slot's first product is done.
Where there is one row, only it comes, and whatever lies beside it is multiplied in vain; its h comes in parts, two of
them at once, so it may be of any width.
Before the first piece, where the router has chosen nothing, the first group chooses (experts_few_choose.py).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.dependent_launch import wait_for_inputs
from kernels.experts_few_choose import choose
from kernels.experts_few_feed import BOXES, COLUMNS, GROUPS, SHARED

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name until Triton 3.6

_DONE, _APART = gl.constexpr(8), gl.constexpr(8)
"""Places among the counters: pieces taken lie at 0, then each slot's finished pieces of the first product, a sector (32
bytes) apart."""

HALVES = gl.constexpr(2)
"""Parts of one row's h that a group has in shared memory: the next is on its way while one is multiplied."""


@gluon.jit
def _pick(values, lane, which: gl.constexpr):
    return gl.sum(gl.where(lane == which, values, 0), axis=0)


@gluon.jit
def _sweep(acc, step, width, x_chunks, ring, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """64 rows of weights, or fewer and what lies behind them, by 8 of x. CHUNKS of 64 columns a stage."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ws, full, empty = ring
    for first in range(0, width, CHUNKS * 64):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        for c in gl.static_range(CHUNKS):
            w = ws.index(stage * BOXES + c * (BOXES // CHUNKS))._reinterpret(ws.dtype, [64, 64], SWIZZLED)
            x = x_chunks.index(first // 64 + c).permute((1, 0))
            acc = warpgroup_mma(w, x, acc, is_async=True)
        # This stage's products are under way; the stage of those before them is free.
        acc = warpgroup_mma_wait(CHUNKS, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=first > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc, step


@gluon.jit
def _copy_rows(ptr, stride8, row, there, width, xs):
    """Eight rows to shared memory, zero where they are not there and behind their end."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    k = gl.arange(0, xs.shape[1], gl.SliceLayout(0, COPY))[None, :]
    # Groups of 8 values, 16 bytes, are what one copy moves: spelt out, for the compiler to see it of any width.
    mask = there[:, None] & (k // 8 < width // 8)
    async_copy.async_copy_global_to_shared(xs, ptr + row[:, None] * stride8 * 8 + k, mask=mask)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()


@gluon.jit
def _ask_row(ptr, width, xs):
    """One row's entries up to the width of xs, zero behind the row's end, as the first of eight rows: 64 columns of
    each lie together."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    CHUNKS: gl.constexpr = xs.shape[1] // 64
    first = xs._reinterpret(xs.dtype, [CHUNKS, 8 * 64], PLAIN).slice(0, 64, dim=1)
    k = gl.arange(0, CHUNKS, gl.SliceLayout(1, COPY))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    async_copy.async_copy_global_to_shared(first, ptr + k, mask=k // 8 < width // 8)
    async_copy.commit_group()


@gluon.jit
def _wait_for_row(OTHERS: gl.constexpr):
    """But for the OTHERS asked for last."""
    async_copy.wait_group(OTHERS)
    fence_async_shared()
    _barrier()


@gluon.jit
def _rows_of_tokens(note, place, token_ptr, LAYOUT: gl.constexpr):
    """The row of each of eight tokens with this slot, else -1: looked up, or, without a table, as the note says."""
    # Of shared experts, too: they have no rows in the table.
    row = note.slice(8, 8).load(LAYOUT) - 1
    if token_ptr is not None:
        _, start, end, _, _ = place
        token = gl.arange(0, 8, LAYOUT)
        for j in gl.static_range(8):
            row = gl.where(token == gl.load(token_ptr + start + j, mask=start + j < end, other=-1), start + j, row)
    return row


@gluon.jit
def _rows_of_slot(note, place, token_ptr, LAYOUT: gl.constexpr):
    """Its rows, up to eight, one behind the other; without a table those of tokens."""
    row = note.slice(8, 8).load(LAYOUT) - 1
    if token_ptr is not None:
        own = place[1] + gl.arange(0, 8, LAYOUT)
        row = gl.where(own < place[2], own, row)
    return row


@gluon.jit
def _store_gated(acc, swap, row, column, num_hidden, h_ptr, begin8):
    """COLUMNS of h, of each token's row, from the sums of gate and, behind them, of up. h begins 8 * begin8 behind."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, 4], [0, 1])
    # Gate and up of a column were summed by different warps.
    swap.store(acc)
    _barrier()
    gate, up = swap.slice(0, COLUMNS).load(OUT), swap.slice(COLUMNS, COLUMNS).load(OUT)
    h = (gate / (1.0 + gl.exp(-gate)) * up).to(h_ptr.dtype.element_ty)
    # All tokens were multiplied, in their order.
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, OUT))
    mask = (row >= 0)[None, :] & (n < num_hidden)[:, None]
    gl.store(h_ptr + begin8 * 8 + row[None, :] * num_hidden + n[:, None], h, mask=mask)


@gluon.jit
def _first(step, note, place, token_ptr, h_ptr, sizes, x_chunks, swap, ring, STAGES: gl.constexpr):
    """16 columns of h for the rows of a slot. `place` is (column, first row, end, columns of h, where they begin)."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, 4], [0, 1])
    column, _, _, num_hidden, begin8 = place
    row = _rows_of_tokens(note, place, token_ptr, gl.SliceLayout(0, OUT))
    acc = gl.zeros([64, 8], gl.float32, SUMS)
    acc, step = _sweep(acc, step, sizes[2], x_chunks, ring, 4, STAGES)
    _store_gated(acc, swap, row, column, num_hidden, h_ptr, begin8)


@gluon.jit
def _second(step, note, place, token_ptr, h_ptr, y_ptr, sizes, hs, is_there, ring, STAGES: gl.constexpr):
    """64 columns of y for the rows of a slot, of which h comes in parts, or is there."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    PART: gl.constexpr = hs.shape[1]
    column, _, _, num_hidden, begin8 = place
    _, _, num_columns, _, num_rows = sizes
    h_chunks = hs._reinterpret(hs.dtype, [PART // 64, 8, 64], gl.NVMMASharedLayout(128, 16, 2))
    row = _rows_of_slot(note, place, token_ptr, gl.SliceLayout(0, SUMS))[None, :]
    h_row = _rows_of_slot(note, place, token_ptr, gl.SliceLayout(1, COPY))
    acc = gl.zeros([64, 8], gl.float32, SUMS)
    for part in range(0, num_hidden, PART):
        if (part > 0) | (is_there == 0):
            # All have multiplied what lies there.
            _barrier()
            part_ptr = h_ptr + (begin8 + part // 8) * 8
            _copy_rows(part_ptr, num_hidden // 8, h_row, h_row >= 0, num_hidden - part, hs)
        acc, step = _sweep(acc, step, min(num_hidden - part, PART), h_chunks, ring, 2, STAGES)
    n = column + gl.arange(0, 64, gl.SliceLayout(1, SUMS))[:, None]
    # Rows of the shared experts lie behind all others.
    y_row = row + gl.where(begin8 > 0, num_rows, 0)
    gl.store(y_ptr + y_row * num_columns + n, acc.to(y_ptr.dtype.element_ty), mask=(row >= 0) & (n < num_columns))


@gluon.jit
def _second_of_row(
    step, row, place, h_ptr, y_ptr, sizes, halves, ring, GROUP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr
):
    """ROWS columns of y for the slot's one row, of which h comes in parts, the next but one while one is multiplied."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    PART: gl.constexpr = halves.shape[2]
    column, _, _, width, begin8 = place
    _, _, num_columns, _, num_rows = sizes
    row_ptr = h_ptr + (begin8 + row * (width // 8)) * 8
    for i in gl.static_range(HALVES):
        _ask_row(row_ptr + i * PART, width - i * PART, halves.index(GROUP * HALVES + i))
    acc, half = gl.zeros([64, 8], gl.float32, SUMS), 0
    for part in range(0, width, PART):
        _wait_for_row(HALVES - 1)
        here = halves.index(GROUP * HALVES + half)
        chunks = here._reinterpret(here.dtype, [PART // 64, 8, 64], gl.NVMMASharedLayout(128, 16, 2))
        acc, step = _sweep(acc, step, min(width - part, PART), chunks, ring, 128 // ROWS, STAGES)
        # All have multiplied what lies there. Behind the end nothing is asked for, which counts nevertheless.
        _barrier()
        _ask_row(row_ptr + (part // 8 + HALVES * PART // 8) * 8, width - part - HALVES * PART, here)
        half ^= 1
    async_copy.wait_group(0)
    lane = gl.arange(0, 64, gl.SliceLayout(1, SUMS))[:, None]
    n, t = column + lane, gl.arange(0, 8, gl.SliceLayout(0, SUMS))[None, :]
    y_row = row + gl.where(begin8 > 0, num_rows, 0)
    mask = (t == 0) & (lane < ROWS) & (n < num_columns)
    gl.store(y_ptr + y_row * num_columns + n + t * 0, acc.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def multiply(
    rows, undecided, handed, counters_ptr, sizes, ring, board, ONE: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, PLACES: gl.constexpr, CHOICE: gl.constexpr, PDL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Multiplies the noted pieces in their order, all groups in turn; ONE: of one row."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_ptr, token_ptr, h_ptr, y_ptr, num_tokens, stride_x8, xs, all_hs, swaps = rows
    hs, swap = all_hs.index(GROUP), swaps.index(GROUP)  # of one row see `_second_of_row`
    x_chunks = xs._reinterpret(xs.dtype, [xs.shape[1] // 64, 8, 64], SWIZZLED)
    _, num_routed, num_columns, num_shared, num_rows = sizes
    notes, noted = board
    if CHOICE is not None and GROUP == 0:
        choose(undecided, handed, sizes[0], CHOICE, PDL)
    else:
        wait_for_inputs(PDL)
    # Each group copies all rows: so it waits for none but its own threads.
    if ONE:
        _ask_row(x_ptr, num_columns, xs)
        _wait_for_row(0)
    else:
        m = gl.arange(0, 8, gl.SliceLayout(1, COPY))
        _copy_rows(x_ptr, stride_x8, m, m < num_tokens, num_columns, xs)
    lane = gl.arange(0, 32, layout=LANES)
    turn, held = num_tokens * 0 + GROUP, num_tokens * 0 - 1
    mbarrier.wait(noted.index(GROUP), 0)
    note = notes.index(GROUP)
    values = note.load(LANES)
    number = _pick(values, lane, 0) - 1
    while number >= 0:
        num_hidden = gl.where(number == SHARED, num_shared, num_routed)
        begin8 = gl.where(number == SHARED, num_rows * (num_routed // 8), 0)
        place = (_pick(values, lane, 1), _pick(values, lane, 2), _pick(values, lane, 3), num_hidden, begin8)
        step = _pick(values, lane, 5)
        done_ptr = counters_ptr + _DONE + number * _APART
        if _pick(values, lane, 4) == 0:
            _first(step, note, place, token_ptr, h_ptr, sizes, x_chunks, swap, ring, STAGES)
            # All threads have written when the piece is counted.
            _barrier()
            gl.atomic_add(done_ptr, 1, sem="release")
        else:
            if number != held:
                while gl.atomic_add(done_ptr, 0, sem="acquire") < (num_hidden + COLUMNS - 1) // COLUMNS:
                    pass
            if ONE:
                row = _pick(values, lane, 8) - 1
                if token_ptr is not None:
                    row = place[1]
                _second_of_row(step, row, place, h_ptr, y_ptr, sizes, all_hs, ring, GROUP, ROWS, STAGES)
            else:
                is_there = (number == held).to(gl.int32)
                _second(step, note, place, token_ptr, h_ptr, y_ptr, sizes, hs, is_there, ring, STAGES)
                held = gl.where(num_hidden <= hs.shape[1], number, -1)
        turn += GROUPS
        mbarrier.wait(noted.index(turn % PLACES), turn // PLACES & 1)
        note = notes.index(turn % PLACES)
        values = note.load(LANES)
        number = _pick(values, lane, 0) - 1
