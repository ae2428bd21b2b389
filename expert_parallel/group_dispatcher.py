"""What all dispatchers over a group of ranks share: how they are made, the form in which rows travel, the sum at home.

Knows ranks, rows and slots; knows no transport: a subclass moves records in `dispatch` and results in `_bring_home`.

Where the experts are held in fp8, rows travel in fp8 with their scales: quantised before they are sent, by the same
function and so to the same bits as one rank quantises them before its first product.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from expert_parallel.dispatcher import Dispatcher, residual_norm
from expert_parallel.group import ExpertGroup
from expert_parallel.record import RecordLayout
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import Combine, RoundInput, Traffic, check_row_cap
from kernels.combine import combine, combine_norm
from kernels.pack import Packed
from kernels.pack_fp8 import pack_rows
from kernels.quantize import FP8, Quantized, quantize_rows, quantized_bytes
from kernels.records import fill_rows
from kernels.rmsnorm import Norm


class Home(NamedTuple):
    """What is summed at home: term k of token t is rows_RD[row_TK[t, k]] (-1: none) and weighs weights_TK[t, k]."""

    rows_RD: Tensor
    row_TK: Tensor
    weights_TK: Tensor


class RowsOfExperts(NamedTuple):
    """The fields of these names of an `ExpertInput`."""

    rows_XD: Tensor
    scales_GX: Tensor | None
    row_index_R: Tensor | None
    offsets_S1: Tensor


class GroupDispatcher(Dispatcher):
    """Dispatcher over a group of ranks. `replicas` says where experts live; `slots_per_rank` never changes.

    `row_cap` bounds the rows of every buffer of a round, pairs of (token, expert) included; with top_k and the number
    of ranks it has a least value. `fp8_rows`: the experts are held in fp8. A handle is used once.
    """

    graph_safe: bool = False
    row_cap: int | None = None
    rows_once: Literal["per_rank", "per_expert"] = "per_rank"

    def __init__(
        self,
        group: ExpertGroup,
        replicas: ReplicaTable,
        slots_per_rank: tuple[int, ...],
        *,
        top_k: int,
        combine: Combine = "exact",
        row_cap: int | None = None,
        fp8_rows: bool = False,
        device: torch.device | str,
    ) -> None:
        assert len(slots_per_rank) == group.size, f"{len(slots_per_rank)} ranks have slots, the group has {group.size}"
        check_row_cap(row_cap, group.size, top_k)
        self.group = group
        self.replicas = replicas
        self.slots_per_rank = slots_per_rank
        self.num_slots = slots_per_rank[group.rank]
        self.top_k = top_k
        self.combine_mode: Combine = combine
        self.row_cap = row_cap
        self.fp8_rows = fp8_rows
        self.device = torch.device(device)
        self.traffic = Traffic()
        self._prepare()

    def _prepare(self) -> None:
        """Makes what a subclass needs in every round and makes once."""

    @abstractmethod
    def buffer_bytes(self, num_tokens: int, width: int, dtype: torch.dtype) -> int: ...

    @abstractmethod
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> RoundInput:
        """Takes the leading rows that fit. Every rank of the group dispatches, also one without rows."""
        ...

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        """The complete sum of every row taken, in the dtype of y. Every rank of the group combines."""
        home = self._bring_home(y_RD, handle)
        return home if isinstance(home, Tensor) else combine(*home)

    def combine_norm(
        self, y_RD: Tensor, handle: Any, residual_TD: Tensor, norm: Norm, shared_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `combine`; residual and shared rows are those of the rows taken."""
        home = self._bring_home(y_RD, handle)
        if isinstance(home, Tensor):
            return residual_norm(home, residual_TD, norm, shared_TD)
        return combine_norm(*home, residual_TD, *norm, shared_TD)

    @abstractmethod
    def _bring_home(self, y_RD: Tensor, handle: Any) -> Home | Tensor:
        """What is still to be summed, or the complete sums."""
        ...

    def _check_top_k(self, expert_ids_TK: Tensor) -> None:
        assert expert_ids_TK.shape[1] == self.top_k, f"{expert_ids_TK.shape[1]} experts a token, made for {self.top_k}"

    def _layout(self, width: int, dtype: torch.dtype) -> RecordLayout:
        """Of a record of rows that the model has in `dtype`."""
        return RecordLayout(width, FP8 if self.fp8_rows else dtype, self.top_k, weights=self.combine_mode == "fast")

    def _write_rows(self, layout: RecordLayout, records: Tensor, x_TD: Tensor) -> None:
        """Row i of x into record i; a row is quantised once, wherever it goes."""
        if not self.fp8_rows:
            fill_rows(layout.rows_XD(records), x_TD)
            return
        x = quantize_rows(x_TD)
        fill_rows(layout.rows_XD(records), x.values)
        fill_rows(layout.scales_XG(records), x.scales.T)

    def _rows_of_experts(self, layout: RecordLayout, records: Tensor, packed: Packed, num_rows: int) -> RowsOfExperts:
        """Of the records that arrived; `packed` groups their pairs by slot. Rows in fp8 are copied out of the records,
        in the order of the slots: their product wants values and scales that lie together."""
        index_R, offsets_S1 = packed.row_token_R[:num_rows], packed.offsets_S1[: self.num_slots + 1]
        if not self.fp8_rows:
            return RowsOfExperts(layout.rows_XD(records), None, index_R, offsets_S1)
        x = Quantized(layout.rows_XD(records), layout.scales_XG(records).T)
        return RowsOfExperts(*pack_rows(x, index_R, offsets_S1), None, offsets_S1)

    def _fp8_bytes(self, num_rows: int, width: int) -> int:
        """Of quantised rows beside the records: this rank's own before they leave, and those of its experts."""
        return quantized_bytes(num_rows, width) if self.fp8_rows else 0

    def _count_dispatch(self, num_sent: int, layout: RecordLayout) -> None:
        self.traffic.rounds += 1
        self.traffic.records_sent += num_sent
        self.traffic.dispatch_bytes += num_sent * layout.num_bytes
