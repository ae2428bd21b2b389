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
from kernels.quantize import GROUP, TINIEST, Quantized, QuantizedBlocks, fp8_group
from kernels.row_tiles import most_row_tiles, slot_of_program, swiglu, tile_of_program, tiles_until_slot


@dataclass(frozen=True)
class ManyRowsTile:
    """Rows x columns of one tensor core product, warps, pipeline stages.

    `dual`: a program owns two such column tiles (of SwiGLU the gate's and the up's) and multiplies one after the other.
    Otherwise one; of SwiGLU half of its columns are the gate's, half the up's, so that block_n counts output columns.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    dual: bool = False
    maxnreg: int | None = None
    group_m: int = 8


# y[r, n] = sum over k of x[r, k] * w[slot, n, k], by steps of 128 k, each scaled; slot the one whose rows hold r
# SWIGLU: y[r, n] = silu(that with gate row n of w) * (that with up row n), w [S, 2, N, D]
#   x_desc e4m3 [R, D] in tiles BLOCK_M x 128; x_scale_ptr fp32 [G, R]; w_desc e4m3 [S * PARTS, N, D] in tiles of 1 or
#   PARTS x BLOCK_N x 128; w_scale_ptr fp32 [S, PARTS, M, G]; offsets_ptr int32 [S+1]; y_ptr [R, N];
#   y_scale_ptr fp32 [cdiv(N, 128), R] where y is e4m3 (rounded to bf16 first; BLOCK_N 128), else None
#   grid (most_row_tiles * cdiv(N, columns),): an upper bound; a program owns one tile of one slot, see row_tiles.py
#   fp32. Rows from the slot's end on may be read, but are not written; TMA fills D and N up with zeros.


@triton.jit(do_not_specialize=["num_slots", "num_x_rows"])
def _many_rows_kernel(
    x_desc,
    x_scale_ptr,
    w_desc,
    w_scale_ptr,
    offsets_ptr,
    y_ptr,
    y_scale_ptr,
    num_columns,
    width,
    num_slots,
    num_x_rows,
    SWIGLU: tl.constexpr,
    DUAL: tl.constexpr,
    TINIEST: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    COLUMNS: tl.constexpr = 2 * BLOCK_N if DUAL and not SWIGLU else BLOCK_N
    PARTS: tl.constexpr = 2 if SWIGLU else 1
    WIDTH: tl.constexpr = BLOCK_N if DUAL else PARTS * BLOCK_N
    tiles_n = tl.cdiv(num_columns, COLUMNS)
    tiles_until = tiles_until_slot(offsets_ptr, num_slots, tiles_n, BLOCK_S, BLOCK_M)
    slot, tile = slot_of_program(tiles_until, tl.program_id(0))
    if slot >= num_slots:
        return
    start, end = tl.load(offsets_ptr + slot), tl.load(offsets_ptr + slot + 1)
    tile_m, tile_n = tile_of_program(tile, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)  # pyright: ignore
    first_row = start + tile_m * BLOCK_M
    num_groups = tl.cdiv(width, 128)
    block_rows = tl.cdiv(num_columns, 128)
    row = first_row + tl.arange(0, BLOCK_M)
    in_m = row < end
    x_scale_ptrs = x_scale_ptr + row
    first_n = tile_n * COLUMNS
    part = slot * PARTS
    w_scale_ptrs = w_scale_ptr + (part.to(tl.int64) * block_rows + first_n // 128) * num_groups
    if SWIGLU:
        second_part, second_n = part + 1, first_n
        other_scale_ptrs = w_scale_ptrs + block_rows * num_groups
    else:
        second_part, second_n = part, first_n + BLOCK_N
        other_scale_ptrs = w_scale_ptrs + (min(second_n // 128, block_rows - 1) - first_n // 128) * num_groups
    i = tl.arange(0, PARTS * BLOCK_N)
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_scale = tl.load(x_scale_ptrs, mask=in_m, other=0.0)
    w_scale, other_scale = tl.load(w_scale_ptrs), tl.load(other_scale_ptrs)
    for step in range(0, num_groups):
        x_tile = x_desc.load([first_row, step * 128])
        # The next step's scales are on their way while this one is multiplied.
        ahead = min(step + 1, num_groups - 1)
        next_x_scale = tl.load(x_scale_ptrs + ahead.to(tl.int64) * num_x_rows, mask=in_m, other=0.0)
        next_w_scale = tl.load(w_scale_ptrs + ahead)
        next_other_scale = tl.load(other_scale_ptrs + ahead)
        if DUAL:
            w_tile = w_desc.load([part, first_n, step * 128]).reshape(BLOCK_N, 128)
            other_tile = w_desc.load([second_part, second_n, step * 128]).reshape(BLOCK_N, 128)
            product = tl.dot(x_tile, w_tile.T)
            acc = tl.fma(product, tl.broadcast_to((w_scale * x_scale)[:, None], acc.shape), acc)
            product = tl.dot(x_tile, other_tile.T)
            other = tl.fma(product, tl.broadcast_to((other_scale * x_scale)[:, None], other.shape), other)
        else:
            w_tile = w_desc.load([part, first_n, step * 128]).reshape(PARTS * BLOCK_N, 128)
            product = tl.dot(x_tile, w_tile.T)
            if SWIGLU:
                scale = tl.where(i < BLOCK_N, w_scale, other_scale)[None, :] * x_scale[:, None]
            else:
                scale = (w_scale * x_scale)[:, None]
            acc = tl.fma(product, tl.broadcast_to(scale, acc.shape), acc)
        x_scale, w_scale, other_scale = next_x_scale, next_w_scale, next_other_scale
    if SWIGLU:
        if DUAL:
            gate, up = acc, other
        else:
            gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        acc = swiglu(gate, up)
    n = tl.arange(0, BLOCK_N)
    y_row_ptr = y_ptr + row.to(tl.int64)[:, None] * num_columns
    mask = in_m[:, None] & (first_n + n < num_columns)[None, :]
    if y_scale_ptr is not None:
        rounded = tl.where(mask, acc.to(tl.bfloat16).to(tl.float32), 0.0)
        acc, y_scale = fp8_group(rounded, TINIEST)  # pyright: ignore
        tl.store(y_scale_ptr + tile_n.to(tl.int64) * num_x_rows + row, y_scale, mask=in_m)
    tl.store(y_row_ptr + first_n + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)
    if DUAL and not SWIGLU:
        mask = in_m[:, None] & (second_n + n < num_columns)[None, :]
        tl.store(y_row_ptr + second_n + n[None, :], other.to(y_ptr.dtype.element_ty), mask=mask)


def launch_many_rows(
    x: Quantized,
    w: QuantizedBlocks,
    offsets_S1: Tensor,
    y_RN: Tensor,
    tile: ManyRowsTile,
    y_scale_RM: Tensor | None = None,
) -> None:
    """One launch into y, whose row r is made of x's row r. w.values [S, PARTS * N, D]; y_scale_RM only if y is fp8."""
    num_columns = y_RN.shape[1]
    num_slots, parts, _, _ = w.scales.shape
    columns = tile.block_n * (2 if tile.dual and parts == 1 else 1)
    w_PND = w.values.view(num_slots * parts, num_columns, w.values.shape[-1])
    row_tiles = most_row_tiles(y_RN.shape[0], num_slots, tile.block_m)
    _many_rows_kernel[(row_tiles * cdiv(num_columns, columns),)](
        TensorDescriptor.from_tensor(x.values, [tile.block_m, GROUP]),
        x.scales,
        TensorDescriptor.from_tensor(w_PND, [1 if tile.dual else parts, tile.block_n, GROUP]),
        w.scales,
        offsets_S1,
        y_RN,
        y_scale_RM,
        num_columns,
        w.values.shape[-1],
        num_slots,
        x.values.shape[0],
        SWIGLU=parts == 2,
        DUAL=tile.dual,
        TINIEST=TINIEST,
        BLOCK_S=next_power_of_2(num_slots),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.maxnreg,
        **dependent_launch(y_RN),
    )
