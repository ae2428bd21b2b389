"""A roofline picture: `python -m launch.roofline_picture out.png result.json ...`.

One point for each figure that has bytes, operations and a time: operations per byte to the right, TFLOP/s reached
upwards, under the card's two ceilings. Knows result files; needs matplotlib, which is no dependency of the project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.figure import Figure
from launch.roofline import Ceilings
from launch.words import helped, refuse

try:
    import matplotlib  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure as Canvas  # pyright: ignore[reportMissingImports]
except ImportError:
    matplotlib = None


@dataclass(frozen=True)
class Point:
    """Where a figure lies: operations per byte, TFLOP/s."""

    series: str
    label: str
    intensity: float
    tflop_s: float


def point(series: str, label: str, num_bytes: float | None, flops: float | None, seconds: float | None) -> Point | None:
    """None where a number is missing."""
    if not num_bytes or not flops or not seconds:
        return None
    return Point(series, label, flops / num_bytes, flops / seconds / 1e12)


def check_matplotlib() -> None:
    """ValueError where there is none."""
    if matplotlib is None:
        raise ValueError("a picture needs matplotlib, which is not installed; install it, or leave the picture out.")


def points_of(figures: Iterable[Figure]) -> list[Point]:
    """The figures that have a place in the picture."""
    found = [
        point(f"{each.workload} {each.subject}", each.name, each.bytes, each.flops, each.seconds) for each in figures
    ]
    return [each for each in found if each is not None]


def points_of_record(record: dict[str, Any]) -> list[Point]:
    """The same from a result file."""
    found = [
        point(
            f"{each['workload']} {each['subject']}",
            each["name"],
            each.get("bytes"),
            each.get("flops"),
            each.get("seconds"),
        )
        for each in record["figures"]
    ]
    return [each for each in found if each is not None]


def draw(figures: Iterable[Figure], ceilings: Ceilings, path: Path) -> None:
    """Draw what was just measured."""
    draw_points(points_of(figures), ceilings.bytes_per_s / 1e12, ceilings.flops_per_s / 1e12, path)


def draw_points(points: Sequence[Point], tb_s: float, tflop_s: float, path: Path) -> None:
    """The picture; its ending chooses the format."""
    check_matplotlib()
    if not points:
        raise ValueError("no figure has bytes, operations and a time: there is nothing to draw.")
    canvas = Canvas(figsize=(11, 7), dpi=120, layout="constrained")
    axes = canvas.subplots()
    low, high = min(each.intensity for each in points) / 2, max(each.intensity for each in points) * 2
    ridge = tflop_s / tb_s
    corners = sorted({min(low, ridge), ridge, max(high, ridge)})
    axes.plot(corners, [min(tflop_s, x * tb_s) for x in corners], color="black", linewidth=1.5)
    axes.annotate(
        f"{tb_s:.2f} TB/s, {tflop_s:.0f} TFLOP/s", (ridge, tflop_s), textcoords="offset points", xytext=(-60, 6)
    )
    markers = "osD^v<>PX*"
    for index, series in enumerate(dict.fromkeys(each.series for each in points)):
        own = [each for each in points if each.series == series]
        marker = markers[index % len(markers)]
        axes.plot([each.intensity for each in own], [each.tflop_s for each in own], marker, label=series, markersize=6)
        for each in own:
            axes.annotate(
                each.label, (each.intensity, each.tflop_s), textcoords="offset points", xytext=(5, -9), fontsize=6
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte that must be read")
    axes.set_ylabel("TFLOP/s")
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend(fontsize=8)
    canvas.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw result files into one picture. 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__):
        return 0
    try:
        if len(words) < 2:
            raise ValueError("give a picture and at least one result file: out.png result.json ...")
        records = [json.loads(Path(word).read_text(encoding="utf-8")) for word in words[1:]]
        rates = records[0]["ceilings"]
        points = [each for record in records for each in points_of_record(record)]
        draw_points(points, rates["tb_s"], rates["tflop_s"], Path(words[0]))
    except (ValueError, OSError, KeyError) as error:
        return refuse(error)
    print(f"picture: {words[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
