"""Bring token rows to their experts and the results back: the interface, and the dispatcher of one rank.

Knows rows, slots and ranks; knows nothing of what an expert computes. `reference.py` defines what is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.combine import combine, combine_norm
from kernels.gate_few import Undecided
from kernels.pack import Packed, pack
from kernels.rmsnorm import Norm, rmsnorm_residual


@dataclass(frozen=True)
class ExpertInput:
    """The rows of this rank's experts, grouped by slot: row r of slot s lies in offsets[s] <= r < offsets[s + 1].

    Row r is rows_XD[row_index_R[r]], or rows_XD[r] where row_index_R is None. `num_rows` is a bound known on the host,
    the same whatever the routing; rows past offsets[-1] exist but mean nothing and are never read back.
    `handle` goes back to the same dispatcher's `combine`, once. Rows that came in fp8 bring their scales, as
    `kernels.quantize.Quantized` has them, and the dtype of the model, in which the experts give theirs back.
    `counters`, zeros as `kernels.pack.Packed` has them, come with rows of which no slot has one twice.
    With `undecided` nobody knows yet which rows those are: the experts choose first, and fill the offsets.
    """

    rows_XD: Tensor
    row_index_R: Tensor | None
    offsets_S1: Tensor
    num_rows: int
    handle: Any
    scales_GX: Tensor | None = None
    out_dtype: torch.dtype | None = None  # of the experts' rows; None: that of rows_XD
    counters: Tensor | None = None
    undecided: Undecided | None = None


class OwnSlots(NamedTuple):
    """All slots there are, on this rank."""

    slot_of_E: Tensor
    """int32: of each logical expert, -1 for none."""
    num_slots: int


class Dispatcher(Protocol):
    """Two verbs around the experts. Implementations inherit from this class, and with it what they do no better.

    `graph_safe`: no host sync and no shape that depends on the routing. `row_cap`: the most rows of any buffer of a
    round, (token, expert) pairs included; at least ranks x K; None for any number. `rows_once`: whether a token that
    goes to several experts of one rank arrives there once (per_rank) or once for each (per_expert). `equal_rows`:
    whether all ranks must bring equally many rows; who has fewer fills up with rows whose ids are -1. `two_open`:
    whether a second dispatch may come, on another stream, before what the first gave is combined.
    """

    @property
    def equal_rows(self) -> bool:
        return False

    @property
    def two_open(self) -> bool:
        return False

    @property
    def own_slots(self) -> OwnSlots | None:
        """Where rows need not travel: the slots that a router may pack for, and `dispatch` takes what it packed."""
        return None

    @property
    def graph_safe(self) -> bool: ...

    @property
    def row_cap(self) -> int | None: ...

    @property
    def rows_once(self) -> Literal["per_rank", "per_expert"]: ...

    def buffer_bytes(self, num_tokens: int, width: int, dtype: torch.dtype) -> int:
        """The most that the buffers of a round hold, where each rank brings up to `num_tokens` rows."""
        return 0

    @property
    def held_bytes(self) -> int:
        """Of buffers that are kept and that no allocator's statistics show."""
        return 0

    def check(self) -> None:
        """RuntimeError where another rank was waited for in vain. Waits for nobody."""

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> ExpertInput:
        """Hand every row to the slots of its K experts. An id without a slot anywhere (-1) takes no part."""
        ...

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        """The complete sum over the K experts of every token, in the dtype of y: no further reduction may follow."""
        ...

    def combine_norm(
        self, y_RD: Tensor, handle: Any, residual_TD: Tensor, norm: Norm, shared_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(normalised rows, new residual) of `combine` (+ shared rows) and the residual. This is what it means; a
        dispatcher that can do both in one launch has the same bits."""
        return residual_norm(self.combine(y_RD, handle), residual_TD, norm, shared_TD)


def residual_norm(
    out_TD: Tensor, residual_TD: Tensor, norm: Norm, shared_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What follows a combine whose sums are complete. Shared rows are added in place."""
    if shared_TD is not None:
        out_TD += shared_TD
    return rmsnorm_residual(out_TD, residual_TD, norm.weight_C, norm.eps)


class LocalHandle(NamedTuple):
    """Where the results of a token lie, and what they weigh."""

    packed_row_TK: Tensor
    weights_TK: Tensor
    in_order: bool = False
    """As `kernels.combine.combine_norm` says."""


class LocalDispatcher(Dispatcher):
    """One rank holds every expert it uses. Rows are not copied: the first product gathers them by index.

    slot_of_E int32 [E]: the slot of each logical expert here, -1 for none; such an expert adds nothing to the sum.
    """

    graph_safe: bool = True
    two_open: bool = True
    row_cap: int | None = None
    rows_once: Literal["per_rank", "per_expert"] = "per_rank"

    def __init__(self, slot_of_E: Tensor, num_slots: int) -> None:
        self.slot_of_E = slot_of_E
        self.num_slots = num_slots

    @property
    def own_slots(self) -> OwnSlots:
        return OwnSlots(self.slot_of_E, self.num_slots)

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, packed: Packed | Undecided | None = None
    ) -> ExpertInput:
        """`packed`: what `pack` makes of the ids for `own_slots`, where the router has done it or left it open."""
        undecided = packed if isinstance(packed, Undecided) else None
        if isinstance(packed, Undecided):
            packed = packed.packed
        packed = packed or pack(expert_ids_TK, self.slot_of_E, self.num_slots)
        return ExpertInput(
            rows_XD=x_TD,
            row_index_R=packed.row_token_R,
            offsets_S1=packed.offsets_S1,
            num_rows=expert_ids_TK.numel(),
            handle=LocalHandle(packed.packed_row_TK, weights_TK, undecided is not None),
            counters=packed.counters,
            undecided=undecided,
        )

    def combine(self, y_RD: Tensor, handle: LocalHandle) -> Tensor:
        return combine(y_RD, handle.packed_row_TK, handle.weights_TK)

    def combine_norm(
        self, y_RD: Tensor, handle: LocalHandle, residual_TD: Tensor, norm: Norm, shared_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows = (y_RD, handle.packed_row_TK, handle.weights_TK)
        return combine_norm(*rows, residual_TD, *norm, shared_TD, in_order=handle.in_order)
