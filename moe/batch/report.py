"""What became of a job, in numbers: for the screen, for its files, and while it runs. Knows counters, no files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from expert_parallel.offload_figures import OffloadFigures
from moe.engine.stats import EngineStats

LATENCIES = {
    "first_token": "time to first token, p50 / p95 / p99",
    "between_tokens": "between tokens, p50 / p95 / p99",
    "answer": "whole answer, p50 / p95 / p99",
}


@dataclass(frozen=True)
class Progress:
    """Where a running job is; handed out after every step of the engine."""

    lines_read: int
    lines_done: int  # answered or failed
    lines_failed: int
    output_tokens: int
    kv_use: float  # share of the cache's blocks in use
    seconds: float
    stats: EngineStats | None = None  # the engine's own, which goes on counting; None: nothing more is known


@dataclass(frozen=True)
class JobReport:
    """A finished job. Times in seconds; `seconds`, which the rate divides by, ends with the last record written."""

    model: str
    device: str
    lines: int
    answered: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    ttft_median: float | None
    ttft_p95: float | None
    kv_peak_use: float
    kv_blocks_total: int
    preemptions: int
    expert_balance: float | None
    steps: int
    computed_prompt_tokens: int = 0  # prefilled; again after a preemption included
    latencies: dict[str, Any] = field(default_factory=dict)  # as Latencies.as_dict gives them
    expert_counts: list[list[int]] = field(default_factory=list)  # tokens per layer and logical expert
    rank_balance: float | None = None  # mean over max of the ranks' rows; None: one rank
    experts_moved: int = 0
    rebalances: int = 0
    balance_seconds: float = 0.0
    offload: OffloadFigures | None = None  # None: all experts are on the device

    @classmethod
    def of(
        cls, stats: EngineStats, *, model: str, device: str, answered: int, failed: int, seconds: float
    ) -> JobReport:
        """Read the engine's counters at the end of a job."""
        return cls(
            model=model,
            device=device,
            lines=answered + failed,
            answered=answered,
            failed=failed,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            output_tokens=stats.output_tokens,
            seconds=seconds,
            output_tokens_per_second=stats.output_tokens / seconds if seconds > 0 else 0.0,
            ttft_median=stats.latencies.first_token.percentile(50),
            ttft_p95=stats.latencies.first_token.percentile(95),
            kv_peak_use=stats.kv_peak_use,
            kv_blocks_total=stats.kv_blocks_total,
            preemptions=stats.preemptions,
            expert_balance=stats.expert_balance,
            steps=stats.steps,
            computed_prompt_tokens=stats.computed_prompt_tokens,
            latencies=stats.latencies.as_dict(),
            expert_counts=stats.expert_counts,
            rank_balance=stats.rank_balance,
            experts_moved=stats.experts_moved,
            rebalances=stats.rebalances,
            balance_seconds=stats.balance_seconds,
            offload=stats.offload,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, for metrics.json."""
        return asdict(self) | {"offload": None if self.offload is None else self.offload.as_dict()}

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the summary."""
        return [
            ("lines answered / failed", f"{self.answered} / {self.failed}"),
            ("prompt tokens (cached)", f"{self.prompt_tokens:,} ({self.cached_tokens:,})"),
            ("output tokens", f"{self.output_tokens:,}"),
            ("time", f"{self.seconds:.1f} s"),
            ("output tokens/s", f"{self.output_tokens_per_second:,.1f}"),
            *((label, self._percentiles(name)) for name, label in LATENCIES.items()),
            ("KV cache, largest use", f"{self.kv_peak_use:.1%} of {self.kv_blocks_total:,} blocks"),
            ("preemptions", str(self.preemptions)),
            (
                "expert load, mean / max",
                "-" if self.expert_balance is None else f"{self.expert_balance:.2f} (1 is even)",
            ),
            *self._rank_rows(),
            *([] if self.offload is None else self.offload.rows()),
        ]

    def _rank_rows(self) -> list[tuple[str, str]]:
        """Of several ranks alone."""
        if self.rank_balance is None:
            return []
        moved = f"{self.experts_moved:,} (rebalanced {self.rebalances:,} times, {self.balance_seconds:.1f} s)"
        return [("rank load, mean / max", f"{self.rank_balance:.2f}"), ("experts moved", moved)]

    def _percentiles(self, name: str) -> str:
        times = self.latencies.get(name, {})
        return " / ".join(show_seconds(times.get(percent)) for percent in ("p50", "p95", "p99"))


def percentile(values: list[float], percent: int) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed; None of none.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.0
    """
    if not values:
        return None
    return sorted(values)[max(-(-len(values) * percent // 100) - 1, 0)]


def show_seconds(value: float | None) -> str:
    """A short time for people.

    >>> show_seconds(0.0123), show_seconds(2.5), show_seconds(None)
    ('12 ms', '2.50 s', '-')
    """
    if value is None:
        return "-"
    return f"{value * 1000:.{0 if value >= 0.01 else 2}f} ms" if value < 1 else f"{value:.2f} s"
