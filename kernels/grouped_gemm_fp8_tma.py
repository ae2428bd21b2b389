"""The fp8 products of grouped_gemm_fp8.py for many rows: both operands come as TMA tiles, rows packed beforehand.

Knows rows, slots, offsets and scales. For GPUs with TMA (compute capability 9 and above) and widths that 16 divides.
Same sums, in the same order, as the kernel for few rows: on wgmma the bits are the same.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.quantize import GROUP, Quantized, QuantizedBlocks
from kernels.row_tiles import (
    most_row_tiles,
    slot_of_program,
    slot_range,
    slot_step,
    swiglu,
    tile_of_program,
    tiles_until_slot,
)


@dataclass(frozen=True)
class ManyRowsTile:
    """Rows x output columns of a program, warps, pipeline stages. SwiGLU makes each column of two rows of weights."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# y[r, n] = sum over k of x[r, k] * w[slot, n, k], by steps of 128 k, each scaled; slot the one whose rows hold r
# PARTS 2: y[r, n] = silu(that with gate row n of w) * (that with up row n), w [S, 2, N, D]
#   x_desc e4m3 [R, D] in tiles BLOCK_M x 128; x_scale_ptr fp32 [G, R]; w_desc e4m3 [S * PARTS, N, D] in tiles
#   PARTS x BLOCK_N x 128; w_scale_ptr fp32 [S, PARTS, M, G]; offsets_ptr int32 [S+1] or [S, 2]; y_ptr [R, N]
#   grid (most_row_tiles * cdiv(N, BLOCK_N),): an upper bound; a program owns one tile of one slot, see row_tiles.py
#   fp32. Rows from the slot's end on may be read, but are not written; TMA fills D and N up with zeros.


@triton.jit(do_not_specialize=["num_slots", "num_x_rows"])
def _many_rows_kernel(
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
    PARTS: tl.constexpr,
    SLOT_STEP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    tiles_until = tiles_until_slot(offsets_ptr, num_slots, tiles_n, SLOT_STEP, BLOCK_S, BLOCK_M)
    slot, tile = slot_of_program(tiles_until, tl.program_id(0))
    if slot >= num_slots:
        return
    start, end = slot_range(offsets_ptr, slot, SLOT_STEP)
    tile_m, tile_n = tile_of_program(tile, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)  # pyright: ignore
    first_row, first_n = start + tile_m * BLOCK_M, tile_n * BLOCK_N
    num_groups, block_rows = tl.cdiv(width, 128), tl.cdiv(num_columns, 128)
    row = first_row + tl.arange(0, BLOCK_M)
    in_m = row < end
    x_scale_ptrs = x_scale_ptr + row
    w_scale_ptrs = w_scale_ptr + (slot.to(tl.int64) * PARTS * block_rows + first_n // 128) * num_groups
    up_scale_ptrs = w_scale_ptrs + (PARTS - 1) * block_rows * num_groups
    i = tl.arange(0, PARTS * BLOCK_N)  # columns of acc: of PARTS 2 the gate's, then the up's
    acc = tl.zeros((BLOCK_M, PARTS * BLOCK_N), tl.float32)
    x_scale = tl.load(x_scale_ptrs, mask=in_m, other=0.0)
    w_scale, up_scale = tl.load(w_scale_ptrs), tl.load(up_scale_ptrs)
    for step in range(0, num_groups):
        x_tile = x_desc.load([first_row, step * 128])
        w_tile = w_desc.load([slot * PARTS, first_n, step * 128]).reshape(PARTS * BLOCK_N, 128)
        # The next step's scales are on their way while this one is multiplied.
        ahead = min(step + 1, num_groups - 1)
        next_x_scale = tl.load(x_scale_ptrs + ahead.to(tl.int64) * num_x_rows, mask=in_m, other=0.0)
        next_w_scale, next_up_scale = tl.load(w_scale_ptrs + ahead), tl.load(up_scale_ptrs + ahead)
        product = tl.dot(x_tile, w_tile.T)
        if PARTS == 2:
            scale = tl.where(i < BLOCK_N, w_scale, up_scale)[None, :] * x_scale[:, None]
        else:
            scale = (w_scale * x_scale)[:, None]
        acc = tl.fma(product, tl.broadcast_to(scale, acc.shape), acc)
        x_scale, w_scale, up_scale = next_x_scale, next_w_scale, next_up_scale
    if PARTS == 2:
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        acc = swiglu(gate, up)
    n = first_n + tl.arange(0, BLOCK_N)[None, :]
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * num_columns + n
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & (n < num_columns))


def launch_many_rows(x: Quantized, w: QuantizedBlocks, offsets_S1: Tensor, y_RN: Tensor, tile: ManyRowsTile) -> None:
    """One launch into y, whose row r is made of x's row r. w.values [S, PARTS * N, D], w.scales [S, PARTS, M, G]."""
    num_columns, width = y_RN.shape[1], w.values.shape[2]
    num_slots, parts, _, _ = w.scales.shape
    w_PND = w.values.view(num_slots * parts, num_columns, width)
    row_tiles = most_row_tiles(y_RN.shape[0], num_slots, tile.block_m)
    _many_rows_kernel[(row_tiles * cdiv(num_columns, tile.block_n),)](
        TensorDescriptor.from_tensor(x.values, [tile.block_m, GROUP]),
        x.scales,
        TensorDescriptor.from_tensor(w_PND, [parts, tile.block_n, GROUP]),
        w.scales,
        offsets_S1,
        y_RN,
        num_columns,
        width,
        num_slots,
        x.values.shape[0],
        PARTS=parts,
        SLOT_STEP=slot_step(offsets_S1),
        BLOCK_S=next_power_of_2(num_slots),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP_M=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(y_RN),
    )
