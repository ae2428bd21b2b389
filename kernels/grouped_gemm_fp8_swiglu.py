"""The first fp8 product of many rows with SwiGLU, its result quantised where it is made; for compute capability 9.

Knows rows, slots, offsets and scales. One program lives on each multiprocessor. Its last warps only load: weights by
TMA, rows by TMA too where they lie in order, else each row by its index. Two groups of four warps own 64 rows each of
a tile and share 128 gate and 128 up rows of weights. So a row's 128 columns of the result, which share one scale, are
one group's, and neither rows nor result pass through memory once more.

Same sums, in the same order, and the same scales as the product, the cast and quantize_rows one after another: the bits
are the same.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

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

from kernels.barriers import barriers
from kernels.checks import cdiv
from kernels.dependent_launch import wait_for_inputs
from kernels.grouped_gemm_specialized import advance, descriptor, launch_options
from kernels.quantize import GROUP, TINIEST, Quantized, QuantizedBlocks, empty_quantized
from kernels.row_tiles import even_tile, most_row_tiles, slot_step
from kernels.tiles import num_multiprocessors

_STAGES = 4  # of 48 KB: no more fit

_LAG = 200
"""Cycles by which the second group begins a tile after the first. Groups that ask for the tensor cores at once get them
by turns, end together, and leave them idle while both add. A lag stays, so one adds while the other multiplies.

