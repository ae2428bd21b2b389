"""The gate: fp32 logits for every dtype and batch size, selection bias in fp32, worked examples."""

from __future__ import annotations

import pytest
import torch

from kernels.pack import pack
from kernels.routing import RoutingRule
from router.gate import Gate
from tests.compare import assert_same_bits


def identity_gate(num_experts: int, rule: RoutingRule, bias_E: torch.Tensor | None = None, dtype=torch.float32) -> Gate:
    """Row t's logits are row t's hidden values."""
    return Gate(torch.eye(num_experts, dtype=dtype), bias_E, rule)


def test_C11_softmax_before_top_k_with_and_without_renormalising() -> None:
    """The worked example of the case: weights are of the softmax over all experts, not over the chosen ones."""
    logits_14 = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain = identity_gate(4, RoutingRule(top_k=2, renormalize=False))(logits_14)
    renormalised = identity_gate(4, RoutingRule(top_k=2, renormalize=True))(logits_14)
    assert plain.expert_ids_TK.tolist() == renormalised.expert_ids_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(plain.weights_TK, torch.tensor([[0.6439, 0.2369]]), atol=5e-5, rtol=0)
    torch.testing.assert_close(renormalised.weights_TK, torch.tensor([[0.7311, 0.2689]]), atol=5e-5, rtol=0)
    assert identity_gate(4, RoutingRule(top_k=1, renormalize=True))(logits_14).weights_TK.tolist() == [[1.0]]


def test_C31_near_ties_are_decided_in_fp32() -> None:
    """Logits 4.000 and 4.004 are one number in bf16; the second must win, from bf16 rows and weights too."""
    # 4.004 as a sum of products of bf16 numbers: 4 * 1 + 0.00390625 * 1.
    weight_ED = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.25, 0.0], [0.0, 0.0]], dtype=torch.bfloat16)
    gate = Gate(weight_ED, None, RoutingRule(top_k=1))
    x_TD = torch.tensor([[4.0, 0.00390625]], dtype=torch.bfloat16)
    assert gate(x_TD).expert_ids_TK.tolist() == [[1]]
    assert (x_TD @ weight_ED.T)[0, 0] == (x_TD @ weight_ED.T)[0, 1], "the example must be a tie in bf16"


def test_C31_selection_bias_is_fp32() -> None:
    """Biases 5.0000 and 5.0005 with equal scores: one number in bf16, the second must win; weights stay unbiased."""
    rule = RoutingRule(top_k=1, score="sigmoid", renormalize=False)
    gate = identity_gate(2, rule, torch.tensor([5.0, 5.0005]))
    routing = gate(torch.zeros(1, 2))
    assert routing.expert_ids_TK.tolist() == [[1]]
    assert routing.weights_TK.tolist() == [[0.5]]
    with pytest.raises(AssertionError, match="fp32"):
        identity_gate(2, rule, torch.tensor([5.0, 5.0005], dtype=torch.bfloat16))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_C31_ids_do_not_depend_on_the_batch(device: str, dtype: torch.dtype) -> None:
    """4096 tokens in batches of 1 and 512 choose the same experts with the same weights as all at once."""
    torch.manual_seed(0)
    num_tokens, hidden, num_experts = 4096, 64, 8
    weight_ED = (torch.randn(num_experts, hidden) * 0.05).to(device, dtype)
    bias_E = torch.randn(num_experts, device=device) * 0.1
    rule = RoutingRule(
        top_k=3, score="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum", epsilon=1e-20, scale=2.5
    )
    gate = Gate(weight_ED, bias_E, rule)
    x_TD = torch.randn(num_tokens, hidden).to(device, dtype)
    whole = gate(x_TD)
    for size in (1, 512):
        parts = [gate(x_TD[start : start + size]) for start in range(0, num_tokens if size > 1 else 300, size)]
        ids_TK = torch.cat([part.expert_ids_TK for part in parts])
        assert_same_bits(ids_TK, whole.expert_ids_TK[: len(ids_TK)])
        assert_same_bits(torch.cat([part.weights_TK for part in parts]), whole.weights_TK[: len(ids_TK)])


def test_rule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k=5"):
        Gate(torch.zeros(4, 8), None, RoutingRule(top_k=5))


def test_a_gate_that_packs_too_gives_what_gate_and_pack_give() -> None:
    """Experts 2 and 5 live elsewhere, slot 3 is empty."""
    generator = torch.Generator().manual_seed(0)
    gate = Gate(torch.randn(6, 16, generator=generator), torch.randn(6, generator=generator), RoutingRule(top_k=3))
    x_TD = torch.randn(5, 16, generator=generator)
    real_T = torch.tensor([True, True, False, True, True])
    slot_of_E = torch.tensor([4, 0, -1, 1, 2, -1], dtype=torch.int32)
    routing, packed = gate.and_pack(x_TD, slot_of_E, 5, real_T)
    alone = gate(x_TD, real_T)
    assert torch.equal(routing.expert_ids_TK, alone.expert_ids_TK)
    assert torch.equal(routing.weights_TK, alone.weights_TK)
    expected = pack(alone.expert_ids_TK, slot_of_E, 5)
    for name in ("row_token_R", "packed_row_TK", "offsets_S1"):
        assert torch.equal(getattr(packed, name), getattr(expected, name)), name
