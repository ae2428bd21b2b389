"""The router in one stretch: against the reference, and equal bits whoever multiplies the parts of K, for any batch."""

from __future__ import annotations

import pytest
import torch

from kernels.gate import PART, GateTile, _gate_kernel, gate, gate_reference, gate_tile, gate_triton
from kernels.routing import RoutingRule
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


CUT = GateTile(16, 32, PART, 4, 1, cut=True)
TILES = [
    pytest.param(None, id="by-the-rule"),
    pytest.param(CUT, id="cut"),
    pytest.param(GateTile(32, 16, 64, 4, 2, cut=False), id="whole"),
]


@pytest.mark.parametrize("tile", TILES)
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
def test_kernels_against_the_reference(backend, tile, num_tokens, num_experts, width, rule):
    """Ids are equal but for near ties, which these logits do not have; padding rows go nowhere."""
    x_TD, weight_ED, bias_E = operands(num_tokens, num_experts, width, backend.dtype, backend.device)
    real_T = torch.arange(num_tokens, device=backend.device) % 3 != 1
    ours = gate_triton(x_TD, weight_ED, bias_E, rule, real_T=real_T, tile=tile)
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
def test_bits_depend_neither_on_the_batch_nor_on_the_tile(dtype, num_experts, width, rule):
    """One row, a few, and as many as take each of the rule's tiles."""
    x_TD, weight_ED, bias_E = operands(4500, num_experts, width, dtype, "cuda")
    whole = gate(x_TD, weight_ED, bias_E, rule)
    for start, end in ((0, 1), (4499, 4500), (100, 117), (3, 67), (3, 259), (0, 1500), (0, 4500)):
        for tile in (None, CUT, GateTile(16, 32, 64, 4, 1, cut=False)):
            part = gate_triton(x_TD[start:end].clone(), weight_ED, bias_E, rule, tile=tile)
            assert torch.equal(part.expert_ids_TK, whole.expert_ids_TK[start:end]), (tile, start, end)
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
    for num_tokens in (1, 1024, 4096):
        tile = gate_tile(num_tokens, arch // 10, wide=False)
        blocks = {"CUT": tile.cut, "BLOCK_T": tile.block_t, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
        for even in (True,) if tile.cut else (True, False):
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            assert compile_ahead(_gate_kernel, arch, args | blocks | {"EVEN": even}, **options), tile
