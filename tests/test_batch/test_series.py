"""Numbers over time: bounded whatever the length, counters exact at every kept time, means and peaks kept."""

from __future__ import annotations

import pytest

from moe.batch.series import Series


@pytest.mark.parametrize(("samples", "step"), [(5, 0.1), (1000, 0.01), (20_000, 0.07), (700, 30.0)])
def test_any_length_fits_and_nothing_is_lost(samples: int, step: float) -> None:
    series = Series(["count"], ["load"], max_buckets=50, bucket_s=0.25)
    for number in range(samples):
        series.add(number * step, (number,), (1.0 if number == samples // 2 else 0.5,))
    columns = series.as_dict()
    seconds, counts = columns["seconds"], columns["count"]
    assert len(seconds) <= 50 and len({len(column) for name, column in columns.items() if name != "bucket_s"}) == 1
    assert counts[-1] == samples - 1 and seconds[-1] == (samples - 1) * step
    assert all(count == round(second / step) for second, count in zip(seconds, counts)), "a counter beside its time"
    assert max(columns["load_max"]) == 1.0
    assert all(0.5 <= mean <= 1.0 for mean in columns["load_mean"])


def test_few_samples_stay_apart() -> None:
    series = Series(["count"], [], max_buckets=50, bucket_s=0.25)
    for second in (0.0, 1.0, 2.0):
        series.add(second, (int(second),), ())
    assert series.as_dict() == {"bucket_s": 0.25, "seconds": [0.0, 1.0, 2.0], "count": [0, 1, 2]}


def test_a_mean_weighs_every_sample() -> None:
    series = Series([], ["load"], max_buckets=1, bucket_s=1.0)
    for second, load in ((0.1, 1.0), (0.2, 1.0), (0.3, 1.0), (1.5, 5.0)):
        series.add(second, (), (load,))
    columns = series.as_dict()
    assert columns["bucket_s"] == 2.0 and columns["load_mean"] == [2.0] and columns["load_max"] == [5.0]
