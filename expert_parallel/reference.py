"""What dispatch and combine mean, as plain loops. Every dispatcher is tested against this; the product never calls it.

Where the others may not look at the ids (that would wait for the device), this one does: an id outside -1..E-1 is an
error. `ReferenceDispatcher` is one rank by itself; `ReferenceRanks` is a whole group, its ranks in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from expert_parallel.dispatcher import ExpertInput
from expert_parallel.placement import Placement


class ReferenceHandle(NamedTuple):
    """For each (token, k): its row and its weight; None where the expert has no slot here."""

    rows: list[list[int | None]]
    weights_TK: Tensor


class ReferenceDispatcher:
    """The same two verbs as `Dispatcher`, one token at a time, one row for each (token, expert)."""

    graph_safe: bool = False
    row_cap: int | None = None
    rows_once: Literal["per_rank", "per_expert"] = "per_expert"

    def __init__(self, slot_of_E: Tensor, num_slots: int) -> None:
        self.slot_of = slot_of_E.tolist()
        self.num_slots = num_slots

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> ExpertInput:
        """Copies rows, ordered by slot, then token, then k."""
        ids, num_experts = expert_ids_TK.tolist(), len(self.slot_of)
        places: list[tuple[int, int, int]] = []
        for t, of_token in enumerate(ids):
            for k, expert in enumerate(of_token):
                if not -1 <= expert < num_experts:
                    raise ValueError(f"expert id {expert} of token {t} is outside 0..{num_experts - 1} and not -1.")
                if expert >= 0 and self.slot_of[expert] >= 0:
                    places.append((self.slot_of[expert], t, k))
        places.sort()
        rows: list[list[int | None]] = [[None] * len(of_token) for of_token in ids]
        for row, (_, t, k) in enumerate(places):
            rows[t][k] = row
        counts = [sum(slot == s for slot, _, _ in places) for s in range(self.num_slots)]
        offsets = [sum(counts[:s]) for s in range(self.num_slots + 1)]
        tokens = torch.tensor([t for _, t, _ in places], dtype=torch.int64, device=x_TD.device)
        return ExpertInput(
            rows_XD=x_TD[tokens],
            row_index_R=None,
            offsets_S1=torch.tensor(offsets, dtype=torch.int32, device=x_TD.device),
            num_rows=len(places),
            handle=ReferenceHandle(rows, weights_TK),
        )

    def combine(self, y_RD: Tensor, handle: ReferenceHandle) -> Tensor:
        """Sum in fp32 over k = 0..K-1, one cast at the end."""
        out_TD = torch.zeros(len(handle.rows), y_RD.shape[1], dtype=torch.float32, device=y_RD.device)
        for t, of_token in enumerate(handle.rows):
            for k, row in enumerate(of_token):
                if row is not None:
                    out_TD[t] += handle.weights_TK[t, k] * y_RD[row].float()
        return out_TD.to(y_RD.dtype)


class RankBatch(NamedTuple):
    """What one rank brings to a group's dispatch."""

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor


class Row(NamedTuple):
    """One row of the experts' input: where it goes, then whose it is. Rows of a rank are sorted in this order."""

    slot: int
    source: int
    token: int
    k: int


class ReferenceRanks:
    """The two verbs for all ranks of a group at once: what goes in and comes out are lists by rank.

    Rows lie by slot, then source rank, token, k. Token t of source rank r goes to replica (t + r) mod count of each of
    its experts, replicas in order of rank and slot.
    """

    def __init__(self, placement: Placement, combine: Literal["exact", "fast"]) -> None:
        self.placement = placement
        self.combine_mode = combine

    def dispatch(self, batches: Sequence[RankBatch]) -> list[ExpertInput]:
        """The input of every rank's experts. The handle of each is its list of `Row`; combine wants them all."""
        arrived: list[list[Row]] = [[] for _ in range(self.placement.num_ranks)]
        for source, batch in enumerate(batches):
            for token, of_token in enumerate(batch.expert_ids_TK.tolist()):
                for k, expert in enumerate(of_token):
                    if not -1 <= expert < self.placement.num_experts:
                        raise ValueError(
                            f"expert id {expert} of token {token} of rank {source} is outside "
                            f"0..{self.placement.num_experts - 1} and not -1."
                        )
                    if expert >= 0:
                        replicas = self.placement.slots_of(expert)
                        target = replicas[(token + source) % len(replicas)]
                        arrived[target.rank].append(Row(target.slot, source, token, k))
        return [self._input(rank, sorted(rows), batches) for rank, rows in enumerate(arrived)]

    def _input(self, rank: int, rows: list[Row], batches: Sequence[RankBatch]) -> ExpertInput:
        width, dtype = batches[0].x_TD.shape[1], batches[0].x_TD.dtype
        counts = [sum(row.slot == slot for row in rows) for slot in range(self.placement.num_slots(rank))]
        offsets = [sum(counts[:slot]) for slot in range(len(counts) + 1)]
        return ExpertInput(
            rows_XD=torch.stack([batches[row.source].x_TD[row.token] for row in rows])
            if rows
            else torch.empty(0, width, dtype=dtype),
            row_index_R=None,
            offsets_S1=torch.tensor(offsets, dtype=torch.int32),
            num_rows=len(rows),
            handle=rows,
        )

    def combine(
        self, y_of_rank: Sequence[Tensor], handles: Sequence[list[Row]], batches: Sequence[RankBatch]
    ) -> list[Tensor]:
        """The sums of every rank's tokens. exact: fp32, k = 0..K-1, one cast. fast: the same on each rank for its own
        rows, cast, then the ranks' sums in fp32 in the order of a token's first k on each, one cast."""
        terms: dict[tuple[int, int], dict[int, tuple[int, Tensor]]] = {}
        for rank, rows in enumerate(handles):
            for index, row in enumerate(rows):
                terms.setdefault((row.source, row.token), {})[row.k] = (rank, y_of_rank[rank][index].float())
        outs = []
        for source, batch in enumerate(batches):
            out_TD = torch.zeros(batch.x_TD.shape, dtype=torch.float32)
            for token, weights_K in enumerate(batch.weights_TK):
                sums: dict[int, Tensor] = {}
                for k, (rank, y_D) in sorted(terms.get((source, token), {}).items()):
                    place = rank if self.combine_mode == "fast" else 0
                    sums[place] = sums.get(place, torch.zeros_like(y_D)) + weights_K[k] * y_D
                for sum_D in sums.values():
                    out_TD[token] += sum_D.to(batch.x_TD.dtype).float() if self.combine_mode == "fast" else sum_D
            outs.append(out_TD.to(batch.x_TD.dtype))
        return outs
