"""The fp8 products of grouped_gemm_fp8.py with many rows a slot, for compute capability 9: a warp loads for others.

Knows rows, slots, offsets and scales. One program lives on each multiprocessor. A warp fills the stages by TMA; two or
three groups of four warps own 64 rows of a tile each, and all use the same weights. While one group adds what it
multiplied, scaled, to its sums, the others have the tensor cores. (Twice 64 rows a group do not fit its registers.)

Same sums, in the same order, as the other kernels: the bits are the same.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.barriers import barriers
from kernels.checks import cdiv
from kernels.dependent_launch import wait_for_inputs
from kernels.grouped_gemm_specialized import advance, descriptor, launch_options, write_rows
from kernels.quantize import GROUP, Quantized, QuantizedBlocks
from kernels.row_tiles import even_tile, most_row_tiles, slot_step
from kernels.tiles import num_multiprocessors


@dataclass(frozen=True)
class SpecializedTile:
    """128 rows of weights (columns, or half of them gate and half up) by 64 rows of each group; pipeline stages."""

    num_groups: int
    num_stages: int

    @property
    def block_m(self) -> int:
        return 64 * self.num_groups


class Fp8ProductTile(NamedTuple):
    """What a product is compiled for: parts of the weights, groups that multiply, how tiles take turns, and how slots
    are said."""

    parts: int
    groups: int
    group_m: int
    slot_step: int
    stages: int


# Of the tuples below: `rows` is (offsets_ptr, num_slots), `out` (y_ptr, its stride, its columns), `scales`
# (x_scale_ptr, w_scale_ptr, rows of x), `buffers` (x's stages, w's, full, empty).


@gluon.jit
def _produce(x_desc, w_desc, rows, num_columns, width, buffers, TILE: gl.constexpr):
    """Fills the stages, of x only for groups that have rows of the slot."""
    GROUPS: gl.constexpr = TILE.groups
    PARTS: gl.constexpr = TILE.parts
    BLOCK_N: gl.constexpr = 128 // PARTS
    BLOCK_M: gl.constexpr = 64 * GROUPS
    SLOT_STEP: gl.constexpr = TILE.slot_step
    STAGES: gl.constexpr = TILE.stages
    offsets_ptr, num_slots = rows
    xs, ws, full, empty = buffers
    tiles_n = (num_columns + BLOCK_N - 1) // BLOCK_N
    program = gl.program_id(0)
    step = program * 0
    slot, passed, start, end = advance(offsets_ptr, step, step, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)
    while slot < num_slots:
        first_row, used, tile_n = even_tile(program - passed, slot, end - start, tiles_n, GROUPS, TILE.group_m)
        first_row += start
        w_row = slot * PARTS * num_columns + tile_n * BLOCK_N
        for first in range(0, width, 128):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            for i in gl.static_range(GROUPS):
                mbarrier.expect(ready, (128 + 64 * (i + 1)) * 128, pred=used == i + 1)
            w = ws.index(stage)
            if PARTS == 2:
                tma.async_copy_global_to_shared(w_desc, [w_row, first], ready, w.slice(0, BLOCK_N))
                tma.async_copy_global_to_shared(w_desc, [w_row + num_columns, first], ready, w.slice(BLOCK_N, BLOCK_N))
            else:
                tma.async_copy_global_to_shared(w_desc, [w_row, first], ready, w)
            for i in gl.static_range(GROUPS):
                x = xs.index(stage * GROUPS + i)
                tma.async_copy_global_to_shared(x_desc, [first_row + 64 * i, first], ready, x, pred=i < used)
            step += 1
        program += gl.num_programs(0)
        slot, passed, start, end = advance(offsets_ptr, slot, passed, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)


@gluon.jit
def _tile(place, out, scales, width, buffers, step, TILE: gl.constexpr, GROUP: gl.constexpr):
    """Multiply and write a group's rows of a tile; returns the next step. `place` is (first row, end, column, slot)."""
    GROUPS: gl.constexpr = TILE.groups
    PARTS: gl.constexpr = TILE.parts
    STAGES: gl.constexpr = TILE.stages
    TENSOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    xs, ws, full, empty = buffers
    x_scale_ptr, w_scale_ptr, num_x_rows = scales
    first_row, end, first_n, slot = place
    num_groups, block_rows = (width + 127) // 128, (out[2] + 127) // 128
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, TENSOR))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, TENSOR))
    x_ptrs = x_scale_ptr + row
    w_ptr = w_scale_ptr + (slot.to(gl.int64) * PARTS * block_rows + first_n // 128) * num_groups
    up_ptr = w_ptr + (PARTS - 1) * block_rows * num_groups
    acc = gl.zeros((64, 128), gl.float32, TENSOR)
    zero = gl.zeros((64, 128), gl.float32, TENSOR)
    x_scale, w_scale, up_scale = gl.load(x_ptrs, mask=row < end, other=0.0), gl.load(w_ptr), gl.load(up_ptr)
    for group in range(0, num_groups):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        w = ws.index(stage).permute((1, 0))
        product = warpgroup_mma(xs.index(stage * GROUPS + GROUP), w, zero, use_acc=False, is_async=True)
        # The next step's scales are on their way while this one is multiplied.
        ahead = min(group + 1, num_groups - 1)
        next_x = gl.load(x_ptrs + ahead.to(gl.int64) * num_x_rows, mask=row < end, other=0.0)
        next_w, next_up = gl.load(w_ptr + ahead), gl.load(up_ptr + ahead)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(stage), count=1)
        if PARTS == 2:
            scale = gl.where(column < 64, w_scale, up_scale)[None, :] * x_scale[:, None]
        else:
            scale = (w_scale * x_scale)[:, None]
        scale, _ = gl.broadcast(scale, acc)
        acc = gl.fma(product, scale, acc)
        x_scale, w_scale, up_scale = next_x, next_w, next_up
        step += 1
    # Half of the columns at a time: shared memory holds no more beside the stages.
    low, high = acc.reshape([64, 2, 64]).permute(0, 2, 1).split()
    if PARTS == 2:
        write_rows(out, low / (1.0 + gl.exp(-low)) * high, first_row, end, first_n, 64, 64)
    else:
        write_rows(out, low, first_row, end, first_n, 64, 64)
        write_rows(out, high, first_row, end, first_n + 64, 64, 64)
    return step


