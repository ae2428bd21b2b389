"""From the experts of each token to rows grouped by expert slot: a counting sort on the device.

Knows ids, slots and rows; knows neither weights nor hidden states. The grouped GEMM reads its operand through
`row_token_R`, the combine finds each row again through `packed_row_TK`.

Worked example: three tokens, K = 2, experts 0 and 1 live in slots 1 and 0, expert 2 lives elsewhere.

    expert_ids_TK = [[0, 1], [2, 0], [1, 2]]     slot_of_E = [1, 0, -1]     num_slots = 2
    row_token_R   = [0, 2, 0, 1, -, -]           rows of slot 0: tokens 0, 2; of slot 1: tokens 0, 1; then unused
    packed_row_TK = [[2, 0], [-1, 3], [1, -1]]
    offsets_S1    = [0, 2, 4]
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


class Packed(NamedTuple):
    """Where each (token, k) went, and which rows belong to which slot."""

    row_token_R: Tensor
    """int32 [T*K]: the token of each packed row. Entries from offsets_S1[-1] on are unspecified."""
    packed_row_TK: Tensor
    """int32 [T, K]: the packed row of (t, k), -1 where its expert has no slot here."""
    offsets_S1: Tensor
    """int32 [S+1]: slot s owns rows offsets_S1[s] to offsets_S1[s+1]."""
    counters: Tensor | None = None
    """int32 [NUM_COUNTERS], or None without a GPU and of many rows: zeros, for a launch behind this one whose programs
    count themselves, once. New ones each time: steps on two streams need their own."""


NUM_COUNTERS = tl.constexpr(1024)


def pack(expert_ids_TK: Tensor, slot_of_E: Tensor, num_slots: int) -> Packed:
    """Groups the (token, k) pairs by slot, stably: by slot, then token, then k. `pack_reference` is the definition.

    expert_ids_TK int32 [T, K]; slot_of_E int32 [E], the slot of each expert on this rank or -1. Ids outside [0, E) and
    slots outside [0, num_slots) count as -1. Shapes depend on T, K and S alone; the host learns nothing.
    """
    if not uses_triton(expert_ids_TK):
        return pack_reference(expert_ids_TK, slot_of_E, num_slots)
    run = pack_slots_triton if expert_ids_TK.numel() <= _ONE_LAUNCH_ROWS else pack_counts_triton
    return run(expert_ids_TK, slot_of_E, num_slots)


@triton.jit
def clear_counters(counters_ptr):
    """By one program of the launch that packs."""
    tl.store(counters_ptr + tl.arange(0, NUM_COUNTERS), 0)


_ONE_LAUNCH_ROWS = 4096
"""Up to here every slot's program reads all rows, in one launch; above, counts are taken first."""

_BLOCK = 128
"""Many rows: rows per program; those of one block are ranked by comparing each with each."""

_SCANS = ((128, 4), (512, 4), (2048, 8))
"""Few rows: (rows that a slot's program takes at once, warps), the first that takes them all, else the last. On an H200
512 rows took 1.9 us with the first and 2.7 with the second, 2048 rows 5.5 and 3.0."""


@triton.jit
def _load_slots(ids_ptr, slot_of_ptr, row, num_rows, num_experts, num_slots):
    """The slot of each row; num_slots where its expert is not here, num_slots + 1 past the last row."""
    in_range = row < num_rows
    expert = tl.load(ids_ptr + row, mask=in_range, other=-1)
    known = (expert >= 0) & (expert < num_experts)
    slot = tl.load(slot_of_ptr + expert, mask=known, other=-1)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, num_slots)
    return tl.where(in_range, slot, num_slots + 1)


# Few rows, one launch. A slot's program reads the slots of all rows: the rows of lower slots, counted, are its offset,
# its own follow from there, ascending. The program behind the last slot writes the last offset, the rows of none and
# zeros for counters.
#   ids_ptr int32 [R]; slot_of_ptr int32 [E]; row_token_ptr int32 [R]; packed_row_ptr int32 [R]; offsets_ptr int32 [S+1]
#   counters_ptr int32 [NUM_COUNTERS]
#   grid (S + 1,): a program owns one slot. Sums of integers: no order to see.


