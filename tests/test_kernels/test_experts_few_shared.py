"""Shared experts that come along in the launch of few tokens' experts: the bits of their own two products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.experts_few import FEW_TOKENS, SharedExperts, experts_few, experts_few_undecided, takes_along
from kernels.gate_few import Undecided, leave_open
from kernels.grouped_gemm import grouped_gemm_swiglu_triton, grouped_gemm_triton
from kernels.linear import linear_triton
from kernels.pack import pack
from kernels.routing import RoutingRule
from tests.compare import assert_same_bits, filled_memory

# experts, top k, D, F, F of the shared experts
SHAPES = [
    pytest.param(64, 6, 2048, 1408, 2816, id="dsv2-lite, two parts of h"),
    pytest.param(40, 3, 1032, 72, 200, id="nothing divides, two parts"),
    pytest.param(3, 2, 64, 1024, 8, id="hardly any"),
    pytest.param(16, 2, 256, 128, 5000, id="forty parts"),
]


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).mul_(shape[-1] ** -0.5).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_experts", "top_k", "width", "hidden", "shared_hidden"), SHAPES)
def test_bits_are_those_of_launches_of_their_own(num_experts, top_k, width, hidden, shared_hidden, dtype):
    """Many times, as programs come in another order each time; some tokens go to shared experts alone."""
    w13_S2FD = drawn(num_experts, 2 * hidden, width, dtype=dtype, seed=1)
    w2_SDF = drawn(num_experts, width, hidden, dtype=dtype, seed=2)
    gate_up_2FD = drawn(2 * shared_hidden, width, dtype=dtype, seed=3)
    shared = SharedExperts(gate_up_2FD, drawn(width, shared_hidden, dtype=dtype, seed=4))
    slots = torch.arange(num_experts, dtype=torch.int32, device="cuda")
    for turn in range(40):
        num_tokens = 1 + turn % FEW_TOKENS
        generator = torch.Generator().manual_seed(turn)
        ids_TK = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices.int().cuda()
        if turn % 3 == 1:
            ids_TK[turn % num_tokens] = -1
        packed = pack(ids_TK, slots, num_experts)
        x_TD = drawn(num_tokens, width, dtype=dtype, seed=turn).mul_(width**0.5)
        num_rows = ids_TK.numel()
        assert takes_along(x_TD, w13_S2FD, w2_SDF, num_rows, shared)
        assert packed.counters is not None
        with filled_memory():
            given = (x_TD, w13_S2FD, w2_SDF, packed.offsets_S1, packed.row_token_R, num_rows, packed.counters)
            ours = experts_few(*given, shared)
        last = int(packed.offsets_S1[-1])
        h_RF = grouped_gemm_swiglu_triton(
            x_TD, w13_S2FD, packed.offsets_S1, row_index_R=packed.row_token_R, num_rows=num_rows
        )
        y_RD = grouped_gemm_triton(h_RF, w2_SDF, packed.offsets_S1, num_rows=num_rows)
        assert_same_bits(ours.y_RD[:last], y_RD[:last])
        assert ours.shared_TD is not None
        assert_same_bits(ours.shared_TD, of_all_rows(x_TD, shared))


def of_all_rows(x_TD: Tensor, shared: SharedExperts) -> Tensor:
    """In two launches."""
    num_tokens = x_TD.shape[0]
    all_rows_2 = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    h_TF = grouped_gemm_swiglu_triton(x_TD, shared.gate_up_2FD[None], all_rows_2, num_rows=num_tokens)
    return linear_triton(h_TF, shared.down_DF)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_the_choice_may_be_left_open_too(num_tokens):
    """In a graph of six layers, each of which begins with the rows of the one before."""
    num_experts, rule = 64, RoutingRule(top_k=6, renormalize=False)
    gate_ED = drawn(num_experts, 512, dtype=torch.bfloat16, seed=0)
    w13_S2FD = drawn(num_experts, 512, 512, dtype=torch.bfloat16, seed=1)
    w2_SDF = drawn(num_experts, 512, 256, dtype=torch.bfloat16, seed=2)
    weights = ((1920, 512), (512, 960))
    shared = SharedExperts(*(drawn(*shape, dtype=torch.bfloat16, seed=3) for shape in weights))
    slots = torch.arange(num_experts, dtype=torch.int32, device="cuda")
    x_TD = drawn(num_tokens, 512, dtype=torch.bfloat16, seed=4).mul_(512**0.5)

    def layers(*, along: bool) -> list[Tensor]:
        x, out = x_TD, []
        for _ in range(6):
            undecided = leave_open(x, None, None, gate_ED, None, rule, slots, num_experts).packed
            assert isinstance(undecided, Undecided)
            few = experts_few_undecided(x, w13_S2FD, w2_SDF, undecided, shared if along else None)
            x = of_all_rows(x, shared) if few.shared_TD is None else few.shared_TD
            out += [few.y_RD, x]
        return out

    layers(along=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = layers(along=True)
    for _ in range(20):
        graph.replay()
    for each, wanted in zip(ours, layers(along=False), strict=True):
        assert_same_bits(each, wanted)


@pytest.mark.gpu
def test_what_does_not_come_along():
    w13_S2FD, w2_SDF = (drawn(*shape, dtype=torch.bfloat16, seed=1) for shape in ((4, 128, 64), (4, 64, 64)))
    gate_up_2FD, down_DF = (drawn(*shape, dtype=torch.bfloat16, seed=2) for shape in ((64, 64), (64, 32)))
    x_TD = torch.zeros(9, 64, device="cuda", dtype=torch.bfloat16)
    assert takes_along(x_TD[:8], w13_S2FD, w2_SDF, 16, SharedExperts(gate_up_2FD, down_DF))
    assert not takes_along(x_TD, w13_S2FD, w2_SDF, 18, SharedExperts(gate_up_2FD, down_DF))  # nine tokens
    assert not takes_along(x_TD[:8], w13_S2FD, w2_SDF, 16, SharedExperts(gate_up_2FD.half(), down_DF))
    odd = torch.zeros(64, 36, device="cuda", dtype=torch.bfloat16)[:, :31]  # the copy engine wants 16 bytes
    assert not takes_along(x_TD[:8], w13_S2FD, w2_SDF, 16, SharedExperts(gate_up_2FD, odd))
