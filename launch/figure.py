"""A measured figure beside its floor and what others reach, and how figures are shown and stored.

Knows names, numbers and units; measures nothing. What others reach stands in benchmarks/baselines.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
BASELINES = ROOT / "benchmarks" / "baselines.json"
KEPT_SAMPLES = 100


@dataclass(frozen=True)
class Figure:
    """`floor`: the best possible value in the same unit. bytes, flops: of one unit of work, if it has one (a step, a
    layer). `seconds` is the time of that unit. `peers`: others' values, `target`: what issue and baselines ask for."""

    workload: str
    subject: str  # model, layer or head layout
    name: str
    value: float
    unit: str
    floor: float | None = None
    seconds: float | None = None
    bytes: float | None = None
    flops: float | None = None
    target: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)
    samples: tuple[float, ...] = ()

    @property
    def higher_is_better(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def over_floor(self) -> float | None:
        """value / floor: at least 1 for times, at most 1 for rates."""
        return self.value / self.floor if self.floor else None

    @property
    def meets_target(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.higher_is_better else self.value <= self.target

    def rates(self) -> tuple[float | None, float | None]:
        """TB/s and TFLOP/s reached."""
        if not self.seconds:
            return None, None
        return (
            None if self.bytes is None else self.bytes / self.seconds / 1e12,
            None if self.flops is None else self.flops / self.seconds / 1e12,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: numbers to six digits, at most KEPT_SAMPLES samples."""
        record: dict[str, Any] = {"workload": self.workload, "subject": self.subject, "name": self.name}
        numbers = {"value": self.value, "floor": self.floor, "value_over_floor": self.over_floor}
        numbers |= {"seconds": self.seconds, "bytes": self.bytes, "flops": self.flops, "target": self.target}
        record |= {name: short(value) for name, value in numbers.items() if value is not None}
        record["unit"] = self.unit
        if self.meets_target is not None:
            record["meets_target"] = self.meets_target
        record |= {
            name: {key: short(value) for key, value in each.items()}
            for name, each in (("peers", self.peers), ("extra", self.extra))
            if each
        }
        return record | {"num_samples": len(self.samples), "samples": [short(x) for x in thin(self.samples)]}


def short(value: float) -> float:
    """Six significant digits: no measurement has more."""
    return value if value == 0 or not math.isfinite(value) else float(f"{value:.6g}")


def thin(samples: Sequence[float], most: int = KEPT_SAMPLES) -> list[float]:
    """At most so many, evenly spread over the run.

    >>> thin([1.0, 2.0, 3.0, 4.0], 2)
    [1.0, 3.0]
    """
    if len(samples) <= most:
        return list(samples)
    return [samples[index * len(samples) // most] for index in range(most)]


def load_baselines(path: Path = BASELINES) -> dict[str, Any]:
    """The recorded figures of others; empty where the file is not (an installed wheel has none)."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def baseline(baselines: dict[str, Any], *keys: str) -> tuple[dict[str, float], float | None]:
    """Peers and target of one point, both empty where nothing is recorded."""
    entry: Any = baselines
    for key in keys:
        entry = entry.get(key, {}) if isinstance(entry, dict) else {}
    peers = {name: float(value) for name, value in entry.items() if name != "target"}
    return peers, entry.get("target")


def tables(figures: Iterable[Figure]) -> list[Table]:
    """One table for each workload and unit: columns that no figure fills are left out."""
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.workload, figure.unit), []).append(figure)
    return [_table(workload, unit, group) for (workload, unit), group in groups.items()]


def _table(workload: str, unit: str, figures: list[Figure]) -> Table:
    rows = [_cells(figure) for figure in figures]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=f"{workload} ({unit})")
    for column in columns:
        table.add_column(column, justify="left" if column in ("subject", "point") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    return table


def _cells(figure: Figure) -> dict[str, str]:
    cells = {"subject": figure.subject, "point": figure.name, "value": number(figure.value)}
    tb_s, tflop_s = figure.rates()
    optional = {
        "floor": figure.floor,
        "value/floor": figure.over_floor,
        "TB/s": tb_s,
        "TFLOP/s": tflop_s,
        "target": figure.target,
        **figure.peers,
    }
    cells |= {name: number(value) for name, value in optional.items() if value is not None}
    if "vllm" in figure.peers:
        ratio = figure.value / figure.peers["vllm"]
        cells["x vllm"] = number(ratio if figure.higher_is_better else 1 / ratio)
    if figure.meets_target is not None:
        cells["met"] = "yes" if figure.meets_target else "no"
    return cells | {name: number(value) for name, value in figure.extra.items()}


def number(value: float) -> str:
    """Four digits that matter, thousands apart.

    >>> number(12345.6), number(0.041534), number(3.0)
    ('12,346', '0.04153', '3')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def print_figures(figures: Iterable[Figure], console: Console) -> None:
    """The tables, wide enough for their columns whatever the terminal."""
    for table in tables(figures):
        console.print(table)