@triton.jit
def _write_rows(row_token_ptr, packed_row_ptr, row, mine, first, has_slot, TOP_K: tl.constexpr):
    """Rows that are `mine` take the places from `first` on, or none; returns how many there are."""
    packed = first + tl.cumsum(mine.to(tl.int32), axis=0) - 1
    tl.store(packed_row_ptr + row, tl.where(has_slot, packed, -1), mask=mine)
    tl.store(row_token_ptr + packed, row // TOP_K, mask=mine & has_slot)
    return tl.sum(mine.to(tl.int32), axis=0)


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_rows"])
def _pack_slots_kernel(
    ids_ptr,
    slot_of_ptr,
    row_token_ptr,
    packed_row_ptr,
    offsets_ptr,
    counters_ptr,
    num_rows,
    num_experts,
    num_slots,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    own = tl.program_id(0)
    if own == num_slots:
        clear_counters(counters_ptr)
    row = tl.arange(0, BLOCK)
    # The first block stays in registers for the second pass: mostly it is the only one.
    slot = _load_slots(ids_ptr, slot_of_ptr, row, num_rows, num_experts, num_slots)
    before = tl.sum((slot < own).to(tl.int32), axis=0)
    for start in range(BLOCK, num_rows, BLOCK):
        later_slot = _load_slots(ids_ptr, slot_of_ptr, start + row, num_rows, num_experts, num_slots)
        before += tl.sum((later_slot < own).to(tl.int32), axis=0)
    tl.store(offsets_ptr + own, before)
    has_slot = own < num_slots
    place = before + _write_rows(row_token_ptr, packed_row_ptr, row, slot == own, before, has_slot, TOP_K)
    for start in range(BLOCK, num_rows, BLOCK):
        later_slot = _load_slots(ids_ptr, slot_of_ptr, start + row, num_rows, num_experts, num_slots)
        mine = later_slot == own
        place += _write_rows(row_token_ptr, packed_row_ptr, start + row, mine, place, has_slot, TOP_K)


# Many rows, four launches: count the slots of each block of rows, sum up the blocks of each slot, sum up the slots,
# then rank and write.
#   block_counts_ptr int32 [S, NB], NB = cdiv(R, BLOCK): counts, then their exclusive sums over the blocks
#   slot_counts_ptr int32 [S]
# Everything is a sum of integers in a fixed place: no atomics on global memory, no order to see.


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _count_kernel(
    ids_ptr,
    slot_of_ptr,
    block_counts_ptr,
    num_rows,
    num_experts,
    num_slots,
    num_blocks,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    slot = _load_slots(ids_ptr, slot_of_ptr, row, num_rows, num_experts, num_slots)
    # The bin behind the slots takes what has none.
    count = tl.histogram(tl.minimum(slot, num_slots), BINS)
    counted = tl.arange(0, BINS)
    tl.store(block_counts_ptr + counted.to(tl.int64) * num_blocks + block, count, mask=counted < num_slots)


@triton.jit(do_not_specialize=["num_blocks"])
def _sum_blocks_kernel(block_counts_ptr, slot_counts_ptr, num_blocks, BLOCK_B: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    slot = tl.program_id(0)
    counts_ptr = block_counts_ptr + slot.to(tl.int64) * num_blocks
    total = tl.zeros((), tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        count = tl.load(counts_ptr + block, mask=block < num_blocks, other=0)
        tl.store(counts_ptr + block, total + tl.cumsum(count, axis=0) - count, mask=block < num_blocks)
        total += tl.sum(count, axis=0)
    tl.store(slot_counts_ptr + slot, total)


@triton.jit
def _sum_slots_kernel(slot_counts_ptr, offsets_ptr, num_slots, BINS: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    slot = tl.arange(0, BINS)
    count = tl.load(slot_counts_ptr + slot, mask=slot < num_slots, other=0)
    tl.store(offsets_ptr + slot, tl.cumsum(count, axis=0) - count, mask=slot <= num_slots)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _rank_kernel(
    ids_ptr,
    slot_of_ptr,
    block_sums_ptr,
    offsets_ptr,
    row_token_ptr,
    packed_row_ptr,
    num_rows,
    num_experts,
    num_slots,
    num_blocks,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    row = block * BLOCK + lane
    slot = _load_slots(ids_ptr, slot_of_ptr, row, num_rows, num_experts, num_slots)
    here = slot < num_slots
    packed = tl.load(offsets_ptr + slot, mask=here, other=0)
    packed += tl.load(block_sums_ptr + slot.to(tl.int64) * num_blocks + block, mask=here, other=0)
    # Earlier rows of the same slot in this block, down a column, most of which one thread holds and adds by itself:
    # 656 instructions of sm_90. Along a row each sum went across a warp: 1,288.
    earlier = (slot[:, None] == slot[None, :]) & (lane[:, None] < lane[None, :])
    packed += tl.sum(earlier.to(tl.int32), axis=0)
    tl.store(packed_row_ptr + row, tl.where(here, packed, -1), mask=row < num_rows)
    tl.store(row_token_ptr + packed, row // TOP_K, mask=here)


def _empty_packed(expert_ids_TK: Tensor, num_slots: int) -> Packed:
    num_rows = expert_ids_TK.numel()
    # Without rows no kernel runs, and the offsets are all zero.
    new_offsets = expert_ids_TK.new_empty if num_rows else expert_ids_TK.new_zeros
    return Packed(
        row_token_R=expert_ids_TK.new_empty(num_rows),
        packed_row_TK=expert_ids_TK.new_empty(expert_ids_TK.shape),
        offsets_S1=new_offsets(num_slots + 1),
    )


def pack_slots_triton(expert_ids_TK: Tensor, slot_of_E: Tensor, num_slots: int) -> Packed:
    """`pack` with a program for each slot, in one launch."""
    _check_operands(expert_ids_TK, slot_of_E, num_slots)
    packed = _empty_packed(expert_ids_TK, num_slots)
    num_rows, top_k = expert_ids_TK.numel(), expert_ids_TK.shape[1]
    if num_rows == 0:
        return packed
    packed = packed._replace(counters=expert_ids_TK.new_empty(NUM_COUNTERS.value))
    block, num_warps = next((scan for scan in _SCANS if num_rows <= scan[0]), _SCANS[-1])
    _pack_slots_kernel[(num_slots + 1,)](
        expert_ids_TK.contiguous(),
        slot_of_E,
        *packed,
        num_rows,
        slot_of_E.shape[0],
        num_slots,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=num_warps,
        **dependent_launch(expert_ids_TK),
    )
    return packed


def pack_counts_triton(expert_ids_TK: Tensor, slot_of_E: Tensor, num_slots: int) -> Packed:
    """`pack` as a counting sort, in four launches."""
    _check_operands(expert_ids_TK, slot_of_E, num_slots)
    packed = _empty_packed(expert_ids_TK, num_slots)
    num_rows, top_k = expert_ids_TK.numel(), expert_ids_TK.shape[1]
    if num_rows == 0:
        return packed
    ids_TK, num_experts, num_blocks = expert_ids_TK.contiguous(), slot_of_E.shape[0], cdiv(num_rows, _BLOCK)
    bins = next_power_of_2(num_slots + 1)
    block_counts_SN = torch.empty(num_slots, num_blocks, dtype=torch.int32, device=ids_TK.device)
    slot_counts_S = torch.empty(num_slots, dtype=torch.int32, device=ids_TK.device)
    sizes = (num_rows, num_experts, num_slots, num_blocks)
    pdl = dependent_launch(ids_TK)
    _count_kernel[(num_blocks,)](
        ids_TK, slot_of_E, block_counts_SN, *sizes, BLOCK=_BLOCK, BINS=bins, num_warps=4, **pdl
    )
    _sum_blocks_kernel[(num_slots,)](block_counts_SN, slot_counts_S, num_blocks, BLOCK_B=1024, num_warps=4, **pdl)
    _sum_slots_kernel[(1,)](slot_counts_S, packed.offsets_S1, num_slots, BINS=bins, num_warps=4, **pdl)
    _rank_kernel[(num_blocks,)](
        ids_TK,
        slot_of_E,
        block_counts_SN,
        packed.offsets_S1,
        packed.row_token_R,
        packed.packed_row_TK,
        *sizes,
        TOP_K=top_k,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl,
    )
    return packed


def _check_operands(expert_ids_TK: Tensor, slot_of_E: Tensor, num_slots: int) -> None:
    """Few comparisons: this runs before every launch of a layer, and the device waits for it."""
    given = (expert_ids_TK.dim(), slot_of_E.dim(), expert_ids_TK.dtype, slot_of_E.dtype, slot_of_E.device)
    wanted = (2, 1, torch.int32, torch.int32, expert_ids_TK.device)
    assert given == wanted, f"expert_ids_TK and slot_of_E are {given}, wanted {wanted}"
    check_num_slots(num_slots)
    assert expert_ids_TK.numel() < 2**31, f"{expert_ids_TK.numel()} rows do not fit int32 row numbers"


def check_num_slots(num_slots: int) -> None:
    """A rank has slots."""
    assert num_slots >= 1, f"num_slots={num_slots}; a rank holds at least one slot"


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
