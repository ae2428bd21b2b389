"""The tensors of one step: what the engine hands to the network. Knows nothing of requests.

Rows are ordered: first one row for each decoding sequence (B_d rows), then the prefill chunks, one after another.
Decode rows and prefill rows take different attention kernels, whose results differ in bits; a position belongs to the
kind that its request's prompt length says (a prompt position is prefilled, whatever the length of its chunk), so that
the KV cache of a position is always written by the same kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeBatch:
    """B sequences with one new token each. `kv_lens_B` counts that token too; a padding row has length 0."""

    block_tables_BM: Tensor  # int32 [B, M], physical block of each logical block; unused entries hold any valid id
    kv_lens_B: Tensor  # int32 [B]
    max_kv_len: int  # no length is above it; in a CUDA graph the graph's bound


@dataclass(frozen=True)
class PrefillBatch:
    """B sequences with a chunk of one or more prompt tokens each.

    Chunk b is rows query_starts[b]:query_starts[b+1] of the prefill rows; its first row has position query_offsets[b];
    kv_lens[b] = query_offsets[b] + chunk length. The `_host` twins let the network plan bounded work (MLA's expansion).
    """

    block_tables_BM: Tensor  # int32 [B, M]
    query_starts_B1: Tensor  # int32 [B + 1]
    query_offsets_B: Tensor  # int32 [B]
    kv_lens_B: Tensor  # int32 [B]
    max_query_len: int
    max_kv_len: int
    query_lens_host: tuple[int, ...]
    kv_lens_host: tuple[int, ...]


@dataclass(frozen=True)
class StepOfAll:
    """What all ranks agreed on of a step: the most rows that any of them brings, and whether any has prompt rows."""

    most_rows: int
    has_prefill: bool


@dataclass(frozen=True)
class StepInput:
    """One step on one rank: T rows, the first `num_decode` of them decode rows; 0 where only other ranks have rows."""

    token_ids_T: Tensor  # int64 [T]
    positions_T: Tensor  # int64 [T]
    slot_mapping_T: Tensor  # int64 [T], block * block_size + offset; -1: write nothing
    num_decode: int
    decode: DecodeBatch | None
    prefill: PrefillBatch | None
    # int64 [B'], the distinct rows whose logits are wanted, in the order of the result. Any order; but a step of decode
    # rows alone that wants them all has 0, 1, 2, ...: the network then gathers nothing.
    logits_rows_B: Tensor
    real_T: Tensor | None = None  # bool [T], False: a padding row, which goes to no expert; None: every row is real
    of_all: StepOfAll | None = None  # None: there is no other rank

    @property
    def any_prefill(self) -> bool:
        """Whether any rank has prompt rows in this step."""
        return self.prefill is not None if self.of_all is None else self.of_all.has_prefill

    @property
    def most_rows(self) -> int:
        """T of the rank that has most."""
        return self.token_ids_T.shape[0] if self.of_all is None else self.of_all.most_rows

    @classmethod
    def empty(cls, of_all: StepOfAll, device: torch.device) -> StepInput:
        """The step of a rank that has no rows while others have."""
        no_ids = torch.empty(0, dtype=torch.int64, device=device)
        return cls(no_ids, no_ids, no_ids, 0, None, None, no_ids, of_all=of_all)
