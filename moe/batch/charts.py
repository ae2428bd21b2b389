"""Charts as inline SVG, for the report page: lines over time, histograms, a heat map. Knows numbers and a canvas.

Colours come from the page's style sheet by class (`c1` to `c3`), so that one chart suits a light and a dark page. All
text is escaped.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 28
MAP_WIDTH = 1200
# A load of so many times the mean has the darkest colour.
DARKEST = 3.0


@dataclass(frozen=True)
class Line:
    """One curve. `band`: the upper edge of a shaded area above it. `filled`: shaded down to zero."""

    label: str
    values: Sequence[float]
    band: Sequence[float] | None = None
    filled: bool = False


def line_chart(seconds: Sequence[float], lines: Sequence[Line], *, percent: bool = False, name: str = "") -> Markup:
    """Curves over seconds, from zero up. `percent`: values are shares of 1, and the axis ends there."""
    end = max(seconds, default=0.0) or 1.0
    tops = [value for line in lines for value in (*line.values, *(line.band or ()))]
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if percent else nice_ticks(max(tops, default=0.0))
    show = (lambda value: f"{value:.0%}") if percent else short_number
    parts = [_frame([(value / ticks[-1], show(value)) for value in ticks])]
    parts += [_x_label(value / end, short_time(value)) for value in time_ticks(end)]
    for place, line in enumerate(lines, start=1):
        points = [(_x(at / end), _y(value / ticks[-1])) for at, value in zip(seconds, line.values, strict=True)]
        if line.band is not None:
            upper = [(_x(at / end), _y(value / ticks[-1])) for at, value in zip(seconds, line.band, strict=True)]
            parts.append(f'<polygon class="area c{place}" points="{_points([*points, *reversed(upper)])}"/>')
        elif line.filled and points:
            foot = [(points[-1][0], _y(0)), (points[0][0], _y(0))]
            parts.append(f'<polygon class="area c{place}" points="{_points([*points, *foot])}"/>')
        if len(points) == 1:
            parts.append(f'<circle class="dot c{place}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>')
        parts.append(f'<polyline class="line c{place}" points="{_points(points)}"/>')
    return _svg(parts, name)


def histogram_chart(
    buckets: Sequence[tuple[float, float]], marks: Sequence[tuple[str, float]], *, name: str = ""
) -> Markup:
    """Counts over times on a logarithmic axis. `buckets`: upper end in seconds and count, as `Histogram.as_dict` gives
    them; drawn four to an octave. `marks`: dashed lines with a label, e.g. percentiles."""
    drawn: dict[int, float] = {}
    for upper, count in buckets:
        place = math.ceil(math.log2(upper) * 4 - 1e-6) - 1
        drawn[place] = drawn.get(place, 0) + count
    first, last = min(drawn), max(drawn) + 1
    while last - first < 12:  # a lone bar would fill the chart
        first, last = first - 1, last + 1

    def across(seconds: float) -> float:
        return (math.log2(seconds) * 4 - first) / (last - first)

    ticks = nice_ticks(max(drawn.values()))
    parts = [_frame([(value / ticks[-1], short_number(value)) for value in ticks])]
    for place, count in sorted(drawn.items()):
        left, right = _x((place - first) / (last - first)), _x((place + 1 - first) / (last - first))
        top = _y(count / ticks[-1])
        size = f'x="{left + 0.5:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" height="{_y(0) - top:.1f}"'
        parts.append(f'<rect class="bar c1" {size}/>')
    steps = [value for value in _log_ticks(2 ** (first / 4), 2 ** (last / 4)) if 0.02 <= across(value) <= 0.98]
    parts += [_x_label(across(value), short_time(value)) for value in steps]
    for label, seconds in marks:
        at = _x(min(max(across(seconds), 0), 1))
        size = f'x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{_y(0)}"'
        parts.append(f'<line class="mark" {size}><title>{escape(label)}</title></line>')
    return _svg(parts, name)


def heat_map(loads: Sequence[Sequence[float]], *, name: str = "") -> Markup:
    """Rows of layers, columns of experts; each cell by its share of the row's mean. A picture of one pixel a cell, so
    that a big model's does not weigh more than the page."""
    rows = [[value / (sum(row) / len(row)) if sum(row) else 0.0 for value in row] for row in loads]
    num_experts = len(rows[0])
    height = min(max(len(rows) * 9, 90), 420)
    pixels = [[round(255 * min(value / DARKEST, 1.0)) for value in row] for row in rows]
    uri = "data:image/png;base64," + base64.b64encode(_png(pixels)).decode()
    wide = MAP_WIDTH - LEFT - RIGHT
    parts = [
        f'<rect class="paper" x="{LEFT}" y="{TOP}" width="{wide}" height="{height}"/>',
        f'<image x="{LEFT}" y="{TOP}" width="{wide}" height="{height}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{uri}"/>',
    ]
    for index in _few(len(rows), 8):
        middle = TOP + (index + 0.5) / len(rows) * height
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{middle + 4:.1f}" text-anchor="end">{index}</text>')
    for index in _few(num_experts, 16):
        middle = LEFT + (index + 0.5) / num_experts * wide
        parts.append(f'<text class="tick" x="{middle:.1f}" y="{TOP + height + 16}" text-anchor="middle">{index}</text>')
    return _svg(parts, name, MAP_WIDTH, height + TOP + BOTTOM)


