"""The ragged products of some dozens of rows a slot, for compute capability 9 (H100, H200): weights are the rows of the
tensor core, and the slot's rows its columns.

Knows rows, slots and offsets as kernels/grouped_gemm.py does, which holds the definition and says when this kernel
serves. So many rows cost less than the weights they are multiplied with, but not nothing: the card's clock falls with
the power that they take. So a tile is wide, 256 rows of weights, each read into shared memory once, and of x it reads
and multiplies as many rows as the slot has, in steps of 16, not as many as the tensor core has. One program lives on
each multiprocessor: its last four warps only load, two groups of four warps multiply, each its half of the weights.

The sum over K ascends, unsplit, in one fp32 accumulator, as in every other kernel here: the bits are the same.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.barriers import barriers
from kernels.checks import cdiv
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.grouped_gemm_specialized import ProductTile, advance, descriptor
from kernels.row_tiles import most_row_tiles, slot_step, tile_of_program
from kernels.tiles import TileConfig, num_multiprocessors

_GROUPS = gl.constexpr(2)
"""Of four warps that multiply. Each has 128 rows of a tile of weights: with SwiGLU 64 of gate and 64 of up."""

_BOX = gl.constexpr(16)
"""Rows of x that the copy engine reads at once."""


@gluon.jit
def _fill(
    x,
    w_desc,
    index_ptr,
    sizes,
    buffers,
    step,
    w_row,
    first_row,
    end,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Fill the stages of a tile with ROWS rows of x; returns the next step."""
    BLOCK_K: gl.constexpr = TILE.block_k
    STAGES: gl.constexpr = TILE.stages
    OWN: gl.constexpr = TILE.block_n // _GROUPS
    GATHER: gl.constexpr = index_ptr is not None
    BYTES: gl.constexpr = (128 * _GROUPS + (0 if GATHER else ROWS)) * BLOCK_K * 2
    num_columns, width, stride_x8 = sizes
    xs, ws, full, empty = buffers
    if GATHER:
        BY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
        row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_ROWS))
        x_row = gl.load(index_ptr + row, mask=row < end, other=0)
        k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, BY_ROWS))
        # Groups of 8 values, 16 bytes, are what one copy moves: spelt out, for the compiler to see it of any width.
        x_ptrs = x + x_row.to(gl.int64)[:, None] * stride_x8 * 8 + k[None, :]
    for first in range(0, width, BLOCK_K):
        stage = step % STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(ready, BYTES)
        for group in gl.static_range(_GROUPS):
            own, own_row = ws.index(stage * _GROUPS + group), w_row + group * OWN
            tma.async_copy_global_to_shared(w_desc, [own_row, first], ready, own.slice(0, OWN))
            if TILE.swiglu:
                tma.async_copy_global_to_shared(w_desc, [own_row + num_columns, first], ready, own.slice(OWN, OWN))
        if GATHER:
            mask = (row < end)[:, None] & (k // 8 < (width - first) // 8)[None, :]
            async_copy.async_copy_global_to_shared(xs.index(stage).slice(0, ROWS), x_ptrs, mask=mask)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            x_ptrs += BLOCK_K
        else:
            for box in gl.static_range(ROWS // _BOX):
                part = xs.index(stage).slice(box * _BOX, _BOX)
                tma.async_copy_global_to_shared(x, [first_row + box * _BOX, first], ready, part)
        step += 1
    return step


@gluon.jit
def _produce(
    x,
    w_desc,
    index_ptr,
    rows,
    sizes,
    buffers,
    TILE: gl.constexpr,
):
    """Fills the stages. `rows` is (offsets_ptr, num_slots), `sizes` (columns, width, x's stride / 8)."""
    BLOCK_M: gl.constexpr = TILE.block_m
    SLOT_STEP: gl.constexpr = TILE.slot_step
    # Gathered rows past a slot's end are not read, however many there are.
    GATHER: gl.constexpr = index_ptr is not None
    SOME: gl.constexpr = BLOCK_M if GATHER else 80
    MORE: gl.constexpr = BLOCK_M if GATHER else 96
    offsets_ptr, num_slots = rows
    num_columns = sizes[0]
    tiles_n = (num_columns + TILE.block_n - 1) // TILE.block_n
    program = gl.program_id(0)
    step = program * 0
    slot, passed, start, end = advance(offsets_ptr, step, step, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)
    while slot < num_slots:
        tile_m, tile_n = tile_of_program(
            program - passed, (end - start + BLOCK_M - 1) // BLOCK_M, tiles_n, TILE.group_m
        )
        row = start + tile_m * BLOCK_M
        w_row = slot * (num_columns * (2 if TILE.swiglu else 1)) + tile_n * TILE.block_n
        if end - row <= 64:
            step = _fill(x, w_desc, index_ptr, sizes, buffers, step, w_row, row, end, 64, TILE)
        elif end - row <= SOME:
            step = _fill(x, w_desc, index_ptr, sizes, buffers, step, w_row, row, end, SOME, TILE)
        elif end - row <= MORE:
            step = _fill(x, w_desc, index_ptr, sizes, buffers, step, w_row, row, end, MORE, TILE)
        else:
            step = _fill(x, w_desc, index_ptr, sizes, buffers, step, w_row, row, end, BLOCK_M, TILE)
        program += gl.num_programs(0)
        slot, passed, start, end = advance(offsets_ptr, slot, passed, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)


@gluon.jit
def _write_columns(out, value, first_row, end, first_n):
    """64 columns of y for those rows of a tile that lie before `end`, from [64, rows]; `out` is (y_ptr, its stride, its
    columns)."""
    y_ptr, stride_y, num_columns = out
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    n = first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    row = first_row + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LINES))
    y = gl.convert_layout(value.to(y_ptr.dtype.element_ty), LINES)
    y_ptrs = y_ptr + row.to(gl.int64)[None, :] * stride_y + n[:, None]
    gl.store(y_ptrs, y, mask=(row < end)[None, :] & (n < num_columns)[:, None])


