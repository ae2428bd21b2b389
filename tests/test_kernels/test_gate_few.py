"""The router of few rows in one launch: the bits of the three launches it stands for, and a counter left at zero."""

from __future__ import annotations

import pytest
import torch

from kernels.gate import PART, gate_triton
from kernels.gate_few import (
    FEW_ROWS,
    Undecided,
    _gate_few_kernel,
    gate_and_pack,
    gate_and_pack_reference,
    gate_and_pack_triton,
    leave_open,
    norm_gate_and_pack,
    norm_gate_and_pack_triton,
    norm_serves,
    serves,
)
from kernels.pack import pack
from kernels.rmsnorm import Norm, rmsnorm_residual, rmsnorm_residual_triton
from kernels.routing import RoutingRule, choice_of
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, filled_memory

GROUPED = RoutingRule(
    top_k=4, score="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum", epsilon=1e-20, scale=2.5
)
CASES = [
    # tokens, experts, width, slots, rule
    pytest.param(1, 8, 2 * PART, 8, RoutingRule(top_k=2), id="one-row-two-parts"),
    pytest.param(3, 60, PART + 44, 64, RoutingRule(top_k=4, renormalize=False), id="odd-part-and-experts-empty-slots"),
    pytest.param(5, 16, 96, 3, GROUPED, id="groups-few-slots"),
    pytest.param(4, 257, 40, 257, RoutingRule(top_k=8), id="one-expert-above-a-power-of-two"),
    pytest.param(2, 1, 24, 1, RoutingRule(top_k=1), id="one-expert"),
    pytest.param(4, 5, 24, 4, RoutingRule(top_k=5), id="every-expert"),
    # Triton 3.6 once counted the rows of all slots wrongly here, and products read rows that are none.
    pytest.param(7, 16, 192, 16, GROUPED, id="the-most-choices"),
]


