"""Products of ragged rows with the weights of their expert slot, optionally with SwiGLU in the epilogue.

Knows rows, slots and offsets; knows neither tokens nor routing. The rows of slot s are offsets_S1[s] to
offsets_S1[s+1], a device tensor that the host never reads: the grid is an upper bound, and each program finds its slot.
Where slots lie in another order than their rows, or only some of them are there, ranges say where (row_tiles.py).
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.checks import (
    assert_dtype,
    assert_last_contiguous,
    assert_same_device,
    assert_shape,
    cdiv,
    next_power_of_2,
    uses_triton,
)
from kernels.copy_rows import copy_rows
from kernels.dependent_launch import dependent_launch
from kernels.grouped_gemm_specialized import launch_specialized
from kernels.grouped_gemm_swapped import launch_swapped
from kernels.grouped_gemm_tma import launch_tma, tma_serves
from kernels.linear import multiply_blocks
from kernels.row_tiles import (
    check_offsets,
    most_row_tiles,
    multiply,
    ranges_of,
    rows_out,
    slot_of_program,
    slot_range,
    slot_step,
    swiglu,
    tile_of_program,
    tiles_until_slot,
)
from kernels.tiles import TileConfig, device_generation, grouped_tile, packs_rows

_GROUP_M = 8
"""Row tiles that share a column's weights in the L2 cache. Measured on an H200: 8 and 16 within 3 % of each other."""


_FEW_ROWS = 64
"""Up to so many rows the next kernel may be placed two steps before a program's last. Measured on an H200, us a layer,
so / behind the last: qwen3 1 row 51.0 / 51.9, 4 101.4 / 102.1, 8 150.1 / 150.9, dsv2-lite 1 77.2 / 77.9, 8 170.2 /
170.9, mixtral 1 203.2 / 203.4, 8 556.3 / 556.5. Four steps: qwen3 1 row 51.0, mixtral 205.6. Without `old_offsets` the
row of qwen3 takes 0.5 more; where second products ask for weights before their wait (to L2, 2 to 16 lines a row), 0.2
to 3."""


def grouped_gemm(
    x_XD: Tensor,
    w_SND: Tensor,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out: Tensor | None = None,
    old_offsets: bool = False,
) -> Tensor:
    """y_RN[r] = w_SND[slot of r] x_XD[row_index_R[r]], or x_XD[r] without an index.

    offsets_S1 int32 [S+1], ascending, or [S, 2], the start and end of each slot's rows, which do not overlap; all
    at most num_rows. Rows of no slot are neither read nor written: several calls with other slots may fill one `out`
    [R, N]. fp32 accumulation, one cast to x's dtype; the sum over D is not split, so a row's bits do not depend on the
    other rows. `old_offsets`: offsets older than the launch before this one, as a second product's are, are read ahead
    of its end. `grouped_gemm_reference` is the definition.
    """
    rows = {"row_index_R": row_index_R, "num_rows": num_rows, "out": out}
    if not uses_triton(x_XD):
        return grouped_gemm_reference(x_XD, w_SND, offsets_S1, **rows)
    return grouped_gemm_triton(x_XD, w_SND, offsets_S1, **rows, old_offsets=old_offsets)


def grouped_gemm_swiglu(
    x_XD: Tensor,
    w_SND: Tensor,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out: Tensor | None = None,
) -> Tensor:
    """h_RF[r] = silu(gate x) * (up x), where slot s's weight w_SND[s] is [2F, D]: F rows of gate, then F rows of up.

    The activation is computed in fp32 from the fp32 sums, then cast once. Otherwise as `grouped_gemm`;
    `grouped_gemm_swiglu_reference` is the definition.
    """
    run = grouped_gemm_swiglu_triton if uses_triton(x_XD) else grouped_gemm_swiglu_reference
    return run(x_XD, w_SND, offsets_S1, row_index_R=row_index_R, num_rows=num_rows, out=out)


# y[r, n] = sum over k, ascending and unsplit, of x[index[r], k] * w[slot, n, k], slot the one whose rows hold r
# SWIGLU: y[r, n] = silu(that with row n of w) * (that with row N + n), N the width of y
#   x_ptr [X, D], y_ptr [R, N], rows strided; w_ptr [S, N or 2N, D]; offsets_ptr int32 [S+1] or [S, 2];
#   index_ptr int32 [R] | None
#   grid (most_row_tiles * cdiv(N, BLOCK_N),): an upper bound. A program owns one tile of one slot, see row_tiles.py;
#   surplus programs do nothing.
#   fp32 accumulation. Rows from the slot's end on are neither read nor written; D and N are filled up with zeros where
#   EVEN says that the tile does not divide them.


