"""What became of a job, in numbers: for the screen, for a JSON file, and while it runs. Knows counters, no files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moe.engine.stats import EngineStats


@dataclass(frozen=True)
class Progress:
    """Where a running job is; handed out after every step of the engine."""

    lines_read: int
    lines_done: int  # answered or failed
    lines_failed: int
    output_tokens: int
    kv_use: float  # share of the cache's blocks in use
    seconds: float


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
            ttft_median=stats.ttft_median,
            ttft_p95=percentile(list(stats.ttft_seconds), 95),
            kv_peak_use=stats.kv_peak_use,
            kv_blocks_total=stats.kv_blocks_total,
            preemptions=stats.preemptions,
            expert_balance=stats.expert_balance,
            steps=stats.steps,
        )

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file of job.report."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the summary."""
        return [
            ("lines answered / failed", f"{self.answered} / {self.failed}"),
            ("prompt tokens (cached)", f"{self.prompt_tokens:,} ({self.cached_tokens:,})"),
            ("output tokens", f"{self.output_tokens:,}"),
            ("time", f"{self.seconds:.1f} s"),
            ("output tokens/s", f"{self.output_tokens_per_second:,.1f}"),
            ("time to first token, median / p95", f"{_seconds(self.ttft_median)} / {_seconds(self.ttft_p95)}"),
            ("KV cache, largest use", f"{self.kv_peak_use:.1%} of {self.kv_blocks_total:,} blocks"),
            ("preemptions", str(self.preemptions)),
            (
                "expert load, mean / max",
                "-" if self.expert_balance is None else f"{self.expert_balance:.2f} (1 is even)",
            ),
        ]


def percentile(values: list[float], percent: int) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed; None of none.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.0
    """
    if not values:
        return None
    return sorted(values)[max(-(-len(values) * percent // 100) - 1, 0)]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
