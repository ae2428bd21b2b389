"""The router in one stretch: against the reference, and equal bits whoever multiplies the parts of K, for any batch."""

from __future__ import annotations

import pytest
import torch

from kernels.gate import (
    PART,
    _gate_parts_kernel,
    _gate_route_kernel,
    gate,
    gate_counted_triton,
    gate_parts_triton,
    gate_reference,
)
from kernels.routing import Routing, RoutingRule
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits

GROUPED = RoutingRule(
    top_k=4, score="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum", epsilon=1e-20, scale=2.5
)


def operands(num_tokens: int, num_experts: int, width: int, dtype: torch.dtype, device: str):
    """Rows and gate are views into wider, NaN ones; logits have a spread of about 1."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((num_tokens + num_experts, width + 8), torch.nan)
    wide[:num_tokens, :width] = torch.randn(num_tokens, width, generator=generator)
    wide[num_tokens:, :width] = torch.randn(num_experts, width, generator=generator) * width**-0.5
    wide = wide.to(device, dtype)
    bias_E = torch.randn(num_experts, generator=generator).to(device) * 0.1
    return wide[:num_tokens, :width], wide[num_tokens:, :width], bias_E


def run_cut(x_TD, weight_ED, bias_E, rule, **marks) -> Routing:
    return gate_parts_triton(x_TD, weight_ED, bias_E, rule, **marks, cut=True)


def run_whole(x_TD, weight_ED, bias_E, rule, **marks) -> Routing:
    return gate_parts_triton(x_TD, weight_ED, bias_E, rule, **marks, cut=False)


def run_counted(x_TD, weight_ED, bias_E, rule, **marks) -> Routing:
    """The counters are zero again afterwards."""
    counters_X = torch.zeros(-(-x_TD.shape[0] // 16) + 1, dtype=torch.int32, device=x_TD.device)
    routing = gate_counted_triton(x_TD, weight_ED, bias_E, rule, counters_X, **marks)
    assert not bool(counters_X.any())
    return routing


KERNELS = [
    pytest.param(run_cut, id="cut"),
    pytest.param(run_whole, id="whole"),
    pytest.param(run_counted, id="one-launch"),
]


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "width", "rule"),
    [
        pytest.param(0, 8, 64, RoutingRule(top_k=2), id="no-tokens"),
        pytest.param(1, 8, 2 * PART, RoutingRule(top_k=2), id="two-parts"),
        pytest.param(17, 60, PART + 44, RoutingRule(top_k=4, renormalize=False), id="odd-part-and-experts"),
        pytest.param(35, 16, 96, GROUPED, id="one-part-groups"),
        pytest.param(3, 257, 40, RoutingRule(top_k=8), id="one-expert-above-a-power-of-two"),
    ],
)
def test_kernels_against_the_reference(backend, run, num_tokens, num_experts, width, rule):
    """Ids are equal but for near ties, which these logits do not have; padding rows go nowhere."""
    x_TD, weight_ED, bias_E = operands(num_tokens, num_experts, width, backend.dtype, backend.device)
    real_T = torch.arange(num_tokens, device=backend.device) % 3 != 1
    ours = run(x_TD, weight_ED, bias_E, rule, real_T=real_T)
    expected = gate_reference(x_TD.cpu(), weight_ED.cpu(), bias_E.cpu(), rule, real_T=real_T.cpu())
    assert torch.equal(ours.expert_ids_TK.cpu(), expected.expert_ids_TK)
    assert bool((expected.expert_ids_TK[1::3] == -1).all())
    torch.testing.assert_close(ours.weights_TK.cpu(), expected.weights_TK, rtol=2e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_experts", "width", "rule"),
    [
        pytest.param(128, 2048, RoutingRule(top_k=8), id="qwen3"),
        pytest.param(8, 4096, RoutingRule(top_k=2), id="mixtral"),
        pytest.param(256, 7168, GROUPED, id="deepseek-v3"),
    ],
)
def test_bits_depend_neither_on_the_batch_nor_on_the_kernel(dtype, num_experts, width, rule):
    x_TD, weight_ED, bias_E = operands(600, num_experts, width, dtype, "cuda")
    whole = run_whole(x_TD, weight_ED, bias_E, rule)
    for start, end in ((0, 1), (599, 600), (100, 117), (3, 259), (0, 600)):
        for run in (run_cut, run_whole, run_counted, gate):
            part = run(x_TD[start:end].clone(), weight_ED, bias_E, rule)
            assert torch.equal(part.expert_ids_TK, whole.expert_ids_TK[start:end]), (run, start, end)
            assert_same_bits(part.weights_TK, whole.weights_TK[start:end])


def test_C31_logits_are_never_rounded_to_the_model_dtype():
    """4 * 1 + 0.00390625 * 1 is 4.004 in fp32 and ties with 4.0 in bf16."""
    weight_ED = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)
    x_TD = torch.tensor([[4.0, 0.00390625]], dtype=torch.bfloat16)
    assert gate(x_TD, weight_ED, None, RoutingRule(top_k=1)).expert_ids_TK.tolist() == [[1]]


def test_a_gate_of_another_width_is_refused():
    with pytest.raises(AssertionError, match="gate of"):
        gate(torch.zeros(2, 8), torch.zeros(4, 9), None, RoutingRule(top_k=1))


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    args: dict[str, object] = {"x_ptr": "*bf16", "w_ptr": "*bf16", "parts_ptr": "*fp32", "PART": PART, "WIDE": False}
    args |= dict.fromkeys(("num_tokens", "num_experts", "width", "stride_x", "stride_w"), "i32") | {"PDL": arch >= 90}
    for block_t, block_n, stages in ((16, 32, 1), (64, 128, 2)):
        parts = {"CUT": stages == 1, "BLOCK_T": block_t, "BLOCK_N": block_n}
        assert compile_ahead(_gate_parts_kernel, arch, args | parts, num_stages=stages)
    args |= {"counters_ptr": "*i32", "bias_ptr": None, "real_ptr": "*i1", "ids_ptr": "*i32"}
    args |= {
        "weights_ptr": "*fp32",
        "epsilon": "fp32",
        "scale": "fp32",
        "NUM_PARTS": 8,
        "NUM_EXPERTS": 128,
        "TOP_K": 8,
        "SIGMOID": False,
    }
    args |= {"NUM_GROUPS": 1, "TOPK_GROUPS": 1, "TOP2_SUM": False, "RENORMALIZE": True, "BLOCK_T": 4, "BLOCK_S": 128}
    args |= {"BLOCK_G": 1, "BLOCK_K": 8, "BLOCK_M": 16, "BLOCK_N": 32}
    assert compile_ahead(_gate_route_kernel, arch, args, num_stages=1)
