"""Products of ragged fp8 rows with the fp8 weights of their expert slot, optionally with SwiGLU in the epilogue.

Knows rows, slots, offsets and scales; knows neither tokens nor routing. The fp8 twin of grouped_gemm.py: rows have a
scale for each 128 columns, weights for each block of 128 x 128 (quantize.py). Slots are found as there.

A K step is 128 columns, whose products have one scale for each (row, block of weights): the tensor cores sum a step
from zero, then acc = fma(step, x's scale * w's scale, acc) in fp32, steps ascending and never split. On a GPU with
wgmma the bits are the same for every tile, and with operands swapped. This file's kernel swaps them: the weights are
the tensor core's M side, of which wgmma takes 64 at a time, the rows its N side, for which 16 will do. (mma.sync sums
fp8 differently, so wgmma has to serve few rows too.) Many rows have kernels of their own.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.checks import (
    assert_dtype,
    assert_same_device,
    assert_shape,
    cdiv,
    next_power_of_2,
    uses_triton,
)
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.fp8_tiles import FewRowsTile, Fp8Tile, fp8_tile, quantizes_swiglu
from kernels.grouped_gemm import swiglu_reference
from kernels.grouped_gemm_fp8_resident import ResidentTile, launch_fp8_resident
from kernels.grouped_gemm_fp8_specialized import launch_fp8_specialized
from kernels.grouped_gemm_fp8_swiglu import launch_swiglu_quantized
from kernels.grouped_gemm_fp8_tma import ManyRowsTile, launch_many_rows
from kernels.linear import multiply_blocks
from kernels.pack_fp8 import pack_rows
from kernels.quantize import (
    FP8,
    GROUP,
    Quantized,
    QuantizedBlocks,
    dequantize_blocks,
    dequantize_rows,
    quantize_rows,
)
from kernels.row_tiles import (
    check_offsets,
    most_row_tiles,
    ranges_of,
    rows_out,
    slot_of_program,
    slot_range,
    slot_step,
    swiglu,
    tile_of_program,
    tiles_until_slot,
)


def grouped_gemm_fp8(
    x: Quantized,
    w: QuantizedBlocks,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """y_RN[r] = w[slot of r] x[row_index_R[r]], or x[r] without an index; w.values [S, N, D], w.scales [S, 1, M, G].

    offsets_S1 int32 [S+1], ascending, or [S, 2], the start and end of each slot's rows, which do not overlap; all
    at most num_rows. Rows of no slot are not written: several calls with other slots may fill one `out` [R, N].
    `grouped_gemm_fp8_reference` is the definition; the sum is fp32, one cast, and a row's bits do not depend on the
    other rows.
    """
    run = grouped_gemm_fp8_triton if uses_triton(x.values) else grouped_gemm_fp8_reference
    return run(x, w, offsets_S1, row_index_R=row_index_R, num_rows=num_rows, out_dtype=out_dtype, out=out)


def grouped_gemm_swiglu_fp8(
    x: Quantized,
    w: QuantizedBlocks,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """h_RF[r] = silu(gate x) * (up x); w.values [S, 2F, D], gate rows first, w.scales [S, 2, M, G], each its own.

    Otherwise as `grouped_gemm_fp8`: the number of parts in w.scales makes the difference.
    """
    return grouped_gemm_fp8(x, w, offsets_S1, row_index_R=row_index_R, num_rows=num_rows, out_dtype=out_dtype, out=out)


def grouped_gemm_swiglu_quantized(
    x: Quantized,
    w: QuantizedBlocks,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    dtype: torch.dtype,
) -> Quantized:
    """`quantize_rows` of `grouped_gemm_swiglu_fp8` in `dtype`, as the second product takes it; rows of no slot mean
    nothing. That is the definition, and the way of few rows; many are quantised where they are made."""
    if uses_triton(x.values) and quantizes_swiglu(x.values, w, num_rows):
        _check_operands(x, w, offsets_S1, row_index_R, num_rows)
        return launch_swiglu_quantized(x, w, offsets_S1, row_index_R, num_rows, dtype)
    options = {"row_index_R": row_index_R, "num_rows": num_rows, "out_dtype": dtype}
    return quantize_rows(grouped_gemm_swiglu_fp8(x, w, offsets_S1, **options))


# y[r, n] = sum over k of x[index[r], k] * w[slot, n, k], stepwise as above, slot the one whose rows hold r
# PARTS 2: y[r, n] = silu(that with gate row n of w) * (that with up row n), w [S, 2, N, D]
#   x_ptr e4m3 [X, D]; x_scale_ptr fp32 [G, X]; w e4m3 [S, PARTS, N, D], a pointer or (W_DESC) a descriptor of
#   [S * PARTS, N, D] in tiles PARTS x BLOCK_N x 128; w_scale_ptr fp32 [S, PARTS, M, G]; offsets_ptr int32 [S+1]
#   or [S, 2]; index_ptr int32 [R] | None; y_ptr [R, N]; all contiguous
#   grid (most_row_tiles * cdiv(N, BLOCK_N),): an upper bound; a program owns one tile of one slot, see row_tiles.py
#   fp32. Rows from the slot's end on are neither read nor written; D and N are filled up with zeros.


@triton.jit(do_not_specialize=["num_slots", "num_x_rows"])
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
    num_x_rows,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    W_DESC: tl.constexpr,
    EVEN_K: tl.constexpr,
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
    first_row = start + tile_m * BLOCK_M
    num_groups = tl.cdiv(width, 128)
    row = first_row + tl.arange(0, BLOCK_M)
    in_m = row < end
    x_row = (row if index_ptr is None else tl.load(index_ptr + row, mask=in_m, other=0)).to(tl.int64)
    x_scale_ptrs = x_scale_ptr + x_row
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
    x_scale = tl.load(x_scale_ptrs, mask=in_m, other=0.0)
    w_scale, up_scale = tl.load(w_scale_row), tl.load(w_scale_row + (PARTS - 1) * block_rows * num_groups)
    for first in range(0, num_groups, UNROLL):
        for u in tl.static_range(UNROLL):
            step = first + u
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
            # The next step's scales are on their way while this one is multiplied.
            ahead = min(step + 1, num_groups - 1)
            next_x_scale = tl.load(x_scale_ptrs + ahead.to(tl.int64) * num_x_rows, mask=in_m, other=0.0)
            next_w_scale = tl.load(w_scale_row + ahead)
            next_up_scale = tl.load(w_scale_row + (PARTS - 1) * block_rows * num_groups + ahead)
            product = tl.dot(w_tile, x_tile.T)
            if PARTS == 2:
                scale = tl.where(i < BLOCK_N, w_scale, up_scale)[:, None] * x_scale[None, :]
            else:
                scale = (w_scale * x_scale)[None, :]
            acc = tl.fma(product, tl.broadcast_to(scale, acc.shape), acc)
            x_scale, w_scale, up_scale = next_x_scale, next_w_scale, next_up_scale
    if PARTS == 2:
        gate, up = acc.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0).split()
        acc = swiglu(gate, up)
    n_out = first_n + tl.arange(0, BLOCK_N)
    y_ptrs = y_ptr + row.to(tl.int64)[None, :] * num_columns + n_out[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_m[None, :] & (n_out < num_columns)[:, None])


def grouped_gemm_fp8_triton(
    x: Quantized,
    w: QuantizedBlocks,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    tile: Fp8Tile | None = None,
) -> Tensor:
    """`grouped_gemm_fp8` as one launch, or two where many rows come with an index: they are packed first.

    `tile` is chosen by `fp8_tile` unless given. Needs a GPU with fp8.
    """
    _check_operands(x, w, offsets_S1, row_index_R, num_rows)
    num_slots, parts, _, _ = w.scales.shape
    num_columns, width = w.values.shape[1] // parts, w.values.shape[2]
    y_RN = rows_out(out, (num_rows, num_columns), out_dtype, x.values.device)
    if y_RN.numel() == 0:
        return y_RN
    tile = tile or fp8_tile(x.values, w, num_rows)
    if not isinstance(tile, FewRowsTile):
        assert row_index_R is None or slot_step(offsets_S1) == 1, "rows with ranges are packed before"
        packed = x if row_index_R is None else pack_rows(x, row_index_R, offsets_S1)
        if isinstance(tile, ManyRowsTile):
            launch_many_rows(packed, w, offsets_S1, y_RN, tile)
        elif isinstance(tile, ResidentTile):
            launch_fp8_resident(packed, w, offsets_S1, y_RN, tile)
        else:
            launch_fp8_specialized(packed, w, offsets_S1, y_RN, tile)
        return y_RN
    assert parts * tile.block_n >= 64, f"{tile}: wgmma takes 64 rows of weights, and mma.sync gives other bits"
    assert cdiv(width, GROUP) % tile.unroll == 0, f"{tile}: {cdiv(width, GROUP)} steps"
    w_PND = w.values.view(num_slots * parts, num_columns, width)
    row_tiles = most_row_tiles(num_rows, num_slots, tile.block_m)
    _few_rows_kernel[(row_tiles * cdiv(num_columns, tile.block_n),)](
        x.values,
        x.scales,
        TensorDescriptor.from_tensor(w_PND, [parts, tile.block_n, GROUP]) if tile.tma else w_PND,
        w.scales,
        offsets_S1,
        row_index_R,
        y_RN,
        num_columns,
        width,
        num_slots,
        x.values.shape[0],
        PARTS=parts,
        UNROLL=tile.unroll,
        W_DESC=tile.tma,
        EVEN_K=width % GROUP == 0,
        SLOT_STEP=slot_step(offsets_S1),
        BLOCK_S=next_power_of_2(num_slots),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP_M=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(y_RN),
    )
    return y_RN


def _check_operands(
    x: Quantized, w: QuantizedBlocks, offsets_S1: Tensor, row_index_R: Tensor | None, num_rows: int
) -> None:
    for name, values, scales in (("x", *x), ("w", *w)):
        assert_dtype(f"{name}.values", values, FP8)
        assert_dtype(f"{name}.scales", scales, torch.float32)
        assert values.is_contiguous(), f"{name}.values has strides {values.stride()}"
        assert scales.is_contiguous(), f"{name}.scales has strides {scales.stride()}"
    assert_shape("w.values", w.values, (None, None, None))
    assert_shape("x.values", x.values, (None, w.values.shape[2]))
    (num_slots, rows, _), groups = w.values.shape, cdiv(w.values.shape[2], GROUP)
    assert_shape("x.scales", x.scales, (groups, x.values.shape[0]))
    parts = w.scales.shape[1]
    assert parts in (1, 2) and rows % parts == 0, f"w has {rows} rows a slot in {parts} parts"
    assert_shape("w.scales", w.scales, (num_slots, parts, cdiv(rows // parts, GROUP), groups))
    check_offsets(offsets_S1, num_slots)
    if row_index_R is None:
        assert x.values.shape[0] >= num_rows, f"x has {x.values.shape[0]} rows, num_rows={num_rows}, no row index"
    else:
        assert_shape("row_index_R", row_index_R, (num_rows,))
        assert_dtype("row_index_R", row_index_R, torch.int32)
    assert_same_device(x.values, x_scales=x.scales, w=w.values, w_scales=w.scales, offsets_S1=offsets_S1)
    assert_same_device(x.values, row_index_R=row_index_R)


def grouped_gemm_fp8_reference(
    x: Quantized,
    w: QuantizedBlocks,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """The definition, and the CPU's product path: slot by slot the dequantised operands' product in fp32."""
    _check_operands(x, w, offsets_S1, row_index_R, num_rows)
    parts = w.scales.shape[1]
    x_XD = dequantize_rows(x)
    y_RN = rows_out(out, (num_rows, w.values.shape[1] // parts), out_dtype, x.values.device)
    for slot, (start, end) in enumerate(ranges_of(offsets_S1)):
        if start == end:
            continue
        x_MD = x_XD[start:end] if row_index_R is None else x_XD[row_index_R[start:end].long()]
        w_ND = dequantize_blocks(w.values[slot].unflatten(0, (parts, -1)), w.scales[slot]).flatten(0, 1)
        y_MN = multiply_blocks(x_MD, w_ND)
        y_RN[start:end] = (swiglu_reference(y_MN) if parts == 2 else y_MN).to(out_dtype)
    return y_RN
