"""The ragged products with weights read by the copy engine (TMA, from compute capability 9 on): for many rows a slot.

Knows rows, slots and offsets as kernels/grouped_gemm.py does, which holds the definition and says when this kernel
serves. Gate and up rows of a column tile come as one block of a [2S, F, D] view, so that one product makes both.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.row_tiles import (
    most_row_tiles,
    slot_of_program,
    slot_range,
    slot_step,
    swiglu,
    tile_of_program,
    tiles_until_slot,
)
from kernels.tiles import TileConfig, num_multiprocessors

# y[r, n] as kernels/grouped_gemm.py defines it.
#   x: rows in order as a descriptor [R, D] of blocks [BLOCK_M, BLOCK_K], or with index_ptr int32 [R] a pointer [X, D]
#   w_desc: [S, N, D] of blocks [1, BLOCK_N, BLOCK_K]; SWIGLU: [2S, N, D] of blocks [2, BLOCK_N, BLOCK_K]
#   offsets_ptr int32 [S+1] or [S, 2]; y_ptr [R, N], rows strided
#   grid: PERSISTENT (multiprocessors,), a program owns every so-manieth tile, slot by slot; else (most_row_tiles *
#   cdiv(N, BLOCK_N),), one tile each, and surplus programs do nothing.
#   fp32 accumulation. Rows from a slot's end on may be read (they are the next slot's, or zero) and are not written;
#   D and N are filled up with zeros.


@triton.jit
def _tile(
    x,
    w_desc,
    offsets_ptr,
    index_ptr,
    y_ptr,
    program,
    tiles_until,
    tiles_n,
    num_columns,
    width,
    stride_x,
    stride_y,
    SWIGLU: tl.constexpr,
    EVEN: tl.constexpr,
    SLOT_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiply and write a tile, the one of so manieth program in a grid of all tiles."""
    slot, tile = slot_of_program(tiles_until, program)  # pyright: ignore
    start, end = slot_range(offsets_ptr, slot, SLOT_STEP)
    tile_m, tile_n = tile_of_program(tile, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)  # pyright: ignore
    first_row, first_n = start + tile_m * BLOCK_M, tile_n * BLOCK_N
    PRODUCTS: tl.constexpr = 2 if SWIGLU else 1
    row = first_row + tl.arange(0, BLOCK_M)
    in_m = (row < end)[:, None]
    k = tl.arange(0, BLOCK_K)
    if index_ptr is not None:
        x_row = tl.load(index_ptr + row, mask=row < end, other=0)
        x_ptrs = x + x_row.to(tl.int64)[:, None] * stride_x + k[None, :]
    acc = tl.zeros((BLOCK_M, PRODUCTS * BLOCK_N), tl.float32)
    for first in range(0, width, BLOCK_K):
        if index_ptr is None:
            x_MK = x.load([first_row, first])
        else:
            x_MK = tl.load(x_ptrs + first, mask=in_m if EVEN else in_m & (first + k < width)[None, :], other=0.0)
        w_NK = w_desc.load([PRODUCTS * slot, first_n, first]).reshape(PRODUCTS * BLOCK_N, BLOCK_K)
        acc = tl.dot(x_MK, w_NK.T, acc, input_precision="ieee")
    if SWIGLU:
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        y = swiglu(gate, up)
    else:
        y = acc
    n = first_n + tl.arange(0, BLOCK_N)
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * stride_y + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=in_m & (n < num_columns)[None, :])


@triton.jit(do_not_specialize=["num_slots"])
def _grouped_gemm_tma_kernel(
    x,
    w_desc,
    offsets_ptr,
    index_ptr,
    y_ptr,
    num_columns,
    width,
    num_slots,
    stride_x,
    stride_y,
    SWIGLU: tl.constexpr,
    EVEN: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SLOT_STEP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    tiles_until = tiles_until_slot(offsets_ptr, num_slots, tiles_n, SLOT_STEP, BLOCK_S, BLOCK_M)
    num_tiles = tl.max(tiles_until, axis=0)
    if PERSISTENT:
        for program in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
            _tile(
                x, w_desc, offsets_ptr, index_ptr, y_ptr, program, tiles_until, tiles_n, num_columns, width, stride_x,
                stride_y, SWIGLU, EVEN, SLOT_STEP, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            )  # fmt: skip
    elif tl.program_id(0) < num_tiles:
        _tile(
            x, w_desc, offsets_ptr, index_ptr, y_ptr, tl.program_id(0), tiles_until, tiles_n, num_columns, width,
            stride_x, stride_y, SWIGLU, EVEN, SLOT_STEP, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
        )  # fmt: skip


def tma_serves(x_XD: Tensor, w_SND: Tensor) -> bool:
    """Whether the copy engine can read these operands: rows 16-byte aligned, weights in one piece."""
    return w_SND.is_contiguous() and all(
        x.data_ptr() % 16 == 0 and x.stride(-2) * x.element_size() % 16 == 0 for x in (x_XD, w_SND)
    )


_MANY_COLUMN_TILES = 64
"""From so many column tiles on, twice as many row tiles share a column's weights: those of a slot have left the cache
when the next group of row tiles asks for them again, so half as many groups read half as much.

Measured on an H200, mixtral, 8192 tokens, 112 column tiles in the first product and 16 in the second, us a layer in
three runs: 8 row tiles in both 9243, 9397, 9266; 16 in the first 9115, 9325, 9186; 16 in both 9261; 32 and 8 9240.
"""


def launch_tma(
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
    """Fills y_RN. Operands as `grouped_gemm` checks them, and as `tma_serves` wants them."""
    (num_rows, num_columns), (num_slots, _, width) = y_RN.shape, w_SND.shape
    products = 2 if swiglu else 1
    w_view = w_SND.view(num_slots * products, num_columns, width)
    w_block = [products, tile.block_n, tile.block_k]
    x = x_XD
    if row_index_R is None:
        x = TensorDescriptor(x_XD, list(x_XD.shape), list(x_XD.stride()), [tile.block_m, tile.block_k])
    tiles_n = cdiv(num_columns, tile.block_n)
    tiles = most_row_tiles(num_rows, num_slots, tile.block_m) * tiles_n
    # With rows in order, the next tile's first loads fly while this one is written; gathered rows gain nothing by it.
    persistent = row_index_R is None and tile.num_warps == 8
    _grouped_gemm_tma_kernel[(min(tiles, num_multiprocessors(x_XD.device)) if persistent else tiles,)](
        x,
        TensorDescriptor(w_view, list(w_view.shape), list(w_view.stride()), w_block),
        offsets_S1,
        row_index_R,
        y_RN,
        num_columns,
        width,
        num_slots,
        x_XD.stride(0),
        y_RN.stride(0),
        SWIGLU=swiglu,
        EVEN=width % tile.block_k == 0,
        PERSISTENT=persistent,
        SLOT_STEP=slot_step(offsets_S1),
        BLOCK_S=next_power_of_2(num_slots),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=2 * group_m if tiles_n >= _MANY_COLUMN_TILES else group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(x_XD),
    )
