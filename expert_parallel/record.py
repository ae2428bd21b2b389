"""One token as it travels: its row, the slots it goes to and, if it is summed afar, their weights. Knows bytes only.

    bytes   0 .. row_bytes     the row, in the model's dtype
            .. + 4 K           slot of each of the K experts, int32
            .. + 4 K           weight of each, fp32 (only with `weights`)
            .. num_bytes       unused, up to a multiple of 64: rows stay aligned

One record is one collective instead of three, and a rank gets a token's row once, however many of its experts it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    def num_bytes(self) -> int:
        # Slots begin at a multiple of 4 for every dtype and width.
        used = self._slots_at + 4 * self.top_k * (2 if self.weights else 1)
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    @property
    def _slots_at(self) -> int:
        return -(-self.row_bytes // 4) * 4

    def empty(self, num_records: int, device: torch.device) -> Tensor:
        return torch.empty(num_records, self.num_bytes, dtype=torch.uint8, device=device)

    def rows_XD(self, records: Tensor) -> Tensor:
        """The rows, strided: the last dimension lies together."""
        return records[:, : self.row_bytes].view(self.dtype)

    def slots_XK(self, records: Tensor) -> Tensor:
        return records[:, self._slots_at : self._slots_at + 4 * self.top_k].view(torch.int32)

    def weights_XK(self, records: Tensor) -> Tensor:
        assert self.weights, "these records carry no weights"
        start = self._slots_at + 4 * self.top_k
        return records[:, start : start + 4 * self.top_k].view(torch.float32)
