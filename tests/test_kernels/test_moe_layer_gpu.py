"""From router logits to combined rows as one stretch: numbers, bits, no host sync, no torch kernel, one CUDA graph."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.combine import combine
from kernels.gate import gate
from kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from kernels.pack import pack
from kernels.routing import RoutingRule
from tests.compare import assert_close_as_torch, assert_same_bits, host_never_waits

RULE = RoutingRule(
    top_k=4,
    score="sigmoid",
    num_groups=4,
    topk_groups=2,
    group_score="top2_sum",
    epsilon=1e-20,
    scale=2.5,
)

SIZES = [
    pytest.param(1, id="T1"),
    pytest.param(64, id="T64-one-launch-of-pack"),
    pytest.param(2048, id="T2048-four-launches-of-pack"),
]


class Layer(NamedTuple):
    """Sixty experts, of which this rank holds all but the last three, in another order."""

    gate_ED: Tensor
    bias_E: Tensor
    w13_SND: Tensor
    w2_SDF: Tensor
    slot_of_E: Tensor


def make_layer(device: str, dtype: torch.dtype = torch.bfloat16, hidden: int = 192, width: int = 104) -> Layer:
    generator = torch.Generator().manual_seed(0)
    slot_of_E = torch.full((60,), -1)
    slot_of_E[:57] = torch.randperm(57, generator=generator)
    return Layer(
        gate_ED=torch.randn(60, hidden, generator=generator).div(hidden**0.5).to(device, dtype),
        bias_E=torch.randn(60, generator=generator).mul(0.1).to(device),
        w13_SND=torch.randn(57, 2 * width, hidden, generator=generator).div(hidden**0.5).to(device, dtype),
        w2_SDF=torch.randn(57, hidden, width, generator=generator).div(width**0.5).to(device, dtype),
        slot_of_E=slot_of_E.to(device, torch.int32),
    )


def draw_rows(num_tokens: int, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    return torch.randn(num_tokens, 192, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def run_layer(x_TD: Tensor, layer: Layer) -> Tensor:
    routing = gate(x_TD, layer.gate_ED, layer.bias_E, RULE)
    packed = pack(routing.expert_ids_TK, layer.slot_of_E, layer.w13_SND.shape[0])
    num_rows = x_TD.shape[0] * RULE.top_k
    h_RF = grouped_gemm_swiglu(
        x_TD, layer.w13_SND, packed.offsets_S1, row_index_R=packed.row_token_R, num_rows=num_rows
    )
    y_RD = grouped_gemm(h_RF, layer.w2_SDF, packed.offsets_S1, num_rows=num_rows)
    return combine(y_RD, packed.packed_row_TK, routing.weights_TK)


def plain_layer(x_TD: Tensor, layer: Layer, wide: torch.dtype) -> Tensor:
    """Experts one after the other by torch: rounded to the model dtype where it is (`wide` fp32), nowhere (fp64)."""
    expert_ids_TK, weights_TK = gate(x_TD, layer.gate_ED, layer.bias_E, RULE)
    keep = torch.float64 if wide == torch.float64 else x_TD.dtype
    x, total_TD = x_TD.to(keep), torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
    for expert, slot in enumerate(layer.slot_of_E.tolist()):
        tokens, k = torch.where(expert_ids_TK == expert)
        if slot >= 0 and tokens.numel():
            gated, up = (x[tokens] @ layer.w13_SND[slot].to(keep).T).to(wide).chunk(2, dim=-1)
            y = (functional.silu(gated) * up).to(keep) @ layer.w2_SDF[slot].to(keep).T
            total_TD.index_add_(0, tokens, y.to(wide) * weights_TK[tokens, k].to(wide)[:, None])
    return total_TD.to(keep)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_tokens", [1, 65, 129])
def test_numbers(device, num_tokens):
    x_TD, layer = draw_rows(num_tokens, device), make_layer(device)
    torchs, exact = plain_layer(x_TD, layer, torch.float32), plain_layer(x_TD, layer, torch.float64)
    assert_close_as_torch(run_layer(x_TD, layer), torchs, exact)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_row_alone_and_among_256(device, dtype):
    x_TD, layer = draw_rows(256, device, dtype), make_layer(device, dtype)
    whole = run_layer(x_TD, layer)
    for start, end in ((0, 1), (255, 256), (100, 117), (3, 131)):
        assert_same_bits(run_layer(x_TD[start:end].clone(), layer), whole[start:end])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", SIZES)
def test_the_host_never_waits(num_tokens):
    x_TD, layer = draw_rows(num_tokens, "cuda"), make_layer("cuda")
    warm = run_layer(x_TD, layer)
    with host_never_waits():
        again = run_layer(x_TD, layer)
    assert_same_bits(again, warm)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", SIZES)
def test_every_kernel_of_the_stretch_is_ours(num_tokens):
    """All device work of a profiled run, by name: no torch product, sort, top-k, copy or fill stands in for ours."""
    x_TD, layer = draw_rows(num_tokens, "cuda"), make_layer("cuda")
    run_layer(x_TD, layer)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run_layer(x_TD, layer)
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    few_rows = num_tokens * RULE.top_k <= 4096
    packing = (
        ["_pack_slots_kernel"]
        if few_rows
        else ["_count_kernel", "_sum_blocks_kernel", "_sum_slots_kernel", "_rank_kernel"]
    )
    # A grouped product has several forms, which a card's table may choose among; each is one launch.
    on_device = ["_grouped_gemm" if name.startswith("_grouped_gemm") else name for name in on_device]
    products = ["_gate_kernel", "_grouped_gemm", "_grouped_gemm"]
    assert sorted(on_device) == sorted(["_route_kernel", *packing, *products, "_combine_kernel"])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", SIZES)
def test_one_graph_serves_every_routing(num_tokens):
    """Captured once, replayed with other rows: spread as they come, and all alike, so that four experts get all."""
    layer, static_TD = make_layer("cuda"), draw_rows(num_tokens, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_layer(static_TD, layer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD = run_layer(static_TD, layer)
    for x_TD in (draw_rows(num_tokens, "cuda", seed=2), draw_rows(1, "cuda", seed=3).expand(num_tokens, -1)):
        static_TD.copy_(x_TD)
        graph.replay()
        assert_same_bits(out_TD, run_layer(x_TD.contiguous(), layer))