Measured on an H200, whole layers, us, without / 200 / 300 / 450 cycles: qwen3 4096 tokens 492 / 484 / 485 / 485, 16384
1650 / - / 1623 / -, dsv3-ep8 4096 3146 / 3155 / 3172 / 3184. By barriers that give the turn: qwen3 985 and more, for
the compiler then moves sums behind the next product, and spills.
"""


class SwigluTile(NamedTuple):
    """What the product is compiled for: how tiles take turns, how slots are said, and what quantize.py does."""

    h_dtype: gl.dtype
    tiniest: float
    group_m: int
    slot_step: int
    stages: int
    lag: int


# Of the tuples below: `rows` is (offsets_ptr, num_slots, index_ptr), `out` (q_ptr, scale_ptr, columns, rows), `scales`
# (x_scale_ptr, w_scale_ptr, rows of x), `buffers` (x's stages, w's, full, empty).


@gluon.jit
def _produce(x, w_desc, rows, num_columns, width, buffers, TILE: gl.constexpr):
    """Fills the stages, of x only rows of the slot; copies by TMA only for groups that have any."""
    SLOT_STEP: gl.constexpr = TILE.slot_step
    STAGES: gl.constexpr = TILE.stages
    offsets_ptr, num_slots, index_ptr = rows
    GATHER: gl.constexpr = index_ptr is not None
    xs, ws, full, empty = buffers
    tiles_n = (num_columns + 127) // 128
    program = gl.program_id(0)
    step = program * 0
    slot, passed, start, end = advance(offsets_ptr, step, step, program, num_slots, tiles_n, SLOT_STEP, 128)
    while slot < num_slots:
        first_row, used, tile_n = even_tile(program - passed, slot, end - start, tiles_n, 2, TILE.group_m)
        first_row += start
        gate_row = slot * 2 * num_columns + tile_n * 128
        if GATHER:
            ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
            row = first_row + gl.arange(0, 128, layout=gl.SliceLayout(1, ROWS))
            in_m = row < min(end, first_row + used * 64)
            x_row = gl.load(index_ptr + row, mask=in_m, other=0)
            k = gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS))
            # Groups of 16 values, 16 bytes, are what one copy moves: spelt out, for the compiler to see it.
            x_ptrs = x + x_row.to(gl.int64)[:, None] * (width // 16) * 16 + k[None, :]
        for first in range(0, width, 128):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            if GATHER:
                mbarrier.expect(ready, 256 * 128)
            else:
                for i in gl.static_range(2):
                    mbarrier.expect(ready, (256 + 64 * (i + 1)) * 128, pred=used == i + 1)
            tma.async_copy_global_to_shared(w_desc, [gate_row, first], ready, ws.index(stage * 2))
            tma.async_copy_global_to_shared(w_desc, [gate_row + num_columns, first], ready, ws.index(stage * 2 + 1))
            if GATHER:
                mask = in_m[:, None] & (k // 16 < (width - first) // 16)[None, :]
                async_copy.async_copy_global_to_shared(xs.index(stage), x_ptrs, mask=mask)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                x_ptrs += 128
            else:
                for i in gl.static_range(2):
                    x_part = xs.index(stage).slice(64 * i, 64)
                    tma.async_copy_global_to_shared(x, [first_row + 64 * i, first], ready, x_part, pred=i < used)
            step += 1
        program += gl.num_programs(0)
        slot, passed, start, end = advance(offsets_ptr, slot, passed, program, num_slots, tiles_n, SLOT_STEP, 128)


@gluon.jit
def _spin(cycles):
    """Wait so long."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .u32 start, now;
            .reg .pred early;
            mov.u32 start, %clock;
            LAGGING: mov.u32 now, %clock;
            sub.u32 now, now, start;
            setp.lt.u32 early, now, $1;
            @early bra LAGGING;
            mov.u32 $0, now;
        }
        """,
        "=r,r",
        [cycles],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _add_scaled(acc, product, x_scale, w_scale):
    """acc + a step's product, each row by its scale and the block's."""
    scale, _ = gl.broadcast((w_scale * x_scale)[:, None], acc)
    return gl.fma(product, scale, acc)


@gluon.jit
def _write(out, h, first_row, end, first_n, TENSOR: gl.constexpr, TILE: gl.constexpr):
    """h [64, 128] rounded, then quantised as kernels/quantize.py does it."""
    q_ptr, scale_ptr, num_columns, num_rows = out
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, TENSOR))
    n = first_n + gl.arange(0, 128, layout=gl.SliceLayout(0, TENSOR))
    h = gl.where((n < num_columns)[None, :], h.to(TILE.h_dtype).to(gl.float32), 0.0)
    largest = gl.max(gl.abs(h), axis=1)
    scale = gl.div_rn(gl.where(largest > TILE.tiniest, largest, TILE.tiniest), 448.0)
    gl.store(scale_ptr + (first_n // 128).to(gl.int64) * num_rows + row, scale, mask=row < end)
    OUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    q = gl.convert_layout((h * gl.div_rn(1.0, scale)[:, None]).to(q_ptr.dtype.element_ty), OUT)
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    n = first_n + gl.arange(0, 128, layout=gl.SliceLayout(0, OUT))
    q_ptrs = q_ptr + row.to(gl.int64)[:, None] * num_columns + n[None, :]
    gl.store(q_ptrs, q, mask=(row < end)[:, None] & (n < num_columns)[None, :])


@gluon.jit
def _tile(place, index_ptr, out, scales, width, buffers, step, TILE: gl.constexpr, GROUP: gl.constexpr):
    """Multiply and write a group's rows of a tile; returns the next step. `place` is (first row, end, column, slot)."""
    STAGES: gl.constexpr = TILE.stages
    GATHER: gl.constexpr = index_ptr is not None
    TENSOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    xs, ws, full, empty = buffers
    x_scale_ptr, w_scale_ptr, num_x_rows = scales
    first_row, end, first_n, slot = place
    num_groups, block_rows = (width + 127) // 128, (out[2] + 127) // 128
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, TENSOR))
    in_m = row < end
    if GATHER:
        x_ptrs = x_scale_ptr + gl.load(index_ptr + row, mask=in_m, other=0)
    else:
        x_ptrs = x_scale_ptr + row
    gate_ptr = w_scale_ptr + (slot.to(gl.int64) * 2 * block_rows + first_n // 128) * num_groups
    up_ptr = gate_ptr + block_rows * num_groups
    gate = gl.zeros((64, 128), gl.float32, TENSOR)
    up = gl.zeros((64, 128), gl.float32, TENSOR)
    zero = gl.zeros((64, 128), gl.float32, TENSOR)
    x_scale, gate_scale, up_scale = gl.load(x_ptrs, mask=in_m, other=0.0), gl.load(gate_ptr), gl.load(up_ptr)
    if GROUP == 1:
        mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
        _spin(step * 0 + TILE.lag)
    for group in range(0, num_groups):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if GATHER:
            # Rows were written by ordinary copies; the tensor cores read through another path.
            fence_async_shared()
        x = xs.index(stage).slice(64 * GROUP, 64)
        product = warpgroup_mma(x, ws.index(stage * 2).permute((1, 0)), zero, use_acc=False, is_async=True)
        # The next step's scales are on their way while this one is multiplied.
        ahead = min(group + 1, num_groups - 1)
        next_x = gl.load(x_ptrs + ahead.to(gl.int64) * num_x_rows, mask=in_m, other=0.0)
        next_gate, next_up = gl.load(gate_ptr + ahead), gl.load(up_ptr + ahead)
        gate = _add_scaled(gate, warpgroup_mma_wait(0, deps=[product]), x_scale, gate_scale)
        product = warpgroup_mma(x, ws.index(stage * 2 + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(stage), count=1)
        up = _add_scaled(up, product, x_scale, up_scale)
        x_scale, gate_scale, up_scale = next_x, next_gate, next_up
        step += 1
    _write(out, gate / (1.0 + gl.exp(-gate)) * up, first_row, end, first_n, TENSOR, TILE)
    return step


@gluon.jit
def _consume(rows, out, scales, width, buffers, TILE: gl.constexpr, GROUP: gl.constexpr):
    """A group's rows of every tile of the program; where there are none, it only lets the stages go."""
    SLOT_STEP: gl.constexpr = TILE.slot_step
    STAGES: gl.constexpr = TILE.stages
    offsets_ptr, num_slots, index_ptr = rows
    full, empty = buffers[2], buffers[3]
    tiles_n = (out[2] + 127) // 128
    program = gl.program_id(0)
    step = program * 0
    slot, passed, start, end = advance(offsets_ptr, step, step, program, num_slots, tiles_n, SLOT_STEP, 128)
    while slot < num_slots:
        first_row, used, tile_n = even_tile(program - passed, slot, end - start, tiles_n, 2, TILE.group_m)
        first_row += start + GROUP * 64
        if used > GROUP:
            place = (first_row, end, tile_n * 128, slot)
            step = _tile(place, index_ptr, out, scales, width, buffers, step, TILE, GROUP)
        else:
            for _first in range(0, width, 128):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        program += gl.num_programs(0)
        slot, passed, start, end = advance(offsets_ptr, slot, passed, program, num_slots, tiles_n, SLOT_STEP, 128)


# q[r], scale[:, r] = quantised cast(silu(gate x) * (up x)), x = x[index[r]] or x[r], by steps of 128 k, each scaled
#   x e4m3 [X, D], a pointer, or without an index a descriptor of boxes 64 x 128; x_scale_ptr fp32 [ceil(D/128), X];
#   w_desc e4m3 [S * 2F, D] of boxes 128 x 128; w_scale_ptr fp32 [S, 2, M, G]; offsets_ptr int32 [S+1] or [S, 2];
#   index_ptr int32 [R] | None; q_ptr e4m3 [R, F]; scale_ptr fp32 [ceil(F/128), R]
#   grid (multiprocessors,) or fewer: a program owns every so-manieth tile, slot by slot, until there are no more.
#   fp32. Rows from the slot's end on may be read, but are not written; D and F are filled up with zeros.
@gluon.jit(do_not_specialize=["num_slots", "num_x_rows", "num_rows"])
def _fp8_swiglu_kernel(
    x,
    x_scale_ptr,
    w_desc,
    w_scale_ptr,
    offsets_ptr,
    index_ptr,
    q_ptr,
    scale_ptr,
    num_columns,
    width,
    num_slots,
    num_x_rows,
    num_rows,
    TILE: gl.constexpr,
    PDL: gl.constexpr,
):
    wait_for_inputs(PDL)
    GATHER: gl.constexpr = index_ptr is not None
    STAGES: gl.constexpr = TILE.stages
    dtype: gl.constexpr = w_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], dtype)
    xs = gl.allocate_shared_memory(dtype, [STAGES, 128, 128], LAYOUT)
    ws = gl.allocate_shared_memory(dtype, [STAGES * 2, 128, 128], LAYOUT)
    # The loading threads arrive each with its copies; for TMA the one that announced the bytes.
    full, empty = barriers(STAGES, (129 if GATHER else 1, 2))
    fence_async_shared()
    buffers = (xs, ws, full, empty)
    rows = (offsets_ptr, num_slots, index_ptr)
    out = (q_ptr, scale_ptr, num_columns, num_rows)
    scales = (x_scale_ptr, w_scale_ptr, num_x_rows)
    gl.warp_specialize(
        [
            (_consume, (rows, out, scales, width, buffers, TILE, 0)),
            (_consume, (rows, out, scales, width, buffers, TILE, 1)),
            (_produce, (x, w_desc, rows, num_columns, width, buffers, TILE)),
        ],
        [4, 4 if GATHER else 1],
        [224, 48],
    )


