"""What multiplies in the launch of experts_few_fp8.py: experts_few_multiply.py, whose pieces and counters these are,
with weights in fp8 and rows that are quantised here.

Rows of x are quantised once a program, by all groups together, while the first weights come. Rows of h lie in memory as
the two launches leave them there, rounded and not yet quantised: so a piece of a first product may be narrower than the
128 columns that share a scale. Who needs a slot's rows of h quantises them for itself, some hundred instructions.

A step of 128 columns is summed from zero and added by its scales, as grouped_gemm_fp8.py says: the bits are the same.
No launcher.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.experts_few_choose import choose
from kernels.experts_few_feed import COLUMNS, STAGE_BYTES
from kernels.experts_few_fp8_feed import BOX, GROUPS, SCALES, STEPS
from kernels.experts_few_multiply import _APART, _DONE, _barrier, _pick, _rows_of_slot, _rows_of_tokens, _store_gated

BATCH = gl.constexpr(8)
"""Rows lie in shared memory in so many groups of 128 columns, or several times so many: they are quantised together."""

_TINIEST = gl.constexpr(1e-30)
"""As kernels/quantize.py has it, whose scales and values these are."""

_CHUNK = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def _twice(x):
    """[8, R, ...] as [8, 2R, ...], the rows again behind themselves."""
    if len(x.shape) == 2:
        return gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])
    else:
        return gl.reshape(gl.permute(gl.join(x, x), (0, 3, 1, 2)), [x.shape[0], 2 * x.shape[1], x.shape[2]])


@gluon.jit
def _quantise(ptr, stride8, row, first, last, width, qs, scales, own, ROWS: gl.constexpr):
    """Of ROWS rows, those that are not there zero, the groups from `first` to `last`, as the chunks of 8 x 128 from
    `own` on and the scales that `_sweep` takes. Of two rows there are copies: chunks have eight."""
    GROUPED: gl.constexpr = 16 // ROWS if ROWS == 2 else 32 // ROWS
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    chunks = qs._reinterpret(qs.dtype, [qs.shape[0] // GROUPED, GROUPED * 8, 128], _CHUNK)
    chunk_scales = scales._reinterpret(gl.float32, [qs.shape[0] // GROUPED, GROUPED * 8], _LINE)
    number = gl.arange(0, ROWS * GROUPED, gl.SliceLayout(1, TILE)) % GROUPED
    k = gl.arange(0, 128, gl.SliceLayout(0, TILE))[None, :]
    x_ptrs = ptr + gl.maximum(row, 0)[:, None] * stride8 * 8 + k
    for now in range(first, last, GROUPED):
        group = (now + number)[:, None]
        # Groups of 8 values, 16 bytes, are what one load moves: spelt out, for the compiler to see it of any width.
        mask = (row >= 0)[:, None] & (group * 16 + k // 8 < width // 8)
        # Past the L1 cache, which knows nothing of other multiprocessors' stores.
        x = gl.load(x_ptrs + group * 128, mask=mask, other=0.0, cache_modifier=".cg").to(gl.float32)
        largest = gl.max(gl.abs(x), axis=1)
        scale = gl.div_rn(gl.where(largest > _TINIEST, largest, _TINIEST), 448.0)
        q = (x * gl.div_rn(1.0, scale)[:, None]).to(gl.float8e4nv)
        # From rows of groups to groups of rows.
        q = gl.permute(gl.reshape(q, [ROWS, GROUPED, 128]), (1, 0, 2))
        scale = gl.permute(gl.reshape(scale, [ROWS, GROUPED]), (1, 0))
        if ROWS == 2:
            q, scale = _twice(_twice(q)), _twice(_twice(scale))
        to = (own + now - first) // GROUPED
        chunks.index(to).store(gl.reshape(q, [GROUPED * 8, 128]))
        chunk_scales.index(to).store(gl.reshape(scale, [GROUPED * 8]))


@gluon.jit
def _row_number(ROWS: gl.constexpr):
    """Of a tile of `_quantise`."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    GROUPED: gl.constexpr = 16 // ROWS if ROWS == 2 else 32 // ROWS
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
        for t in gl.static_range(2 if ROWS == 2 else 4):
            row = gl.where(column == t, gl.max(gl.where(lane == 8 + t, values, 0), axis=0) - 1, row)
    _quantise(h_ptr, num_hidden // 8, row, 0, (num_hidden + 127) // 128, num_hidden, qs, scales, own, ROWS)


@gluon.jit
def _product(ws, stage, chunks, chunk, zero, K: gl.constexpr, c: gl.constexpr):
    """64 rows of weights, or fewer and what lies behind them, by 8 rows, over 128 columns, from zero."""
    BOXES: gl.constexpr = STAGE_BYTES // BOX
    w = ws.index(stage * BOXES + c * (BOXES // K))._reinterpret(ws.dtype, [64, 128], _CHUNK)
    x = chunks.index(chunk + c).permute((1, 0))
    return warpgroup_mma(w, x, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_scaled(acc, product, ss, stage, scales, group, PARTS: gl.constexpr, K: gl.constexpr, c: gl.constexpr):
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    each = ss._reinterpret(gl.float32, [ss.shape[0] * SCALES, 1], _LINE)
    w = each.index(stage * SCALES + c).load(gl.SliceLayout(1, SUMS))
    if PARTS == 2:
        up = each.index(stage * SCALES + K + c).load(gl.SliceLayout(1, SUMS))
        w = gl.where(gl.arange(0, 64, gl.SliceLayout(1, SUMS)) < COLUMNS, w, up)
    x = scales.index(group + c).load(gl.SliceLayout(0, SUMS))
    scale, _ = gl.broadcast(w[:, None] * x[None, :], acc)
    return gl.fma(product, scale, acc)


@gluon.jit
def _sweep(acc, step, width, chunks, scales, own, ring, PARTS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):
    """A piece's rows of weights by 8 rows, whose chunks begin at `own`, K steps of 128 columns a stage."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    ws, ss, full, empty = ring
    zero = gl.zeros([64, 8], gl.float32, SUMS)
    for first in range(0, width, K * 128):
        stage = step % STAGES
        group = own + first // 128
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = _product(ws, stage, chunks, group, zero, K, 0)
        b = _product(ws, stage, chunks, group, zero, K, 1)
        if K == 4:
            c = _product(ws, stage, chunks, group, zero, K, 2)
            d = _product(ws, stage, chunks, group, zero, K, 3)
            a, b, c, d = warpgroup_mma_wait(0, deps=[a, b, c, d])
            acc = _add_scaled(acc, a, ss, stage, scales, group, PARTS, K, 0)
            acc = _add_scaled(acc, b, ss, stage, scales, group, PARTS, K, 1)
            acc = _add_scaled(acc, c, ss, stage, scales, group, PARTS, K, 2)
            acc = _add_scaled(acc, d, ss, stage, scales, group, PARTS, K, 3)
        else:
            a, b = warpgroup_mma_wait(0, deps=[a, b])
            acc = _add_scaled(acc, a, ss, stage, scales, group, PARTS, K, 0)
            acc = _add_scaled(acc, b, ss, stage, scales, group, PARTS, K, 1)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return acc, step


@gluon.jit
def _first(step, note, place, rows, x, swap, ring, STAGES: gl.constexpr):
    """COLUMNS of h for the rows of a slot. `place` is (column, first row, end, columns of h, of y)."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, 4], [0, 1])
    _, token_ptr, h_ptr, _, _, _ = rows
    _, _, _, num_hidden, width = place
    qs, scales, _ = x
    row = _rows_of_tokens(note, place, token_ptr, gl.SliceLayout(0, OUT))
    acc = gl.zeros([64, 8], gl.float32, SUMS)
    acc, step = _sweep(acc, step, width, qs, scales, 0, ring, 2, 4, STAGES)
    _store_gated(acc, swap, row, place[0], num_hidden, h_ptr, 0)


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
            if number != held:
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
