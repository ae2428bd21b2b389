"""Experts chosen in the launch that multiplies them: the choice, weights and rows of the router's own launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.combine import combine_norm, combine_norm_triton
from kernels.experts_few import experts_few_undecided, serves_undecided
from kernels.gate import gate_triton
from kernels.gate_few import Undecided, leave_open
from kernels.grouped_gemm import grouped_gemm_swiglu_triton, grouped_gemm_triton
from kernels.pack import pack
from kernels.rmsnorm import Norm, rmsnorm_residual_triton
from kernels.routing import RoutingRule
from tests.compare import assert_same_bits, filled_memory

SIGMOID = RoutingRule(top_k=6, score="sigmoid", epsilon=1e-20, scale=2.5)

# experts, D, F, rule, with a bias, most rows
CASES = [
    pytest.param(128, 2048, 768, RoutingRule(top_k=8), False, 4, id="qwen3"),
    pytest.param(64, 2048, 1408, RoutingRule(top_k=6, renormalize=False, scale=1.5), False, 4, id="dsv2-lite"),
    pytest.param(250, 1032, 72, SIGMOID, True, 4, id="nothing divides"),
    pytest.param(24, 264, 1032, SIGMOID, True, 4, id="one row's h in parts, the last of eight columns"),
    pytest.param(3, 4096, 14336, RoutingRule(top_k=2), False, 1, id="h that eight rows have no room for"),
    pytest.param(5, 256, 128, RoutingRule(top_k=5), False, 4, id="every expert"),
    pytest.param(60, 96, 64, RoutingRule(top_k=4), True, 4, id="softmax with a bias"),
    pytest.param(40, 64, 64, RoutingRule(top_k=1, score="sigmoid", renormalize=False), False, 4, id="one of forty"),
]


def operands(num_experts: int, width: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """(gate, w13, w2)"""
    generator = torch.Generator(device="cuda").manual_seed(num_experts)
    draw = {"device": "cuda", "generator": generator}
    gate_ED = torch.randn(num_experts, width, **draw).mul_(2 * width**-0.5).bfloat16()
    w13_S2FD = torch.randn(num_experts, 2 * hidden, width, **draw).mul_(width**-0.5).bfloat16()
    return gate_ED, w13_S2FD, torch.randn(num_experts, width, hidden, **draw).mul_(hidden**-0.5).bfloat16()


def rows_of(num_tokens: int, width: int, seed: int) -> Tensor:
    """A view into wider, NaN rows."""
    wide = torch.full((num_tokens, width + 8), torch.nan, device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    wide[:, :width] = torch.randn(num_tokens, width, device="cuda", generator=generator)
    return wide[:, :width]


def assert_as_apart(undecided: Undecided, y_RD: Tensor, x_TD: Tensor, gate_ED: Tensor, weights: tuple[Tensor, Tensor]):
    """The bits of the router, of packing and of two products, each apart."""
    routing = gate_triton(x_TD, gate_ED, undecided.bias_E, undecided.rule, real_T=undecided.real_T)
    num_slots = weights[0].shape[0]
    packed = pack(routing.expert_ids_TK, undecided.slot_of_E, num_slots)
    num_rows = routing.expert_ids_TK.numel()
    h_RF = grouped_gemm_swiglu_triton(
        x_TD, weights[0], packed.offsets_S1, row_index_R=packed.row_token_R, num_rows=num_rows
    )
    wanted_RD = grouped_gemm_triton(h_RF, weights[1], packed.offsets_S1, num_rows=num_rows)
    assert torch.equal(undecided.routing.expert_ids_TK, routing.expert_ids_TK)
    assert torch.equal(undecided.routing.weights_TK.nan_to_num(-1.0), routing.weights_TK.nan_to_num(-1.0))
    assert torch.equal(undecided.packed.offsets_S1, packed.offsets_S1)
    place_R, here_R = torch.arange(num_rows, device="cuda"), packed.packed_row_TK.flatten() >= 0
    assert torch.equal(undecided.packed.packed_row_TK.flatten(), torch.where(here_R, place_R, -1).int())
    wanted_RD = wanted_RD[packed.packed_row_TK.flatten()[here_R].long()]
    assert_same_bits(y_RD[here_R].nan_to_num(-1.0), wanted_RD.nan_to_num(-1.0))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "width", "hidden", "rule", "with_bias", "most_rows"), CASES)
def test_bits_are_those_of_each_apart(num_experts, width, hidden, rule, with_bias, most_rows):
    gate_ED, w13_S2FD, w2_SDF = operands(num_experts, width, hidden)
    bias_E = torch.linspace(-0.1, 0.1, num_experts, device="cuda") if with_bias else None
    generator = torch.Generator().manual_seed(0)
    for turn in range(6 * most_rows):
        num_tokens = turn // 6 + 1
        x_TD, gate = rows_of(num_tokens, width, turn), gate_ED
        if turn % 6 == 1:
            gate = gate_ED[torch.arange(num_experts, device="cuda") // 3 * 3]  # ties
        if turn % 6 == 2:
            x_TD[turn % num_tokens] = torch.inf
        if turn % 6 == 3:
            gate = gate_ED * 60  # most scores are zero
        if turn % 6 == 4:
            x_TD[:] = x_TD[:1]
        slot_of_E = torch.randperm(num_experts, generator=generator).int()
        if turn % 4 == 3:
            slot_of_E[::3] = -1
        real_T = torch.arange(num_tokens, device="cuda") % 3 != turn % 5
        assert serves_undecided(x_TD, w13_S2FD, w2_SDF, num_experts, rule)
        with filled_memory():
            routed = leave_open(
                x_TD, None, None, gate, bias_E, rule, slot_of_E.cuda(), num_experts, real_T=None if turn % 2 else real_T
            )
            assert isinstance(routed.packed, Undecided)
            y_RD = experts_few_undecided(x_TD, w13_S2FD, w2_SDF, routed.packed).y_RD
        assert_as_apart(routed.packed, y_RD, x_TD, gate, (w13_S2FD, w2_SDF))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_with_the_norm_before_and_the_sum_behind_in_graphs(num_tokens):
    """Launches follow each other at once, and tell ahead: nobody reads what is not there yet. As in a network, others
    stand between a layer and the next router, which reads the residual ahead of its wait."""
    rule, norm = RoutingRule(top_k=8), Norm(torch.rand(2048, device="cuda").bfloat16() + 0.5, 1e-6)
    gate_ED, w13_S2FD, w2_SDF = operands(128, 2048, 768)
    x_TD, residual_TD = rows_of(num_tokens, 2048, 0), rows_of(num_tokens, 2048, 1)
    slot_of_E = torch.arange(128, dtype=torch.int32, device="cuda")

    def layers() -> list[Tensor]:
        x, residual, out = x_TD, residual_TD, []
        for _ in range(6):
            routed = leave_open(x, residual, norm, gate_ED, None, rule, slot_of_E, 128)
            assert isinstance(routed.packed, Undecided)
            y_RD = experts_few_undecided(routed.y_TD, w13_S2FD, w2_SDF, routed.packed).y_RD
            rows_TK, weights_TK = routed.packed.packed.packed_row_TK, routed.routing.weights_TK
            x, residual = combine_norm(y_RD, rows_TK, weights_TK, routed.new_residual_TD, *norm, in_order=True)
            out += [x, residual]
            x = x.clone()
        return out

    def apart() -> list[Tensor]:
        x, residual, out = x_TD, residual_TD, []
        for _ in range(6):
            y_TD, residual = rmsnorm_residual_triton(x, residual, *norm)
            routing = gate_triton(y_TD, gate_ED, None, rule)
            packed = pack(routing.expert_ids_TK, slot_of_E, 128)
            given = {"row_index_R": packed.row_token_R, "num_rows": 8 * num_tokens}
            h_RF = grouped_gemm_swiglu_triton(y_TD, w13_S2FD, packed.offsets_S1, **given)
            y_RD = grouped_gemm_triton(h_RF, w2_SDF, packed.offsets_S1, num_rows=8 * num_tokens)
            x, residual = combine_norm_triton(y_RD, packed.packed_row_TK, routing.weights_TK, residual, *norm)
            out += [x, residual]
        return out

    wanted = apart()
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = layers()
    for _ in range(20):
        graph.replay()
    for ours_TD, wanted_TD in zip(ours, wanted, strict=True):
        assert_same_bits(ours_TD, wanted_TD)


@pytest.mark.gpu
def test_what_the_router_keeps():
    """Groups, more experts than a warp holds, more rows than warps, and rows of another kind."""
    _, w13_S2FD, w2_SDF = operands(64, 256, 128)
    given, rule = (w13_S2FD, w2_SDF), RoutingRule(top_k=4)
    x_TD = rows_of(4, 256, 0)
    assert serves_undecided(x_TD, *given, 64, rule)
    assert not serves_undecided(x_TD, *given, 64, RoutingRule(top_k=4, num_groups=8, topk_groups=2))
    assert not serves_undecided(x_TD, *given, 257, rule)
    assert not serves_undecided(rows_of(5, 256, 0), *given, 64, rule)
    assert not serves_undecided(x_TD.float(), *given, 64, rule)


def test_a_cpu_leaves_it_to_the_router():
    w13_S2FD, w2_SDF = torch.zeros(4, 128, 64).bfloat16(), torch.zeros(4, 64, 64).bfloat16()
    assert not serves_undecided(torch.zeros(1, 64).bfloat16(), w13_S2FD, w2_SDF, 4, RoutingRule(top_k=2))