@gluon.jit
def _consume(rows, out, scales, width, buffers, TILE: gl.constexpr, GROUP: gl.constexpr):
    """A group's rows of every tile of the program; where there are none, it only lets the stages go."""
    BLOCK_M: gl.constexpr = 64 * TILE.groups
    BLOCK_N: gl.constexpr = 128 // TILE.parts
    SLOT_STEP: gl.constexpr = TILE.slot_step
    STAGES: gl.constexpr = TILE.stages
    offsets_ptr, num_slots = rows
    full, empty = buffers[2], buffers[3]
    tiles_n = (out[2] + BLOCK_N - 1) // BLOCK_N
    program = gl.program_id(0)
    step = program * 0
    slot, passed, start, end = advance(offsets_ptr, step, step, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)
    while slot < num_slots:
        first_row, used, tile_n = even_tile(program - passed, slot, end - start, tiles_n, TILE.groups, TILE.group_m)
        first_row += start + GROUP * 64
        if used > GROUP:
            place = (first_row, end, tile_n * BLOCK_N, slot)
            step = _tile(place, out, scales, width, buffers, step, TILE, GROUP)
        else:
            for _first in range(0, width, 128):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        program += gl.num_programs(0)
        slot, passed, start, end = advance(offsets_ptr, slot, passed, program, num_slots, tiles_n, SLOT_STEP, BLOCK_M)


# y[r, n] = sum over k of x[r, k] * w[slot, n, k], by steps of 128 k, each scaled; slot the one whose rows hold r
# TILE.parts 2: y[r, n] = silu(that with gate row n of w) * (that with up row n), w [S, 2, N, D]
#   x_desc e4m3 [R, D] of boxes 64 x 128; x_scale_ptr fp32 [G, R]; w_desc e4m3 [S * parts * N, D] of boxes
#   128 / parts x 128; w_scale_ptr fp32 [S, parts, M, G]; offsets_ptr int32 [S+1] or [S, 2]; y_ptr [R, N]
#   grid (multiprocessors,) or fewer: a program owns every so-manieth tile, slot by slot, until there are no more.
#   fp32. Rows from the slot's end on may be read, but are not written; TMA fills D and N up with zeros.
@gluon.jit(do_not_specialize=["num_slots", "num_x_rows"])
def _fp8_specialized_kernel(
    x_desc,
    x_scale_ptr,
    w_desc,
    w_scale_ptr,
    offsets_ptr,
    y_ptr,
    num_columns,
    width,
    num_slots,
    num_x_rows,
    stride_y,
    TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    wait_for_inputs(PDL)
    GROUPS: gl.constexpr = TILE.groups
    STAGES: gl.constexpr = TILE.stages
    dtype: gl.constexpr = w_desc.dtype
    X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128 // TILE.parts, 128], dtype)
    xs = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, 64, 128], X)
    ws = gl.allocate_shared_memory(dtype, [STAGES, 128, 128], W)
    full, empty = barriers(STAGES, (1, GROUPS))
    fence_async_shared()
    buffers = (xs, ws, full, empty)
    rows = (offsets_ptr, num_slots)
    out = (y_ptr, stride_y, num_columns)
    scales = (x_scale_ptr, w_scale_ptr, num_x_rows)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_consume, (rows, out, scales, width, buffers, TILE, 0)),
                (_consume, (rows, out, scales, width, buffers, TILE, 1)),
                (_consume, (rows, out, scales, width, buffers, TILE, 2)),
                (_produce, (x_desc, w_desc, rows, num_columns, width, buffers, TILE)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (rows, out, scales, width, buffers, TILE, 0)),
                (_consume, (rows, out, scales, width, buffers, TILE, 1)),
                (_produce, (x_desc, w_desc, rows, num_columns, width, buffers, TILE)),
            ],
            [4, 1],
            [232, 40],
        )


def launch_fp8_specialized(
    x: Quantized, w: QuantizedBlocks, offsets_S1: Tensor, y_RN: Tensor, tile: SpecializedTile
) -> None:
    """One launch into y, whose row r is made of x's row r. w.values [S, PARTS * N, D], w.scales [S, PARTS, M, G]."""
    (num_rows, num_columns), width = y_RN.shape, w.values.shape[2]
    num_slots, parts, _, _ = w.scales.shape
    tiles = most_row_tiles(num_rows, num_slots, tile.block_m) * cdiv(num_columns, 128 // parts)
    _fp8_specialized_kernel[(min(tiles, num_multiprocessors(y_RN.device)),)](
        descriptor(x.values, 64, GROUP),
        x.scales,
        descriptor(w.values.view(-1, width), 128 // parts, GROUP),
        w.scales,
        offsets_S1,
        y_RN,
        num_columns,
        width,
        num_slots,
        x.values.shape[0],
        y_RN.stride(0),
        TILE=Fp8ProductTile(parts, tile.num_groups, 8, slot_step(offsets_S1), tile.num_stages),
        num_warps=4,
        **launch_options(y_RN, tiles, cdiv(num_rows, num_slots)),
    )
