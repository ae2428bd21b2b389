"""Rows of a table and their norm in one launch: the rows themselves, and the norm's own bits."""

from __future__ import annotations

import pytest
import torch

from kernels.embed import _embed_norm_kernel, embed_norm, embed_norm_reference, embed_norm_triton
from kernels.rmsnorm import Norm, rmsnorm, rmsnorm_triton
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_as_separate, assert_same_bits
from tests.paged_cache import draw


def operands(num_tokens: int, num_ids: int, width: int, dtype: torch.dtype, device: str):
    """The table is a view into wider, NaN rows; the first two ids lie outside it."""
    wide = torch.full((num_ids, width + 8), torch.nan, dtype=dtype)
    wide[:, :width] = draw(num_ids, width, dtype=dtype)
    ids_T = torch.randint(0, num_ids, (num_tokens,), generator=torch.Generator().manual_seed(0))
    ids_T[:2] = torch.tensor([-1, num_ids + 7])[:num_tokens]
    norm = Norm((1 + 0.3 * draw(width, seed=1)).to(device, dtype), 1e-6)
    return ids_T.to(device), wide.to(device)[:, :width], norm


@pytest.mark.parametrize(
    ("num_tokens", "width"),
    [
        pytest.param(0, 16, id="no-tokens"),
        pytest.param(1, 2048, id="qwen3"),
        pytest.param(17, 40, id="several-rows-a-program"),
        pytest.param(3, 2880, id="odd-width"),
    ],
)
def test_kernel(backend, num_tokens, width):
    ids_T, weight_VD, norm = operands(num_tokens, 11, width, backend.dtype, backend.device)
    out_TD, rows_TD = embed_norm_triton(ids_T, weight_VD, norm)
    assert_same_bits(rows_TD, weight_VD[ids_T.clamp(0, 10)])
    assert_same_as_separate(out_TD, rmsnorm_triton(rows_TD, *norm))


def test_reference():
    ids_T, weight_VD, norm = operands(5, 11, 24, torch.bfloat16, "cpu")
    out_TD, rows_TD = embed_norm(ids_T, weight_VD, norm)
    assert_same_bits(rows_TD, torch.stack([weight_VD[min(max(i, 0), 10)] for i in ids_T.tolist()]))
    assert_same_bits(out_TD, rmsnorm(rows_TD, *norm))


def test_a_norm_of_another_width_is_refused():
    ids_T, weight_VD, norm = operands(3, 11, 24, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="ids and norm are"):
        embed_norm_reference(ids_T, weight_VD, Norm(norm.weight_C[1:], norm.eps))


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    args: dict[str, object] = dict.fromkeys(("weight_ptr", "norm_ptr", "rows_ptr", "out_ptr"), "*bf16")
    args |= dict.fromkeys(("num_tokens", "num_ids", "num_columns", "stride_v"), "i32") | {"eps": "fp32"}
    args |= {"ids_ptr": "*i64", "PDL": arch >= 90}
    assert compile_ahead(_embed_norm_kernel, arch, args | {"BLOCK_R": 1, "BLOCK_D": 8192}, num_warps=8)
    assert compile_ahead(_embed_norm_kernel, arch, args | {"BLOCK_R": 8, "BLOCK_D": 128})
