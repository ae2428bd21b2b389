"""The fp8 products of grouped_gemm_fp8.py with short rows, for compute capability 9: weights stay for a slot's rows.

Knows rows, slots, offsets and scales. One program lives on each multiprocessor and owns 128 columns of a slot at a
time: their weights, up to 1024 wide, stay in shared memory while all rows of the slot pass by. Three groups of four
warps take 64 rows each in turn, every one at its own pace: while one writes out, the others have the tensor cores,
which tiles of few steps could not hide. Four single warps load by TMA, one the weights and one each group's rows.

Same sums, in the same order, as the other kernels: the bits are the same.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

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
from kernels.grouped_gemm_specialized import descriptor, launch_options, write_rows
from kernels.quantize import GROUP, Quantized, QuantizedBlocks
from kernels.row_tiles import slot_range, slot_step
from kernels.tiles import num_multiprocessors


@dataclass(frozen=True)
class ResidentTile:
    """Stages of weights, each 128 columns of 128 values, at least as many as a row has; stages of each group's rows."""

    w_stages: int
    x_stages: int


# A unit: 128 columns of a slot. Of the tuples below: `rows` is (offsets_ptr, num_slots), `out` (y_ptr, its stride, its
# columns), `scales` (x_scale_ptr, w_scale_ptr, rows of x), `buffers` (x's stages, group by group, w's, and of each full
# and empty), TILE (SLOT_STEP, W_STAGES, X_STAGES). A unit's groups of 64 rows are dealt out in turn, on from the last
# unit's: `turn` is the unit's first one of ours.