@triton.jit(do_not_specialize=["num_slots"])
def _grouped_gemm_kernel(
    x_ptr,
    w_ptr,
    offsets_ptr,
    index_ptr,
    y_ptr,
    num_columns,
    width,
    num_slots,
    stride_x,
    stride_ws,
    stride_wn,
    stride_y,
    SWIGLU: tl.constexpr,
    EVEN: tl.constexpr,
    SLOT_STEP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OLD_OFFSETS: tl.constexpr,
    TELL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and not OLD_OFFSETS:
        gdc_wait()
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    tiles_until = tiles_until_slot(offsets_ptr, num_slots, tiles_n, SLOT_STEP, BLOCK_S, BLOCK_M)
    slot, tile = slot_of_program(tiles_until, tl.program_id(0))
    if slot >= num_slots:
        if PDL and OLD_OFFSETS:
            gdc_wait()
        return
    start, end = slot_range(offsets_ptr, slot, SLOT_STEP)
    tile_m, tile_n = tile_of_program(tile, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)  # pyright: ignore
    if PDL and OLD_OFFSETS:
        gdc_wait()

    row = start + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = (row < end)[:, None]
    x_row = row if index_ptr is None else tl.load(index_ptr + row, mask=row < end, other=0)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = (n < num_columns)[None, :]
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * stride_x + k[None, :]
    slot_ptr = w_ptr + slot.to(tl.int64) * stride_ws
    w_ptrs = slot_ptr + n.to(tl.int64)[None, :] * stride_wn + k[:, None]
    up_ptrs = slot_ptr + (num_columns + n).to(tl.int64)[None, :] * stride_wn + k[:, None]
    # The tensor core takes 16 rows of one operand and 8 of the other: few rows of x are the other.
    SWAPPED: tl.constexpr = BLOCK_M < 16
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    # The step in which the next kernel may be placed, where that is not behind the last.
    tell_at = tl.maximum(tl.cdiv(width, BLOCK_K) - TELL, 0) * BLOCK_K
    for first in range(0, width, BLOCK_K):
        if PDL and TELL > 0 and first == tell_at:
            gdc_launch_dependents()
        in_k = first + k < width
        x = tl.load(x_ptrs, mask=in_m if EVEN else in_m & in_k[None, :], other=0.0)
        w = tl.load(w_ptrs) if EVEN else tl.load(w_ptrs, mask=in_n & in_k[:, None], other=0.0)
        acc = multiply(x, w, acc, SWAPPED)
        if SWIGLU:
            up = tl.load(up_ptrs) if EVEN else tl.load(up_ptrs, mask=in_n & in_k[:, None], other=0.0)
            acc_up = multiply(x, up, acc_up, SWAPPED)
            up_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if PDL and TELL == 0:
        # Only now: programs of the next kernel that are placed while some multiprocessors still work would crowd on the
        # others. Measured on an H200, both products of one token: told at once 33 us (qwen3) and 196 (mixtral), told
        # here 26 and 174. (Linears have a program for each multiprocessor and gain by telling at once: 9.1 against 9.7
        # us for [5120, 2048], 142 against 150 for [151936, 2048].)
        gdc_launch_dependents()
    if SWIGLU:
        acc = swiglu(acc, acc_up)
    if SWAPPED:
        acc = tl.trans(acc)
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * stride_y + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_m & in_n)


def grouped_gemm_triton(
    x_XD: Tensor,
    w_SND: Tensor,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out: Tensor | None = None,
    tile: TileConfig | None = None,
    old_offsets: bool = False,
) -> Tensor:
    """`grouped_gemm` as one launch; `tile` is chosen by the rule of kernels/tiles.py unless given."""
    _check_operands(x_XD, w_SND, offsets_S1, row_index_R, num_rows)
    y_RN = rows_out(out, (num_rows, w_SND.shape[1]), x_XD.dtype, x_XD.device)
    _launch(x_XD, w_SND, offsets_S1, row_index_R, y_RN, tile, swiglu=False, old_offsets=old_offsets)
    return y_RN


