"""Counters of a run: steps, tokens, cache, preemptions, times, expert load. Numbers only; the engine writes them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from expert_parallel.offload_figures import OffloadFigures
from moe.engine.latency import Latencies
from router.load import balancedness

# Times to first token kept for the median: enough to be steady, small enough for a job of any size.
KEPT_TIMES = 10_000
LISTS = ("ttft_seconds", "latencies", "expert_counts", "offload")


@dataclass
class EngineStats:
    """Since the engine was made, or since `reset`. Times are in seconds, of a monotonic clock."""

    steps: int = 0
    mixed_steps: int = 0  # decode rows and prompt chunks together
    chunks: int = 0  # prompt chunks run
    split_prompts: int = 0  # prompts that took two chunks or more
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    preemptions: int = 0
    replayed_tokens: int = 0  # generated tokens fed again after a preemption
    requests: int = 0  # ended, whatever the ending
    failed_requests: int = 0
    prompt_tokens: int = 0  # of requests that were accepted
    computed_prompt_tokens: int = 0  # prefilled, again after a preemption included
    output_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_peak: int = 0
    num_running: int = 0  # sequences admitted, after the last step
    num_waiting: int = 0  # sequences not admitted yet
    step_seconds: float = 0.0
    ttft_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))  # the newest, exact
    latencies: Latencies = field(default_factory=Latencies)  # of all requests, in buckets
    # Filled by Engine.count_experts, which waits for the device.
    saturated_entries: int = 0  # of keys and values, beyond what a layer's given scale reaches, so cut to it
    expert_counts: list[list[int]] = field(default_factory=list)  # tokens per layer and logical expert
    expert_balance: float | None = None  # mean over max of them, averaged over sparse layers: 1 is even
    rank_balance: float | None = None  # the same of ranks, of the rows that each worked on; None: one rank
    rebalances: int = 0  # looks after which experts moved
    experts_moved: int = 0  # arrivals of an expert in a slot of a layer
    balance_seconds: float = 0.0  # that looking and moving took between steps
    offload: OffloadFigures | None = None  # of experts in host memory; None: all are on the device

    def reset(self) -> None:
        """Begin again, in place; the size of the cache stays."""
        fresh = EngineStats(kv_blocks_total=self.kv_blocks_total)
        self.__dict__.update(fresh.__dict__)

    @classmethod
    def of_ranks(cls, ranks: Sequence[EngineStats]) -> EngineStats:
        """All ranks together: counts are added up; steps, which they take together, and times are the largest."""
        together = ("steps", "step_seconds", "rebalances", "balance_seconds")
        whole = cls(**{name: max(getattr(each, name) for each in ranks) for name in together})
        for name in cls.__dataclass_fields__:
            if isinstance(getattr(whole, name), int) and name not in together:
                setattr(whole, name, sum(getattr(each, name) for each in ranks))
        for each in ranks:
            whole.ttft_seconds.extend(each.ttft_seconds)
            whole.latencies.merge(each.latencies)
        offloads = [each.offload for each in ranks if each.offload is not None]
        whole.offload = OffloadFigures.together(offloads) if offloads else None
        layers = zip(*(each.expert_counts for each in ranks), strict=True)
        whole.expert_counts = [[sum(counts) for counts in zip(*of_layer, strict=True)] for of_layer in layers]
        if len(ranks) > 1 and any(map(sum, whole.expert_counts)):
            rows_NL = [[sum(counts) for counts in each.expert_counts] for each in ranks]
            whole.rank_balance = balancedness(torch.tensor(rows_NL).T)
        return whole

    @property
    def kv_peak_use(self) -> float:
        """Largest share of the cache's blocks in use at once."""
        return self.kv_blocks_peak / self.kv_blocks_total if self.kv_blocks_total else 0.0

    @property
    def ttft_median(self) -> float | None:
        return statistics.median(self.ttft_seconds) if self.ttft_seconds else None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time spent in steps."""
        return self.output_tokens / self.step_seconds if self.step_seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For reports: every counter and every derived number, JSON-ready."""
        names = [name for name in self.__dataclass_fields__ if name not in LISTS]
        counters: dict[str, Any] = {name: getattr(self, name) for name in names}
        derived = ("kv_peak_use", "ttft_median", "tokens_per_second")
        counters["offload"] = None if self.offload is None else self.offload.as_dict()
        return counters | {name: getattr(self, name) for name in derived}