def operands(num_tokens, num_experts, width, num_slots, dtype, device):
    """Rows and gate are views into wider, NaN ones; experts are spread over the slots, some of which are empty, some
    experts live elsewhere."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((num_tokens + num_experts, width + 8), torch.nan)
    wide[:num_tokens, :width] = torch.randn(num_tokens, width, generator=generator)
    wide[num_tokens:, :width] = torch.randn(num_experts, width, generator=generator) * width**-0.5
    wide = wide.to(device, dtype)
    bias_E = torch.randn(num_experts, generator=generator).to(device) * 0.1
    slot_of_E = torch.randperm(max(num_slots, num_experts), generator=generator)[:num_experts].to(torch.int32)
    slot_of_E[slot_of_E >= num_slots] = -1
    return wide[:num_tokens, :width], wide[num_tokens:, :width], bias_E, slot_of_E.to(device)


def assert_packed(ours, expected):
    """Rows beyond the last offset mean nothing."""
    assert torch.equal(ours.offsets_S1.cpu(), expected.offsets_S1.cpu())
    assert torch.equal(ours.packed_row_TK.cpu(), expected.packed_row_TK.cpu())
    last = int(expected.offsets_S1[-1])
    assert torch.equal(ours.row_token_R[:last].cpu(), expected.row_token_R[:last].cpu())
    assert not ours.counters.any()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "width", "num_slots", "rule"), CASES)
def test_kernel_against_the_reference(backend, with_bias, num_tokens, num_experts, width, num_slots, rule):
    x_TD, weight_ED, bias_E, slot_of_E = operands(
        num_tokens, num_experts, width, num_slots, backend.dtype, backend.device
    )
    bias_E = bias_E if with_bias else None
    real_T = torch.arange(num_tokens, device=backend.device) % 3 != 1
    counter_1 = torch.zeros(1, dtype=torch.int32, device=backend.device)
    with filled_memory():
        routing, packed = gate_and_pack_triton(
            x_TD, weight_ED, bias_E, rule, slot_of_E, num_slots, real_T=real_T, counter_1=counter_1
        )
    expected, wanted = gate_and_pack_reference(
        x_TD.cpu(),
        weight_ED.cpu(),
        None if bias_E is None else bias_E.cpu(),
        rule,
        slot_of_E.cpu(),
        num_slots,
        real_T=real_T.cpu(),
    )
    assert torch.equal(routing.expert_ids_TK.cpu(), expected.expert_ids_TK)
    torch.testing.assert_close(routing.weights_TK.cpu(), expected.weights_TK, rtol=2e-5, atol=1e-7)
    assert_packed(packed, wanted)
    assert counter_1.tolist() == [0]


def test_two_experts_of_one_slot_keep_their_tokens_order(backend):
    """Every expert in slot 1: by token, then by choice."""
    x_TD, weight_ED, _, _ = operands(3, 4, 24, 4, backend.dtype, backend.device)
    slot_of_E = torch.ones(4, dtype=torch.int32, device=backend.device)
    counter_1 = torch.zeros(1, dtype=torch.int32, device=backend.device)
    _, packed = gate_and_pack_triton(x_TD, weight_ED, None, RoutingRule(2), slot_of_E, 3, counter_1=counter_1)
    assert packed.packed_row_TK.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert packed.offsets_S1.tolist() == [0, 0, 6, 6]
    assert packed.row_token_R.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_experts", "width", "rule"),
    [
        pytest.param(128, 2048, RoutingRule(top_k=8), id="qwen3"),
        pytest.param(64, 2048, RoutingRule(top_k=6, renormalize=False), id="dsv2-lite"),
        pytest.param(8, 4096, RoutingRule(top_k=2), id="mixtral"),
        pytest.param(256, 7168, GROUPED, id="deepseek-v3"),
    ],
)
def test_bits_are_those_of_three_launches(num_experts, width, rule):
    """Of every number of rows, and many times: in no order of programs does the last one see too little."""
    x_TD, weight_ED, bias_E, slot_of_E = operands(300, num_experts, width, num_experts, torch.bfloat16, "cuda")
    whole = gate_triton(x_TD, weight_ED, bias_E, rule)
    counter_1 = torch.zeros(1, dtype=torch.int32, device="cuda")
    most = max(n for n in range(1, FEW_ROWS + 1) if serves(n, rule.top_k))
    for turn in range(200):
        num_tokens, start = 1 + turn % most, turn
        rows = slice(start, start + num_tokens)
        routing, packed = gate_and_pack_triton(
            x_TD[rows], weight_ED, bias_E, rule, slot_of_E, num_experts, counter_1=counter_1
        )
        assert torch.equal(routing.expert_ids_TK, whole.expert_ids_TK[rows]), turn
        assert_same_bits(routing.weights_TK, whole.weights_TK[rows])
        assert_packed(packed, pack(routing.expert_ids_TK, slot_of_E, num_experts))
    assert counter_1.tolist() == [0]


def assert_normed_as_separate(x_TD, residual_TD, norm, weight_ED, bias_E, rule, slot_of_E, num_slots, counter_1):
    y_TD, new_residual_TD = rmsnorm_residual_triton(x_TD, residual_TD, *norm)
    gated = (weight_ED, bias_E, rule, slot_of_E, num_slots)
    routing, packed = gate_and_pack_triton(y_TD, *gated, counter_1=counter_1)
    ours = norm_gate_and_pack_triton(x_TD, residual_TD, norm, *gated, counter_1=counter_1)
    assert_same_bits(ours.y_TD, y_TD)
    assert_same_bits(ours.new_residual_TD, new_residual_TD)
    assert torch.equal(ours.routing.expert_ids_TK, routing.expert_ids_TK)
    assert_same_bits(ours.routing.weights_TK, routing.weights_TK)
    assert_packed(ours.packed, packed)


def normed_operands(num_tokens, width, dtype, device):
    """Rows and residual are views into wider, NaN ones."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.full((2 * num_tokens, width + 16), torch.nan)
    wide[:, :width] = torch.randn(2 * num_tokens, width, generator=generator)
    wide, weight_D = wide.to(device, dtype), (1 + 0.3 * torch.randn(width, generator=generator)).to(device, dtype)
    return wide[:num_tokens, :width], wide[num_tokens:, :width], Norm(weight_D, 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("width", [1024, 1040])
def test_the_norm_before_it_comes_along(backend, num_tokens, width):
    _, weight_ED, bias_E, slot_of_E = operands(1, 6, width, 6, backend.dtype, backend.device)
    counter_1 = torch.zeros(1, dtype=torch.int32, device=backend.device)
    normed = normed_operands(num_tokens, width, backend.dtype, backend.device)
    assert_normed_as_separate(*normed, weight_ED, bias_E, RoutingRule(2), slot_of_E, 6, counter_1)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "width", "top_k"), [(128, 2048, 8), (8, 4096, 2), (60, 1040, 4)])
def test_the_norm_has_the_bits_of_its_own_launch(num_experts, width, top_k):
    """For every number of rows that it serves, through the rule."""
    _, weight_ED, bias_E, slot_of_E = operands(1, num_experts, width, num_experts, torch.bfloat16, "cuda")
    counter_1 = torch.zeros(1, dtype=torch.int32, device="cuda")
    gated = (weight_ED, bias_E, RoutingRule(top_k), slot_of_E, num_experts)
    x_TD, residual_TD, norm = normed_operands(40, width, torch.bfloat16, "cuda")
    served = [n for n in range(1, FEW_ROWS + 1) if norm_serves(x_TD[:n], top_k)]
    assert served[0] == 1 and len(served) < FEW_ROWS, served
    for n in served:
        for start in range(0, 40 - n, 3):
            rows = slice(start, start + n)
            assert_normed_as_separate(x_TD[rows], residual_TD[rows], norm, *gated, counter_1)
    whole = rmsnorm_residual_triton(x_TD, residual_TD, *norm)
    for n in (served[-1], served[-1] + 1):
        ours = norm_gate_and_pack(x_TD[:n], residual_TD[:n], norm, *gated, counter_1=counter_1)
        assert_same_bits(ours.y_TD, whole[0][:n])
        assert_same_bits(ours.new_residual_TD, whole[1][:n])
    assert counter_1.tolist() == [0]


