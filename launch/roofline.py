"""The least that a piece of work can take: bytes that must be read, operations that must be done, and the card's rates.

Knows shapes, dtypes and rates; measures nothing but the rates themselves, and runs no workload.

Bytes of a step of the network: the weights of the distinct experts that its rows hit, every other weight but the
embedding table once, and the cached positions that attention must see. Operations: two for every multiplication of the
linear maps and of attention. A step takes at least max(bytes / bandwidth, operations / rate); steps add up.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from moe.model.config import GQAConfig, MLAConfig, ModelConfig
from moe.model.parameter_shapes import is_expert_parameter, parameter_shapes


@dataclass(frozen=True)
class Work:
    """Bytes read and floating-point operations; both of what cannot be avoided."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Ceilings:
    """What the card can do at best. `source` says how it is known."""

    bytes_per_s: float
    flops_per_s: float
    source: str

    def seconds(self, work: Work) -> float:
        """The floor of one piece of work whose reads and products may overlap completely."""
        return max(work.bytes / self.bytes_per_s, work.flops / self.flops_per_s)


def measure_ceilings(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """A reduction over far more than the caches hold, and a square product of random numbers: best of several each.

    Under two seconds on a GPU. On a CPU small sizes: rates to print, not to judge by.
    """
    gpu = device.type == "cuda"
    num_bytes, side = (4 << 30, 8192) if gpu else (1 << 26, 256)
    big_X = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    read_s = _best_seconds(partial(torch.sum, big_X), device, repeats=8)
    a_MK = torch.empty(side, side, dtype=dtype, device=device).normal_()
    b_NK = torch.empty(side, side, dtype=dtype, device=device).normal_()
    product_s = _best_seconds(partial(torch.nn.functional.linear, a_MK, b_NK), device, repeats=20)
    return Ceilings(num_bytes / read_s, 2 * side**3 / product_s, f"sum of {num_bytes >> 20} MiB, {side}^3 product")


def fp8_ceilings(ceilings: Ceilings, device: torch.device) -> Ceilings:
    """The same bandwidth, and the rate of the vendor library's square fp8 product with one scale for each operand; as
    they are on a CPU, which has none."""
    if device.type != "cuda":
        return ceilings
    side = 8192
    a_MK, b_NK = (torch.empty(side, side, device=device).normal_().to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    scaled_product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    product = partial(scaled_product, a_MK, b_NK.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    seconds = _best_seconds(product, device, repeats=20)
    return replace(ceilings, flops_per_s=2 * side**3 / seconds, source=f"{ceilings.source} in fp8")


def _best_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of the faster half: neither the first, cold calls nor a lucky one."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 4]


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Experts that at least one of the tokens hits, on average, where each draws top_k of them evenly.

    >>> distinct_experts(8, 2, 1)
    2.0
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def expert_layer_work(
    num_tokens: int, num_rows: int, num_hit: float, hidden: int, width: int, weight_bytes: float = 2.0
) -> Work:
    """The routed experts of one layer: weights of the experts hit, x in and the result out (bf16), three products."""
    weights = num_hit * 3 * hidden * width * weight_bytes
    return Work(weights + 2 * num_tokens * hidden * 2, 6.0 * num_rows * hidden * width)


def causal_pairs(start: int, length: int) -> int:
    """(query, key) pairs of a chunk: its query i sees start + i + 1 positions.

    >>> causal_pairs(2, 3)
    12
    """
    return start * length + length * (length + 1) // 2


@dataclass(frozen=True)
class StepWork:
    """What one step of the engine was: lengths of its decoding sequences with the new token, chunks (start, length),
    rows of logits, and the distinct experts hit, summed over layers."""

    decode_lens: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    logits_rows: int
    experts_hit: float

    @property
    def num_tokens(self) -> int:
        return len(self.decode_lens) + sum(length for _, length in self.chunks)


class NetworkCost:
    """Bytes and operations of the steps of one network."""

    def __init__(self, model: ModelConfig, *, weight_bytes: int = 2, cache_bytes: float = 2) -> None:
        self.model = model
        specs = parameter_shapes(model, 1)  # of each layer one expert
        head = math.prod(specs["embed.weight"].shape)
        embedding = 0 if model.tie_embeddings else head
        rest = [(name, spec.shape) for name, spec in specs.items() if not is_expert_parameter(name)]
        self.other_weight_bytes = (sum(math.prod(shape) for _, shape in rest) - embedding) * weight_bytes
        not_per_row = head if model.tie_embeddings else 2 * head
        linear = sum(math.prod(shape) for _, shape in rest if len(shape) == 2) - not_per_row
        expert = 3 * model.hidden_size * model.moe.expert_dim
        bundles = [spec for name, spec in specs.items() if is_expert_parameter(name)]
        sizes = [weight_bytes if spec.fixed_dtype is None else spec.fixed_dtype.itemsize for spec in bundles]
        num_bytes = sum(math.prod(spec.shape) * size for spec, size in zip(bundles, sizes))
        self.expert_bytes = num_bytes / max(1, sum(model.sparse_layers))
        active = model.moe.rule.top_k * expert * sum(model.sparse_layers)
        self.flops_per_row = 2.0 * (linear + active)
        self.flops_per_logits = 2.0 * head
        self.cache_bytes_per_position = cache_width(model) * cache_bytes
        self.windows = Counter(model.sliding_windows)

    def experts_hit(self, num_tokens: int) -> float:
        """Summed over layers, where routing is even."""
        moe = self.model.moe
        return sum(self.model.sparse_layers) * distinct_experts(moe.num_experts, moe.rule.top_k, num_tokens)

    def step(self, step: StepWork) -> Work:
        """The least work of one step."""
        num_bytes = self.other_weight_bytes + step.experts_hit * self.expert_bytes
        flops = step.num_tokens * self.flops_per_row + step.logits_rows * self.flops_per_logits
        decode_flops, prefill_flops = _attention_flops(self.model)
        for window, num_layers in self.windows.items():
            seen = [min(length, window) if window else length for length in step.decode_lens]
            positions = sum(seen)
            pairs = 0
            for start, length in step.chunks:
                first = max(0, start + 1 - window) if window else 0
                positions += start - min(first, start) + length
                pairs += _windowed_pairs(start, length, window)
            num_bytes += num_layers * positions * self.cache_bytes_per_position
            flops += num_layers * (sum(seen) * decode_flops + pairs * prefill_flops)
        return Work(num_bytes, flops)

    def decode_step(self, batch: int, mean_len: float, experts_hit: float | None = None) -> Work:
        """A step of `batch` sequences whose lengths average `mean_len`; even routing unless the hits are given."""
        hit = self.experts_hit(batch) if experts_hit is None else experts_hit
        return self.step(StepWork((round(mean_len),) * batch, (), batch, hit))

    def seconds(self, steps: Iterable[StepWork], ceilings: Ceilings) -> float:
        """The floor of several steps, one after another."""
        return sum(ceilings.seconds(self.step(step)) for step in steps)


def cache_width(model: ModelConfig) -> int:
    """Numbers that one position keeps in one layer."""
    attention = model.attention
    if isinstance(attention, MLAConfig):
        return attention.kv_lora_rank + attention.qk_rope_head_dim
    return 2 * attention.num_kv_heads * attention.head_dim


def _attention_flops(model: ModelConfig) -> tuple[float, float]:
    """Operations of one (query token, key) pair in one layer, all heads: decode, prefill.

    MLA decodes over the latent (its products with kv_b count as a linear map) and prefills in the expanded form.
    """
    attention = model.attention
    if isinstance(attention, GQAConfig):
        both = 4.0 * attention.num_heads * attention.head_dim
        return both, both
    latent = 2 * attention.kv_lora_rank + attention.qk_rope_head_dim
    expanded = attention.qk_head_dim + attention.v_head_dim
    return 2.0 * attention.num_heads * latent, 2.0 * attention.num_heads * expanded


def _windowed_pairs(start: int, length: int, window: int) -> int:
    """`causal_pairs` where a query sees `window` positions at most (0: all)."""
    if not window or start + length <= window:
        return causal_pairs(start, length)
    growing = max(0, window - start)  # queries that still see everything
    return causal_pairs(start, growing) + (length - growing) * window


def mean_work(works: Sequence[Work]) -> Work:
    """The average of several pieces of work."""
    assert works, "the mean of no work"
    total = sum(works, Work(0.0, 0.0))
    return Work(total.bytes / len(works), total.flops / len(works))
