"""w4: the routed experts of one layer, from chosen experts to the weighted sum, by CUDA graph replay.

Knows shapes and the layer's parts; knows nothing of networks. Routing is random and even, weights normalised. A shape
whose name ends in -fp8 has its experts in fp8, and a floor by the card's fp8 products. Operands rotate (copies of small
weights, several routings), so that no weight is read from the L2 cache. `parts`: each kernel alone as well, the
router's top-k included, which the layer's own time leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from expert_parallel.dispatcher import ExpertInput, LocalDispatcher
from kernels.checks import cdiv
from kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from kernels.grouped_gemm_fp8 import grouped_gemm_fp8, grouped_gemm_swiglu_quantized
from kernels.quantize import FP8, GROUP, Quantized, QuantizedBlocks, quantize_blocks, quantize_rows
from kernels.routing import Routing, RoutingRule, route
from launch.figure import Figure, baseline
from launch.replay import L2_BYTES, Call, rotation_length, time_variants
from launch.roofline import Ceilings, expert_layer_work, fp8_ceilings
from moe.model.experts import Experts, Fp8Experts
from router.synthetic import skewed_routing

TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
MAX_WEIGHT_BYTES = 16 << 30  # of all copies together


@dataclass(frozen=True)
class LayerShape:
    """The routed experts of one layer."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    width: int
    fp8: bool = False

    @property
    def expert_bytes(self) -> int:
        """Of the values: bf16, or fp8 (whose scales are a four-thousandth more)."""
        return 3 * self.hidden * self.width * (1 if self.fp8 else 2)


SHAPES = {
    shape.name: shape
    for shape in (
        LayerShape("mixtral", 8, 2, 4096, 14336),
        LayerShape("qwen3", 128, 8, 2048, 768),
        LayerShape("dsv3-ep8", 32, 8, 7168, 2048),  # a rank of eight with T tokens each
        LayerShape("tiny", 6, 2, 64, 48),  # for a CPU
    )
}


def layer_shape(text: str) -> LayerShape:
    """A name of SHAPES, or sizes of one's own.

    >>> layer_shape("E60-k4-D2880-F1408").num_experts, layer_shape("qwen3-fp8").fp8
    (60, True)
    """
    if text in SHAPES:
        return SHAPES[text]
    if text.endswith("-fp8"):
        return replace(layer_shape(text.removesuffix("-fp8")), name=text, fp8=True)
    sizes = re.fullmatch(r"E(\d+)-k(\d+)-D(\d+)-F(\d+)", text)
    if sizes is None:
        raise ValueError(
            f"shapes={text} is unknown; use {', '.join(SHAPES)}, or sizes such as E60-k4-D2880-F1408, with -fp8 behind "
            "for experts in fp8."
        )
    num_experts, top_k, hidden, width = map(int, sizes.groups())
    if not 1 <= top_k <= num_experts or not hidden or not width:
        raise ValueError(f"shapes={text}: k must lie in 1 to E, and no size may be 0.")
    return LayerShape(text, num_experts, top_k, hidden, width)


@dataclass(frozen=True)
class LayerOperands:
    """What one call of the layer reads."""

    x_TD: Tensor
    logits_TE: Tensor
    routing: Routing
    w13_S2FD: Tensor  # fp8 values where the experts are in fp8
    w2_SDF: Tensor
    experts: Experts | Fp8Experts
    dispatcher: LocalDispatcher


# From the operands of a rotation to its calls, in the same order; for comparisons in the same run.
Peer = Callable[[Sequence[LayerOperands]], Sequence[Call]]


def layer_call(operands: LayerOperands) -> Call:
    """The product's own way from chosen experts to the sum."""

    def call() -> Tensor:
        inputs = operands.dispatcher.dispatch(operands.x_TD, *operands.routing)
        return operands.dispatcher.combine(operands.experts(inputs), inputs.handle)

    return call


def part_calls(operands: LayerOperands) -> dict[str, Call]:
    """Each kernel alone, on what the one before it makes of these operands."""
    dispatcher = operands.dispatcher
    inputs: ExpertInput = dispatcher.dispatch(operands.x_TD, *operands.routing)
    y_RD = operands.experts(inputs)
    rule = RoutingRule(top_k=operands.routing.expert_ids_TK.shape[1])
    experts = operands.experts
    products = _fp8_products(experts, inputs) if isinstance(experts, Fp8Experts) else _products(operands, inputs)
    return {
        "route": lambda: route(operands.logits_TE, None, rule),
        "pack": lambda: dispatcher.dispatch(operands.x_TD, *operands.routing),
        **products,
        "combine": lambda: dispatcher.combine(y_RD, inputs.handle),
    }


def _products(operands: LayerOperands, inputs: ExpertInput) -> dict[str, Call]:
    offsets_S1, rows = inputs.offsets_S1, inputs.num_rows

    def gemm1() -> Tensor:
        return grouped_gemm_swiglu(
            inputs.rows_XD, operands.w13_S2FD, offsets_S1, row_index_R=inputs.row_index_R, num_rows=rows
        )

    h_RF = gemm1()
    return {"gemm1": gemm1, "gemm2": lambda: grouped_gemm(h_RF, operands.w2_SDF, offsets_S1, num_rows=rows)}


def _fp8_products(experts: Fp8Experts, inputs: ExpertInput) -> dict[str, Call]:
    """Quantising rows is its own part; quantising what the first product makes of them is the product's."""
    offsets_S1, rows, dtype = inputs.offsets_S1, inputs.num_rows, inputs.rows_XD.dtype
    x = quantize_rows(inputs.rows_XD)

    def gemm1() -> Quantized:
        return grouped_gemm_swiglu_quantized(
            x, experts.w13, offsets_S1, row_index_R=inputs.row_index_R, num_rows=rows, dtype=dtype
        )

    h = gemm1()
    return {
        "quantize": lambda: quantize_rows(inputs.rows_XD),
        "gemm1": gemm1,
        "gemm2": lambda: grouped_gemm_fp8(h, experts.w2, offsets_S1, num_rows=rows, out_dtype=dtype),
    }


