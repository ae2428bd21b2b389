"""A layer of routed experts with its router and its sum, as the cases of experts_row.py run it. Knows calls and
operands; knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.combine import combine_norm
from kernels.experts_few import FewRows, SharedExperts
from kernels.gate_few import Undecided, leave_open, norm_gate_and_pack
from kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from kernels.linear import linear
from kernels.rmsnorm import Norm
from kernels.routing import RoutingRule
from launch.replay import Call

Run = Callable[..., FewRows]


class Layer(NamedTuple):
    """A layer's operands but for its row."""

    norm: Norm
    gate_ED: Tensor
    bias_E: Tensor | None
    rule: RoutingRule
    slot_of_E: Tensor
    w13_S2FD: Tensor
    w2_SDF: Tensor
    shared: SharedExperts | None


def drawn(
    device: torch.device,
    seed: int,
    num_experts: int,
    width: int,
    hidden: int,
    shared: int,
    rule: RoutingRule,
    apart: float,
    *,
    with_bias: bool,
) -> Layer:
    """Of normal weights. With a bias every fourth expert is elsewhere, too."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, scale: float) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, scale, generator=generator)

    slot_of_E = torch.arange(num_experts, dtype=torch.int32, device=device)
    if with_bias:
        slot_of_E[::4] = -1
    return Layer(
        Norm(torch.rand(width, device=device, generator=generator).to(dtype) + 0.5, 1e-6),
        draw(num_experts, width, scale=2 * apart * width**-0.5),
        torch.linspace(-0.1, 0.1, num_experts, device=device) if with_bias else None,
        rule,
        slot_of_E,
        draw(num_experts, 2 * hidden, width, scale=width**-0.5),
        draw(num_experts, width, hidden, scale=hidden**-0.5),
        SharedExperts(draw(2 * shared, width, scale=width**-0.5), draw(width, shared, scale=shared**-0.5))
        if shared
        else None,
    )


def whole(layer: Layer, x_TD: Tensor, residual_TD: Tensor, serves: Callable[..., bool], run: Run) -> Call:
    """Experts chosen and multiplied by `run`, where `serves` says so; else by the router and two launches."""
    router = (layer.norm, layer.gate_ED, layer.bias_E, layer.rule, layer.slot_of_E, layer.w2_SDF.shape[0])
    weights, shared, (norm_D, eps) = (layer.w13_S2FD, layer.w2_SDF), layer.shared, layer.norm
    counter_1 = torch.zeros(1, dtype=torch.int32, device=x_TD.device)
    all_rows_2 = torch.tensor([0, 1], dtype=torch.int32, device=x_TD.device)

    def chosen_there() -> tuple[Tensor, Tensor]:
        routed = leave_open(x_TD, residual_TD, *router)
        assert isinstance(routed.packed, Undecided)
        few = run(routed.y_TD, *weights, routed.packed, shared)
        row_TK = routed.packed.packed.packed_row_TK
        chosen = (few.y_RD, row_TK, routed.routing.weights_TK)
        return combine_norm(*chosen, routed.new_residual_TD, norm_D, eps, few.shared_TD, in_order=True)

    def two_launches() -> tuple[Tensor, Tensor]:
        rows_TD, new_residual_TD, routing, packed = norm_gate_and_pack(x_TD, residual_TD, *router, counter_1=counter_1)
        assert not isinstance(packed, Undecided)
        given = {"row_index_R": packed.row_token_R, "num_rows": packed.row_token_R.shape[0]}
        h_RF = grouped_gemm_swiglu(rows_TD, weights[0], packed.offsets_S1, **given)
        y_RD = grouped_gemm(h_RF, weights[1], packed.offsets_S1, num_rows=h_RF.shape[0], old_offsets=True)
        shared_TD = None
        if shared is not None:
            shared_h_TF = grouped_gemm_swiglu(rows_TD, shared.gate_up_2FD[None], all_rows_2, num_rows=1)
            shared_TD = linear(shared_h_TF, shared.down_DF)
        return combine_norm(y_RD, packed.packed_row_TK, routing.weights_TK, new_residual_TD, norm_D, eps, shared_TD)

    there = serves(x_TD, *weights, layer.gate_ED.shape[0], layer.rule)
    return chosen_there if there else two_launches
