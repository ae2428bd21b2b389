"""Few rows on Hopper: against fp64, and the bits of the other unsplit kernel, for widths that nothing divides."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch.nn import functional

from kernels import linear_few
from kernels.linear import linear_triton
from kernels.linear_few import (
    _STAGES,
    FEW_ROWS,
    few_rows_kernel,
    few_rows_sizes,
    is_deep,
    rows_of_weights,
    serves_few_rows,
)
from kernels.linear_few_deep import few_rows_deep_kernel
from kernels.tiles import TileConfig
from tests.aot import aot
from tests.compare import assert_close_as_torch, assert_same_bits
from tests.gluon_aot import box, compile_gluon_ahead

SHAPES = [
    (2048, 4096),  # 16 rows of weights a program, all columns of x that fit
    (3648, 2048),  # 32
    (5120, 2048),  # 64
    (8448, 264),  # a program for every multiprocessor of an H200, and a last stage that is nearly empty
    (1, 8),  # one column of y, of one group of columns of x
    (77, 2816),  # a last program with 13 rows; 11 stages
    (40, 72),
    (3000, 2600),  # a ring of 32 rows that does not hold all, and a last stage of which a part is there
]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def test_worked_examples():
    assert doctest.testmod(linear_few).failed == 0


@pytest.mark.parametrize("multiprocessors", [114, 132])
def test_no_multiprocessor_has_a_second_program(multiprocessors):
    for columns in (1, 16, 576, 2048, 2112, 3648, 4224, 5120, 64 * multiprocessors):
        rows = rows_of_weights(columns, multiprocessors)
        assert rows in _STAGES and -(-columns // rows) <= multiprocessors
        assert rows == 16 or -(-columns // (rows // 2)) > multiprocessors  # and no fewer programs than could be


def test_a_cpu_is_left_to_the_other_kernel():
    assert not serves_few_rows(torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_kernel(columns, width, bias, dtype):
    """NaN in what lies beside and below the operands, and in the output before."""
    wide_w = torch.full((columns + 3, width + 8), torch.nan, dtype=dtype, device="cuda")
    wide_w[:columns, :width] = draw(columns, width, dtype=dtype, seed=1)
    w_NK, bias_N = wide_w[:columns, :width], draw(columns, dtype=dtype, seed=2) if bias else None
    for num_rows in (1, 3, FEW_ROWS):
        wide_x = torch.full((num_rows + 2, width + 16), torch.nan, dtype=dtype, device="cuda")
        wide_x[:num_rows, :width] = draw(num_rows, width, dtype=dtype)
        x_MK = wide_x[:num_rows, :width]
        assert serves_few_rows(x_MK, w_NK)
        ours = linear_triton(x_MK, w_NK, bias_N)
        exact = functional.linear(x_MK.double(), w_NK.double(), None if bias_N is None else bias_N.double())
        assert_close_as_torch(ours, functional.linear(x_MK, w_NK, bias_N), exact)
        assert_same_bits(linear_triton(x_MK, w_NK, bias_N, tile=TileConfig(16, 32, 128, 4, 4)), ours)
        for row in range(num_rows):
            assert_same_bits(linear_triton(x_MK[row : row + 1], w_NK, bias_N), ours[row : row + 1])
        wide = linear_triton(x_MK, w_NK, bias_N, out_dtype=torch.float32)
        assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), ours)


@pytest.mark.gpu
def test_a_row_among_many_has_the_same_bits():
    x_MK, w_NK = draw(300, 2048, dtype=torch.bfloat16), draw(5120, 2048, dtype=torch.bfloat16, seed=1)
    whole = linear_triton(x_MK, w_NK)
    for start, rows in ((0, 1), (290, 8), (100, 5)):
        assert_same_bits(linear_triton(x_MK[start : start + rows], w_NK), whole[start : start + rows])


@pytest.mark.gpu
def test_what_is_left_to_the_other_kernel():
    x_MK, w_NK = draw(9, 64, dtype=torch.bfloat16), draw(16, 64, dtype=torch.bfloat16)
    assert serves_few_rows(x_MK[:8], w_NK)
    assert not serves_few_rows(x_MK, w_NK)  # nine rows
    assert not serves_few_rows(x_MK[:0], w_NK)
    assert not serves_few_rows(x_MK[:8].float(), w_NK.float())
    assert not serves_few_rows(x_MK[:8].float(), w_NK)
    assert not serves_few_rows(x_MK[:8, 1:57], w_NK[:, 1:57])  # begin two bytes after a multiple of 16
    assert not serves_few_rows(x_MK[:8, :60], w_NK[:, :60])  # no whole groups of eight columns
    assert not serves_few_rows(draw(8, 4104, dtype=torch.bfloat16), draw(16, 4104, dtype=torch.bfloat16))


def test_what_a_ring_does_not_hold_is_deep(monkeypatch):
    monkeypatch.setattr(linear_few, "num_multiprocessors", lambda device: 132)
    shapes = {(2048, 3072): False, (2048, 4096): True, (3648, 2048): False, (5120, 1280): False, (5120, 2048): True}
    sizes = {shape: few_rows_sizes(torch.empty(shape, device="meta")) for shape in shapes}
    assert {shape: is_deep(shape[1], sizes[shape]) for shape in shapes} == shapes


@aot
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("rows", "block_k"), [(16, 256), (16, 4096), (32, 4096), (64, 4096)])
def test_compiles(rows, block_k, bias):
    args: dict[str, object] = {"num_rows": "i32", "num_columns": "i32", "width": "i32", "stride_x8": "i32"}
    args |= {"x_ptr": "*bf16", "bias_ptr": "*bf16" if bias else None, "y_ptr": "*bf16"}
    args |= {"stride_y": "i32", "ROWS": rows, "STAGES": _STAGES[rows], "BLOCK_K": block_k, "PDL": True}
    compile_gluon_ahead(few_rows_kernel, args | {"w_desc": box("bf16", rows, 64)}, num_warps=4)
    compile_gluon_ahead(few_rows_deep_kernel, args | {"w_desc": box("bf16", rows, 256)}, num_warps=4)
