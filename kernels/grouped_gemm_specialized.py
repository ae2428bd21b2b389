"""The ragged products with many rows a slot, for compute capability 9 (H100, H200): some warps load, others multiply.

Knows rows, slots and offsets as kernels/grouped_gemm.py does, which holds the definition and says when this kernel
serves. One program lives on each multiprocessor. Its last four warps only load: weights by TMA, rows by TMA too where
they lie in order, else each row by its index. Two groups of four warps multiply, in turn: while one writes out its
tile, the other has the tensor cores. All are tied by barriers in shared memory: a stage is full, a stage is free.

The sum over K ascends, unsplit, in one fp32 accumulator, as in every other kernel here: the bits are the same.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.barriers import barriers
from kernels.checks import cdiv
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.row_tiles import most_row_tiles, slot_step, tile_of_program
from kernels.tiles import TileConfig, num_multiprocessors


class ProductTile(NamedTuple):
    """What a product is compiled for: the tile of a program, how tiles take turns, and how slots are said."""

    swiglu: bool
    block_m: int
    block_n: int
    block_k: int
    group_m: int
    slot_step: int
    stages: int
    group_n: int = 1


@gluon.jit
def advance(offsets_ptr, slot, passed, program, num_slots, tiles_n, SLOT_STEP: gl.constexpr, BLOCK_M: gl.constexpr):
    """From a slot at or before the program's: (its slot, tiles of the slots before it, first row, end of its rows)."""
    start = gl.load(offsets_ptr + slot * SLOT_STEP)
    end = gl.load(offsets_ptr + slot * SLOT_STEP + 1)
    own = (end - start + BLOCK_M - 1) // BLOCK_M * tiles_n
    while (slot < num_slots) & (program >= passed + own):
        passed += own
        slot += 1
        if SLOT_STEP == 1:
            start = end
            end = gl.load(offsets_ptr + min(slot + 1, num_slots))
        else:
            start = gl.load(offsets_ptr + min(slot, num_slots - 1) * SLOT_STEP)
            end = gl.load(offsets_ptr + min(slot, num_slots - 1) * SLOT_STEP + 1)
        own = (end - start + BLOCK_M - 1) // BLOCK_M * tiles_n
    return slot, passed, start, end


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
    BLOCK_N: gl.constexpr = TILE.block_n
    BLOCK_K: gl.constexpr = TILE.block_k
    SLOT_STEP: gl.constexpr = TILE.slot_step
    PRODUCTS: gl.constexpr = 2 if TILE.swiglu else 1
    GATHER: gl.constexpr = index_ptr is not None
    BYTES: gl.constexpr = (PRODUCTS * BLOCK_N + (0 if GATHER else BLOCK_M)) * BLOCK_K * 2
    offsets_ptr, num_slots = rows
    num_columns, width, stride_x8 = sizes
    xs, ws, full, empty, _ = buffers
    tiles_n = (num_columns + BLOCK_N - 1) // BLOCK_N
    program = gl.program_id(0)
    step = program * 0
    slot, passed, start, end = advance(offsets_ptr, step, step, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)
    while slot < num_slots:
        tiles_m = (end - start + BLOCK_M - 1) // BLOCK_M
        tile_m, tile_n = tile_of_program(program - passed, tiles_m, tiles_n, TILE.group_m, TILE.group_n)
        first_row = start + tile_m * BLOCK_M
        w_row = slot * PRODUCTS * num_columns + tile_n * BLOCK_N
        if GATHER:
            ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
            row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS))
            in_m = row < end
            x_row = gl.load(index_ptr + row, mask=in_m, other=0)
            k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
            # Groups of 8 values, 16 bytes, are what one copy moves: spelt out, for the compiler to see it of any width.
            x_ptrs = x + x_row.to(gl.int64)[:, None] * stride_x8 * 8 + k[None, :]
        for first in range(0, width, BLOCK_K):
            stage = step % TILE.stages
            mbarrier.wait(empty.index(stage), (step // TILE.stages & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            if TILE.swiglu:
                tma.async_copy_global_to_shared(w_desc, [w_row, first], ready, ws.index(stage).slice(0, BLOCK_N))
                up = ws.index(stage).slice(BLOCK_N, BLOCK_N)
                tma.async_copy_global_to_shared(w_desc, [w_row + num_columns, first], ready, up)
            else:
                tma.async_copy_global_to_shared(w_desc, [w_row, first], ready, ws.index(stage))
            if GATHER:
                mask = in_m[:, None] & (k // 8 < (width - first) // 8)[None, :]
                async_copy.async_copy_global_to_shared(xs.index(stage), x_ptrs, mask=mask)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                x_ptrs += BLOCK_K
            else:
                tma.async_copy_global_to_shared(x, [first_row, first], ready, xs.index(stage))
            step += 1
        program += gl.num_programs(0)
        slot, passed, start, end = advance(
            offsets_ptr, slot, passed, program, num_slots, tiles_n, TILE.slot_step, BLOCK_M
        )


@gluon.jit
def write_rows(out, value, first_row, end, first_n, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Those rows of a tile that lie before `end`. `out` is (y_ptr, its stride, its columns)."""
    y_ptr, stride_y, num_columns = out
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    n = first_n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    y = gl.convert_layout(value.to(y_ptr.dtype.element_ty), OUT)
    y_ptrs = y_ptr + row.to(gl.int64)[:, None] * stride_y + n[None, :]
    gl.store(y_ptrs, y, mask=(row < end)[:, None] & (n < num_columns)[None, :])


@gluon.jit
def _tile(
    place,
    out,
    buffers,
    step,
    turn,
    width,
    GATHER: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Multiply and write the first ROWS rows of a tile; returns the next step. `place` is (first row, end, column)."""
    STAGES: gl.constexpr = TILE.stages
    WIDE: gl.constexpr = TILE.block_n * (2 if TILE.swiglu else 1)
    HALF: gl.constexpr = WIDE // 2
    TENSOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    xs, ws, full, empty, order = buffers
    # The other group has seen all its stages full. (A barrier tells odd from even rounds and no more: without this
    # order, a group could take a stage of the other's for its own.)
    mbarrier.wait(order.index(GROUP), (turn & 1) ^ (1 - GROUP))
    acc = gl.zeros((ROWS, WIDE), gl.float32, TENSOR)
    for first in range(0, width, TILE.block_k):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if GATHER:
            # Rows were written by ordinary copies; the tensor cores read through another path.
            fence_async_shared()
        x = xs.index(stage).slice(0, ROWS)
        # One product is always under way; the stage of the one before it is free.
        acc = warpgroup_mma(x, ws.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=first > 0)
        step += 1
    mbarrier.arrive(order.index(1 - GROUP), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    # Half of the columns at a time: shared memory holds no more beside the stages.
    low, high = acc.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()
    first_row, end, first_n = place
    if TILE.swiglu:
        low = low / (1.0 + gl.exp(-low)) * high
    write_rows(out, low, first_row, end, first_n, ROWS, HALF)
    if not TILE.swiglu:
        write_rows(out, high, first_row, end, first_n + HALF, ROWS, HALF)
    return step


@gluon.jit
def _consume(rows, out, width, buffers, GATHER: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr):
    """Every second tile of this program: the even ones for group 0, the odd ones for group 1."""
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    SLOT_STEP: gl.constexpr = TILE.slot_step
    # The last rows of a slot: half a tile is half the work.
    FEW: gl.constexpr = 64
    offsets_ptr, num_slots = rows
    tiles_n = (out[2] + BLOCK_N - 1) // BLOCK_N
    steps = (width + TILE.block_k - 1) // TILE.block_k
    program = gl.program_id(0) + GROUP * gl.num_programs(0)
    step = GROUP * steps
    turn = step * 0
    slot, passed, start, end = advance(offsets_ptr, turn, turn, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)
    while slot < num_slots:
        tiles_m = (end - start + BLOCK_M - 1) // BLOCK_M
        tile_m, tile_n = tile_of_program(program - passed, tiles_m, tiles_n, TILE.group_m, TILE.group_n)
        first_row = start + tile_m * BLOCK_M
        place = (first_row, end, tile_n * BLOCK_N)
        if min(end - first_row, BLOCK_M) <= FEW:
            step = _tile(place, out, buffers, step, turn, width, GATHER, FEW, TILE, GROUP)
        elif BLOCK_M > FEW:
            step = _tile(place, out, buffers, step, turn, width, GATHER, BLOCK_M, TILE, GROUP)
        step += steps
        turn += 1
        program += 2 * gl.num_programs(0)
        slot, passed, start, end = advance(
            offsets_ptr, slot, passed, program, num_slots, tiles_n, TILE.slot_step, BLOCK_M
        )


# y[r, n] as kernels/grouped_gemm.py defines it.
#   x: rows in order as a descriptor [R, D] of blocks [block_m, block_k], or with index_ptr int32 [R] a pointer [X, D]
#   stride_x8: between rows of x, in groups of 8 values; D is a multiple of 8 too
#   w_desc: [S * N or S * 2N, D] of blocks [block_n, block_k]; offsets_ptr int32 [S+1] or [S, 2];
#   y_ptr [R, N], rows strided
#   grid (multiprocessors,) or fewer: a program owns every so-manieth tile, slot by slot, until there are no more.
#   fp32 accumulation. Rows from a slot's end on may be read (they are the next slot's, or zero) and are not written;
#   D and N are filled up with zeros.
@gluon.jit(do_not_specialize=["num_slots"])
def _grouped_gemm_specialized_kernel(
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
    WIDE: gl.constexpr = TILE.block_n * (2 if TILE.swiglu else 1)
    dtype: gl.constexpr = w_desc.dtype
    X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE.block_m, TILE.block_k], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE.block_n, TILE.block_k], dtype)
    xs = gl.allocate_shared_memory(dtype, [TILE.stages, TILE.block_m, TILE.block_k], X)
    ws = gl.allocate_shared_memory(dtype, [TILE.stages, WIDE, TILE.block_k], W)
    (order,) = barriers(2, (1,))
    # The loading threads arrive each with its copies; for TMA the one that announced the bytes.
    full, empty = barriers(TILE.stages, (129 if GATHER else 1, 1))
    fence_async_shared()
    buffers = (xs, ws, full, empty, order)
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


_MANY_TILES = 4
"""From so many tiles a multiprocessor on, a kernel of many rows is launched when the one before it has ended, not
beside its end.

Beside it, programs take the multiprocessors in the order in which these come free; into an empty card they are spread
evenly, keep step, and all end within 2 % of each other (beside: 12 %), so that what one fetches is near for the others.
Measured on an H200, graphs of whole layers (pack to norm), us a layer, so / beside: qwen3, 8192 tokens 1234 / 1502
(first products 765 / 890), 16384 tokens 2343 / 2858; dsv2-lite, 8192 1588 / 1890; dsv3-ep8, 16384 21788 / 28768; fp8
dsv3-ep8, 4096 3555 / 3589. Tiles by the multiprocessor's number: 1335 (qwen3); by a counter, for whoever is free: 1448.
"""
_MANY_ROWS = 96
"""Up to so many rows a slot, reading weights takes longest, which nobody shares."""


def launch_options(x: Tensor, tiles: int, rows_of_slot: int) -> dict[str, Any]:
    """Of a kernel whose programs stay on the multiprocessors until all `tiles` are done."""
    alone = rows_of_slot > _MANY_ROWS and tiles >= _MANY_TILES * num_multiprocessors(x.device)
    return {"PDL": False} if alone else dependent_launch(x)


_DTYPES: dict[torch.dtype, gl.dtype] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def descriptor(x_MK: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine reads boxes of so many rows and columns by."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _DTYPES[x_MK.dtype])
    return TensorDescriptor(x_MK, list(x_MK.shape), list(x_MK.stride()), [rows, columns], layout)


def launch_specialized(
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
    x = x_XD if row_index_R is not None else descriptor(x_XD, tile.block_m, tile.block_k)
    tiles = most_row_tiles(num_rows, num_slots, tile.block_m) * cdiv(num_columns, tile.block_n)
    # Of a square tile four neighbours share two blocks each of rows and weights; else two share the larger one. On
    # an H200, second products of 128 x 128, us, else / so: dsv2-lite 16384 tokens 965 / 917, 8192 499 / 478, qwen3
    # 16384 717 / 708. First ones of 64 x 256: 2012 / 2135, 1434 / 1550.
    group_n = 2 if row_index_R is None and tile.block_m == tile.block_n else 1
    blocks = (tile.block_m, tile.block_n, tile.block_k)
    product_tile = ProductTile(swiglu, *blocks, group_m, slot_step(offsets_S1), tile.num_stages, group_n)
    _grouped_gemm_specialized_kernel[(min(tiles, num_multiprocessors(x_XD.device)),)](
        x,
        descriptor(w_SND.view(-1, width), tile.block_n, tile.block_k),
        offsets_S1,
        row_index_R,
        y_RN,
        num_columns,
        width,
        num_slots,
        x_XD.stride(0) // 8,
        y_RN.stride(0),
        TILE=product_tile,
        num_warps=tile.num_warps,
        **launch_options(x_XD, tiles, cdiv(num_rows, num_slots)),
    )
