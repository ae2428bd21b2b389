"""What multiplies in the draft experts_few_fp8.py: kernels/experts_few_fp8_multiply.py, with less before a second
product.

- Rows are quantised as two, four or eight. Of four, eight groups of 128 columns are quantised at once, as of two.
- The next groups are on their way while some are quantised: loads that a loop carries, which ptxas leaves there.
- No counter is asked where the note says that all first products are done.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.experts_few_choose import choose
from kernels.experts_few_feed import COLUMNS
from kernels.experts_few_fp8_feed import GROUPS, STEPS
from kernels.experts_few_fp8_multiply import _CHUNK, _LINE, _TINIEST, BATCH, _first, _sweep, _twice
from kernels.experts_few_multiply import _APART, _DONE, _barrier, _pick, _rows_of_slot


@gluon.jit
def _load_groups(row_ptrs, there, now, number, last, width):
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    k = gl.arange(0, 128, gl.SliceLayout(0, TILE))[None, :]
    group = (now + number)[:, None]
    # Groups of 8 values, 16 bytes, are what one load moves: spelt out, for the compiler to see it of any width.
    mask = there[:, None] & (group < last) & (group * 16 + k // 8 < width // 8)
    # Past the L1 cache, which knows nothing of other multiprocessors' stores.
    return gl.load(row_ptrs + group * 128 + k, mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _quantise(ptr, stride8, row, first, last, width, qs, scales, own, ROWS: gl.constexpr):
    """Of ROWS rows, those that are not there zero, the groups from `first` to `last`, as the chunks of 8 x 128 from
    `own` on and the scales that `_sweep` takes. Of two or four rows there are copies: chunks have eight."""
    GROUPED: gl.constexpr = 4 if ROWS == 8 else 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    chunks = qs._reinterpret(qs.dtype, [qs.shape[0] // GROUPED, GROUPED * 8, 128], _CHUNK)
    chunk_scales = scales._reinterpret(gl.float32, [qs.shape[0] // GROUPED, GROUPED * 8], _LINE)
    number = gl.arange(0, ROWS * GROUPED, gl.SliceLayout(1, TILE)) % GROUPED
    row_ptrs = ptr + gl.maximum(row, 0)[:, None] * stride8 * 8
    ahead = _load_groups(row_ptrs, row >= 0, first, number, last, width)
    for now in range(first, last, GROUPED):
        x = ahead.to(gl.float32)
        ahead = _load_groups(row_ptrs, row >= 0, now + GROUPED, number, last, width)
        largest = gl.max(gl.abs(x), axis=1)
        scale = gl.div_rn(gl.where(largest > _TINIEST, largest, _TINIEST), 448.0)
        q = (x * gl.div_rn(1.0, scale)[:, None]).to(gl.float8e4nv)
        # From rows of groups to groups of rows.
        q = gl.permute(gl.reshape(q, [ROWS, GROUPED, 128]), (1, 0, 2))
        scale = gl.permute(gl.reshape(scale, [ROWS, GROUPED]), (1, 0))
        if ROWS <= 4:
            q, scale = _twice(q), _twice(scale)
        if ROWS == 2:
            q, scale = _twice(q), _twice(scale)
        to = (own + now - first) // GROUPED
        chunks.index(to).store(gl.reshape(q, [GROUPED * 8, 128]))
        chunk_scales.index(to).store(gl.reshape(scale, [GROUPED * 8]))


@gluon.jit
def _row_number(ROWS: gl.constexpr):
    """Of a tile of `_quantise`."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    GROUPED: gl.constexpr = 4 if ROWS == 8 else 8
    return gl.arange(0, ROWS * GROUPED, gl.SliceLayout(1, TILE)) // GROUPED


