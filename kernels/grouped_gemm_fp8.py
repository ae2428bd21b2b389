"""Products of ragged fp8 rows with the fp8 weights of their expert slot, optionally with SwiGLU in the epilogue.

Knows rows, slots, offsets and scales; knows neither tokens nor routing. The fp8 twin of grouped_gemm.py: rows have a
scale for each 128 columns, weights for each block of 128 x 128 (quantize.py). Slots are found as there.

A K step is 128 columns, whose products have one scale for each (row, block of weights): the tensor cores sum a step from
zero, then acc = fma(step, x's scale * w's scale, acc) in fp32, steps ascending and never split. On a GPU with wgmma the
bits are the same for every tile, and with operands swapped: few rows make the weights the tensor core's M side, which
needs 64, and the rows its N side, for which 16 will do. (mma.sync sums fp8 differently, so wgmma's M is kept at 64.)
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.checks import (
    cdiv,
    next_power_of_2,
)
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.quantize import TINIEST, Quantized, fp8_group
from kernels.row_tiles import most_row_tiles, slot_of_program, swiglu, tile_of_program, tiles_until_slot


@dataclass(frozen=True)
class Fp8Tile:
    """A program's tile: rows x columns of the output, warps, stages; which operands come by TMA descriptor."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    wide: bool = False
    dual: bool = False
    w_desc: bool = True
    maxnreg: int | None = None
    group_m: int = 8


# y[r, n] = sum over k of x[index[r], k] * w[slot, n, k], stepwise as above, slot the one whose rows hold r
# PARTS 2: y[r, n] = silu(that with gate row n of w) * (that with up row n), w [S, 2, N, D]
#   x e4m3 [X, D] (pointer or descriptor of BLOCK_M x 128), x_scale_ptr fp32 [X, G]; w e4m3 [S, PARTS, N, D] (pointer or
#   descriptor of [S * PARTS, N, D] by PARTS x BLOCK_N x 128), w_scale_ptr fp32 [S, PARTS, M, G]; offsets_ptr int32 [S+1];
#   index_ptr int32 [R] | None; y_ptr [R, N]; y_scale_ptr fp32 [R, cdiv(N, 128)] where y is e4m3 (BLOCK_N 128), else None
#   grid (tiles_m * cdiv(N, BLOCK_N),), tiles_m an upper bound of the slots' row tiles; surplus programs do nothing.
#   Rows from the slot's end on are not written; D and N are filled up with zeros.


