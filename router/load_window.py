"""The experts' load over time, on the host: a window of recent steps, a moving average, and how even ranks were.

Knows layers, logical experts and steps; knows no placement: whoever knows it hands in the ranks' loads as numbers. The
counters on the device only grow; what happened since the last look is their difference. Memory stays flat: the window
holds so many looks, the timeline at most TIMELINE points (every other one is dropped when it is full).
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from router.load import balancedness

FORMAT = "sortyard-expert-load"
VERSION = 1
TIMELINE = 4096


class BalancePoint(NamedTuple):
    """Of the rows between the look before and the one at `step`: how even they were over ranks, and how many."""

    step: int
    balancedness: float
    rows: int


class LoadWindow:
    """Fed with the counters every so many steps; all ranks feed it the sum over ranks, so that all see the same."""

    def __init__(self, num_layers: int, num_experts: int, window: int) -> None:
        """`window`: looks that it spans. The average weighs the newest look 2 / (window + 1): as old as the window."""
        if window < 1:
            raise ValueError(f"balance.window={window} must be at least 1.")
        self.shape = (num_layers, num_experts)
        self.window = window
        self.step = 0
        self.total_LE = np.zeros(self.shape, dtype=np.int64)
        self.average_LE: np.ndarray | None = None
        self.timeline: list[BalancePoint] = []
        self._recent: deque[tuple[int, np.ndarray]] = deque(maxlen=window)
        self._stride = 1
        self._looks = 0

    def push(self, step: int, counters_LE: npt.ArrayLike, rank_loads_LN: npt.ArrayLike | None = None) -> np.ndarray:
        """Take the counters as they stand after `step` steps; int64 [L, E]: what was new. Without rows it is no look.

        rank_loads_LN: the new rows by rank, under the placement that served them; without them the timeline says how
        even the experts were, as if each were a rank.
        """
        counters_LE = np.array(counters_LE, dtype=np.int64)
        assert counters_LE.shape == self.shape, f"counters of shape {counters_LE.shape}, the window's is {self.shape}"
        new_LE = counters_LE - self.total_LE
        assert (new_LE >= 0).all(), "the counters went back; they may be reset only together with a new window"
        rows = int(new_LE.sum())
        if rows == 0:
            self.step = step
            return new_LE
        weight = 1.0 if self.average_LE is None else 2 / (self.window + 1)
        average_LE = new_LE if self.average_LE is None else self.average_LE
        self.average_LE = weight * new_LE + (1 - weight) * average_LE
        self.step, self.total_LE = step, counters_LE
        self._recent.append((step, new_LE))
        loads_LX = new_LE if rank_loads_LN is None else np.asarray(rank_loads_LN, dtype=np.float64)
        self._add_point(BalancePoint(step, balancedness(torch.from_numpy(loads_LX)), rows))
        return new_LE

    def _add_point(self, point: BalancePoint) -> None:
        if self._looks % self._stride == 0:
            self.timeline.append(point)
        self._looks += 1
        if len(self.timeline) == TIMELINE:
            self.timeline = self.timeline[::2]
            self._stride *= 2

    def recent_LE(self) -> np.ndarray:
        """int64 [L, E]: rows in the window."""
        return sum((counts_LE for _, counts_LE in self._recent), np.zeros(self.shape, dtype=np.int64))

    def as_text(self) -> str:
        """The load file's content, which `read_load` reads."""
        return json.dumps(self.as_dict(), separators=(",", ":")) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready. `trace` are the looks of the window, oldest first: what `launch.simulate` plays back."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_layers": self.shape[0],
            "num_experts": self.shape[1],
            "steps": self.step,
            "total": self.total_LE.tolist(),
            "average": None if self.average_LE is None else self.average_LE.round(3).tolist(),
            "trace": [{"step": step, "counts": counts_LE.tolist()} for step, counts_LE in self._recent],
            "timeline": [list(point) for point in self.timeline],
        }


@dataclass(frozen=True)
class LoadRecord:
    """A load file as read: rows of every layer and expert in all, in each look of the last window, and the timeline."""

    total_LE: np.ndarray
    trace_ILE: np.ndarray
    timeline: tuple[BalancePoint, ...]

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that saw rows."""
        return tuple(np.flatnonzero(self.total_LE.sum(axis=1)).tolist())


def read_load(path: Path) -> LoadRecord:
    """ValueError, with the file's name, where it is no load file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"load file {path} cannot be read: {error}; give one that a run wrote.") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path} is no load file (its format is not {FORMAT!r}); give one that a run wrote.")
    if record.get("version") != VERSION:
        raise ValueError(f"load file {path} has version {record.get('version')}, this code reads {VERSION}.")
    try:
        shape = (record["num_layers"], record["num_experts"])
        total_LE = np.array(record["total"], dtype=np.int64).reshape(shape)
        looks = [np.array(look["counts"], dtype=np.int64).reshape(shape) for look in record["trace"]]
        timeline = tuple(BalancePoint(int(step), float(even), int(rows)) for step, even, rows in record["timeline"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"load file {path} is damaged ({type(error).__name__}: {error}); write it again.") from None
    trace_ILE = np.stack(looks) if looks else np.zeros((0, *shape), dtype=np.int64)
    if total_LE.min(initial=0) < 0 or trace_ILE.min(initial=0) < 0:
        raise ValueError(f"load file {path} is damaged (negative counts); write it again.")
    return LoadRecord(total_LE, trace_ILE, timeline)
