"""How often each id occurs, added to counts that stay on the device. Knows ids; knows neither experts nor layers.

The atomics add integers: whatever their order, the counts are the same, so nothing of it shows.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape, cdiv, uses_triton

_BLOCK = 256


def count_ids_(counts_E: Tensor, ids_TK: Tensor) -> None:
    """counts_E[id] += 1 for every id of ids_TK (int32) in [0, E); others count for nothing. counts_E int64, in place.

    No host sync. `count_ids_reference_` is the definition.
    """
    (count_ids_triton_ if uses_triton(counts_E) else count_ids_reference_)(counts_E, ids_TK)


# counts_E[id] += 1 for id in ids_TK, 0 <= id < E
#   counts_ptr int64 [E]; ids_ptr int32 [T*K]; grid (cdiv(T*K, BLOCK),): a program owns BLOCK ids


@triton.jit(do_not_specialize=["num_ids"])
def _count_ids_kernel(counts_ptr, ids_ptr, num_ids, num_counts, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_ptr + index, mask=index < num_ids, other=-1)
    one = tl.full((BLOCK,), 1, tl.int64)
    tl.atomic_add(counts_ptr + id, one, mask=(id >= 0) & (id < num_counts), sem="relaxed")


def count_ids_triton_(counts_E: Tensor, ids_TK: Tensor) -> None:
    """`count_ids_` as one launch."""
    _check_operands(counts_E, ids_TK)
    num_ids = ids_TK.numel()
    if num_ids == 0:
        return
    grid = (cdiv(num_ids, _BLOCK),)
    _count_ids_kernel[grid](counts_E, ids_TK.contiguous(), num_ids, counts_E.shape[0], BLOCK=_BLOCK, num_warps=4)


def _check_operands(counts_E: Tensor, ids_TK: Tensor) -> None:
    assert_shape("counts_E", counts_E, (None,))
    assert_dtype("counts_E", counts_E, torch.int64)
    assert_last_contiguous("counts_E", counts_E)
    assert_dtype("ids_TK", ids_TK, torch.int32)
    assert_same_device(counts_E, ids_TK=ids_TK)


def count_ids_reference_(counts_E: Tensor, ids_TK: Tensor) -> None:
    """The definition, in plain torch."""
    _check_operands(counts_E, ids_TK)
    known_X = ids_TK[(ids_TK >= 0) & (ids_TK < counts_E.shape[0])].long()
    counts_E += torch.bincount(known_X, minlength=counts_E.shape[0])