@triton.jit(do_not_specialize=["num_slots"])
def _few_rows_kernel(
    x_ptr,
    x_scale_ptr,
    w,
    w_scale_ptr,
    offsets_ptr,
    index_ptr,
    y_ptr,
    num_columns,
    width,
    num_slots,
    PARTS: tl.constexpr,
    W_DESC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    tiles_until = tiles_until_slot(offsets_ptr, num_slots, tiles_n, BLOCK_S, BLOCK_M)
    slot, tile = slot_of_program(tiles_until, tl.program_id(0))
    if slot >= num_slots:
        return
    start, end = tl.load(offsets_ptr + slot), tl.load(offsets_ptr + slot + 1)
    tile_m, tile_n = tile_of_program(tile, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)  # pyright: ignore
    first_row = start + tile_m * BLOCK_M
    num_groups = tl.cdiv(width, 128)
    row = first_row + tl.arange(0, BLOCK_M)
    in_m = row < end
    x_row = (row if index_ptr is None else tl.load(index_ptr + row, mask=in_m, other=0)).to(tl.int64)
    x_scale_ptrs = x_scale_ptr + x_row * num_groups
    first_n = tile_n * BLOCK_N
    part = slot.to(tl.int64) * PARTS
    block_rows = tl.cdiv(num_columns, 128)
    w_scale_row = w_scale_ptr + (part * block_rows + first_n // 128) * num_groups
    k = tl.arange(0, 128)
    i = tl.arange(0, PARTS * BLOCK_N)  # rows of the weights' tile: of PARTS 2 the gate's, then the up's
    x_ptrs = x_ptr + x_row[:, None] * width + k[None, :]
    if not W_DESC:
        n = first_n + i % BLOCK_N
        w_ptrs = w + ((part + i // BLOCK_N) * num_columns + n)[:, None] * width + k[None, :]
        in_n = (n < num_columns)[:, None]
    acc = tl.zeros((PARTS * BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, num_groups):
        in_k = (step * 128 + k < width)[None, :]
        if EVEN_K:
            x_tile = tl.load(x_ptrs + step * 128, mask=in_m[:, None], other=0.0)
        else:
            x_tile = tl.load(x_ptrs + step * 128, mask=in_m[:, None] & in_k, other=0.0)
        if W_DESC:
            w_tile = w.load([slot * PARTS, first_n, step * 128]).reshape(PARTS * BLOCK_N, 128)
        elif EVEN_K:
            w_tile = tl.load(w_ptrs + step * 128, mask=in_n, other=0.0)
        else:
            w_tile = tl.load(w_ptrs + step * 128, mask=in_n & in_k, other=0.0)
        x_scale = tl.load(x_scale_ptrs + step, mask=in_m, other=0.0)
        w_scale = tl.load(w_scale_row + step)
        if PARTS == 2:
            up_scale = tl.load(w_scale_row + block_rows * num_groups + step)
        product = tl.dot(w_tile, x_tile.T)
        if PARTS == 2:
            w_scale = tl.where(i < BLOCK_N, w_scale, up_scale)
            scale = w_scale[:, None] * x_scale[None, :]
        else:
            scale = (w_scale * x_scale)[None, :]
        acc = tl.fma(product, tl.broadcast_to(scale, acc.shape), acc)
    if PARTS == 2:
        gate, up = acc.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0).split()
        acc = swiglu(gate, up)
    n_out = first_n + tl.arange(0, BLOCK_N)
    y_ptrs = y_ptr + row.to(tl.int64)[None, :] * num_columns + n_out[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_m[None, :] & (n_out < num_columns)[:, None])


@triton.jit(do_not_specialize=["num_slots", "stride_xsg"])
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
    stride_xsx,
    stride_xsg,
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
    x_scale_ptrs = x_scale_ptr + row.to(tl.int64) * stride_xsx
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
        next_x_scale = tl.load(x_scale_ptrs + ahead * stride_xsg, mask=in_m, other=0.0)
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
        tl.store(y_scale_ptr + row.to(tl.int64) * block_rows + tile_n, y_scale, mask=in_m)
    tl.store(y_row_ptr + first_n + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)
    if DUAL and not SWIGLU:
        mask = in_m[:, None] & (second_n + n < num_columns)[None, :]
        tl.store(y_row_ptr + second_n + n[None, :], other.to(y_ptr.dtype.element_ty), mask=mask)


def launch(
    x: Quantized,
    w_SPND: Tensor,
    w_scale_SPMG: Tensor,
    offsets_S1: Tensor,
    row_index_R: Tensor | None,
    y_RN: Tensor,
    y_scale_RM: Tensor | None,
    tile: Fp8Tile,
) -> None:
    """One launch into y."""
    if y_RN.numel() == 0:
        return
    num_rows, num_columns = y_RN.shape
    num_slots, parts, _, width = w_SPND.shape
    tiles_m = most_row_tiles(num_rows, num_slots, tile.block_m)
    options = {
        "BLOCK_S": next_power_of_2(num_slots),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.maxnreg,
        **dependent_launch(y_RN),
    }
    w_PND = w_SPND.flatten(0, 1)
    if not tile.wide:
        _few_rows_kernel[(tiles_m * cdiv(num_columns, tile.block_n),)](
            x.values_XD,
            x.scales_XG,
            TensorDescriptor.from_tensor(w_PND, [parts, tile.block_n, 128]) if tile.w_desc else w_PND,
            w_scale_SPMG,
            offsets_S1,
            row_index_R,
            y_RN,
            num_columns,
            width,
            num_slots,
            PARTS=parts,
            W_DESC=tile.w_desc,
            EVEN_K=width % 128 == 0,
            **options,
        )
        return
    columns = tile.block_n * (2 if tile.dual and parts == 1 else 1)
    _many_rows_kernel[(tiles_m * cdiv(num_columns, columns),)](
        TensorDescriptor.from_tensor(x.values_XD, [tile.block_m, 128]),
        x.scales_XG,
        TensorDescriptor.from_tensor(w_PND, [1 if tile.dual else parts, tile.block_n, 128]),
        w_scale_SPMG,
        offsets_S1,
        y_RN,
        y_scale_RM,
        num_columns,
        width,
        num_slots,
        x.scales_XG.stride(0),
        x.scales_XG.stride(1),
        SWIGLU=parts == 2,
        DUAL=tile.dual,
        TINIEST=TINIEST,
        **options,
    )