@gluon.jit
def _write(out, acc, first_row, end, first_n, SWIGLU: gl.constexpr):
    """A group's 128 rows of weights by some rows of x: 128 columns of y, or with SwiGLU 64."""
    low, high = acc.reshape([2, 64, acc.shape[1]]).permute(1, 2, 0).split()
    if SWIGLU:
        _write_columns(out, low / (1.0 + gl.exp(-low)) * high, first_row, end, first_n)
    else:
        _write_columns(out, low, first_row, end, first_n)
        _write_columns(out, high, first_row, end, first_n + 64)


@gluon.jit
def _tile(
    place,
    out,
    buffers,
    step,
    width,
    GATHER: gl.constexpr,
    ROWS: gl.constexpr,
    MORE: gl.constexpr,
    TILE: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Multiply this group's half of a tile of weights with ROWS + MORE rows, both powers of two or MORE 0, and write
    it; returns the next step. `place` is (first row, end, column)."""
    STAGES: gl.constexpr = TILE.stages
    xs, ws, full, empty = buffers
    acc = gl.zeros((128, ROWS), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    if MORE > 0:
        more = gl.zeros((128, MORE), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16]))
    for first in range(0, width, TILE.block_k):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if GATHER:
            # Rows were written by ordinary copies; the tensor cores read through another path.
            fence_async_shared()
        w, x = ws.index(stage * _GROUPS + GROUP), xs.index(stage)
        # One stage is always being multiplied; the one before it is free.
        acc = warpgroup_mma(w, x.slice(0, ROWS).permute((1, 0)), acc, is_async=True)
        if MORE > 0:
            more = warpgroup_mma(w, x.slice(ROWS, MORE).permute((1, 0)), more, is_async=True)
            acc, more = warpgroup_mma_wait(2, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=first > 0)
        step += 1
    if MORE > 0:
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    first_row, end, first_n = place
    first_n += GROUP * (TILE.block_n // _GROUPS)
    _write(out, acc, first_row, end, first_n, TILE.swiglu)
    if MORE > 0:
        _write(out, more, first_row + ROWS, end, first_n, TILE.swiglu)
    return step


@gluon.jit
def _consume(rows, out, width, buffers, GATHER: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr):
    """This group's half of every tile of this program."""
    BLOCK_M: gl.constexpr = TILE.block_m
    SLOT_STEP: gl.constexpr = TILE.slot_step
    offsets_ptr, num_slots = rows
    tiles_n = (out[2] + TILE.block_n - 1) // TILE.block_n
    program = gl.program_id(0)
    step = program * 0
    slot, passed, start, end = advance(offsets_ptr, step, step, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)
    while slot < num_slots:
        tile_m, tile_n = tile_of_program(
            program - passed, (end - start + BLOCK_M - 1) // BLOCK_M, tiles_n, TILE.group_m
        )
        row = start + tile_m * BLOCK_M
        place = (row, end, tile_n * TILE.block_n)
        if end - row <= 64:
            step = _tile(place, out, buffers, step, width, GATHER, 64, 0, TILE, GROUP)
        elif end - row <= 80:
            step = _tile(place, out, buffers, step, width, GATHER, 64, 16, TILE, GROUP)
        elif end - row <= 96:
            step = _tile(place, out, buffers, step, width, GATHER, 64, 32, TILE, GROUP)
        else:
            step = _tile(place, out, buffers, step, width, GATHER, BLOCK_M, 0, TILE, GROUP)
        program += gl.num_programs(0)
        slot, passed, start, end = advance(offsets_ptr, slot, passed, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)


# y[r, n] as kernels/grouped_gemm.py defines it.
#   x: rows in order as a descriptor [R, D] of blocks [16, block_k], or with index_ptr int32 [R] a pointer [X, D]
#   stride_x8: between rows of x, in groups of 8 values; D is a multiple of 8 too
#   w_desc: [S * N or S * 2N, D] of blocks [128 or 64, block_k]; offsets_ptr int32 [S+1] or [S, 2];
#   y_ptr [R, N], rows strided
#   grid (multiprocessors,) or fewer: a program owns every so-manieth tile, slot by slot, until there are no more. A
#   tile is block_n columns, 256 or with SwiGLU 128, of at most block_m = 128 rows.
#   fp32 accumulation. Rows from a slot's end on may be read (they are the next slot's, or zero, or what lay in shared
#   memory before) and are not written; D and N are filled up with zeros.
@gluon.jit(do_not_specialize=["num_slots"])
def _grouped_gemm_swapped_kernel(
    x,
    w_desc,
    offsets_ptr,
    index_ptr,
    y_ptr,
    num_columns,
    width,
    num_slots,
    stride_x8,
    stride_y,
    TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    wait_for_inputs(PDL)
    GATHER: gl.constexpr = index_ptr is not None
    STAGES: gl.constexpr = TILE.stages
    dtype: gl.constexpr = w_desc.dtype
    X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE.block_m, TILE.block_k], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, TILE.block_k], dtype)
    xs = gl.allocate_shared_memory(dtype, [STAGES, TILE.block_m, TILE.block_k], X)
    ws = gl.allocate_shared_memory(dtype, [STAGES * _GROUPS, 128, TILE.block_k], W)
    # The loading threads arrive each with its copies; for TMA the one that announced the bytes.
    full, empty = barriers(STAGES, (129 if GATHER else 1, _GROUPS))
    fence_async_shared()
    buffers = (xs, ws, full, empty)
    rows = (offsets_ptr, num_slots)
    sizes = (num_columns, width, stride_x8)
    out = (y_ptr, stride_y, num_columns)
    gl.warp_specialize(
        [
            (_consume, (rows, out, width, buffers, GATHER, TILE, 0)),
            (_consume, (rows, out, width, buffers, GATHER, TILE, 1)),
            (_produce, (x, w_desc, index_ptr, rows, sizes, buffers, TILE)),
        ],
        [4, 4],
        [216, 56],
    )


