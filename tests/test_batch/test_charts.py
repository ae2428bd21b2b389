"""Charts: axes that hold every value, points where they belong, text escaped; a heat map read back pixel by pixel."""

from __future__ import annotations

import base64
import doctest
import re
import struct
import zlib
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from moe.batch import charts, page
from moe.batch.charts import Line, heat_map, histogram_chart, line_chart, nice_ticks, time_ticks


@pytest.mark.parametrize("module", [charts, page])
def test_worked_examples(module: object) -> None:
    result = doctest.testmod(module)  # pyright: ignore[reportArgumentType]
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("highest", [0.0, 1e-9, 0.3, 1, 7, 99.9, 100, 101, 5e12])
def test_ticks_reach_beyond_the_highest_in_few_even_steps(highest: float) -> None:
    ticks = nice_ticks(highest)
    assert ticks[0] == 0 and ticks[-1] >= highest and 2 <= len(ticks) <= 7
    steps = [after - before for before, after in pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps)) and (highest == 0 or ticks[-2] < highest)


@pytest.mark.parametrize("end", [0.001, 1.0, 59.0, 3601.0, 86400.0 * 40])
def test_times_lie_within_the_chart(end: float) -> None:
    assert 2 <= len(time_ticks(end)) <= 7 and time_ticks(end)[-1] <= end * (1 + 1e-9)


def test_points_of_a_curve() -> None:
    svg = line_chart([0.0, 5.0, 10.0], [Line("load", [0.0, 50.0, 100.0])], name='<a "name">')
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == '<a "name">'
    (curve,) = root.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()]
    assert points == [(46.0, 162.0), (228.0, 86.0), (410.0, 10.0)]


def test_a_band_and_a_single_sample() -> None:
    root = ElementTree.fromstring(line_chart([3.0], [Line("use", [0.5], [0.75])], percent=True))
    assert [each.get("cx") for each in root.iter("circle")] == ["410.0"]
    assert [each.text for each in root.iter("text")][:5] == ["0%", "25%", "50%", "75%", "100%"]


def test_bars_hold_every_count_and_marks_stand_where_they_belong() -> None:
    buckets = [(2 ** (place / 16), 1) for place in range(-64, 65)]  # 1/16 s to 16 s
    root = ElementTree.fromstring(histogram_chart(buckets, [("P50", 1.0)], name="times"))
    bars = [each for each in root.iter("rect") if each.get("class") == "bar c1"]
    assert len(bars) == 33  # an eighth of a second's bucket ends where a bar does
    (mark,) = [each for each in root.iter("line") if each.get("class") == "mark"]
    middle = (float(bars[16].attrib["x"]) - 0.5) + float(bars[16].attrib["width"]) + 1
    assert float(mark.attrib["x1"]) == pytest.approx(middle, abs=0.2) and mark[0].text == "P50"


def test_a_heat_map_has_one_pixel_for_each_expert() -> None:
    svg = heat_map([[0, 10, 20, 10], [0, 0, 0, 0], [1, 1, 1, 97]])
    (data,) = re.findall(r"base64,([^\"]+)", svg)
    png = base64.b64decode(data)
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (4, 3)
    length = struct.unpack(">I", png[33:37])[0]
    raw = zlib.decompress(png[41 : 41 + length])
    covers = [[raw[row * 17 + 1 + column * 4 + 3] for column in range(4)] for row in range(3)]
    assert covers == [[0, 85, 170, 85], [0, 0, 0, 0], [3, 3, 3, 255]]
