"""One token as it travels: its row, the slots it goes to and, if it is summed afar, their weights. Knows bytes only.

    bytes   0 .. row_bytes     the row, in the model's dtype or in fp8
            .. + 4 G           scale of each 128 columns, fp32 (only of a row in fp8)
            .. + 4 K           slot of each of the K experts, int32
            .. + 4 K           weight of each, fp32 (only with `weights`)
            .. num_bytes       unused, up to a multiple of 64: rows stay aligned

One record is one collective instead of three, and a rank gets a token's row once, however many of its experts it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import cdiv
from kernels.quantize import FP8, GROUP
from kernels.records import RecordParts

_ALIGNMENT = 64


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of a record lie. Records are uint8 [X, num_bytes]; the parts are views of them."""

    width: int
    dtype: torch.dtype
    top_k: int
    weights: bool

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def num_scales(self) -> int:
        return cdiv(self.width, GROUP) if self.dtype == FP8 else 0

    @property
    def num_bytes(self) -> int:
        used = self._slots_at + 4 * self.top_k * (2 if self.weights else 1)
        return cdiv(used, _ALIGNMENT) * _ALIGNMENT

    @property
    def _scales_at(self) -> int:
        # All that follows the row begins at a multiple of 4, for every dtype and width.
        return cdiv(self.row_bytes, 4) * 4

    @property
    def _slots_at(self) -> int:
        return self._scales_at + 4 * self.num_scales

    def empty(self, num_records: int, device: torch.device) -> Tensor:
        return torch.empty(num_records, self.num_bytes, dtype=torch.uint8, device=device)

    def rows_XD(self, records: Tensor) -> Tensor:
        """The rows, strided: the last dimension lies together."""
        return records[:, : self.row_bytes].view(self.dtype)

    def scales_XG(self, records: Tensor) -> Tensor:
        assert self.num_scales, f"rows in {self.dtype} have no scales"
        return self._words(records, self._scales_at, self.num_scales, torch.float32)

    def slots_XK(self, records: Tensor) -> Tensor:
        return self._words(records, self._slots_at, self.top_k, torch.int32)

    def weights_XK(self, records: Tensor) -> Tensor:
        assert self.weights, "these records carry no weights"
        return self._words(records, self._slots_at + 4 * self.top_k, self.top_k, torch.float32)

    def parts(self, records: Tensor) -> RecordParts:
        """All that records of this layout hold, as views."""
        return RecordParts(
            self.rows_XD(records),
            self.slots_XK(records),
            self.weights_XK(records) if self.weights else None,
            self.scales_XG(records) if self.num_scales else None,
        )

    def _words(self, records: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
        return records[:, start : start + 4 * count].view(dtype)
