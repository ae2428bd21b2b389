"""What a rank tells the others before its rows travel: how many for each of them, in one launch. Knows counts only."""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs

_BLOCK = 4096


def round_counts(
    pair_offsets_N1: Tensor, record_offsets_N1: Tensor, record_row_TK: Tensor, num_taken: int, num_left: int
) -> Tensor:
    """int32 [2 N + 3]: pairs for each rank, records for each rank, how many records there are by record_row_TK (-1:
    none), tokens of this round, tokens left after it. The records are counted apart from their offsets, so that who
    hears of them can compare. `round_counts_reference` is the definition."""
    run = round_counts_triton if uses_triton(record_row_TK) else round_counts_reference
    return run(pair_offsets_N1, record_offsets_N1, record_row_TK, num_taken, num_left)


# out = [diff of pair offsets; diff of record offsets; number of rows >= 0; num_taken; num_left]
#   offsets int32 [N + 1]; row_ptr int32 [R]; out_ptr int32 [2 N + 3]; grid (1,): one program reads all rows in blocks


@triton.jit(do_not_specialize=["num_rows", "num_taken", "num_left"])
def _counts_kernel(
    pair_offsets_ptr,
    record_offsets_ptr,
    row_ptr,
    out_ptr,
    num_rows,
    num_taken,
    num_left,
    num_ranks,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    n = tl.arange(0, BLOCK_N)
    in_group = n < num_ranks
    pairs = tl.load(pair_offsets_ptr + n + 1, mask=in_group) - tl.load(pair_offsets_ptr + n, mask=in_group)
    tl.store(out_ptr + n, pairs, mask=in_group)
    records = tl.load(record_offsets_ptr + n + 1, mask=in_group) - tl.load(record_offsets_ptr + n, mask=in_group)
    tl.store(out_ptr + num_ranks + n, records, mask=in_group)
    counted = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        place = start + tl.arange(0, BLOCK)
        counted += (tl.load(row_ptr + place, mask=place < num_rows, other=-1) >= 0).to(tl.int32)
    tl.store(out_ptr + 2 * num_ranks, tl.sum(counted, axis=0))
    tl.store(out_ptr + 2 * num_ranks + 1, num_taken)
    tl.store(out_ptr + 2 * num_ranks + 2, num_left)


def round_counts_triton(
    pair_offsets_N1: Tensor, record_offsets_N1: Tensor, record_row_TK: Tensor, num_taken: int, num_left: int
) -> Tensor:
    """`round_counts` as one launch."""
    _check_operands(pair_offsets_N1, record_offsets_N1, record_row_TK)
    num_ranks = pair_offsets_N1.shape[0] - 1
    out = pair_offsets_N1.new_empty(2 * num_ranks + 3)
    _counts_kernel[(1,)](
        pair_offsets_N1,
        record_offsets_N1,
        record_row_TK,
        out,
        record_row_TK.numel(),
        num_taken,
        num_left,
        num_ranks,
        BLOCK_N=next_power_of_2(num_ranks),
        BLOCK=_BLOCK,
        num_warps=8,
        **dependent_launch(out),
    )
    return out


def _check_operands(pair_offsets_N1: Tensor, record_offsets_N1: Tensor, record_row_TK: Tensor) -> None:
    assert pair_offsets_N1.shape == record_offsets_N1.shape, f"{pair_offsets_N1.shape}, {record_offsets_N1.shape}"
    given = {"pair": pair_offsets_N1, "record": record_offsets_N1, "row": record_row_TK}
    for name, each in given.items():
        assert_dtype(name, each, torch.int32)
        assert each.is_contiguous(), f"{name} lies together"


def round_counts_reference(
    pair_offsets_N1: Tensor, record_offsets_N1: Tensor, record_row_TK: Tensor, num_taken: int, num_left: int
) -> Tensor:
    """The definition, in plain torch."""
    _check_operands(pair_offsets_N1, record_offsets_N1, record_row_TK)
    rest = [int((record_row_TK >= 0).sum()), num_taken, num_left]
    last_3 = torch.tensor(rest, dtype=torch.int32, device=record_row_TK.device)
    return torch.cat([pair_offsets_N1.diff(), record_offsets_N1.diff(), last_3])
