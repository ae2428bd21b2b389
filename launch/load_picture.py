"""The experts' load as a picture: `python -m launch.load_picture load.json` makes load.png beside it.

`balance.load_file` of a run writes the load file. A picture of another name or format: `... out.svg load.json`.

Above, a heat map of experts by layer: rows of an expert over the mean of its layer, 1 is even. Below, how even the
ranks were over the run. Knows load files; needs matplotlib, which is no dependency of the project.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from launch.canvas import canvas
from launch.words import helped, refuse
from router.load_window import LoadRecord, read_load

BRIGHTEST = 5.0  # times the mean; what lies above looks the same


def relative_load(record: LoadRecord) -> np.ndarray:
    """float64 [sparse layers, E]: rows over the layer's mean."""
    total_LE = record.total_LE[list(record.sparse_layers)].astype(np.float64)
    return total_LE / total_LE.mean(axis=1, keepdims=True)


def draw_load(record: LoadRecord, path: Path) -> None:
    """The picture; its ending chooses the format."""
    if not record.sparse_layers:
        raise ValueError("the load file holds no rows: there is nothing to draw.")
    load_LE = relative_load(record)
    picture = canvas(12, 8)
    map_axes, time_axes = picture.subplots(2, 1, height_ratios=(3, 1))
    image = map_axes.imshow(load_LE, aspect="auto", interpolation="nearest", vmin=0, vmax=min(BRIGHTEST, load_LE.max()))
    picture.colorbar(image, ax=map_axes, label="rows / mean of the layer")
    step = max(1, len(record.sparse_layers) // 16)
    map_axes.set_yticks(range(0, len(load_LE), step), [str(layer) for layer in record.sparse_layers[::step]])
    map_axes.set_xlabel("expert")
    map_axes.set_ylabel("layer")
    map_axes.set_title(f"{record.total_LE.sum():,} rows; the busiest expert has {load_LE.max():.1f} times its share")
    time_axes.plot([point.step for point in record.timeline], [point.balancedness for point in record.timeline], ".-")
    time_axes.set_ylim(0, 1.02)
    time_axes.set_xlabel("step")
    time_axes.set_ylabel("balancedness")
    time_axes.grid(visible=True, linewidth=0.3)
    picture.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one load file. 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__):
        return 0
    try:
        if len(words) not in (1, 2):
            raise ValueError("give a load file, or a picture and a load file: out.png load.json")
        source = Path(words[-1])
        picture = Path(words[0]) if len(words) == 2 else source.with_suffix(".png")
        draw_load(read_load(source), picture)
    except (ValueError, OSError) as error:
        return refuse(error)
    print(f"picture: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