def launch_swapped(
    x_XD: Tensor,
    w_SND: Tensor,
    offsets_S1: Tensor,
    row_index_R: Tensor | None,
    y_RN: Tensor,
    tile: TileConfig,
    *,
    swiglu: bool,
    group_m: int,
) -> None:
    """Fills y_RN. Operands as `grouped_gemm` checks them, and as `tma_serves` wants them; 16-bit."""
    (num_rows, num_columns), (num_slots, _, width) = y_RN.shape, w_SND.shape
    products = 2 if swiglu else 1
    assert (tile.block_m, tile.block_n * products) == (128, 256), f"{tile} is no tile of this form"
    x = x_XD if row_index_R is not None else descriptor(x_XD, _BOX.value, tile.block_k)
    tiles = most_row_tiles(num_rows, num_slots, tile.block_m) * cdiv(num_columns, tile.block_n)
    blocks = (tile.block_m, tile.block_n, tile.block_k)
    _grouped_gemm_swapped_kernel[(min(tiles, num_multiprocessors(x_XD.device)),)](
        x,
        descriptor(w_SND.view(-1, width), 128 // products, tile.block_k),
        offsets_S1,
        row_index_R,
        y_RN,
        num_columns,
        width,
        num_slots,
        x_XD.stride(0) // 8,
        y_RN.stride(0),
        TILE=ProductTile(swiglu, *blocks, group_m, slot_step(offsets_S1), tile.num_stages),
        num_warps=tile.num_warps,
        **dependent_launch(x_XD),
    )
