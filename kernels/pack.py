"""From the experts of each token to rows grouped by expert slot: a counting sort on the device.

Knows ids, slots and rows; knows neither weights nor hidden states. The grouped GEMM reads its operand through
`row_token_R`, the combine finds each row again through `packed_row_TK`.

Worked example: three tokens, K = 2, experts 0 and 1 live in slots 1 and 0, expert 2 lives elsewhere.

    expert_ids_TK = [[0, 1], [2, 0], [1, 2]]     slot_of_E = [1, 0, -1]     num_slots = 2
    row_token_R   = [0, 2, 0, 1, -, -]           rows of slot 0: tokens 0, 2; of slot 1: tokens 0, 1; then unused
    packed_row_TK = [[2, 0], [-1, 3], [1, -1]]
    offsets_S1    = [0, 2, 4]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_same_device, assert_shape


class Packed(NamedTuple):
    """Where each (token, k) went, and which rows belong to which slot."""

    row_token_R: Tensor
    """int32 [T*K]: the token of each packed row. Entries from offsets_S1[-1] on are unspecified."""
    packed_row_TK: Tensor
    """int32 [T, K]: the packed row of (t, k), -1 where its expert has no slot here."""
    offsets_S1: Tensor
    """int32 [S+1]: slot s owns rows offsets_S1[s] to offsets_S1[s+1]."""


def pack(expert_ids_TK: Tensor, slot_of_E: Tensor, num_slots: int) -> Packed:
    """Groups the (token, k) pairs by slot, stably: by slot, then token, then k. `pack_reference` is the definition.

    expert_ids_TK int32 [T, K]; slot_of_E int32 [E], the slot of each expert on this rank or -1. Ids outside [0, E) and
    slots outside [0, num_slots) count as -1. Shapes depend on T, K and S alone; the host learns nothing.
    """
    return pack_reference(expert_ids_TK, slot_of_E, num_slots)


def _check_operands(expert_ids_TK: Tensor, slot_of_E: Tensor, num_slots: int) -> None:
    assert_shape("expert_ids_TK", expert_ids_TK, (None, None))
    assert_dtype("expert_ids_TK", expert_ids_TK, torch.int32)
    assert_shape("slot_of_E", slot_of_E, (None,))
    assert_dtype("slot_of_E", slot_of_E, torch.int32)
    assert_same_device(expert_ids_TK, slot_of_E=slot_of_E)
    assert num_slots >= 1, f"num_slots={num_slots}; a rank holds at least one slot"
    assert expert_ids_TK.numel() < 2**31, f"{expert_ids_TK.numel()} rows do not fit int32 row numbers"


def pack_reference(expert_ids_TK: Tensor, slot_of_E: Tensor, num_slots: int) -> Packed:
    """The definition of packing, in plain torch: a stable sort by slot."""
    _check_operands(expert_ids_TK, slot_of_E, num_slots)
    num_experts, top_k = slot_of_E.shape[0], expert_ids_TK.shape[1]
    ids_R = expert_ids_TK.reshape(-1).long()
    known_R = (ids_R >= 0) & (ids_R < num_experts)
    slots_R = slot_of_E[ids_R.where(known_R, 0)].long()
    here_R = known_R & (slots_R >= 0) & (slots_R < num_slots)
    order_R = torch.argsort(slots_R.where(here_R, num_slots), stable=True)
    counts_S = torch.bincount(slots_R[here_R], minlength=num_slots)
    offsets_S1 = torch.nn.functional.pad(counts_S.cumsum(0), (1, 0)).to(torch.int32)
    row_of_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.shape[0], device=order_R.device))
    packed_row_TK = row_of_R.where(here_R, -1).to(torch.int32).view_as(expert_ids_TK)
    row_token_R = (order_R // max(top_k, 1)).to(torch.int32)
    return Packed(row_token_R, packed_row_TK, offsets_S1)
