"""Every rank gets every rank's rows and computes its experts' share: fixed shapes, no host sync, fit for CUDA graphs.

Knows ranks, rows and slots; knows nothing of what an expert computes. For small batches: where most ranks need most
tokens anyway, and the time goes to the number of launches and not to bytes.

    dispatch   records of all ranks' tokens, slots chosen by their source             one all_gather
    combine    exact: for each token its row of each expert here, at most
               J = min(K, slots here) of them, goes to its rank and is summed there   one all_to_all of fixed shape
               fast:  the rows of a token are summed first, then ranks are added      one reduce_scatter

All ranks give the same number of rows, agreed on beforehand: who has fewer fills up with rows whose ids are -1. The
same number gives the same rounds on every rank.

Why exact sends J rows and not fewer: all K experts of every token may live on one rank, and a fixed shape has room for
that. A sum over ranks of [T, K, D] with zeros would keep the bits as well and moves K rows where this moves J.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from expert_parallel.group_dispatcher import GroupDispatcher, Home
from expert_parallel.rounds import RoundInput
from kernels.combine import combine
from kernels.pack import pack


class AllGatherHandle(NamedTuple):
    """What a round needs to bring its rows home."""

    packed_row_XK: Tensor  # the experts' row of each pair of all ranks' tokens
    weights_XK: Tensor | None  # fast: the weights of all ranks' tokens
    ranks_TK: Tensor  # where this rank's own pairs went
    weights_TK: Tensor


class AllGatherDispatcher(GroupDispatcher):
    """`GroupDispatcher` with `all_gather` there and fixed shapes home.

    With N ranks, row_cap leaves room for N * K rows for each row that a rank brings.
    """

    graph_safe: bool = True
    equal_rows: bool = True
    two_open: bool = True

    def _prepare(self) -> None:
        # J of each rank, and how many rows of one token come home from the ranks before it.
        self._pairs_of_rank = [min(self.top_k, num_slots) for num_slots in self.slots_per_rank]
        self._pairs_N = torch.tensor(self._pairs_of_rank, dtype=torch.int64, device=self.device)
        self._pairs_before_N = self._pairs_N.cumsum(0) - self._pairs_N
        # Slots of all ranks have one number each, rank by rank; those of this rank are the table's only known ones.
        slots_N = torch.tensor(self.slots_per_rank, dtype=torch.int32, device=self.device)
        self._first_slot_N = slots_N.cumsum(0).int() - slots_N
        first = sum(self.slots_per_rank[: self.group.rank])
        self._own_slot_of_P = torch.full((sum(self.slots_per_rank),), -1, dtype=torch.int32, device=self.device)
        self._own_slot_of_P[first : first + self.num_slots] = torch.arange(self.num_slots, dtype=torch.int32)

    def buffer_bytes(self, num_tokens: int, width: int, dtype: torch.dtype) -> int:
        """What the buffers of a round hold, where each rank brings `num_tokens` rows."""
        taken, pairs = self._num_taken(num_tokens), self.group.size * self._pairs_of_rank[self.group.rank]
        layout = self._layout(width, dtype)
        arrived = (1 + self.group.size) * taken * layout.num_bytes + self._fp8_bytes(taken + pairs * taken, width)
        home = (self.group.size + 1 if self.combine_mode == "fast" else pairs + sum(self._pairs_of_rank)) * taken
        return arrived + home * width * dtype.itemsize

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> RoundInput:
        """Takes the leading rows that fit: the same number on every rank of the group."""
        self._check_top_k(expert_ids_TK)
        num_taken = self._num_taken(x_TD.shape[0])
        if not x_TD.is_cuda:
            self._check_same_rows(x_TD.shape[0])
        layout = self._layout(x_TD.shape[1], x_TD.dtype)
        targets = self.replicas.choose(expert_ids_TK[:num_taken], self.group.rank)
        own = layout.empty(num_taken, x_TD.device)
        self._write_rows(layout, own, x_TD[:num_taken])
        first_slot_TK = self._first_slot_N[targets.ranks_TK.clamp_min(0)]
        layout.slots_XK(own).copy_(torch.where(targets.ranks_TK >= 0, first_slot_TK + targets.slots_TK, -1))
        if layout.weights:
            layout.weights_XK(own).copy_(weights_TK[:num_taken])
        records = layout.empty(self.group.size * num_taken, x_TD.device)
        self.group.all_gather(records, own)
        self._count_dispatch((self.group.size - 1) * num_taken, layout)

        packed = pack(layout.slots_XK(records).contiguous(), self._own_slot_of_P, max(self.num_slots, 1))
        # The experts of a token are distinct, so no more of its pairs can be here.
        num_rows = records.shape[0] * self._pairs_of_rank[self.group.rank]
        handle = AllGatherHandle(
            packed_row_XK=packed.packed_row_TK,
            weights_XK=layout.weights_XK(records).contiguous() if layout.weights else None,
            ranks_TK=targets.ranks_TK,
            weights_TK=weights_TK[:num_taken],
        )
        return RoundInput(
            **self._rows_of_experts(layout, records, packed, num_rows)._asdict(),
            num_rows=num_rows,
            handle=handle,
            out_dtype=x_TD.dtype,
            num_taken=num_taken,
            more=num_taken < x_TD.shape[0],
        )

    def _bring_home(self, y_RD: Tensor, handle: AllGatherHandle) -> Home | Tensor:
        if handle.weights_XK is not None:
            return self._sums(combine(y_RD, handle.packed_row_XK, handle.weights_XK))
        num_taken, pairs_here = handle.ranks_TK.shape[0], self._pairs_of_rank[self.group.rank]
        back_RD = y_RD[_pairs_by_token(handle.packed_row_XK, pairs_here)]
        out_rows = [num_taken * pairs for pairs in self._pairs_of_rank]
        rows = [num_taken * pairs_here] * self.group.size
        home_RD = y_RD.new_empty(sum(out_rows), y_RD.shape[1])
        self.group.all_to_all(home_RD, back_RD, out_rows, rows)
        self.traffic.combine_bytes += (self.group.size - 1) * rows[0] * y_RD.shape[1] * y_RD.element_size()
        return Home(home_RD, self._home_rows(handle.ranks_TK), handle.weights_TK)

    def _sums(self, part_XD: Tensor) -> Tensor:
        out_TD = part_XD.new_empty(part_XD.shape[0] // self.group.size, part_XD.shape[1])
        self.group.reduce_scatter(out_TD, part_XD)
        self.traffic.combine_bytes += (self.group.size - 1) * out_TD.numel() * out_TD.element_size()
        return out_TD

    def _home_rows(self, ranks_TK: Tensor) -> Tensor:
        """Where each own pair comes home: by rank, then token, then place among the token's pairs on that rank."""
        num_taken, top_k = ranks_TK.shape
        earlier_KK = torch.ones(top_k, top_k, dtype=torch.bool, device=ranks_TK.device).tril(-1)
        place_TK = ((ranks_TK[:, :, None] == ranks_TK[:, None, :]) & earlier_KK).sum(dim=2)
        rank_TK = ranks_TK.clamp_min(0).long()
        token_T1 = torch.arange(num_taken, device=ranks_TK.device)[:, None]
        row_TK = num_taken * self._pairs_before_N[rank_TK] + token_T1 * self._pairs_N[rank_TK] + place_TK
        return torch.where(ranks_TK >= 0, row_TK, -1).int()

    def _num_taken(self, num_tokens: int) -> int:
        if self.row_cap is None:
            return num_tokens
        return min(num_tokens, self.row_cap // (self.group.size * self.top_k))

    def _check_same_rows(self, num_tokens: int) -> None:
        """gloo does not compare sizes: where they differ it ends a process without a word. On a GPU the graph's batch
        is agreed on by all ranks, and waiting for the device here would not be graph-safe."""
        own = torch.tensor([num_tokens])
        everyone = own.new_empty(self.group.size)
        self.group.all_gather(everyone, own)
        self.traffic.count_bytes += (self.group.size - 1) * own.element_size()
        counts = everyone.tolist()
        if len(set(counts)) > 1:
            raise RuntimeError(f"all_gather: ranks bring {counts} rows; all must bring the same number, with padding.")


def _pairs_by_token(packed_row_XK: Tensor, num_pairs: int) -> Tensor:
    """int64 [X * J]: the rows of each record's pairs, in the order of k, then row 0 as often as J asks for."""
    num_records = packed_row_XK.shape[0]
    here_XK = packed_row_XK >= 0
    record_X1 = torch.arange(num_records, device=here_XK.device)[:, None]
    place_XK = record_X1 * num_pairs + here_XK.cumsum(1) - 1
    # Pairs without a row are all written behind the last place, where nobody reads.
    place_XK = torch.where(here_XK, place_XK, num_records * num_pairs)
    row_R = torch.zeros(num_records * num_pairs + 1, dtype=torch.int64, device=here_XK.device)
    return row_R.scatter_(0, place_XK.flatten(), packed_row_XK.flatten().long())[:-1]
