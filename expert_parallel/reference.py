"""What dispatch and combine mean, as plain loops. Every dispatcher is tested against this; the product never calls it.

Where the others may not look at the ids (that would wait for the device), this one does: an id outside -1..E-1 is an
error.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from expert_parallel.dispatcher import ExpertInput


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
