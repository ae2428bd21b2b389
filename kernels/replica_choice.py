"""Which replica of an expert each choice of a token goes to, and which choices are a rank's first: one launch.

Knows tables of replicas, tokens and ranks; knows no loads. Replicas hold equal weights, so the choice moves work and
changes no bit of a result.

Worked example: token 0 of rank 1 with experts 4, 2 and 6, which live on ranks 0, 1 and 0, in slots 1, 0 and 2: ranks
[0, 1, 0], slots [1, 0, 2], firsts [0, 1, -1]: its row goes to rank 0 once.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs

_ELEMENTS = 512
"""Choices of one program."""


class ReplicaColumns(NamedTuple):
    """int32: where the replicas of an expert live. Column c of row e is read for c < count[e]."""

    ranks_EC: Tensor
    slots_EC: Tensor
    count_E: Tensor


class Targets(NamedTuple):
    """int32 [T, K] each: the rank and the slot on it where (token, k) goes; -1 where the id is no expert."""

    ranks_TK: Tensor
    slots_TK: Tensor
    firsts_TK: Tensor
    """The rank, and -1 where an earlier choice of the token goes to the same one."""


def choose_replicas(expert_ids_TK: Tensor, columns: ReplicaColumns, source_rank: int) -> Targets:
    """Token t of the source rank takes replica (t + source rank) mod count of each of its experts. Ids outside [0, E)
    give -1. No host sync. `choose_replicas_reference` is the definition."""
    run = choose_replicas_triton if uses_triton(expert_ids_TK) else choose_replicas_reference
    return run(expert_ids_TK, columns, source_rank)


@triton.jit
def replica_of(ids_ptr, ranks_ptr, slots_ptr, count_ptr, choice, turn, used, num_experts, num_replicas):
    """Rank and slot where choices (indices into [T, K]) go, -1 for none; `turn` is source rank + token."""
    expert = tl.load(ids_ptr + choice, mask=used, other=-1)
    known = (expert >= 0) & (expert < num_experts)
    count = tl.load(count_ptr + expert, mask=known, other=1)
    place = expert * num_replicas + (turn % count).to(tl.int32)
    return tl.load(ranks_ptr + place, mask=known, other=-1), tl.load(slots_ptr + place, mask=known, other=-1)


# ranks[t, k], slots[t, k] = the columns (t + source) mod count[e] of e = ids[t, k]; firsts[t, k] = ranks[t, k] or -1
#   ids_ptr int32 [T, K]; table_ranks_ptr, table_slots_ptr int32 [E, C]; count_ptr int32 [E]; outputs int32 [T, K]
#   grid (cdiv(T, BLOCK_T),): a program owns BLOCK_T tokens with all their choices; K is filled up by a mask


@triton.jit(do_not_specialize=["num_tokens", "source"])
def _choose_kernel(
    ids_ptr,
    table_ranks_ptr,
    table_slots_ptr,
    count_ptr,
    ranks_ptr,
    slots_ptr,
    firsts_ptr,
    num_tokens,
    num_experts,
    num_replicas,
    source,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    used = (token < num_tokens) & (k < TOP_K)
    choice = token * TOP_K + k
    rank, slot = replica_of(
        ids_ptr, table_ranks_ptr, table_slots_ptr, count_ptr, choice, token + source, used, num_experts, num_replicas
    )
    repeats = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for earlier in tl.static_range(TOP_K):  # pyright: ignore
        other = tl.sum(tl.where(k == earlier, rank, 0), axis=1)[:, None]
        repeats |= ((other == rank) & (k > earlier)).to(tl.int32)
    tl.store(ranks_ptr + choice, rank, mask=used)
    tl.store(slots_ptr + choice, slot, mask=used)
    tl.store(firsts_ptr + choice, tl.where(repeats > 0, -1, rank), mask=used)


def choose_replicas_triton(expert_ids_TK: Tensor, columns: ReplicaColumns, source_rank: int) -> Targets:
    """`choose_replicas` as one launch."""
    _check_operands(expert_ids_TK, columns)
    (num_tokens, top_k), ids_TK = expert_ids_TK.shape, expert_ids_TK.contiguous()
    targets = Targets(*ids_TK.new_empty(3, num_tokens, top_k))
    if num_tokens == 0:
        return targets
    block_k = next_power_of_2(top_k)
    block_t = max(1, _ELEMENTS // block_k)
    _choose_kernel[(cdiv(num_tokens, block_t),)](
        ids_TK,
        *columns,
        *targets,
        num_tokens,
        *columns.ranks_EC.shape,
        source_rank,
        TOP_K=top_k,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        num_warps=4,
        **dependent_launch(ids_TK),
    )
    return targets


def _check_operands(expert_ids_TK: Tensor, columns: ReplicaColumns) -> None:
    given = [each.dtype for each in (expert_ids_TK, *columns)]
    assert given == [torch.int32] * 4, f"ids and tables are {given}, wanted int32"
    assert expert_ids_TK.numel() < 2**31, f"{expert_ids_TK.numel()} choices do not fit int32 places"


def choose_replicas_reference(expert_ids_TK: Tensor, columns: ReplicaColumns, source_rank: int) -> Targets:
    """The definition, in plain torch."""
    num_tokens, top_k = expert_ids_TK.shape
    turn_T = source_rank + torch.arange(num_tokens, device=expert_ids_TK.device)
    ranks_TK, slots_TK = replicas_in_turn(expert_ids_TK, columns, turn_T)
    earlier_KK = torch.ones(top_k, top_k, dtype=torch.bool, device=ranks_TK.device).tril(-1)
    same_TKK = ranks_TK[:, :, None] == ranks_TK[:, None, :]
    return Targets(ranks_TK, slots_TK, torch.where((same_TKK & earlier_KK).any(dim=2), -1, ranks_TK))


def replicas_in_turn(expert_ids_TK: Tensor, columns: ReplicaColumns, turn_T: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks and slots for tokens of any ranks: `turn` is source rank + index on it. No host sync."""
    known_TK = (expert_ids_TK >= 0) & (expert_ids_TK < columns.count_E.shape[0])
    ids_TK = torch.where(known_TK, expert_ids_TK, 0).long()
    column_TK = turn_T[:, None] % columns.count_E[ids_TK]
    ranks_TK = torch.where(known_TK, columns.ranks_EC[ids_TK, column_TK], -1)
    return ranks_TK, torch.where(known_TK, columns.slots_EC[ids_TK, column_TK], -1)
