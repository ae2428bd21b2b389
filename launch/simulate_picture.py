"""Balancedness and the busiest link over the number of ranks, one line for each way to place experts.

Knows names and numbers; needs matplotlib, which is no dependency of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.canvas import canvas


@dataclass(frozen=True)
class PlacedPoint:
    """One setting: `link_mb` is what the busiest rank receives in one dispatch of a layer, from other nodes if any."""

    placement: str
    num_ranks: int
    balancedness: float
    link_mb: float


def draw_points(points: Sequence[PlacedPoint], path: Path) -> None:
    """The picture; its ending chooses the format."""
    picture = canvas(12, 5)
    even_axes, link_axes = picture.subplots(1, 2)
    markers = "osD^v<>PX*"
    for index, placement in enumerate(dict.fromkeys(point.placement for point in points)):
        own = [point for point in points if point.placement == placement]
        ranks, marker = [point.num_ranks for point in own], markers[index % len(markers)]
        even_axes.plot(ranks, [point.balancedness for point in own], marker + "-", label=placement, markersize=5)
        link_axes.plot(ranks, [point.link_mb for point in own], marker + "-", label=placement, markersize=5)
    even_axes.set_ylim(0, 1.02)
    even_axes.set_ylabel("balancedness: mean rows of a rank / rows of the heaviest")
    link_axes.set_yscale("log")
    link_axes.set_ylabel("MB to the busiest rank in a dispatch (from other nodes, if any)")
    ticks = sorted({point.num_ranks for point in points})
    for axes in (even_axes, link_axes):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("ranks")
        axes.grid(visible=True, linewidth=0.3)
    even_axes.legend(fontsize=8)
    picture.savefig(path)