@gluon.jit
def _quantise_x(rows, x, width, PART: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr):
    """A group's share of the columns."""
    x_ptr, _, _, _, num_tokens, stride_x8 = rows
    qs, scales, _ = x
    SHARE: gl.constexpr = (qs.shape[0] // BATCH + PARTS - 1) // PARTS * BATCH
    row = _row_number(ROWS)
    row = gl.where(row < num_tokens, row, -1)
    last = gl.minimum(SHARE * PART + SHARE, (width + 127) // 128)
    _quantise(x_ptr, stride_x8, row, SHARE * PART, last, width, qs, scales, SHARE * PART, ROWS)


@gluon.jit
def _quantise_h(rows, note, place, h, num_hidden, ROWS: gl.constexpr):
    """Rows of a slot."""
    _, token_ptr, h_ptr, _, _, _ = rows
    qs, scales, own = h
    column = _row_number(ROWS)
    if token_ptr is not None:
        row = gl.where(place[1] + column < place[2], place[1] + column, -1)
    else:
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        lane, values = gl.arange(0, 32, layout=LANES), note.load(LANES)
        row = column * 0 - 1
        for t in gl.static_range(ROWS):
            row = gl.where(column == t, gl.max(gl.where(lane == 8 + t, values, 0), axis=0) - 1, row)
    _quantise(h_ptr, num_hidden // 8, row, 0, (num_hidden + 127) // 128, num_hidden, qs, scales, own, ROWS)


@gluon.jit
def _second(step, note, place, rows, h, is_there, ring, STAGES: gl.constexpr):
    """64 columns of y for the rows of a slot, whose h is there from the piece before, or is quantised."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    _, token_ptr, _, y_ptr, num_tokens, _ = rows
    _, _, _, num_hidden, width = place
    qs, scales, own = h
    row = _rows_of_slot(note, place, token_ptr, gl.SliceLayout(0, SUMS))[None, :]
    few = place[2] - place[1]
    if token_ptr is None:
        few = num_tokens
    if is_there == 0:
        # All have multiplied what lies there.
        _barrier()
        if few <= 2:
            _quantise_h(rows, note, place, h, num_hidden, 2)
        else:
            # Where the launch chooses there are four tokens at most.
            if token_ptr is None:
                _quantise_h(rows, note, place, h, num_hidden, 4)
            else:
                if few <= 4:
                    _quantise_h(rows, note, place, h, num_hidden, 4)
                else:
                    _quantise_h(rows, note, place, h, num_hidden, 8)
        fence_async_shared()
        _barrier()
    acc = gl.zeros([64, 8], gl.float32, SUMS)
    acc, step = _sweep(acc, step, num_hidden, qs, scales, own, ring, 1, STEPS, STAGES)
    n = place[0] + gl.arange(0, 64, gl.SliceLayout(1, SUMS))[:, None]
    gl.store(y_ptr + row * width + n, acc.to(y_ptr.dtype.element_ty), mask=(row >= 0) & (n < width))


@gluon.jit
def multiply(
    given, STAGES: gl.constexpr, PLACES: gl.constexpr, CHOICE: gl.constexpr, PDL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Multiplies the noted pieces in their order, all groups in turn."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows, undecided, handed, counters_ptr, sizes, kept, ring, board = given
    _, num_hidden, width = sizes
    num_tokens = rows[4]
    x, hs, swaps = kept
    h, swap = (hs[0], hs[1], GROUP * (hs[0].shape[0] // GROUPS)), swaps.index(GROUP)
    notes, noted = board
    if CHOICE is not None and GROUP == 0:
        choose(undecided, handed, sizes[0], CHOICE, PDL)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Who has chosen leaves the rows of x to the others.
    CHOOSERS: gl.constexpr = 0 if CHOICE is None else 1
    if GROUP >= CHOOSERS:
        if num_tokens <= 2:
            _quantise_x(rows, x, width, GROUP - CHOOSERS, GROUPS - CHOOSERS, 2)
        else:
            if CHOICE is not None:
                _quantise_x(rows, x, width, GROUP - CHOOSERS, GROUPS - CHOOSERS, 4)
            else:
                if num_tokens <= 4:
                    _quantise_x(rows, x, width, GROUP - CHOOSERS, GROUPS - CHOOSERS, 4)
                else:
                    _quantise_x(rows, x, width, GROUP - CHOOSERS, GROUPS - CHOOSERS, 8)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(x[2], count=1)
    mbarrier.wait(x[2], 0)
    lane = gl.arange(0, 32, layout=LANES)
    turn, held = num_tokens * 0 + GROUP, num_tokens * 0 - 1
    mbarrier.wait(noted.index(GROUP), 0)
    note = notes.index(GROUP)
    values = note.load(LANES)
    number = _pick(values, lane, 0) - 1
    while number >= 0:
        place = (_pick(values, lane, 1), _pick(values, lane, 2), _pick(values, lane, 3), num_hidden, width)
        step = _pick(values, lane, 5)
        done_ptr = counters_ptr + _DONE + number * _APART
        if _pick(values, lane, 4) == 0:
            _first(step, note, place, rows, x, swap, ring, STAGES)
            # All threads have written when the piece is counted.
            _barrier()
            gl.atomic_add(done_ptr, 1, sem="release")
        else:
            if (number != held) & (_pick(values, lane, 6) == 0):
                while gl.atomic_add(done_ptr, 0, sem="acquire") < (num_hidden + COLUMNS - 1) // COLUMNS:
                    pass
            is_there = (number == held).to(gl.int32)
            _second(step, note, place, rows, h, is_there, ring, STAGES)
            held = number
        turn += GROUPS
        mbarrier.wait(noted.index(turn % PLACES), turn // PLACES & 1)
        note = notes.index(turn % PLACES)
        values = note.load(LANES)
        number = _pick(values, lane, 0) - 1