@pytest.mark.gpu
def test_a_graph_of_many_can_be_replayed():
    """Launch after launch from one counter, programs of the next placed while the last still runs."""
    x_TD, weight_ED, _, slot_of_E = operands(1, 128, 2048, 128, torch.bfloat16, "cuda")
    counter_1 = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run():
        arguments = (RoutingRule(8), slot_of_E, 128)
        return gate_and_pack(x_TD, weight_ED, None, *arguments, counter_1=counter_1)

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run() for _ in range(20)]
    for _ in range(50):
        graph.replay()
    for routing, packed in results:
        assert_same_bits(routing.weights_TK, expected[0].weights_TK)
        assert_packed(packed, expected[1])


def test_many_rows_and_no_rows_take_the_three_operations(backend):
    for num_tokens in (0, FEW_ROWS + 1):
        x_TD, weight_ED, _, slot_of_E = operands(num_tokens, 6, 24, 6, backend.dtype, backend.device)
        counter_1 = torch.zeros(1, dtype=torch.int32, device=backend.device)
        routing, packed = gate_and_pack(x_TD, weight_ED, None, RoutingRule(2), slot_of_E, 6, counter_1=counter_1)
        assert routing.expert_ids_TK.shape == packed.packed_row_TK.shape == (num_tokens, 2)
        assert int(packed.offsets_S1[-1]) == num_tokens * 2 - int((packed.packed_row_TK < 0).sum())
        with pytest.raises(AssertionError, match="are not few"):
            gate_and_pack_triton(x_TD, weight_ED, None, RoutingRule(2), slot_of_E, 6, counter_1=counter_1)


@pytest.mark.parametrize("normed", [False, True])
def test_what_is_left_open(backend, normed):
    """The parts of the logits, whose sum they are, and counters at zero; with the norm as it is alone."""
    width = 2 * PART + 48
    _, weight_ED, bias_E, slot_of_E = operands(1, 20, width, 20, backend.dtype, backend.device)
    x_TD, residual_TD, norm = normed_operands(6, width, backend.dtype, backend.device)
    before = (residual_TD, norm) if normed else (None, None)
    with filled_memory():
        routed = leave_open(x_TD, *before, weight_ED, bias_E, RoutingRule(3), slot_of_E, 20)
    undecided = routed.packed
    assert isinstance(undecided, Undecided)
    y_TD = x_TD
    if normed:
        # fp32 is left to the norm's own launch, on a CPU to its reference.
        alone = rmsnorm_residual if x_TD.dtype == torch.float32 else rmsnorm_residual_triton
        y_TD, new_residual_TD = alone(x_TD, residual_TD, *norm)
        assert_same_bits(routed.new_residual_TD, new_residual_TD)
    assert_same_bits(routed.y_TD, y_TD)
    assert undecided.parts_PTE.shape == (3, 6, 20) and undecided.packed.counters is not None
    expected_TE = y_TD.double() @ weight_ED.double().T
    torch.testing.assert_close(undecided.parts_PTE.sum(dim=0).double(), expected_TE, rtol=1e-4, atol=1e-4)
    assert not undecided.packed.counters.any()
    assert undecided.packed.packed_row_TK.shape == undecided.routing.weights_TK.shape == (6, 3)


@aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("normed", [False, True])
def test_compiles(arch, normed):
    pointers = dict.fromkeys(("x_ptr", "w_ptr"), "*bf16") | dict.fromkeys(("parts_ptr", "weights_ptr"), "*fp32")
    pointers |= {"bias_ptr": "*fp32", "real_ptr": "*i1"}
    names = ("counter_ptr", "slot_of_ptr", "ids_ptr", "row_token_ptr", "packed_row_ptr", "offsets_ptr", "counters_ptr")
    numbers = dict.fromkeys(("num_tokens", "width", "stride_x", "stride_w", "num_slots"), "i32")
    args: dict[str, object] = pointers | dict.fromkeys(names, "*i32") | numbers | {"epsilon": "fp32", "scale": "fp32"}
    choice = choice_of(GROUPED, 256)._replace(block_t=8)
    args |= {"CHOICE": choice, "NUM_PARTS": 28, "BLOCK_N": 32, "BINS": 256, "PART": PART}
    args |= dict.fromkeys(("residual_ptr", "norm_ptr"), "*bf16" if normed else None)
    args |= {"y_ptr": "*bf16", "sum_ptr": "*bf16", "stride_residual": "i32", "eps": "fp32"}
    args |= {"NORM_ROWS": 2 if normed else 1, "NORM_COLUMNS": 4096, "PDL": arch >= 90}
    assert compile_ahead(_gate_few_kernel, arch, args, num_stages=1, num_warps=8 if normed else 4)
    assert compile_ahead(_gate_few_kernel, arch, args | {"counter_ptr": None}, num_stages=1)
