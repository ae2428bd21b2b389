"""How fast a planned engine can be: the floor of a step, from what must be read, computed and brought over the link.

Knows plans, shapes and rates; measures nothing. Nothing here is a promise: kernels, launches and the host come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from expert_parallel.offload_plan import OffloadPlan
from kv_cache.layout import KVLayout
from launch.roofline import Ceilings, NetworkCost, StepWork, cache_width
from moe.model.config import ModelConfig


@dataclass(frozen=True)
class Rates:
    """Of one GPU, and of its link to the host's pinned memory."""

    ceilings: Ceilings
    link_bytes_per_s: float


@dataclass(frozen=True)
class Load:
    """What the steps of a rank hold: sequences at a time, their prompts and answers, tokens of a prompt step."""

    num_seqs: int
    prompt: int
    answer: int
    max_batched_tokens: int
    num_ranks: int = 1


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a rank: on the GPU, on the link; `regime` None: nothing crosses the link."""

    gpu_s: float
    link_s: float
    regime: str | None
    link_bytes: float

    @property
    def seconds(self) -> float:
        """Streamed copies run beside the products; a copy that is asked for when it is missed is waited for."""
        return self.gpu_s + self.link_s if self.regime == "cache" else max(self.gpu_s, self.link_s)

    @property
    def bound(self) -> str:
        """What it waits for most."""
        return "link" if self.link_s > self.gpu_s else "GPU"


@dataclass(frozen=True)
class Speed:
    """`prefill` fills a step with prompts."""

    decode: StepTime
    prefill: StepTime
    load: Load

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks, while they decode."""
        return self.load.num_ranks * self.load.num_seqs / self.decode.seconds

    @property
    def seqs_per_s(self) -> float:
        """Of all ranks, prompts and answers."""
        load = self.load
        prompt_steps = load.num_seqs * load.prompt / load.max_batched_tokens
        seconds = prompt_steps * self.prefill.seconds + load.answer * self.decode.seconds
        return load.num_ranks * load.num_seqs / seconds


def speed(
    model: ModelConfig, layout: KVLayout, item: int, offload: OffloadPlan | None, load: Load, rates: Rates
) -> Speed:
    """`item`: bytes of a weight that is no expert's. Routing is even."""
    cache_bytes = layout.bytes_per_token / model.num_layers / cache_width(model)
    cost = NetworkCost(model, weight_bytes=item, cache_bytes=cache_bytes)

    def time(step: StepWork) -> StepTime:
        gpu_s = rates.ceilings.seconds(cost.step(step))
        if offload is None:
            return StepTime(gpu_s, 0.0, None, 0.0)
        if offload.streams(step.num_tokens * model.moe.rule.top_k):
            link_bytes, regime = float(offload.streamed_bytes), "stream"
        else:
            missed = step.experts_hit * (1 - offload.held_share)
            link_bytes, regime = missed * offload.bundle_bytes, "cache"
        return StepTime(gpu_s, link_bytes / rates.link_bytes_per_s, regime, link_bytes)

    def hit(num_tokens: int) -> float:
        return cost.experts_hit(num_tokens * load.num_ranks) / load.num_ranks

    mean_len = load.prompt + max(load.answer // 2, 1)
    decode = StepWork((mean_len,) * load.num_seqs, (), load.num_seqs, hit(load.num_seqs))
    tokens = load.max_batched_tokens
    chunks = [(0, load.prompt)] * (tokens // load.prompt)
    chunks += [(0, tokens % load.prompt)] if tokens % load.prompt else []
    prefill = StepWork((), tuple(chunks), len(chunks), hit(tokens))
    return Speed(time(decode), time(prefill), load)
