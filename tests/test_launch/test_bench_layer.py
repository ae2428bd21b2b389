"""The layer that is timed is the layer: the plain definition's numbers, right counts, a figure for each size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from kernels.quantize import FP8, dequantize_blocks
from launch.bench_layer import (
    LayerBank,
    LayerOperands,
    LayerShape,
    experts_hit,
    layer_call,
    layer_shape,
    measure_layer,
    part_calls,
)
from launch.replay import Call
from launch.roofline import Ceilings
from moe.model.experts import Fp8Experts

CPU = torch.device("cpu")
SHAPE = LayerShape("odd", 5, 2, 32, 24)


def plain_layer(operands: LayerOperands) -> torch.Tensor:
    """Token by token, in fp64."""
    out_TD = torch.zeros(operands.x_TD.shape, dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(*operands.routing)):
        x_D = operands.x_TD[t].double()
        for expert, weight in zip(ids.tolist(), weights.tolist()):
            gate_F, up_F = (operands.w13_S2FD[expert].double() @ x_D).chunk(2)
            out_TD[t] += weight * (operands.w2_SDF[expert].double() @ (silu(gate_F) * up_F))
    return out_TD


def test_the_timed_call_is_the_layer() -> None:
    for operands in LayerBank(SHAPE, CPU, torch.float32).operands(7):
        out_TD = layer_call(operands)()
        assert isinstance(out_TD, torch.Tensor)
        torch.testing.assert_close(out_TD.double(), plain_layer(operands), rtol=1e-4, atol=1e-6)


def test_the_parts_end_where_the_layer_does() -> None:
    operands = LayerBank(SHAPE, CPU, torch.float32).operands(7)[0]
    calls = part_calls(operands)
    assert list(calls) == ["route", "pack", "gemm1", "gemm2", "combine"]
    whole, last = layer_call(operands)(), calls["combine"]()
    assert isinstance(whole, torch.Tensor) and isinstance(last, torch.Tensor) and torch.equal(whole, last)


def test_distinct_experts_are_counted() -> None:
    bank = LayerBank(SHAPE, CPU)
    assert experts_hit(bank.operands(1)) == 2
    assert experts_hit(bank.operands(200)) == 5
    rotation = bank.operands(2)
    assert experts_hit(rotation) == sum(
        len(set(operands.routing.expert_ids_TK.flatten().tolist())) for operands in rotation
    ) / len(rotation)


def test_figures_hold_floor_baseline_and_parts() -> None:
    shape = layer_shape("tiny")
    baselines = {"w4": {"tiny": {"3": {"vllm": 1e-9, "grouped_mm": 2.0, "target": 1e9}}}}

    def peer(rotation: Sequence[LayerOperands]) -> list[Call]:
        return [lambda operands=operands: operands.x_TD.sum() for operands in rotation]

    one, three = measure_layer(
        shape, [1, 3], CPU, Ceilings(1e9, 1e15, "test"), baselines, seconds=0.001, peers={"sum": peer}
    )
    # One token: 2 experts of 3 x 64 x 48 in bf16, x and the result; at a gigabyte a second.
    assert one.bytes == 2 * 3 * 64 * 48 * 2 + 2 * 64 * 2
    assert one.floor == pytest.approx(one.bytes / 1e9 * 1e3)
    assert one.flops == 6 * 2 * 64 * 48
    assert one.peers.keys() == {"sum live"} and one.target is None
    assert three.peers.keys() == {"vllm", "grouped_mm", "sum live"} and three.meets_target
    assert {"hit", "route us", "pack us", "gemm1 us", "gemm2 us", "combine us"} == three.extra.keys()
    assert all(value > 0 for value in three.extra.values())


def test_the_layer_in_fp8_is_near_the_same_numbers() -> None:
    """Weights that were bf16 once: the definition on their dequantised values, but for the rows' own fp8."""
    operands = LayerBank(layer_shape("E5-k2-D160-F24-fp8"), CPU, torch.float32).operands(7)[0]
    experts = operands.experts
    assert isinstance(experts, Fp8Experts) and operands.w13_S2FD.dtype == FP8
    plain = replace(
        operands,
        w13_S2FD=dequantize_blocks(experts.w13.values.unflatten(1, (2, -1)), experts.w13.scales).flatten(1, 2),
        w2_SDF=dequantize_blocks(experts.w2.values[:, None], experts.w2.scales).flatten(1, 2),
    )
    out_TD, exact_TD = layer_call(operands)(), plain_layer(plain)
    assert isinstance(out_TD, torch.Tensor)
    assert 1e-4 < float((out_TD - exact_TD).norm() / exact_TD.norm()) < 0.06
    assert list(part_calls(operands)) == ["route", "pack", "quantize", "gemm1", "gemm2", "combine"]
    (figure,) = measure_layer(layer_shape("tiny-fp8"), [1], CPU, Ceilings(1e9, 1e15, "test"), {}, seconds=0.001)
    assert figure.subject == "tiny-fp8" and figure.bytes == 2 * 3 * 64 * 48 + 2 * 64 * 2


def test_sizes_of_ones_own() -> None:
    assert layer_shape("E60-k4-D2880-F1408") == LayerShape("E60-k4-D2880-F1408", 60, 4, 2880, 1408)
    assert layer_shape("mixtral").expert_bytes * 2 == 704_643_072  # what a single token reads
    with pytest.raises(ValueError, match="E60-k4-D2880-F1408"):
        layer_shape("E60")


@pytest.mark.gpu
def test_a_rotation_on_the_gpu_reads_past_the_cache() -> None:
    device = torch.device("cuda")
    bank = LayerBank(LayerShape("small", 16, 2, 512, 256), device)
    rotation = bank.operands(1)
    assert len({operands.w2_SDF.data_ptr() for operands in rotation}) == len(bank.weights) > 1
    (figure,) = measure_layer(bank.shape, [5], device, Ceilings(4e12, 7e14, "test"), {}, seconds=0.01)
    assert figure.value > (figure.floor or 0)