@gluon.jit
def _next_turn(turn, start, end):
    return (turn + 3 - (end - start + 63) // 64 % 3) % 3


@gluon.jit
def _produce_weights(w_desc, rows, num_columns, width, buffers, TILE: gl.constexpr):
    """Fills w's stages, unit by unit."""
    W_STAGES: gl.constexpr = TILE[1]
    offsets_ptr, num_slots = rows
    ws, full, empty = buffers[1], buffers[4], buffers[5]
    tiles_n = (num_columns + 127) // 128
    step = gl.program_id(0) * 0
    for unit in range(gl.program_id(0), num_slots * tiles_n, gl.num_programs(0)):
        slot = unit // tiles_n
        start, end = slot_range(offsets_ptr, slot, TILE[0])
        if end > start:
            w_row = slot * num_columns + unit % tiles_n * 128
            for first in range(0, width, 128):
                stage = step % W_STAGES
                mbarrier.wait(empty.index(stage), (step // W_STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), 128 * 128)
                tma.async_copy_global_to_shared(w_desc, [w_row, first], full.index(stage), ws.index(stage))
                step += 1


@gluon.jit
def _produce_rows(x_desc, rows, num_columns, width, buffers, TILE: gl.constexpr, GROUP: gl.constexpr):
    """Fills x's stages of a group."""
    X_STAGES: gl.constexpr = TILE[2]
    offsets_ptr, num_slots = rows
    xs, full, empty = buffers[0], buffers[2], buffers[3]
    tiles_n = (num_columns + 127) // 128
    step = gl.program_id(0) * 0
    turn = step + GROUP
    for unit in range(gl.program_id(0), num_slots * tiles_n, gl.num_programs(0)):
        start, end = slot_range(offsets_ptr, unit // tiles_n, TILE[0])
        row = start + turn * 64
        while row < end:
            for first in range(0, width, 128):
                stage = step % X_STAGES + GROUP * X_STAGES
                mbarrier.wait(empty.index(stage), (step // X_STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), 64 * 128)
                tma.async_copy_global_to_shared(x_desc, [row, first], full.index(stage), xs.index(stage))
                step += 1
            row += 3 * 64
        turn = _next_turn(turn, start, end)


@gluon.jit
def _multiply(place, scales, width, buffers, step, w_step, TILE: gl.constexpr, GROUP: gl.constexpr):
    """The sums of 64 rows and a unit's columns; `place` is (first row, end, block of weights, whether it is our last of
    the unit, whose stages then go)."""
    W_STAGES: gl.constexpr = TILE[1]
    X_STAGES: gl.constexpr = TILE[2]
    TENSOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    xs, ws, x_full, x_empty, w_full, w_empty = buffers
    x_scale_ptr, w_scale_ptr, num_x_rows = scales
    first_row, end, block, last = place
    num_groups = (width + 127) // 128
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, TENSOR))
    x_ptrs = x_scale_ptr + row
    w_ptr = w_scale_ptr + block * num_groups
    acc = gl.zeros((64, 128), gl.float32, TENSOR)
    zero = gl.zeros((64, 128), gl.float32, TENSOR)
    x_scale, w_scale = gl.load(x_ptrs, mask=row < end, other=0.0), gl.load(w_ptr)
    for group in range(0, num_groups):
        stage = (step + group) % X_STAGES + GROUP * X_STAGES
        w_stage = (w_step + group) % W_STAGES
        mbarrier.wait(w_full.index(w_stage), (w_step + group) // W_STAGES & 1)
        mbarrier.wait(x_full.index(stage), (step + group) // X_STAGES & 1)
        w = ws.index(w_stage).permute((1, 0))
        product = warpgroup_mma(xs.index(stage), w, zero, use_acc=False, is_async=True)
        # The next step's scales are on their way while this one is multiplied.
        ahead = min(group + 1, num_groups - 1)
        next_x = gl.load(x_ptrs + ahead.to(gl.int64) * num_x_rows, mask=row < end, other=0.0)
        next_w = gl.load(w_ptr + ahead)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(x_empty.index(stage), count=1)
        mbarrier.arrive(w_empty.index(w_stage), count=1, pred=last)
        scale, _ = gl.broadcast((w_scale * x_scale)[:, None], acc)
        acc = gl.fma(product, scale, acc)
        x_scale, w_scale = next_x, next_w
    return acc


@gluon.jit
def _consume(rows, out, scales, width, buffers, TILE: gl.constexpr, GROUP: gl.constexpr):
    """A group's rows of every unit of the program; where there are none, it only lets the weights go."""
    W_STAGES: gl.constexpr = TILE[1]
    offsets_ptr, num_slots = rows
    full, empty = buffers[4], buffers[5]
    tiles_n, num_groups = (out[2] + 127) // 128, (width + 127) // 128
    step = gl.program_id(0) * 0
    w_step = step
    turn = step + GROUP
    for unit in range(gl.program_id(0), num_slots * tiles_n, gl.num_programs(0)):
        start, end = slot_range(offsets_ptr, unit // tiles_n, TILE[0])
        first_row = start + turn * 64
        if end > start:
            if first_row >= end:
                for group in range(0, num_groups):
                    stage = (w_step + group) % W_STAGES
                    mbarrier.wait(full.index(stage), (w_step + group) // W_STAGES & 1)
                    mbarrier.arrive(empty.index(stage), count=1)
            while first_row < end:
                place = (first_row, end, unit.to(gl.int64), first_row + 3 * 64 >= end)
                acc = _multiply(place, scales, width, buffers, step, w_step, TILE, GROUP)
                step += num_groups
                # Half of the columns at a time: shared memory holds no more beside the stages.
                low, high = acc.reshape([64, 2, 64]).permute(0, 2, 1).split()
                first_n = unit % tiles_n * 128
                write_rows(out, low, first_row, end, first_n, 64, 64)
                write_rows(out, high, first_row, end, first_n + 64, 64, 64)
                first_row += 3 * 64
            w_step += num_groups
        turn = _next_turn(turn, start, end)


# y[r, n] = sum over k of x[r, k] * w[slot, n, k], by steps of 128 k, each scaled; slot the one whose rows hold r
#   x_desc e4m3 [R, D] of boxes 64 x 128; x_scale_ptr fp32 [G, R]; w_desc e4m3 [S * N, D] of boxes 128 x 128;
#   w_scale_ptr fp32 [S, 1, ceil(N / 128), G]; offsets_ptr int32 [S+1] or [S, 2]; y_ptr [R, N]
#   grid (multiprocessors,) or fewer: a program owns every so-manieth unit, slot by slot.
#   fp32. Rows from the slot's end on may be read, but are not written; TMA fills D and N up with zeros.
@gluon.jit(do_not_specialize=["num_slots", "num_x_rows"])
def _fp8_resident_kernel(
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
    SLOT_STEP: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    wait_for_inputs(PDL)
    TILE: gl.constexpr = (SLOT_STEP, W_STAGES, X_STAGES)
    dtype: gl.constexpr = w_desc.dtype
    X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], dtype)
    xs = gl.allocate_shared_memory(dtype, [3 * X_STAGES, 64, 128], X)
    ws = gl.allocate_shared_memory(dtype, [W_STAGES, 128, 128], W)
    x_full, x_empty = barriers(3 * X_STAGES, (1, 1))
    w_full, w_empty = barriers(W_STAGES, (1, 3))
    fence_async_shared()
    buffers = (xs, ws, x_full, x_empty, w_full, w_empty)
    rows = (offsets_ptr, num_slots)
    out = (y_ptr, stride_y, num_columns)
    scales = (x_scale_ptr, w_scale_ptr, num_x_rows)
    gl.warp_specialize(
        [
            (_consume, (rows, out, scales, width, buffers, TILE, 0)),
            (_consume, (rows, out, scales, width, buffers, TILE, 1)),
            (_consume, (rows, out, scales, width, buffers, TILE, 2)),
            (_produce_weights, (w_desc, rows, num_columns, width, buffers, TILE)),
            (_produce_rows, (x_desc, rows, num_columns, width, buffers, TILE, 0)),
            (_produce_rows, (x_desc, rows, num_columns, width, buffers, TILE, 1)),
            (_produce_rows, (x_desc, rows, num_columns, width, buffers, TILE, 2)),
        ],
        [4, 4, 1, 1, 1, 1],
        [160, 160, 32, 32, 32, 32],
    )


def launch_fp8_resident(x: Quantized, w: QuantizedBlocks, offsets_S1: Tensor, y_RN: Tensor, tile: ResidentTile) -> None:
    """One launch into y, whose row r is made of x's row r. w.values [S, N, D], w.scales [S, 1, M, G]."""
    (num_rows, num_columns), width, num_slots = y_RN.shape, w.values.shape[2], w.scales.shape[0]
    assert w.scales.shape[1] == 1 and cdiv(width, GROUP) <= tile.w_stages, (
        f"{tile}: weights {w.scales.shape} do not fit"
    )
    units = num_slots * cdiv(num_columns, 128)
    _fp8_resident_kernel[(min(units, num_multiprocessors(y_RN.device)),)](
        descriptor(x.values, 64, GROUP),
        x.scales,
        descriptor(w.values.view(-1, width), 128, GROUP),
        w.scales,
        offsets_S1,
        y_RN,
        num_columns,
        width,
        num_slots,
        x.values.shape[0],
        y_RN.stride(0),
        SLOT_STEP=slot_step(offsets_S1),
        W_STAGES=tile.w_stages,
        X_STAGES=tile.x_stages,
        num_warps=4,
        **launch_options(y_RN, units, cdiv(num_rows, num_slots)),
    )
