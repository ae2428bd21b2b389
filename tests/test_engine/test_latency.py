"""Times in buckets: percentiles within the stated error, memory bounded, merging exact."""

from __future__ import annotations

import doctest
import random

import pytest

from moe.engine import latency
from moe.engine.latency import Histogram, Latencies
from moe.engine.stats import EngineStats

ERROR = 2 ** (1 / 32) - 1


def of(*times: float) -> Histogram:
    histogram = Histogram()
    for time in times:
        histogram.add(time)
    return histogram


def test_worked_examples() -> None:
    result = doctest.testmod(latency)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_percentiles_are_within_the_stated_error(spread: float) -> None:
    draw = random.Random(7)
    times = [draw.lognormvariate(-2, spread) for _ in range(4000)]
    histogram = of(*times)
    times.sort()
    for percent in (1, 50, 95, 99, 99.9):
        true = times[max(-int(-len(times) * percent // 100) - 1, 0)]
        found = histogram.percentile(percent)
        assert found is not None and abs(found / true - 1) <= ERROR + 1e-9, percent
    shown = histogram.as_dict()
    assert shown["count"] == 4000 and shown["max"] == times[-1] and shown["mean"] == pytest.approx(sum(times) / 4000)


def test_every_time_lies_below_its_buckets_end_and_above_the_one_before() -> None:
    for time in (1e-9, 0.25, 0.3, 1.0, 1.5, 7200.0):
        ((end, count),) = of(time).as_dict()["buckets"]
        assert count == 1 and time < end <= time * 2 ** (1 / 16) * (1 + 1e-9)


def test_memory_is_bounded_whatever_comes() -> None:
    histogram = Histogram()
    for power in range(-400, 400):
        histogram.add(10.0**power if abs(power) < 300 else 0.0)
    assert len(histogram.counts) <= 1000 and histogram.count == 800 and histogram.percentile(50) is not None


def test_none_of_none() -> None:
    assert Histogram().percentile(50) is None and Histogram().as_dict() == {"count": 0}


def test_merged_is_as_if_counted_together() -> None:
    first, second = Latencies(), Latencies()
    first.first_token.add(0.5, times=3)
    second.first_token.add(0.5)
    second.answer.add(9.0)
    stats = EngineStats.of_ranks([EngineStats(latencies=first), EngineStats(latencies=second)])
    assert stats.latencies.first_token == of(0.5, 0.5, 0.5, 0.5) and stats.latencies.answer == of(9.0)
    assert stats.latencies.between_tokens.as_dict() == {"count": 0}