def grouped_gemm_swiglu_triton(
    x_XD: Tensor,
    w_SND: Tensor,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out: Tensor | None = None,
    tile: TileConfig | None = None,
) -> Tensor:
    """`grouped_gemm_swiglu` as one launch."""
    _check_operands(x_XD, w_SND, offsets_S1, row_index_R, num_rows)
    assert w_SND.shape[1] % 2 == 0, f"w_SND has {w_SND.shape[1]} rows a slot; gate and up must be equally many"
    h_RF = rows_out(out, (num_rows, w_SND.shape[1] // 2), x_XD.dtype, x_XD.device)
    _launch(x_XD, w_SND, offsets_S1, row_index_R, h_RF, tile, swiglu=True)
    return h_RF


def _launch(
    x_XD: Tensor,
    w_SND: Tensor,
    offsets_S1: Tensor,
    row_index_R: Tensor | None,
    y_RN: Tensor,
    tile: TileConfig | None,
    *,
    swiglu: bool,
    old_offsets: bool = False,
) -> None:
    if y_RN.numel() == 0:
        return
    (num_rows, num_columns), (num_slots, _, width) = y_RN.shape, w_SND.shape
    products, by_blocks = 2 if swiglu else 1, tma_serves(x_XD, w_SND)
    # Ranges may be of some slots alone, among calls for the others: what they do not name is not to be read.
    whole = by_blocks and slot_step(offsets_S1) == 1 and x_XD.element_size() == 2
    if row_index_R is not None and whole and packs_rows(num_rows, num_slots, num_columns, device_generation(x_XD)):
        x_XD, row_index_R = copy_rows(x_XD, row_index_R, offsets_S1), None
    tile = tile or grouped_tile(
        num_rows,
        num_slots,
        num_columns,
        width,
        x_XD.dtype,
        x_XD.device,
        num_products=products,
        gathered=row_index_R is not None,
        by_blocks=by_blocks,
    )
    if tile.form != "pointers" and by_blocks:
        launch = {"tma": launch_tma, "specialized": launch_specialized, "swapped": launch_swapped}[tile.form]
        launch(x_XD, w_SND, offsets_S1, row_index_R, y_RN, tile, swiglu=swiglu, group_m=_GROUP_M)
        return
    row_tiles = most_row_tiles(num_rows, num_slots, tile.block_m)
    _grouped_gemm_kernel[(row_tiles * cdiv(num_columns, tile.block_n),)](
        x_XD,
        w_SND,
        offsets_S1,
        row_index_R,
        y_RN,
        num_columns,
        width,
        num_slots,
        x_XD.stride(0),
        w_SND.stride(0),
        w_SND.stride(1),
        y_RN.stride(0),
        SWIGLU=swiglu,
        EVEN=width % tile.block_k == 0 and num_columns % tile.block_n == 0,
        SLOT_STEP=slot_step(offsets_S1),
        BLOCK_S=next_power_of_2(num_slots),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=_GROUP_M,
        OLD_OFFSETS=old_offsets,
        TELL=2 if num_rows <= _FEW_ROWS else 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(x_XD),
    )


def _check_operands(x_XD: Tensor, w_SND: Tensor, offsets_S1: Tensor, row_index_R: Tensor | None, num_rows: int) -> None:
    assert_shape("x_XD", x_XD, (None, None))
    assert_shape("w_SND", w_SND, (None, None, x_XD.shape[1]))
    assert x_XD.dtype == w_SND.dtype, f"x_XD is {x_XD.dtype}, w_SND {w_SND.dtype}; rows and experts share one dtype"
    assert_last_contiguous("x_XD", x_XD)
    assert_last_contiguous("w_SND", w_SND)
    check_offsets(offsets_S1, w_SND.shape[0])
    if row_index_R is None:
        assert x_XD.shape[0] >= num_rows, (
            f"x_XD has {x_XD.shape[0]} rows, num_rows={num_rows}, and there is no row index"
        )
    else:
        assert_shape("row_index_R", row_index_R, (num_rows,))
        assert_dtype("row_index_R", row_index_R, torch.int32)
    assert_same_device(x_XD, w_SND=w_SND, offsets_S1=offsets_S1, row_index_R=row_index_R)


def _rows_of_slots(x_XD: Tensor, offsets_S1: Tensor, row_index_R: Tensor | None) -> Iterator[tuple[int, slice, Tensor]]:
    """Yields (slot, rows as a slice, x of these rows) for each slot that has rows. Reads the offsets: CPU only."""
    for slot, (start, end) in enumerate(ranges_of(offsets_S1)):
        if start < end:
            rows = slice(start, end)
            yield slot, rows, x_XD[rows] if row_index_R is None else x_XD[row_index_R[rows].long()]


def grouped_gemm_reference(
    x_XD: Tensor,
    w_SND: Tensor,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out: Tensor | None = None,
) -> Tensor:
    """The definition, and the CPU's product path: slot by slot, in fixed blocks of rows."""
    _check_operands(x_XD, w_SND, offsets_S1, row_index_R, num_rows)
    y_RN = rows_out(out, (num_rows, w_SND.shape[1]), x_XD.dtype, x_XD.device)
    for slot, rows, x_MD in _rows_of_slots(x_XD, offsets_S1, row_index_R):
        y_RN[rows] = multiply_blocks(x_MD, w_SND[slot])
    return y_RN


def grouped_gemm_swiglu_reference(
    x_XD: Tensor,
    w_SND: Tensor,
    offsets_S1: Tensor,
    *,
    row_index_R: Tensor | None = None,
    num_rows: int,
    out: Tensor | None = None,
) -> Tensor:
    """The definition, and the CPU's product path. Gate and up keep fp32 until the one cast."""
    _check_operands(x_XD, w_SND, offsets_S1, row_index_R, num_rows)
    h_RF = rows_out(out, (num_rows, w_SND.shape[1] // 2), x_XD.dtype, x_XD.device)
    for slot, rows, x_MD in _rows_of_slots(x_XD, offsets_S1, row_index_R):
        gate_up_MN = multiply_blocks(x_MD.float(), w_SND[slot].float())
        h_RF[rows] = swiglu_reference(gate_up_MN).to(h_RF.dtype)
    return h_RF


def swiglu_reference(gate_up_MN: Tensor) -> Tensor:
    """silu(first half of the columns) * second half, in the operand's dtype.

    The sigmoid is spelt out: torch's silu and sigmoid on CPU round the last few elements of a tensor differently.
    """
    gate_MF, up_MF = gate_up_MN.chunk(2, dim=-1)
    return gate_MF / (1.0 + torch.exp(-gate_MF)) * up_MF
