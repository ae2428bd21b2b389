"""What rows and moves cost here, measured: for the rule that decides whether experts move. Knows clocks, no placements.

A row more on the heaviest rank costs what the experts' two products take longer for it, at about the number of rows
that they have now: a step of few rows reads weights, and its time hardly follows the rows. So both times are tried, for
that number and for twice as many, rounded to powers of two; and again when the number of rows has left that octave.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from expert_parallel.dispatcher import ExpertInput
from expert_parallel.group import ExpertGroup
from expert_parallel.proposal import MoveRates
from expert_parallel.rebalance import ExpertMover

_TRIES = 5
_NS = 1e9


class MeasuredRates:
    """Rates that all ranks agree on: the mean of what each of them measured. Every rank makes the same calls."""

    def __init__(
        self,
        group: ExpertGroup,
        mover: ExpertMover,
        experts: Callable[[ExpertInput], Tensor],
        num_slots: int,
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`experts`: of one layer here. Their `num_slots` may be 0, where others do the work."""
        self.group = group
        self.mover = mover
        self.experts = experts
        self.num_slots = num_slots
        self.width, self.dtype, self.device = width, dtype, device
        self._octave: int | None = None
        self._seconds_per_row = self._seconds_per_byte = 0.0

    def rates(self, rows_per_rank: float, steps: int) -> MoveRates:
        """For layers that give a rank so many rows in a step, and a placement that will serve `steps` of them."""
        octave = max(1, round(rows_per_rank)).bit_length() - 1
        if octave != self._octave:
            self._octave = octave
            self._measure(2**octave)
        return MoveRates(self.mover.bundle_bytes, 1 / max(self._seconds_per_byte, 1e-15), self._seconds_per_row, steps)

    def _measure(self, num_rows: int) -> None:
        own = [0, 0, 0]  # fs for a byte, fs for a row, ranks that have experts: whole numbers have one sum
        own[0] = round(self.mover.seconds_per_byte() * _NS * 1e6)
        if self.num_slots:
            own[1] = round(max(self._time(2 * num_rows) - self._time(num_rows), 0.0) / num_rows * _NS * 1e6)
            own[2] = 1
        sums = torch.tensor(own)
        self.group.add_up(sums)
        per_byte, per_row, num_working = sums.tolist()
        self._seconds_per_byte = per_byte / self.group.size / _NS / 1e6
        self._seconds_per_row = per_row / num_working / _NS / 1e6

    @torch.inference_mode()
    def _time(self, num_rows: int) -> float:
        """Median seconds of the experts' products of so many rows, spread over the slots. Waits for the device."""
        offsets = [num_rows * slot // self.num_slots for slot in range(self.num_slots + 1)]
        inputs = ExpertInput(
            rows_XD=torch.zeros(num_rows, self.width, dtype=self.dtype, device=self.device),
            row_index_R=None,
            offsets_S1=torch.tensor(offsets, dtype=torch.int32, device=self.device),
            num_rows=num_rows,
            handle=None,
        )
        seconds = []
        for _ in range(_TRIES):
            self._wait()
            begin = time.perf_counter()
            self.experts(inputs)
            self._wait()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
