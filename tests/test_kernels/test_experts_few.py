"""Both products of few tokens' experts in one launch: the bits of the two launches, whatever rows slots have."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import Tensor

from kernels import experts_few_room
from kernels.experts_few import (
    FEW_TOKENS,
    experts_few,
    experts_few_kernel,
    serves_few_tokens,
)
from kernels.experts_few_room import block_f, num_stages
from kernels.grouped_gemm import grouped_gemm_swiglu_triton, grouped_gemm_triton
from kernels.pack import Packed, pack
from tests.aot import aot
from tests.compare import assert_same_bits, filled_memory
from tests.gluon_aot import box, compile_gluon_ahead

# experts, top k, D, F
SHAPES = [
    pytest.param(128, 8, 2048, 768, id="qwen3"),
    pytest.param(64, 6, 2048, 1408, id="dsv2-lite"),
    pytest.param(40, 3, 1032, 72, id="nothing divides"),
    pytest.param(3, 2, 64, 1024, id="wider inside"),
    pytest.param(257, 8, 1024, 512, id="more slots than a power of two"),
]


def operands(num_experts: int, width: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(num_experts)
    draw = {"device": "cuda", "generator": generator}
    w13_S2FD = torch.randn(num_experts, 2 * hidden, width, **draw).mul_(width**-0.5).to(dtype)
    return w13_S2FD, torch.randn(num_experts, width, hidden, **draw).mul_(hidden**-0.5).to(dtype)


def routed_ids(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Tensor:
    """Every third time one token goes nowhere; every fifth all tokens go to the same experts."""
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices.int()
    if seed % 3 == 1:
        ids_TK[seed % num_tokens] = -1
    if seed % 5 == 4:
        ids_TK[:] = ids_TK[:1].clone()
    return ids_TK.cuda()


def routed(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Packed:
    ids_TK = routed_ids(num_tokens, num_experts, top_k, seed)
    return pack(ids_TK, torch.arange(num_experts, dtype=torch.int32, device="cuda"), num_experts)


def one_launch(x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, packed: Packed) -> Tensor:
    assert packed.counters is not None
    given = (x_TD, w13_S2FD, w2_SDF, packed.offsets_S1, packed.row_token_R, packed.row_token_R.shape[0])
    assert serves_few_tokens(*given)
    return experts_few(*given, packed.counters).y_RD


def two_launches(x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, packed: Packed) -> Tensor:
    given = {"row_index_R": packed.row_token_R, "num_rows": packed.row_token_R.shape[0]}
    h_RF = grouped_gemm_swiglu_triton(x_TD, w13_S2FD, packed.offsets_S1, **given)
    return grouped_gemm_triton(h_RF, w2_SDF, packed.offsets_S1, num_rows=h_RF.shape[0])


def test_worked_examples():
    assert doctest.testmod(experts_few_room).failed == 0


def test_a_cpu_is_left_to_the_two_products():
    x_TD, w13_S2FD = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(2, 128, 64, dtype=torch.bfloat16)
    index = torch.zeros(1, dtype=torch.int32)
    assert not serves_few_tokens(x_TD, w13_S2FD, w13_S2FD[:, :64], torch.zeros(3, dtype=torch.int32), index, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_experts", "top_k", "width", "hidden"), SHAPES)
def test_bits_are_those_of_two_launches(num_experts, top_k, width, hidden, dtype):
    """Many times, as programs come in another order each time; NaN beside the rows of x and in the output before."""
    w13_S2FD, w2_SDF = operands(num_experts, width, hidden, dtype)
    for turn in range(60):
        num_tokens = 1 + turn % FEW_TOKENS
        packed = routed(num_tokens, num_experts, top_k, turn)
        wide = torch.full((num_tokens + 1, width + 8), torch.nan, device="cuda", dtype=dtype)
        wide[:num_tokens, :width] = torch.randn(num_tokens, width, device="cuda").to(dtype)
        x_TD = wide[:num_tokens, :width]
        with filled_memory():
            ours_RD = one_launch(x_TD, w13_S2FD, w2_SDF, packed)
        last = int(packed.offsets_S1[-1])
        assert_same_bits(ours_RD[:last], two_launches(x_TD, w13_S2FD, w2_SDF, packed)[:last])


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "hidden"), [(4096, 14336), (264, 1032)])
def test_one_row_of_any_width_inside(width, hidden):
    w13_S2FD, w2_SDF = operands(3, width, hidden, torch.bfloat16)
    for turn in range(6):
        packed = routed(1, 3, 2, turn)
        x_TD = torch.randn(1, width, device="cuda").bfloat16()
        with filled_memory():
            ours_RD = one_launch(x_TD, w13_S2FD, w2_SDF, packed)
        last = int(packed.offsets_S1[-1])
        assert_same_bits(ours_RD[:last], two_launches(x_TD, w13_S2FD, w2_SDF, packed)[:last])


@pytest.mark.gpu
def test_launches_one_behind_the_other_and_graphs():
    """Packed anew before each launch, replayed, on two streams beside each other."""
    w13_S2FD, w2_SDF = operands(64, 512, 256, torch.bfloat16)
    x_TD, ids_TK = torch.randn(4, 512, device="cuda").bfloat16(), routed_ids(4, 64, 6, 0)
    slots = torch.arange(64, dtype=torch.int32, device="cuda")

    def run(keep: list[object]) -> Tensor:
        packed = pack(ids_TK, slots, 64)
        keep.append(packed)
        return one_launch(x_TD, w13_S2FD, w2_SDF, packed)

    wanted_RD, kept = two_launches(x_TD, w13_S2FD, w2_SDF, pack(ids_TK, slots, 64)), []
    run(kept)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = [run(kept) for _ in range(20)]
        ours = [run(kept) for _ in range(20)]
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(30):
        graph.replay()
    for ours_RD in ours + beside:
        assert_same_bits(ours_RD, wanted_RD)


@pytest.mark.gpu
def test_no_token_goes_anywhere():
    w13_S2FD, w2_SDF = operands(4, 64, 64, torch.bfloat16)
    ids_TK = torch.full((2, 2), -1, dtype=torch.int32, device="cuda")
    packed = pack(ids_TK, torch.arange(4, dtype=torch.int32, device="cuda"), 4)
    x_TD = torch.zeros(2, 64, device="cuda").bfloat16()
    with filled_memory():
        y_RD = one_launch(x_TD, w13_S2FD, w2_SDF, packed)
    assert y_RD.isnan().all()  # not written


@pytest.mark.gpu
def test_what_is_left_to_the_two_products():
    w13_S2FD, w2_SDF = operands(16, 64, 32, torch.bfloat16)
    packed, x_TD = routed(8, 16, 2, 0), torch.zeros(9, 64, device="cuda").bfloat16()
    given = (w13_S2FD, w2_SDF, packed.offsets_S1, packed.row_token_R, 16)
    assert serves_few_tokens(x_TD[:8], *given)
    assert not serves_few_tokens(x_TD, *given)  # nine tokens
    assert not serves_few_tokens(x_TD[:0], *given)
    assert not serves_few_tokens(x_TD[:8].half(), *given)
    ranges_S2 = packed.offsets_S1.unfold(0, 2, 1).contiguous()
    assert not serves_few_tokens(x_TD[:8], w13_S2FD, w2_SDF, ranges_S2, packed.row_token_R, 16)
    large = torch.empty(2, 64, 14336, device="cuda", dtype=torch.bfloat16)  # rows of h would fill a multiprocessor
    assert not serves_few_tokens(x_TD[:8], w13_S2FD[:2], large, packed.offsets_S1[:3], packed.row_token_R, 16)
    assert serves_few_tokens(x_TD[:1], w13_S2FD[:2], large, packed.offsets_S1[:3], packed.row_token_R, 2)


UNDECIDED = ("parts_ptr", "bias_ptr", "real_ptr", "slot_of_ptr", "ids_ptr", "weights_ptr", "packed_row_ptr")


def numbers_and_shared(*, with_shared: bool, piece: int = 64) -> dict[str, object]:
    names = ("num_tokens", "num_rows", "num_slots", "num_hidden", "num_columns", "num_shared")
    args: dict[str, object] = dict.fromkeys(names, "i32")
    boxes = (box("bf16", 16, 64), box("bf16", piece, 64)) if with_shared else (None, None)
    return args | dict(zip(("s13_desc", "s2_desc"), boxes))


@aot
@pytest.mark.parametrize(
    ("num_tokens", "width", "hidden"), [(8, 2048, 768), (8, 2048, 1408), (8, 64, 1024), (1, 2048, 1408), (1, 4096, 512)]
)
def test_compiles(num_tokens, width, hidden):
    args = numbers_and_shared(with_shared=width > 64)
    args |= dict.fromkeys(("offsets_ptr", "token_ptr", "counters_ptr"), "*i32")
    args |= dict.fromkeys(("x_ptr", "h_ptr", "y_ptr"), "*bf16") | {"stride_x8": "i32"}
    args |= {"w13_desc": box("bf16", 16, 64), "w2_desc": box("bf16", 64, 64), "BLOCK_S": 128}
    args |= {"STAGES": num_stages(num_tokens, width, hidden), "BLOCK_D": max(256, width)}
    args |= {"BLOCK_F": block_f(num_tokens, hidden), "ONE": num_tokens == 1, "ROWS": 64}
    args |= dict.fromkeys(UNDECIDED) | dict.fromkeys(("epsilon", "scale"), "fp32") | {"CHOICE": None, "top_k": "i32"}
    compile_gluon_ahead(experts_few_kernel, args | {"PDL": True})


@aot
@pytest.mark.parametrize(("num_experts", "sigmoid"), [(128, False), (250, True)])
@pytest.mark.parametrize(("num_tokens", "piece"), [(4, 64), (1, 64), (1, 32)])
def test_the_choice_in_it_compiles(num_tokens, piece, num_experts, sigmoid):
    args = numbers_and_shared(with_shared=sigmoid, piece=piece) | {"ONE": num_tokens == 1, "ROWS": piece}
    args |= dict.fromkeys(("offsets_ptr", "slot_of_ptr", "ids_ptr", "packed_row_ptr", "counters_ptr"), "*i32")
    args |= dict.fromkeys(("x_ptr", "h_ptr", "y_ptr"), "*bf16") | {"stride_x8": "i32", "token_ptr": None}
    args |= dict.fromkeys(("parts_ptr", "weights_ptr"), "*fp32") | dict.fromkeys(("epsilon", "scale"), "fp32")
    args |= {"w13_desc": box("bf16", 16, 64), "w2_desc": box("bf16", piece, 64)}
    args |= {"top_k": "i32", "real_ptr": "*i1", "bias_ptr": "*fp32" if sigmoid else None}
    block_e = 1 << (num_experts - 1).bit_length()
    args |= {"CHOICE": (num_experts, 16, 8, sigmoid, True, block_e), "BLOCK_S": block_e}
    args |= {"STAGES": num_stages(num_tokens, 2048, 768, num_experts), "BLOCK_D": 2048}
    args |= {"BLOCK_F": block_f(num_tokens, 768)}
    compile_gluon_ahead(experts_few_kernel, args | {"PDL": True})
