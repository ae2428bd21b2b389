"""What multiplies in the launch of experts_row.py: kernels/experts_few_multiply.py for one row. No launcher.

The tensor core's smallest tile has eight columns. Of x and h the one row that there is comes to shared memory, and
whatever lies beside it is multiplied in vain. A row of h comes in parts, two of them at once, the next but one while
one is multiplied: so it may be of any width.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from benchmarks.drafts._experts_row_choose import choose, guess
from kernels.dependent_launch import wait_for_inputs
from kernels.experts_few_feed import COLUMNS, GROUPS, SHARED
from kernels.experts_few_multiply import _APART, _DONE, _barrier, _first, _pick, _sweep

HALVES = gl.constexpr(2)
"""Parts of h that a group has in shared memory."""


@gluon.jit
def _ask_row(ptr, width, xs):
    """A row's entries up to the width of xs, zero behind the row's end, as the first of eight rows: 64 columns of each
    lie together."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    CHUNKS: gl.constexpr = xs.shape[1] // 64
    first = xs._reinterpret(xs.dtype, [CHUNKS, 8 * 64], PLAIN).slice(0, 64, dim=1)
    k = gl.arange(0, CHUNKS, gl.SliceLayout(1, COPY))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    # Groups of 8 values, 16 bytes, are what one copy moves: spelt out, for the compiler to see it of any width.
    async_copy.async_copy_global_to_shared(first, ptr + k, mask=k // 8 < width // 8)
    async_copy.commit_group()


@gluon.jit
def _wait_for_row(OTHERS: gl.constexpr):
    """But for the OTHERS asked last."""
    async_copy.wait_group(OTHERS)
    fence_async_shared()
    _barrier()


@gluon.jit
def _second(
    step, row, place, h_ptr, y_ptr, sizes, halves, ring,
    GROUP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """ROWS columns of y, of a row of h that comes in parts. `place` is (column, columns of h, where they begin)."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    PART: gl.constexpr = halves.shape[2]
    column, width, begin8 = place
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
    # Rows of the shared experts lie behind all others.
    y_row = row + gl.where(begin8 > 0, num_rows, 0)
    mask = (t == 0) & (lane < ROWS) & (n < num_columns)
    gl.store(y_ptr + y_row * num_columns + n + t * 0, acc.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def multiply(
    rows, w13_ptr, undecided, handed, counters_ptr, sizes, ring, board, ROWS: gl.constexpr,
    STAGES: gl.constexpr, PLACES: gl.constexpr, CHOICE: gl.constexpr, GUESS: gl.constexpr, PDL: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Multiplies the noted pieces in their order, all groups in turn."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_ptr, h_ptr, y_ptr, xs, halves, swaps = rows
    swap = swaps.index(GROUP)
    x_chunks = xs._reinterpret(xs.dtype, [xs.shape[1] // 64, 8, 64], SWIZZLED)
    _, num_routed, num_columns, num_shared, num_rows = sizes
    notes, noted = board
    if GROUP == 0:
        choose(undecided, handed, sizes[0], CHOICE, PDL)
    elif GUESS:
        guess(w13_ptr, undecided, sizes, CHOICE, PDL)
    else:
        wait_for_inputs(PDL)
    # Each group copies the row: so it waits for none but its own threads.
    _ask_row(x_ptr, num_columns, xs)
    _wait_for_row(0)
    lane = gl.arange(0, 32, layout=LANES)
    turn = num_columns * 0 + GROUP
    mbarrier.wait(noted.index(GROUP), 0)
    note = notes.index(GROUP)
    values = note.load(LANES)
    number = _pick(values, lane, 0) - 1
    while number >= 0:
        num_hidden = gl.where(number == SHARED, num_shared, num_routed)
        begin8 = gl.where(number == SHARED, num_rows * (num_routed // 8), 0)
        column, step = _pick(values, lane, 1), _pick(values, lane, 5)
        done_ptr = counters_ptr + _DONE + number * _APART
        if _pick(values, lane, 4) == 0:
            place = (column, 0, 0, num_hidden, begin8)
            _first(step, note, place, None, h_ptr, sizes, x_chunks, swap, ring, STAGES)
            # All threads have written when the piece is counted.
            _barrier()
            gl.atomic_add(done_ptr, 1, sem="release")
        else:
            row = _pick(values, lane, 8) - 1
            while gl.atomic_add(done_ptr, 0, sem="acquire") < (num_hidden + COLUMNS - 1) // COLUMNS:
                pass
            own = (column, num_hidden, begin8)
            _second(step, row, own, h_ptr, y_ptr, sizes, halves, ring, GROUP, ROWS, STAGES)
        turn += GROUPS
        mbarrier.wait(noted.index(turn % PLACES), turn // PLACES & 1)
        note = notes.index(turn % PLACES)
        values = note.load(LANES)
        number = _pick(values, lane, 0) - 1