def nice_ticks(highest: float) -> list[float]:
    """From zero to at least `highest` in three to six round steps.

    >>> nice_ticks(870)
    [0, 200, 400, 600, 800, 1000]
    """
    if highest <= 0:
        return [0, 1]
    size = 10.0 ** math.floor(math.log10(highest / 5))
    step = next(factor * size for factor in (1, 2, 5, 10, 20) if factor * size * 5 >= highest * (1 - 1e-9))
    ticks = [round(step * count, 12) for count in range(math.ceil(highest / step - 1e-9) + 1)]
    return [int(value) if value == int(value) else value for value in ticks]


def time_ticks(end: float) -> list[float]:
    """Up to six round times from zero to `end`."""
    units = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((float(unit) for unit in units if end / unit <= 6), math.ceil(end / 86400 / 6) * 86400.0)
    if end <= 3:
        step = nice_ticks(end)[1]
    return [round(step * count, 9) for count in range(int(end / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """A number for an axis.

    >>> [short_number(value) for value in (0, 0.25, 12, 1500, 2_000_000)]
    ['0', '0.25', '12', '1.5k', '2M']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.3g}"


def short_time(seconds: float) -> str:
    """A time for an axis.

    >>> [short_time(value) for value in (0, 0.0005, 0.02, 2.5, 60, 90, 5400)]
    ['0', '0.5ms', '20ms', '2.5s', '1min', '1min30', '1h30']
    """
    if seconds == 0:
        return "0"
    if seconds < 1:
        return f"{seconds * 1000:.3g}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    big, rest = divmod(round(seconds), 60) if seconds < 3600 else divmod(round(seconds / 60), 60)
    return f"{big}{'min' if seconds < 3600 else 'h'}" + (f"{rest:02d}" if rest else "")


def _log_ticks(low: float, high: float) -> Iterator[float]:
    """1, 2, 5 and 10 times powers of ten in between; powers alone over many of them."""
    steps = (1,) if high / low > 1e4 else (1, 3) if high / low > 300 else (1, 2, 5)
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (step * 10.0**power for step in steps if low <= step * 10.0**power <= high)


def _few(count: int, most: int) -> range:
    """At most about `most` of the numbers from 0, evenly."""
    return range(0, count, max(-(-count // most), 1))


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _frame(ticks: Sequence[tuple[float, str]]) -> str:
    """Horizontal lines with their labels; the lowest is the axis."""
    parts = []
    for share, label in ticks:
        y = _y(share)
        parts.append(
            f'<line class="{"grid" if share else "axis"}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    return "".join(parts)


def _x_label(share: float, label: str) -> str:
    return f'<text class="tick" x="{_x(share):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(label)}</text>'


def _svg(parts: Sequence[str], name: str, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">'
    return Markup(f"{head}{''.join(parts)}</svg>")


def _png(pixels: Sequence[Sequence[int]]) -> bytes:
    """A PNG of one colour; each value, from 0 to 255, is how much of it covers the paper."""
    colour = bytes((217, 72, 15))
    raw = b"".join(b"\0" + b"".join(colour + bytes((cover,)) for cover in row) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
