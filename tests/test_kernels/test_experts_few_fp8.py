"""Both products of few tokens' experts with weights in fp8 in one launch: the bits of the four launches, whatever rows
slots have, and of the router's own choice where that launch chooses."""

from __future__ import annotations

import doctest
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_parallel.dispatcher import ExpertInput
from kernels import experts_few_fp8 as module
from kernels.experts_few_fp8 import (
    _batches,
    experts_few_fp8,
    experts_few_fp8_kernel,
    experts_few_fp8_undecided,
    num_stages,
    serves_few_tokens_fp8,
    serves_undecided_fp8,
)
from kernels.experts_few_room import block_e
from kernels.gate import gate_triton
from kernels.gate_few import Undecided, leave_open
from kernels.grouped_gemm_fp8 import grouped_gemm_fp8, grouped_gemm_swiglu_quantized
from kernels.pack import Packed, pack
from kernels.quantize import QuantizedBlocks, quantize_blocks, quantize_rows
from kernels.routing import RoutingRule
from moe.model.experts import Fp8Experts
from tests.aot import aot
from tests.compare import assert_same_bits, filled_memory
from tests.gluon_aot import box, compile_gluon_ahead
from tests.test_kernels.test_experts_few import UNDECIDED, routed, routed_ids
from tests.test_kernels.test_experts_few_choose import rows_of

SIGMOID = RoutingRule(top_k=6, score="sigmoid", epsilon=1e-20, scale=2.5)

# experts, top k, D, F, most tokens
SHAPES = [
    pytest.param(128, 8, 2048, 768, 8, id="qwen3"),
    pytest.param(12, 4, 7168, 2048, 4, id="dsv3"),
    pytest.param(60, 4, 2896, 1424, 8, id="nothing divides"),
    pytest.param(40, 3, 1040, 80, 8, id="less than a block inside"),
    pytest.param(257, 8, 512, 256, 8, id="more slots than a power of two"),
]


def weights(num_experts: int, width: int, hidden: int) -> tuple[QuantizedBlocks, QuantizedBlocks]:
    """(w13, w2), whose blocks differ in size."""
    generator = torch.Generator(device="cuda").manual_seed(num_experts)

    def drawn(parts: int, rows: int, columns: int) -> QuantizedBlocks:
        w_SPND = torch.randn(num_experts, parts, rows, columns, device="cuda", generator=generator).mul_(columns**-0.5)
        w_SPND *= torch.linspace(0.5, 3.0, rows, device="cuda")[:, None]
        q = quantize_blocks(w_SPND.mul_(torch.linspace(2.0, 0.5, columns, device="cuda")))
        return QuantizedBlocks(q.values.flatten(1, 2), q.scales)

    return drawn(2, hidden, width), drawn(1, width, hidden)


def four_launches(x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, packed: Packed) -> Tensor:
    num_rows = packed.row_token_R.shape[0]
    given = {"row_index_R": packed.row_token_R, "num_rows": num_rows, "dtype": x_TD.dtype}
    h = grouped_gemm_swiglu_quantized(quantize_rows(x_TD), w13, packed.offsets_S1, **given)
    return grouped_gemm_fp8(h, w2, packed.offsets_S1, num_rows=num_rows, out_dtype=x_TD.dtype)


def one_launch(x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, packed: Packed) -> Tensor:
    assert packed.counters is not None
    given = (x_TD, w13, w2, packed.offsets_S1)
    assert serves_few_tokens_fp8(*given, packed.row_token_R.shape[0])
    return experts_few_fp8(*given, packed.row_token_R, packed.row_token_R.shape[0], packed.counters)


def test_worked_examples():
    assert doctest.testmod(module).failed == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k", "width", "hidden", "most_tokens"), SHAPES)
def test_bits_are_those_of_four_launches(num_experts, top_k, width, hidden, most_tokens):
    """Many times, as programs come in another order each time; NaN beside the rows of x and in the output before."""
    w13, w2 = weights(num_experts, width, hidden)
    for turn in range(40):
        num_tokens = 1 + turn % most_tokens
        packed, x_TD = routed(num_tokens, num_experts, top_k, turn), rows_of(num_tokens, width, turn)
        with filled_memory():
            ours_RD = one_launch(x_TD, w13, w2, packed)
        last = int(packed.offsets_S1[-1])
        assert_same_bits(ours_RD[:last], four_launches(x_TD, w13, w2, packed)[:last])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_experts", "width", "hidden", "rule", "with_bias"),
    [
        pytest.param(128, 2048, 768, RoutingRule(top_k=8), False, id="qwen3"),
        pytest.param(250, 1040, 80, SIGMOID, True, id="nothing divides"),
        pytest.param(60, 2896, 1424, RoutingRule(top_k=4), True, id="softmax with a bias"),
    ],
)
def test_the_choice_in_it_is_the_router_s(num_experts, width, hidden, rule, with_bias):
    w13, w2 = weights(num_experts, width, hidden)
    generator = torch.Generator(device="cuda").manual_seed(num_experts)
    gate_ED = torch.randn(num_experts, width, device="cuda", generator=generator).mul_(2 * width**-0.5).bfloat16()
    bias_E = torch.linspace(-0.1, 0.1, num_experts, device="cuda") if with_bias else None
    slot_of_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0)).int().cuda()
    for turn in range(16):
        num_tokens = turn % 4 + 1
        x_TD = rows_of(num_tokens, width, turn)
        if turn % 4 == 2:
            x_TD[:] = x_TD[:1]
        assert serves_undecided_fp8(x_TD, w13, w2, num_experts, rule)
        with filled_memory():
            open_ = leave_open(x_TD, None, None, gate_ED, bias_E, rule, slot_of_E, num_experts)
            assert isinstance(open_.packed, Undecided)
            y_RD = experts_few_fp8_undecided(x_TD, w13, w2, open_.packed)
        routing = gate_triton(x_TD, gate_ED, bias_E, rule)
        packed = pack(routing.expert_ids_TK, slot_of_E, num_experts)
        assert torch.equal(open_.routing.expert_ids_TK, routing.expert_ids_TK)
        assert_same_bits(open_.routing.weights_TK, routing.weights_TK)
        assert_same_bits(y_RD, four_launches(x_TD, w13, w2, packed)[packed.packed_row_TK.flatten().long()])


