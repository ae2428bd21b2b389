"""Products of ragged rows with the weights of their expert slot, optionally with SwiGLU in the first product's epilogue.

Knows rows, slots and offsets; knows neither tokens nor routing. The rows of slot s are offsets_S1[s] to offsets_S1[s+1], a
device tensor that the host never reads: the grid is an upper bound, and each program finds its slot by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape
from kernels.linear import multiply_blocks


def grouped_gemm(
    x_XD: Tensor, w_SND: Tensor, offsets_S1: Tensor, *, row_index_R: Tensor | None = None, num_rows: int
) -> Tensor:
    """y_RN[r] = w_SND[slot of r] x_XD[row_index_R[r]], or x_XD[r] without an index. `grouped_gemm_reference` defines it.

    offsets_S1 int32 [S+1] ascending, offsets_S1[-1] <= num_rows. Rows from offsets_S1[-1] on are never written. fp32
    accumulation, one cast to x's dtype; K is not split, so a row's bits do not depend on the other rows.
    """
    return grouped_gemm_reference(x_XD, w_SND, offsets_S1, row_index_R=row_index_R, num_rows=num_rows)


def grouped_gemm_swiglu(
    x_XD: Tensor, w_SND: Tensor, offsets_S1: Tensor, *, row_index_R: Tensor | None = None, num_rows: int
) -> Tensor:
    """h_RF[r] = silu(gate x) * (up x), where slot s's weight w_SND[s] is [2F, D]: F rows of gate, then F rows of up.

    The activation is computed in fp32 from the fp32 sums, then cast once. Otherwise as `grouped_gemm`;
    `grouped_gemm_swiglu_reference` is the definition.
    """
    return grouped_gemm_swiglu_reference(x_XD, w_SND, offsets_S1, row_index_R=row_index_R, num_rows=num_rows)


def _check_operands(x_XD: Tensor, w_SND: Tensor, offsets_S1: Tensor, row_index_R: Tensor | None, num_rows: int) -> None:
    assert_shape("x_XD", x_XD, (None, None))
    assert_shape("w_SND", w_SND, (None, None, x_XD.shape[1]))
    assert x_XD.dtype == w_SND.dtype, f"x_XD is {x_XD.dtype}, w_SND {w_SND.dtype}; rows and experts share one dtype"
    assert_last_contiguous("x_XD", x_XD)
    assert_last_contiguous("w_SND", w_SND)
    assert_shape("offsets_S1", offsets_S1, (w_SND.shape[0] + 1,))
    assert_dtype("offsets_S1", offsets_S1, torch.int32)
    if row_index_R is None:
        assert x_XD.shape[0] >= num_rows, (
            f"x_XD has {x_XD.shape[0]} rows, num_rows={num_rows}, and there is no row index"
        )
    else:
        assert_shape("row_index_R", row_index_R, (num_rows,))
        assert_dtype("row_index_R", row_index_R, torch.int32)
    assert_same_device(x_XD, w_SND=w_SND, offsets_S1=offsets_S1, row_index_R=row_index_R)


def _rows_of_slots(x_XD: Tensor, offsets_S1: Tensor, row_index_R: Tensor | None):
    """Yields (slot, rows as a slice, x of these rows) for each slot that has rows. Reads the offsets: CPU only."""
    offsets = offsets_S1.tolist()
    for slot, (start, end) in enumerate(zip(offsets[:-1], offsets[1:])):
        if start < end:
            rows = slice(start, end)
            yield slot, rows, x_XD[rows] if row_index_R is None else x_XD[row_index_R[rows].long()]


def grouped_gemm_reference(
    x_XD: Tensor, w_SND: Tensor, offsets_S1: Tensor, *, row_index_R: Tensor | None = None, num_rows: int
) -> Tensor:
    """The definition, and the CPU's product path: slot by slot, in fixed blocks of rows."""
    _check_operands(x_XD, w_SND, offsets_S1, row_index_R, num_rows)
    y_RN = x_XD.new_empty(num_rows, w_SND.shape[1])
    for slot, rows, x_MD in _rows_of_slots(x_XD, offsets_S1, row_index_R):
        y_RN[rows] = multiply_blocks(x_MD, w_SND[slot])
    return y_RN


def grouped_gemm_swiglu_reference(
    x_XD: Tensor, w_SND: Tensor, offsets_S1: Tensor, *, row_index_R: Tensor | None = None, num_rows: int
) -> Tensor:
    """The definition, and the CPU's product path. Gate and up keep fp32 until the one cast."""
    _check_operands(x_XD, w_SND, offsets_S1, row_index_R, num_rows)
    width = w_SND.shape[1] // 2
    h_RF = x_XD.new_empty(num_rows, width)
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
