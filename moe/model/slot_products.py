"""The experts' two products on some slots at a time: weights that come and go, rows that stay. Knows no copies.

Several calls, each with the weights of other slots and the ranges of their rows, fill one result; a row's bits are
those that `Experts` and `Fp8Experts` (experts.py) give it, which hold the weights of all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from expert_parallel.dispatcher import ExpertInput
from kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from kernels.grouped_gemm_fp8 import grouped_gemm_fp8, grouped_gemm_swiglu_fp8
from kernels.pack_fp8 import pack_rows
from kernels.quantize import Quantized, QuantizedBlocks, quantize_rows


class SlotProducts(Protocol):
    """The products of one call of a layer. `y_RD`: their result; rows of slots not multiplied yet mean nothing."""

    y_RD: Tensor

    def multiply(self, weights: Sequence[Tensor], ranges_n2: Tensor) -> None:
        """Fill the rows ranges[i][0] to ranges[i][1] of y with those of the expert in row i of every weight."""
        ...


class PlainProducts(SlotProducts):
    """Weights (w13 [n, 2F, D], w2 [n, D, F]) of the model's dtype."""

    def __init__(self, inputs: ExpertInput, width: int) -> None:
        """`width`: F."""
        self.inputs = inputs
        self.h_RF = inputs.rows_XD.new_empty(inputs.num_rows, width)
        self.y_RD = inputs.rows_XD.new_empty(inputs.num_rows, inputs.rows_XD.shape[1])

    def multiply(self, weights: Sequence[Tensor], ranges_n2: Tensor) -> None:
        w13, w2 = weights
        rows, num_rows = self.inputs, self.inputs.num_rows
        x_XD, index_R = rows.rows_XD, rows.row_index_R
        grouped_gemm_swiglu(x_XD, w13, ranges_n2, row_index_R=index_R, num_rows=num_rows, out=self.h_RF)
        grouped_gemm(self.h_RF, w2, ranges_n2, num_rows=num_rows, out=self.y_RD)


class Fp8Products(SlotProducts):
    """Weights (w13, w2, scales of w13, scales of w2) in fp8. Rows are quantised and packed once for all slots."""

    def __init__(self, inputs: ExpertInput, width: int) -> None:
        self.num_rows = inputs.num_rows
        self.dtype: torch.dtype = inputs.out_dtype or inputs.rows_XD.dtype
        rows_XD, scales_GX = inputs.rows_XD, inputs.scales_GX
        x = quantize_rows(rows_XD) if scales_GX is None else Quantized(rows_XD, scales_GX)
        if inputs.row_index_R is not None:
            x = pack_rows(x, inputs.row_index_R, inputs.offsets_S1)
        self.x = x
        # Zeros: all rows are quantised after each product, also those of slots whose turn has not come.
        self.h_RF = torch.zeros(self.num_rows, width, dtype=self.dtype, device=rows_XD.device)
        self.y_RD = torch.empty(self.num_rows, rows_XD.shape[1], dtype=self.dtype, device=rows_XD.device)

    def multiply(self, weights: Sequence[Tensor], ranges_n2: Tensor) -> None:
        w13, w2, w13_scales, w2_scales = weights
        common = {"num_rows": self.num_rows, "out_dtype": self.dtype}
        grouped_gemm_swiglu_fp8(self.x, QuantizedBlocks(w13, w13_scales), ranges_n2, out=self.h_RF, **common)
        h = quantize_rows(self.h_RF)
        grouped_gemm_fp8(h, QuantizedBlocks(w2, w2_scales), ranges_n2, out=self.y_RD, **common)
