"""Gated MLPs: the experts of a layer on their packed rows, and one MLP for all rows. Knows nothing of routing.

y = W2 (silu(W_gate x) * (W_up x)); gate and up are one matrix, gate first; the activation is the epilogue of the first
product, in fp32. A dense or shared MLP is the same product with one slot that takes every row.
"""

from __future__ import annotations

from torch import Tensor

from expert_parallel.dispatcher import ExpertInput
from kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe.model.linear import Linear


class Experts:
    """The experts in this rank's slots: w13 [S, 2F, D] (gate rows, then up rows), w2 [S, D, F]."""

    def __init__(self, w13_S2FD: Tensor, w2_SDF: Tensor) -> None:
        self.w13_S2FD = w13_S2FD
        self.w2_SDF = w2_SDF

    def __call__(self, inputs: ExpertInput) -> Tensor:
        """y_RD, one row for each packed row, in the model dtype: rounded before the router's weight is applied."""
        h_RF = grouped_gemm_swiglu(
            inputs.rows_XD,
            self.w13_S2FD,
            inputs.offsets_S1,
            row_index_R=inputs.row_index_R,
            num_rows=inputs.num_rows,
        )
        return grouped_gemm(h_RF, self.w2_SDF, inputs.offsets_S1, num_rows=inputs.num_rows)


class DenseMLP:
    """One MLP for every row: dense layers and shared experts. gate_up [2F, D]."""

    def __init__(self, gate_up_2FD: Tensor, down: Linear) -> None:
        self.gate_up_12FD = gate_up_2FD[None]
        self.down = down

    def __call__(self, x_TD: Tensor, all_rows_2: Tensor) -> Tensor:
        """`all_rows_2` is the device tensor (0, T): the offsets of one slot with every row."""
        return self.down(grouped_gemm_swiglu(x_TD, self.gate_up_12FD, all_rows_2, num_rows=x_TD.shape[0]))