class LayerBank:
    """Copies of one layer's weights (normal, std 0.02), and rotations of operands over them."""

    def __init__(self, shape: LayerShape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        one_copy = shape.num_experts * shape.expert_bytes
        wanted = -(-L2_BYTES // (shape.top_k * shape.expert_bytes))  # a single token must not find its experts again
        num_copies = max(1, min(wanted, MAX_WEIGHT_BYTES // one_copy, 8)) if device.type == "cuda" else 1
        E, D, F = shape.num_experts, shape.hidden, shape.width
        self.weights = [
            self._fp8_experts(E, D, F)
            if shape.fp8
            else Experts(self._normal(E, 2 * F, D, std=0.02), self._normal(E, D, F, std=0.02))
            for _ in range(num_copies)
        ]
        self.dispatcher = LocalDispatcher(torch.arange(E, dtype=torch.int32, device=device), E)

    def operands(self, num_tokens: int) -> list[LayerOperands]:
        """A rotation for so many tokens."""
        shape = self.shape
        touched = min(shape.num_experts, num_tokens * shape.top_k) * shape.expert_bytes
        few = num_tokens <= 256
        length = rotation_length(touched, least=8 if few else 4, most=16) if self.device.type == "cuda" else 2
        rotation = []
        for index in range(length):
            experts = self.weights[index % len(self.weights)]
            fp8 = isinstance(experts, Fp8Experts)
            seed = 1000 * num_tokens + index
            rotation.append(
                LayerOperands(
                    self._normal(num_tokens, shape.hidden),
                    self._normal(num_tokens, shape.num_experts).float(),
                    skewed_routing(num_tokens, shape.num_experts, shape.top_k, seed=seed, device=self.device),
                    experts.w13.values if fp8 else experts.w13_S2FD,
                    experts.w2.values if fp8 else experts.w2_SDF,
                    experts,
                    self.dispatcher,
                )
            )
        return rotation

    def _fp8_experts(self, E: int, D: int, F: int) -> Fp8Experts:
        """Normal weights quantised, one expert at a time."""
        bundles = []
        for parts, rows, width in ((2, F, D), (1, D, F)):
            values = torch.empty(E, parts * rows, width, dtype=FP8, device=self.device)
            scales = torch.empty(E, parts, cdiv(rows, GROUP), cdiv(width, GROUP), device=self.device)
            for expert in range(E):
                blocks = quantize_blocks(self._normal(parts, rows, width, std=0.02))
                values[expert].copy_(blocks.values.flatten(0, 1))
                scales[expert].copy_(blocks.scales)
            bundles.append(QuantizedBlocks(values, scales))
        return Fp8Experts(*bundles)

    def _normal(self, *sizes: int, std: float = 1.0) -> Tensor:
        return torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(0.0, std)


def experts_hit(rotation: Sequence[LayerOperands]) -> float:
    """Distinct experts of one call, averaged over the rotation."""
    return sum(len(operands.routing.expert_ids_TK.unique()) for operands in rotation) / len(rotation)


def measure_layer(
    shape: LayerShape,
    tokens: Sequence[int],
    device: torch.device,
    ceilings: Ceilings,
    baselines: dict[str, Any],
    *,
    parts: bool = True,
    seconds: float = 0.2,
    peers: Mapping[str, Peer] | None = None,
) -> list[Figure]:
    """A figure for each number of tokens; `peers` run beside it, replay by replay."""
    bank = LayerBank(shape, device)
    if shape.fp8:
        ceilings = fp8_ceilings(ceilings, device)
    figures = []
    for num_tokens in tokens:
        rotation = bank.operands(num_tokens)
        variants: dict[str, Sequence[Call]] = {"ours": [layer_call(operands) for operands in rotation]}
        variants |= {name: peer(rotation) for name, peer in (peers or {}).items()}
        timings = time_variants(variants, device, seconds=seconds)
        ours = timings.pop("ours")
        hit = experts_hit(rotation)
        work = expert_layer_work(
            num_tokens, num_tokens * shape.top_k, hit, shape.hidden, shape.width, weight_bytes=1.0 if shape.fp8 else 2.0
        )
        recorded, target = baseline(baselines, "w4", shape.name, str(num_tokens))
        live = {f"{name} live": timing.median * 1e3 for name, timing in timings.items()}
        extra = {"hit": hit} | (_part_times(rotation, device, seconds) if parts else {})
        figures.append(
            Figure(
                "w4",
                shape.name,
                f"T={num_tokens}",
                ours.median * 1e3,
                "ms",
                floor=ceilings.seconds(work) * 1e3,
                seconds=ours.median,
                bytes=work.bytes,
                flops=work.flops,
                target=target,
                peers=recorded | live,
                extra=extra,
                samples=tuple(sample * 1e3 for sample in ours.samples),
            )
        )
    return figures


def _part_times(rotation: Sequence[LayerOperands], device: torch.device, seconds: float) -> dict[str, float]:
    """Microseconds of each kernel alone."""
    with torch.inference_mode():
        calls = [part_calls(operands) for operands in rotation]
    variants = {name: [each[name] for each in calls] for name in calls[0]}
    return {
        f"{name} us": timing.median * 1e6 for name, timing in time_variants(variants, device, seconds=seconds).items()
    }
