"""Gated MLPs: the experts of a layer on their packed rows, and one MLP for all rows. Knows nothing of routing.

y = W2 (silu(W_gate x) * (W_up x)); gate and up are one matrix, gate first; the activation is the epilogue of the first
product, in fp32. A dense or shared MLP is the same product with one slot that takes every row. Routed experts may be
held in fp8: their rows are quantised too, before each product.
"""

from __future__ import annotations

from torch import Tensor

from expert_parallel.dispatcher import ExpertInput
from kernels.experts_few import (
    FewRows,
    SharedExperts,
    experts_few,
    experts_few_undecided,
    serves_few_tokens,
    serves_undecided,
    takes_along,
)
from kernels.experts_few_fp8 import (
    experts_few_fp8,
    experts_few_fp8_undecided,
    serves_few_tokens_fp8,
    serves_undecided_fp8,
)
from kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from kernels.grouped_gemm_fp8 import grouped_gemm_fp8, grouped_gemm_swiglu_quantized
from kernels.quantize import FP8, Quantized, QuantizedBlocks, quantize_rows
from kernels.routing import RoutingRule
from moe.model.linear import Linear, Parameters
from moe.model.parameter_shapes import scale_name


class Experts:
    """The experts in this rank's slots: w13 [S, 2F, D] (gate rows, then up rows), w2 [S, D, F]."""

    def __init__(self, w13_S2FD: Tensor, w2_SDF: Tensor) -> None:
        self.w13_S2FD = w13_S2FD
        self.w2_SDF = w2_SDF

    def may_choose(self, x_TD: Tensor, num_experts: int, rule: RoutingRule) -> bool:
        """As `router.gate.MayChoose`: in the launch that multiplies them."""
        return serves_undecided(x_TD, self.w13_S2FD, self.w2_SDF, num_experts, rule)

    def takes_along(self, x_TD: Tensor, num_rows: int, shared: DenseMLP) -> bool:
        """Whether the launch that makes `num_rows` rows of these tokens takes shared experts along."""
        return shared.weights is not None and takes_along(x_TD, self.w13_S2FD, self.w2_SDF, num_rows, shared.weights)

    def with_shared(self, inputs: ExpertInput, shared: DenseMLP) -> tuple[Tensor, Tensor]:
        """What a call gives, and the shared experts' rows of all tokens, where these `takes_along`."""
        few = self._few(inputs, shared.weights)
        assert few is not None and few.shared_TD is not None, "shared experts come along with few tokens alone"
        return few.y_RD, few.shared_TD

    def _few(self, inputs: ExpertInput, shared: SharedExperts | None) -> FewRows | None:
        """Both products in one launch, where tokens are few enough."""
        if inputs.undecided is not None:
            return experts_few_undecided(inputs.rows_XD, self.w13_S2FD, self.w2_SDF, inputs.undecided, shared)
        if inputs.counters is None or inputs.row_index_R is None:
            return None
        few = (inputs.rows_XD, self.w13_S2FD, self.w2_SDF, inputs.offsets_S1, inputs.row_index_R, inputs.num_rows)
        return experts_few(*few, inputs.counters, shared) if serves_few_tokens(*few) else None

    def __call__(self, inputs: ExpertInput) -> Tensor:
        """y_RD, one row for each packed row, in the model dtype: rounded before the router's weight is applied."""
        few = self._few(inputs, None)
        if few is not None:
            return few.y_RD
        h_RF = grouped_gemm_swiglu(
            inputs.rows_XD,
            self.w13_S2FD,
            inputs.offsets_S1,
            row_index_R=inputs.row_index_R,
            num_rows=inputs.num_rows,
        )
        return grouped_gemm(h_RF, self.w2_SDF, inputs.offsets_S1, num_rows=inputs.num_rows, old_offsets=True)


class Fp8Experts:
    """The same with weights in fp8: values as above, scales [S, 2, ceil(F / 128), ceil(D / 128)] of w13's gate and up
    and [S, 1, ceil(D / 128), ceil(F / 128)] of w2. Values and scales of a slot are one bundle."""

    def __init__(self, w13: QuantizedBlocks, w2: QuantizedBlocks) -> None:
        self.w13 = w13
        self.w2 = w2

    def may_choose(self, x_TD: Tensor, num_experts: int, rule: RoutingRule) -> bool:
        """As `Experts`."""
        return serves_undecided_fp8(x_TD, self.w13, self.w2, num_experts, rule)

    def _few(self, inputs: ExpertInput) -> Tensor | None:
        x_TD = inputs.rows_XD
        if inputs.undecided is not None:
            return experts_few_fp8_undecided(x_TD, self.w13, self.w2, inputs.undecided)
        if inputs.counters is None or inputs.row_index_R is None or inputs.scales_GX is not None:
            return None
        few = (x_TD, self.w13, self.w2, inputs.offsets_S1)
        serves = inputs.out_dtype in (None, x_TD.dtype) and serves_few_tokens_fp8(*few, inputs.num_rows)
        return experts_few_fp8(*few, inputs.row_index_R, inputs.num_rows, inputs.counters) if serves else None

    def __call__(self, inputs: ExpertInput) -> Tensor:
        """As `Experts`: rows of the model dtype out, and in unless they travelled in fp8; the first product's result is
        rounded to it in between."""
        few_RD = self._few(inputs)
        if few_RD is not None:
            return few_RD
        offsets_S1, num_rows, dtype = inputs.offsets_S1, inputs.num_rows, inputs.out_dtype or inputs.rows_XD.dtype
        rows_XD, scales_GX = inputs.rows_XD, inputs.scales_GX
        h = grouped_gemm_swiglu_quantized(
            quantize_rows(rows_XD) if scales_GX is None else Quantized(rows_XD, scales_GX),
            self.w13,
            offsets_S1,
            row_index_R=inputs.row_index_R,
            num_rows=num_rows,
            dtype=dtype,
        )
        return grouped_gemm_fp8(h, self.w2, offsets_S1, num_rows=num_rows, out_dtype=dtype)


def make_experts(parameters: Parameters, name: str) -> Experts | Fp8Experts:
    """The routed experts called `name`, in fp8 where their parameters are."""
    w13, w2 = f"{name}.w13", f"{name}.w2"
    if parameters[w13].dtype != FP8:
        return Experts(parameters[w13], parameters[w2])
    return Fp8Experts(
        QuantizedBlocks(parameters[w13], parameters[scale_name(w13)]),
        QuantizedBlocks(parameters[w2], parameters[scale_name(w2)]),
    )


class DenseMLP:
    """One MLP for every row: dense layers and shared experts. gate_up [2F, D]."""

    def __init__(self, gate_up_2FD: Tensor, down: Linear) -> None:
        self.gate_up_12FD = gate_up_2FD[None]
        self.down = down

    @property
    def weights(self) -> SharedExperts | None:
        """For a launch that takes them along; None where there is more to them."""
        return None if self.down.bias_N is not None else SharedExperts(self.gate_up_12FD[0], self.down.weight_NK)

    def __call__(self, x_TD: Tensor, all_rows_2: Tensor) -> Tensor:
        """`all_rows_2` is the device tensor (0, T): the offsets of one slot with every row."""
        return self.down(grouped_gemm_swiglu(x_TD, self.gate_up_12FD, all_rows_2, num_rows=x_TD.shape[0]))
