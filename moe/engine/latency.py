"""Times of all requests in fixed memory: counts in buckets that grow geometrically. Knows seconds, nothing of requests.

A percentile is the geometric middle of the bucket that holds it, so it is at most 2.2 % beside the true one (half a
bucket of 2**(1/16)); count, sum, least and largest are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BUCKETS_PER_OCTAVE = 16
# Shorter and longer times count as these: 62 octaves at most, so at most 1000 buckets whatever comes.
SHORTEST_S, LONGEST_S = 1e-9, 2.0**32


@dataclass
class Histogram:
    """Bucket `i` holds times from 2**(i/16) seconds up to 2**((i+1)/16)."""

    counts: Counter[int] = field(default_factory=Counter)
    total: float = 0.0
    least: float = math.inf
    most: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a time, as often as it occurred."""
        within = min(max(seconds, SHORTEST_S), LONGEST_S)
        self.counts[math.floor(math.log2(within) * BUCKETS_PER_OCTAVE)] += times
        self.total += seconds * times
        self.least, self.most = min(self.least, seconds), max(self.most, seconds)

    def merge(self, other: Histogram) -> None:
        """Take in all that another counted."""
        self.counts.update(other.counts)
        self.total += other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)

    @property
    def count(self) -> int:
        return self.counts.total()

    def percentile(self, percent: float) -> float | None:
        """What `percent` % of the times do not exceed, within 2.2 %; None of none.

        >>> times = Histogram()
        >>> times.add(0.5, times=99); times.add(8.0)
        >>> round(times.percentile(50), 2), round(times.percentile(100), 2)
        (0.51, 8.0)
        """
        wanted = max(math.ceil(self.count * percent / 100), 1)
        for index in sorted(self.counts):
            wanted -= self.counts[index]
            if wanted <= 0:
                return min(max(2 ** ((index + 0.5) / BUCKETS_PER_OCTAVE), self.least), self.most)
        return None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: percentiles, and each bucket as [upper end in seconds, count]."""
        if not self.counts:
            return {"count": 0}
        return {
            "count": self.count,
            "mean": self.total / self.count,
            "p50": self.percentile(50),
            "p95": self.percentile(95),
            "p99": self.percentile(99),
            "max": self.most,
            "sum": self.total,
            "buckets": [[2 ** ((index + 1) / BUCKETS_PER_OCTAVE), self.counts[index]] for index in sorted(self.counts)],
        }


@dataclass
class Latencies:
    """Of requests since they were made, the wait in the queue included, as the host saw them."""

    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)  # of one sequence; preemptions included
    answer: Histogram = field(default_factory=Histogram)  # until the last token, of those that did not fail

    def merge(self, other: Latencies) -> None:
        """Take in another's."""
        self.first_token.merge(other.first_token)
        self.between_tokens.merge(other.between_tokens)
        self.answer.merge(other.answer)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, by name."""
        return {
            "first_token": self.first_token.as_dict(),
            "between_tokens": self.between_tokens.as_dict(),
            "answer": self.answer.as_dict(),
        }
