"""Edits of single logits: bias, masked end-of-sequence ids, repetition, presence and frequency penalties.

Knows rows, ids and counts; knows nothing of draws. An edit touches only the (row, id) pairs it is about, so nothing of
the size [B, V] is built or uploaded, and rows without edits keep their bits.

    x = x + bias[v]                                     logit_bias
    x = -inf                                            min_tokens not reached, v ends the text
    x = x / r if x > 0 else x * r                       repetition r, v in prompt or output
    x = x - frequency * count(v) - presence             v count(v) > 0 times in the output
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe.engine.upload import upload_array


class TokenCounts:
    """How often each id stands in a sequence's output; ids of the prompt are known with count 0. Grows by `extend`."""

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int] = ()) -> None:
        self._place = {token_id: at for at, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.fromiter(self._place, dtype=np.int64, count=len(self._place))
        self._counts = np.zeros(len(self._place), dtype=np.int32)
        self.num_output = 0
        self.extend(output_ids)

    def extend(self, output_ids: Iterable[int]) -> None:
        for token_id in output_ids:
            at = self._place.setdefault(token_id, len(self._place))
            if at >= len(self._ids):
                self._ids = np.resize(self._ids, max(16, 2 * at))
                self._counts = np.concatenate([self._counts, np.zeros(len(self._ids) - at, dtype=np.int32)])
            self._ids[at] = token_id
            self._counts[at] += 1
            self.num_output += 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(distinct ids, their counts in the output); views, valid until the next `extend`."""
        size = len(self._place)
        return self._ids[:size], self._counts[:size]


@dataclass(frozen=True)
class PenaltyRow:
    """What one row asks for."""

    row: int
    counts: TokenCounts
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True)
class LogitEdits:
    """All edits of one batch on the device. The pairs of one kind are distinct, so each is written by one entry."""

    bias_at_2P: Tensor | None  # int64 [2, P]: rows, ids
    bias_P: Tensor | None
    masked_at_2Q: Tensor | None
    seen_at_2S: Tensor | None
    counts_S: Tensor | None  # int32
    strengths_3S: Tensor | None  # fp32: repetition, presence, frequency of each pair's row

    @classmethod
    def build(
        cls,
        biases: Sequence[tuple[int, int, float]],
        masked: Sequence[tuple[int, int]],
        penalties: Sequence[PenaltyRow],
        device: torch.device,
    ) -> LogitEdits | None:
        """None where no row needs an edit. `biases`: (row, id, bias); `masked`: (row, id)."""
        if not (biases or masked or penalties):
            return None
        seen_at_2S = counts_S = strengths_3S = None
        if penalties:
            arrays = [row.counts.arrays() for row in penalties]
            lengths = [len(ids) for ids, _ in arrays]
            rows = np.repeat(np.array([row.row for row in penalties], dtype=np.int64), lengths)
            strengths = np.array([(p.repetition, p.presence, p.frequency) for p in penalties], dtype=np.float32)
            seen_at_2S = upload_array(np.stack([rows, np.concatenate([ids for ids, _ in arrays])]), device)
            counts_S = upload_array(np.concatenate([counts for _, counts in arrays]), device)
            strengths_3S = upload_array(np.repeat(strengths.T, lengths, axis=1), device)
        return cls(
            bias_at_2P=upload_array(np.array([(r, i) for r, i, _ in biases], dtype=np.int64).T, device)
            if biases
            else None,
            bias_P=upload_array(np.array([b for _, _, b in biases], dtype=np.float32), device) if biases else None,
            masked_at_2Q=upload_array(np.array(masked, dtype=np.int64).T, device) if masked else None,
            seen_at_2S=seen_at_2S,
            counts_S=counts_S,
            strengths_3S=strengths_3S,
        )

    def apply_(self, logits_BV: Tensor) -> None:
        """Edit the logits in place, in the order of this file's header."""
        if self.bias_at_2P is not None and self.bias_P is not None:
            at = tuple(self.bias_at_2P)
            logits_BV[at] = logits_BV[at] + self.bias_P
        if self.masked_at_2Q is not None:
            # A value on the device and not a Python number: index_put with a number copies it from the host each time.
            at = tuple(self.masked_at_2Q)
            logits_BV[at] = torch.full_like(at[0], -torch.inf, dtype=logits_BV.dtype)
        if self.seen_at_2S is not None and self.counts_S is not None and self.strengths_3S is not None:
            at = tuple(self.seen_at_2S)
            repetition_S, presence_S, frequency_S = self.strengths_3S
            x_S = logits_BV[at]
            x_S = torch.where(x_S > 0, x_S / repetition_S, x_S * repetition_S)
            # Two steps, each rounded: a fused multiply-add would give other bits on other devices.
            x_S = x_S - frequency_S * self.counts_S
            logits_BV[at] = x_S - presence_S * (self.counts_S > 0)
