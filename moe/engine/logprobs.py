"""Log-probabilities of tokens: of the chosen one, and of the most likely ones, under the model's own distribution.

Knows logits and ids; knows nothing of requests. The distribution is the raw one, before bias, penalties, temperature
and cuts. The sum of the softmax is taken in fixed-point integers, which add up to the same bits in any order: a row's
numbers do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe.engine.request import Logprob, TokenLogprobs

# exp(x - max) in units of 2^-40: 2^20 of them (a vocabulary) stay below 2^62, and 2^-40 is far below fp32's 2^-24.
FIXED_POINT = 2.0**40


class LogprobTensors(NamedTuple):
    """One row a token. Ranks count from 1; among equal logits the lower id is first. Id -1 has NaN and rank 0."""

    ids_R: Tensor  # int64
    logprobs_R: Tensor  # fp32
    ranks_R: Tensor  # int64
    top_ids_RN: Tensor  # int64, most likely first
    top_logprobs_RN: Tensor  # fp32

    def to_host(self) -> LogprobTensors:
        """Copies on the host, begun and not waited for."""
        return LogprobTensors(*(x.to("cpu", non_blocking=True) for x in self))


def fixed_point_exp(x: Tensor) -> Tensor:
    """exp of values <= 0 as int64 in units of 2^-40; NaN gives 0."""
    return (x.double().exp() * FIXED_POINT).nan_to_num(nan=0.0, posinf=0.0).round().long()


def token_logprobs(logits_RV: Tensor, ids_R: Tensor, num_top: int) -> LogprobTensors:
    """Of token ids_R[r] under softmax(logits_RV[r]), with the `num_top` most likely tokens (at most V)."""
    num_top = min(num_top, logits_RV.shape[1])
    max_R1 = logits_RV.amax(dim=1, keepdim=True)
    sum_R1 = fixed_point_exp(logits_RV - max_R1).sum(dim=1, keepdim=True)
    lse_R1 = max_R1.double() + (sum_R1.double() / FIXED_POINT).log()
    known_R1 = ids_R.unsqueeze(1) >= 0
    at_R1 = ids_R.unsqueeze(1).clamp_min(0)
    x_R1 = logits_RV.gather(1, at_R1)
    all_ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    before_RV = (logits_RV > x_R1) | ((logits_RV == x_R1) & (all_ids_V < at_R1))
    top_ids_RN = _top_ids(logits_RV, num_top)
    return LogprobTensors(
        ids_R=ids_R,
        logprobs_R=torch.where(known_R1, x_R1.double() - lse_R1, torch.nan).squeeze(1).float(),
        ranks_R=torch.where(known_R1.squeeze(1), before_RV.sum(dim=1) + 1, 0),
        top_ids_RN=top_ids_RN,
        top_logprobs_RN=(logits_RV.gather(1, top_ids_RN).double() - lse_R1).float(),
    )


def to_records(tensors: LogprobTensors, num_top_R: Sequence[int]) -> list[TokenLogprobs]:
    """One dict a row: the row's own token, and its `num_top_R[r]` most likely ones in order. Waits for the device.

    A row without a token (id -1) has an empty dict; the text of tokens is the caller's to add.
    """
    ids, logprobs, ranks, top_ids, top_logprobs = (x.tolist() for x in tensors)
    records: list[TokenLogprobs] = []
    for row, num_top in enumerate(num_top_R):
        if ids[row] < 0:
            records.append({})
            continue
        record = {ids[row]: Logprob(logprobs[row], ranks[row])}
        for at in range(min(num_top, len(top_ids[row]))):
            record.setdefault(top_ids[row][at], Logprob(top_logprobs[row][at], at + 1))
        records.append(record)
    return records


def _top_ids(logits_RV: Tensor, num_top: int) -> Tensor:
    """Ids of the largest logits, the lower id first among equals: topk over keys that are all different."""
    if num_top == 0:
        return torch.empty(logits_RV.shape[0], 0, dtype=torch.int64, device=logits_RV.device)
    bits_RV = (logits_RV + 0.0).view(torch.int32)  # + 0.0: -0 and 0 are equal
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV).long()  # as integers, ordered like the floats
    vocab_size = logits_RV.shape[1]
    key_RV = ordered_RV * 2**31 + (vocab_size - 1 - torch.arange(vocab_size, device=logits_RV.device))
    top_RN = key_RV.topk(num_top, dim=1, largest=True, sorted=True).values
    return vocab_size - 1 - top_RN % 2**31
