"""Numbers over the time of a job, in fixed memory however long it runs. Knows seconds and numbers, not what they mean.

Time is cut into buckets; when they grow too many, neighbours are merged and buckets are twice as long from then on.
Of a counter a bucket keeps the last value, of a gauge the mean and the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_BUCKETS = 240
FIRST_BUCKET_S = 0.25


@dataclass
class _Bucket:
    index: int  # of the time that it covers, in lengths of a bucket
    seconds: float  # of the last sample
    counters: Sequence[int]
    sums: list[float]
    highest: list[float]
    samples: int


class Series:
    """Samples of named counters and gauges. Times must not go back."""

    def __init__(
        self,
        counters: Sequence[str],
        gauges: Sequence[str],
        *,
        max_buckets: int = MAX_BUCKETS,
        bucket_s: float = FIRST_BUCKET_S,
    ) -> None:
        self._counters, self._gauges = tuple(counters), tuple(gauges)
        self._max_buckets = max_buckets
        self.bucket_s = bucket_s
        self._buckets: list[_Bucket] = []

    def add(self, seconds: float, counters: Sequence[int], gauges: Sequence[float]) -> None:
        """One sample, values in the order of the names."""
        index = int(seconds / self.bucket_s)
        if self._buckets and (last := self._buckets[-1]).index == index:
            last.seconds, last.counters = seconds, counters
            last.samples += 1
            for place, value in enumerate(gauges):
                last.sums[place] += value
                if value > last.highest[place]:
                    last.highest[place] = value
            return
        self._buckets.append(_Bucket(index, seconds, counters, list(gauges), list(gauges), 1))
        while len(self._buckets) > self._max_buckets:
            self._double()

    def _double(self) -> None:
        self.bucket_s *= 2
        merged: list[_Bucket] = []
        for bucket in self._buckets:
            bucket.index //= 2
            if not merged or merged[-1].index != bucket.index:
                merged.append(bucket)
                continue
            first = merged[-1]
            first.seconds, first.counters = bucket.seconds, bucket.counters
            first.sums = [a + b for a, b in zip(first.sums, bucket.sums, strict=True)]
            first.highest = [max(a, b) for a, b in zip(first.highest, bucket.highest, strict=True)]
            first.samples += bucket.samples
        self._buckets = merged

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, a list for each name; gauges as NAME_mean and NAME_max."""
        columns: dict[str, Any] = {"bucket_s": self.bucket_s, "seconds": [each.seconds for each in self._buckets]}
        for place, name in enumerate(self._counters):
            columns[name] = [each.counters[place] for each in self._buckets]
        for place, name in enumerate(self._gauges):
            columns[f"{name}_mean"] = [each.sums[place] / each.samples for each in self._buckets]
            columns[f"{name}_max"] = [each.highest[place] for each in self._buckets]
        return columns
