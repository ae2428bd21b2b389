"""Copy cached rows of several sequences out of their pages into one packed tensor (MLA's prefill expands them there).

Knows pages, token positions and rows; knows nothing of what the rows mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape


def gather_paged(
    cache_NPX: Tensor, block_tables_BM: Tensor, token_starts_B: Tensor, row_starts_B1: Tensor, *, num_rows: int
) -> Tensor:
    """rows_RX: row row_starts[b] + i is token token_starts[b] + i of sequence b. See `gather_paged_reference`.

    block_tables_BM, token_starts_B, row_starts_B1 int32; row_starts ascend from 0. R = num_rows >= row_starts[B];
    rows past row_starts[B] are zero. Table entries are read only for the tokens copied.
    """
    return gather_paged_reference(cache_NPX, block_tables_BM, token_starts_B, row_starts_B1, num_rows=num_rows)


def _check_operands(cache_NPX: Tensor, block_tables_BM: Tensor, token_starts_B: Tensor, row_starts_B1: Tensor) -> None:
    num_sequences = block_tables_BM.shape[0]
    assert_shape("cache_NPX", cache_NPX, (None, None, None))
    assert_last_contiguous("cache_NPX", cache_NPX)
    assert_shape("token_starts_B", token_starts_B, (num_sequences,))
    assert_shape("row_starts_B1", row_starts_B1, (num_sequences + 1,))
    for name, x in (
        ("block_tables_BM", block_tables_BM),
        ("token_starts_B", token_starts_B),
        ("row_starts_B1", row_starts_B1),
    ):
        assert_dtype(name, x, torch.int32)
    assert_same_device(
        cache_NPX, block_tables_BM=block_tables_BM, token_starts_B=token_starts_B, row_starts_B1=row_starts_B1
    )


def gather_paged_reference(
    cache_NPX: Tensor, block_tables_BM: Tensor, token_starts_B: Tensor, row_starts_B1: Tensor, *, num_rows: int
) -> Tensor:
    """The definition, and the CPU's product path."""
    _check_operands(cache_NPX, block_tables_BM, token_starts_B, row_starts_B1)
    page_size, width = cache_NPX.shape[1:]
    rows_RX = cache_NPX.new_zeros(num_rows, width)
    row_starts_B1 = row_starts_B1.long()
    lens_B = row_starts_B1[1:] - row_starts_B1[:-1]
    sequence_R = torch.repeat_interleave(torch.arange(lens_B.shape[0], device=lens_B.device), lens_B)
    row_R = torch.arange(sequence_R.shape[0], device=lens_B.device)
    token_R = token_starts_B.long()[sequence_R] + row_R - row_starts_B1[sequence_R]
    block_R = block_tables_BM[sequence_R, token_R // page_size].long()
    rows_RX[: sequence_R.shape[0]] = cache_NPX[block_R, token_R % page_size]
    return rows_RX
