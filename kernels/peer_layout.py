"""What lies where in the buffer through which ranks reach each other, and the handles on all ranks' buffers.

Every rank has one such buffer, all of one layout, so that a place is a number of bytes from each buffer's begin. Knows
bytes, shapes and numbers of ranks; knows no transport. A rank brings B tokens to a round, the same number on all; the
B-th part of the room is used, from the front:

    flags     int64 [N]         of each source: its rows are here; see peer_flags.py
    done      int64 [N, B]      of each source and token of this rank (or the first of a few): its results are here
    slots     int32 [N * B, K]  record r * B + t is token t of rank r: the slots it goes to here, -1 for all others
    weights   fp32 [N * B, K]   of each, only where sums go home
    scales    fp32 [N * B, G]   of each 128 columns, only of rows in fp8
    rows      [N * B, D]        written for the records with a slot here; what lies in the others is old
    home      [B * K, D]        row t * K + k is the result of choice k of this rank's own token t, or
              [N * B, D]        where sums go home: row r * B + t is the sum of the choices of token t that rank r holds

No counts are needed to know a record's place: a token goes to a rank once at most, so a source's place is its token's
index, and the room for the worst routing is the room for any.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import cdiv
from kernels.quantize import FP8, GROUP

_ALIGNMENT = 256


class Peers(NamedTuple):
    """The buffers of all ranks as this one reaches them: tensors, and their addresses for kernels."""

    rank: int
    buffers: tuple[Tensor, ...]  # uint8 [num_bytes] each, by rank
    addresses_N: Tensor  # int64 [N], on the device

    @property
    def own(self) -> Tensor:
        return self.buffers[self.rank]


@dataclass(frozen=True)
class PeerLayout:
    """`capacity`: the most tokens that a rank brings to a round. `sums`: a rank's results of a token are summed before
    they go home. `row_dtype` of the rows that are sent, `dtype` of those that return."""

    num_ranks: int
    capacity: int
    width: int
    top_k: int
    row_dtype: torch.dtype
    dtype: torch.dtype
    sums: bool

    @property
    def num_scales(self) -> int:
        return cdiv(self.width, GROUP) if self.row_dtype == FP8 else 0

    @property
    def num_bytes(self) -> int:
        return self._ends[-1]

    @property
    def done_at(self) -> int:
        return self._ends[0]

    @property
    def slots_at(self) -> int:
        return self._ends[1]

    @property
    def weights_at(self) -> int:
        return self._ends[2]

    @property
    def scales_at(self) -> int:
        return self._ends[3]

    @property
    def rows_at(self) -> int:
        return self._ends[4]

    @property
    def home_at(self) -> int:
        return self._ends[5]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Where each part ends and the next begins."""
        records = self.num_ranks * self.capacity
        home_rows = records if self.sums else self.capacity * self.top_k
        sizes = (
            8 * self.num_ranks,
            8 * self.num_ranks * self.capacity,
            4 * records * self.top_k,
            4 * records * self.top_k if self.sums else 0,
            4 * records * self.num_scales,
            records * self.width * self.row_dtype.itemsize,
            home_rows * self.width * self.dtype.itemsize,
        )
        ends, end = [], 0
        for size in sizes:
            end += cdiv(size, _ALIGNMENT) * _ALIGNMENT
            ends.append(end)
        return tuple(ends)

    def clear(self, buffer: Tensor) -> None:
        """As a buffer must be before anyone reaches for it: no flag is up, no record has a slot."""
        buffer[: self.slots_at].zero_()
        self.slots_XK(buffer, self.capacity).fill_(-1)

    def flags_N(self, buffer: Tensor) -> Tensor:
        return self._part(buffer, 0, (self.num_ranks,), torch.int64)

    def done_NB(self, buffer: Tensor, num_tokens: int) -> Tensor:
        return self._part(buffer, self.done_at, (self.num_ranks, num_tokens), torch.int64)

    def slots_XK(self, buffer: Tensor, num_tokens: int) -> Tensor:
        return self._part(buffer, self.slots_at, (self.num_ranks * num_tokens, self.top_k), torch.int32)

    def weights_XK(self, buffer: Tensor, num_tokens: int) -> Tensor:
        assert self.sums, "weights are sent only where sums go home"
        return self._part(buffer, self.weights_at, (self.num_ranks * num_tokens, self.top_k), torch.float32)

    def scales_XG(self, buffer: Tensor, num_tokens: int) -> Tensor:
        assert self.num_scales, f"rows in {self.row_dtype} have no scales"
        return self._part(buffer, self.scales_at, (self.num_ranks * num_tokens, self.num_scales), torch.float32)

    def rows_XD(self, buffer: Tensor, num_tokens: int) -> Tensor:
        return self._part(buffer, self.rows_at, (self.num_ranks * num_tokens, self.width), self.row_dtype)

    def home_RD(self, buffer: Tensor, num_tokens: int) -> Tensor:
        num_rows = num_tokens * (self.num_ranks if self.sums else self.top_k)
        return self._part(buffer, self.home_at, (num_rows, self.width), self.dtype)

    def _part(self, buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        return buffer[start : start + count * dtype.itemsize].view(dtype).view(shape)