_DTYPES: dict[torch.dtype, gl.dtype] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


def launch_swiglu_quantized(
    x: Quantized,
    w: QuantizedBlocks,
    offsets_S1: Tensor,
    row_index_R: Tensor | None,
    num_rows: int,
    dtype: torch.dtype,
) -> Quantized:
    """One launch: `grouped_gemm_swiglu_quantized` (grouped_gemm_fp8.py) of operands that are checked there."""
    num_slots, (_, rows_2F, width) = w.scales.shape[0], w.values.shape
    num_columns = rows_2F // 2
    out = empty_quantized(num_rows, num_columns, x.values.device)
    tiles = most_row_tiles(num_rows, num_slots, 128) * cdiv(num_columns, 128)
    _fp8_swiglu_kernel[(min(tiles, num_multiprocessors(x.values.device)),)](
        descriptor(x.values, 64, GROUP) if row_index_R is None else x.values,
        x.scales,
        descriptor(w.values.view(-1, width), 128, GROUP),
        w.scales,
        offsets_S1,
        row_index_R,
        *out,
        num_columns,
        width,
        num_slots,
        x.values.shape[0],
        num_rows,
        TILE=SwigluTile(_DTYPES[dtype], TINIEST, 8, slot_step(offsets_S1), _STAGES, _LAG),
        num_warps=4,
        **launch_options(x.values, tiles, cdiv(num_rows, num_slots)),
    )
    return out