@pytest.mark.gpu
def test_launches_one_behind_the_other_in_a_graph():
    w13, w2 = weights(64, 512, 256)
    x_TD, ids_TK = torch.randn(4, 512, device="cuda").bfloat16(), routed_ids(4, 64, 6, 0)
    slots = torch.arange(64, dtype=torch.int32, device="cuda")
    kept = []

    def run() -> Tensor:
        kept.append(pack(ids_TK, slots, 64))
        return one_launch(x_TD, w13, w2, kept[-1])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = [run() for _ in range(20)]
    wanted_RD = four_launches(x_TD, w13, w2, pack(ids_TK, slots, 64))
    for _ in range(30):
        graph.replay()
    for ours_RD in ours:
        assert_same_bits(ours_RD, wanted_RD)


@pytest.mark.gpu
def test_experts_take_the_one_launch_where_it_serves(monkeypatch: pytest.MonkeyPatch):
    """Rows of the model's dtype with counters; rows that travelled in fp8 are left to the others."""
    w13, w2 = weights(16, 256, 128)
    packed, x_TD = routed(4, 16, 2, 0), torch.randn(4, 256, device="cuda").bfloat16()
    inputs = ExpertInput(
        x_TD, packed.row_token_R, packed.offsets_S1, packed.row_token_R.shape[0], None, counters=packed.counters
    )
    asked = []

    def counted(*given: Any) -> Tensor:
        asked.append(given)
        return experts_few_fp8(*given)

    monkeypatch.setattr("moe.model.experts.experts_few_fp8", counted)
    wanted_RD = four_launches(x_TD, w13, w2, packed)
    assert_same_bits(Fp8Experts(w13, w2)(inputs), wanted_RD)
    assert len(asked) == 1
    quantized = quantize_rows(x_TD)
    travelled = replace(inputs, rows_XD=quantized.values, scales_GX=quantized.scales, out_dtype=x_TD.dtype)
    assert_same_bits(Fp8Experts(w13, w2)(travelled), wanted_RD)
    assert len(asked) == 1


@pytest.mark.gpu
def test_what_is_left_to_the_four_launches():
    w13, w2 = weights(16, 256, 128)
    packed, x_TD = routed(8, 16, 2, 0), torch.zeros(9, 256, device="cuda").bfloat16()
    given = (w13, w2, packed.offsets_S1, 16)
    assert serves_few_tokens_fp8(x_TD[:8], *given)
    assert not serves_few_tokens_fp8(x_TD, *given)  # nine tokens
    assert not serves_few_tokens_fp8(x_TD[:8].float(), *given)
    wide = weights(2, 256, 4096)  # h in parts
    assert not serves_few_tokens_fp8(x_TD[:1], *wide, packed.offsets_S1[:3], 2)
    large = weights(2, 7168, 2048)
    x_TD = torch.zeros(5, 7168, device="cuda").bfloat16()
    assert serves_few_tokens_fp8(x_TD[:4], *large, packed.offsets_S1[:3], 8)
    assert not serves_few_tokens_fp8(x_TD, *large, packed.offsets_S1[:3], 10)


@aot
@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(2048, 768), (7168, 2048), (1040, 80)])
def test_compiles(width, hidden, chooses):
    names = ("num_tokens", "num_slots", "num_hidden", "width", "stride_x8", "top_k")
    args: dict[str, object] = {**dict.fromkeys(names, "i32"), "epsilon": "fp32", "scale": "fp32"}
    args |= dict.fromkeys(("offsets_ptr", "counters_ptr"), "*i32") | dict.fromkeys(("x_ptr", "h_ptr", "y_ptr"), "*bf16")
    args |= {"w13_desc": box("fp8e4nv", 16, 128), "w2_desc": box("fp8e4nv", 64, 128)}
    args |= dict.fromkeys(("w13_scale_ptr", "w2_scale_ptr"), "*fp32") | dict.fromkeys(UNDECIDED)
    args |= {"token_ptr": None if chooses else "*i32", "CHOICE": None}
    if chooses:
        args |= dict.fromkeys(("slot_of_ptr", "ids_ptr", "packed_row_ptr"), "*i32") | {"real_ptr": "*i1"}
        args |= dict.fromkeys(("parts_ptr", "weights_ptr"), "*fp32")
        args["CHOICE"] = (128, 16, 8, False, True, block_e(128))
    args |= {"STAGES": num_stages(width, hidden, 128 if chooses else 0), "BLOCK_S": 128}
    args |= {"X_BATCHES": _batches(width), "H_BATCHES": _batches(hidden), "PDL": True}
    compile_gluon_ahead(experts_few_fp8_kernel, args)
