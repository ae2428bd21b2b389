"""Move token rows to the ranks that own their experts, and back, with `all_to_all_single` and exact sizes.

Knows ranks, rows and slots; knows nothing of what an expert computes. Not graph-safe: sizes come to the host.

    dispatch   each rank tells all others how many records it has for every rank     one small all_gather, one host sync
               a token's record goes once to each rank that holds any of its experts one all_to_all
               the rank there packs the (record, k) pairs into its slots
    combine    exact: the row of every pair goes home, is weighted and summed there  one all_to_all
               fast:  the pairs of a record are summed first, the sum goes home      one all_to_all

All sizes come from the one matrix of counts that every rank holds after the first step, so sender and receiver cannot
disagree, and what follows from it (does it fit, is there another round) is decided alike everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from expert_parallel.group_dispatcher import GroupDispatcher, Home
from expert_parallel.record import RecordLayout
from expert_parallel.rounds import RoundInput
from kernels.combine import combine
from kernels.pack import Packed, pack
from kernels.quantize import quantize_rows
from kernels.records import RecordSource, rows_in_order, write_records
from kernels.replica_choice import Targets
from kernels.round_counts import round_counts


class AllToAllHandle(NamedTuple):
    """What a round needs to bring its rows home. `out` is what this rank sent, `in` what it received, by rank."""

    packed_row_XK: Tensor  # the experts' row of each pair received
    weights_XK: Tensor | None  # fast: their weights
    home_row_TK: Tensor  # the row, among those that come home, of each pair (exact) or of a token's rank (fast)
    weights_TK: Tensor
    rows_out: list[int]
    rows_in: list[int]


class AllToAllDispatcher(GroupDispatcher):
    """`GroupDispatcher` with exact sizes. row_cap bounds the pairs a rank receives for its experts, and those that come
    home to it."""

    two_open: bool = True

    def _prepare(self) -> None:
        self._ranks_N = torch.arange(self.group.size, dtype=torch.int32, device=self.device)
        self._slots_S = torch.arange(max(self.num_slots, 1), dtype=torch.int32, device=self.device)

    def buffer_bytes(self, num_tokens: int, width: int, dtype: torch.dtype) -> int:
        """The most that the buffers of a round can hold, where each rank brings up to `num_tokens` rows."""
        rows = self.group.size * num_tokens * self.top_k
        rows = rows if self.row_cap is None else min(rows, self.row_cap)
        # Records sent and received, rows returned and at home.
        travel = rows * 2 * (self._layout(width, dtype).num_bytes + width * dtype.itemsize)
        return travel + self._fp8_bytes(min(num_tokens, rows) + rows, width)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> RoundInput:
        self._check_top_k(expert_ids_TK)
        plan = self._agree(expert_ids_TK)
        layout = self._layout(x_TD.shape[1], x_TD.dtype)
        records = self._records(layout, plan, x_TD, weights_TK)
        received = layout.empty(sum(plan.records_in), x_TD.device)
        self.group.all_to_all(received, records, plan.records_in, plan.records_out)
        self._count_dispatch(sum(plan.records_out) - plan.records_out[self.group.rank], layout)

        packed = pack(layout.slots_XK(received).contiguous(), self._slots_S, len(self._slots_S))
        num_pairs = sum(plan.pairs_in)
        exact = self.combine_mode == "exact"
        handle = AllToAllHandle(
            packed_row_XK=packed.packed_row_TK,
            weights_XK=None if exact else layout.weights_XK(received).contiguous(),
            home_row_TK=(plan.pairs if exact else plan.firsts).packed_row_TK,
            weights_TK=weights_TK[: plan.num_taken],
            rows_out=plan.pairs_out if exact else plan.records_out,
            rows_in=plan.pairs_in if exact else plan.records_in,
        )
        return RoundInput(
            **self._rows_of_experts(layout, received, packed, num_pairs)._asdict(),
            num_rows=num_pairs,
            handle=handle,
            out_dtype=x_TD.dtype,
            num_taken=plan.num_taken,
            more=plan.more,
        )

    def _bring_home(self, y_RD: Tensor, handle: AllToAllHandle) -> Home:
        if handle.weights_XK is None:
            back_RD = rows_in_order(y_RD, handle.packed_row_XK, y_RD.shape[0])
            weights_TK = handle.weights_TK
        else:
            back_RD = combine(y_RD, handle.packed_row_XK, handle.weights_XK)
            weights_TK = torch.ones_like(handle.weights_TK)
        home_RD = y_RD.new_empty(sum(handle.rows_out), y_RD.shape[1])
        self.group.all_to_all(home_RD, back_RD, handle.rows_out, handle.rows_in)
        num_sent = back_RD.shape[0] - handle.rows_in[self.group.rank]
        self.traffic.combine_bytes += num_sent * y_RD.shape[1] * y_RD.element_size()
        return Home(home_RD, handle.home_row_TK, weights_TK)

    def _agree(self, expert_ids_TK: Tensor) -> _RoundPlan:
        """The rows of this round on every rank: as many leading ones as fit, by a matrix that all ranks hold alike.

        A rank proposes so many tokens that what comes home fits. Where some rank would receive too much, all take the
        same smaller share; one token of each rank always fits (`check_row_cap`).
        """
        num_tokens, num_ranks = expert_ids_TK.shape[0], self.group.size
        most = num_tokens if self.row_cap is None else self.row_cap // self.top_k
        while True:
            num_taken = min(num_tokens, most)
            targets = self.replicas.choose(expert_ids_TK[:num_taken], self.group.rank)
            pairs = pack(targets.ranks_TK, self._ranks_N, num_ranks)
            firsts = pack(targets.firsts_TK, self._ranks_N, num_ranks)
            counts = self._exchange_counts(pairs, firsts, num_taken, num_tokens - num_taken)
            fullest = max(sum(of_rank.pairs[rank] for of_rank in counts) for rank in range(num_ranks))
            if self.row_cap is None or fullest <= self.row_cap:
                break
            most_taken = max(of_rank.num_taken for of_rank in counts)
            most = max(1, min(most_taken * self.row_cap // fullest, most_taken - 1))
        own = counts[self.group.rank]
        return _RoundPlan(
            num_taken=num_taken,
            more=any(of_rank.num_left for of_rank in counts),
            targets=targets,
            pairs=pairs,
            firsts=firsts,
            records_out=own.records,
            records_in=[of_rank.records[self.group.rank] for of_rank in counts],
            pairs_out=own.pairs,
            pairs_in=[of_rank.pairs[self.group.rank] for of_rank in counts],
        )

    def _exchange_counts(self, pairs: Packed, firsts: Packed, num_taken: int, num_left: int) -> list[_Counts]:
        """What every rank has for every other, after one all_gather and the one host sync of a round."""
        num_ranks = self.group.size
        own = round_counts(pairs.offsets_S1, firsts.offsets_S1, firsts.packed_row_TK, num_taken, num_left)
        everyone = own.new_empty(num_ranks * own.shape[0])
        self.group.all_gather(everyone, own)
        self.traffic.count_bytes += (num_ranks - 1) * own.shape[0] * own.element_size()
        counts = []
        for rank, row in enumerate(everyone.view(num_ranks, -1).tolist()):
            records, (num_records, taken, left) = row[num_ranks : 2 * num_ranks], row[2 * num_ranks :]
            # Counted apart on the sender's device; seen by all ranks before any row travels.
            if sum(records) != num_records:
                raise RuntimeError(
                    f"all_to_all: rank {rank} announces {sum(records)} records ({records} by rank) and holds "
                    f"{num_records}; nothing was sent."
                )
            counts.append(_Counts(row[:num_ranks], records, taken, left))
        return counts

    def _records(self, layout: RecordLayout, plan: _RoundPlan, x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        """One record for each token and rank it goes to, by rank, then token; a row is quantised once."""
        num_records = sum(plan.records_out)
        records = layout.empty(num_records, x_TD.device)
        x_TD, weights_TK = x_TD[: plan.num_taken], weights_TK[: plan.num_taken]
        rows_TD, scales_GT = quantize_rows(x_TD) if self.fp8_rows else (x_TD, None)
        token_X, targets = plan.firsts.row_token_R[:num_records], plan.targets
        source = RecordSource(
            rows_TD, scales_GT, weights_TK, targets.ranks_TK, targets.slots_TK, token_X, plan.firsts.offsets_S1
        )
        write_records(layout.parts(records), source)
        return records


class _Counts(NamedTuple):
    """What one rank announces: pairs and records for each rank, its tokens in this round and those left after it."""

    pairs: list[int]
    records: list[int]
    num_taken: int
    num_left: int


class _RoundPlan(NamedTuple):
    """The round all ranks agreed on, as this rank sees it."""

    num_taken: int
    more: bool
    targets: Targets
    pairs: Packed  # every (token, k), by rank, then token, then k: the order in which exact rows come home
    firsts: Packed  # the first k of each token and rank: one record each
    records_out: list[int]
    records_in: list[int]
    pairs_out: list[int]
    pairs_in: list[int]
