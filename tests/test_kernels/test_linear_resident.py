"""The kernel for few rows: the bits of the general one, at whole and partial residence of the weights; its rule."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch.nn import functional

from kernels import linear_resident
from kernels.linear import linear_triton
from kernels.linear_resident import _resident_kernel, launch_resident, resident_serves, resident_stages
from kernels.tiles import TileConfig
from tests.aot import aot
from tests.compare import assert_close_as_torch, assert_same_bits
from tests.gluon_aot import compile_gluon_ahead

GENERAL = TileConfig(16, 32, 128, 4, 5)
SHAPES = {
    "all-weights-held": (2048, 4096),
    "one-step": (16, 256),
    "fewer-steps-than-stages-of-rows": (48, 512),
    "two-programs-a-multiprocessor": (3648, 2048),
    "three-and-a-ring": (6144, 4096),
}


def test_examples() -> None:
    assert doctest.testmod(linear_resident).failed == 0


@pytest.mark.parametrize("multiprocessors", [78, 132])
def test_programs_of_a_multiprocessor_fit_beside_each_other(multiprocessors: int) -> None:
    """By the kernel's own buffers: 16 columns and 8 rows of 256 entries of 2 bytes a stage."""
    for num_columns in range(16, 8192, 16):
        for width in (256, 2048, 4096, 14336):
            stages = resident_stages(num_columns, width, multiprocessors)
            each = -(-(num_columns // 16) // multiprocessors)
            assert (stages > 0) == (each <= 3)
            if stages:
                assert each * (stages * 8192 + 3 * 4096 + 1024) <= 227 * 1024
                assert min(3, width // 256) <= stages <= width // 256


def test_other_shapes_are_not_taken() -> None:
    assert resident_stages(5120, 2048 + 128, 132) == resident_stages(5120 + 8, 2048, 132) == 0
    assert not resident_serves(torch.zeros(1, 256), torch.zeros(16, 256))  # on a CPU


def drawn(rows: int, columns: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows as a view into wider ones, NaN around them; weight and bias."""
    generator = torch.Generator().manual_seed(rows)
    wide = torch.full((rows + 9, width + 32), torch.nan, dtype=dtype, device="cuda")
    wide[:rows, :width] = torch.randn(rows, width, generator=generator).to(dtype)
    w_NK = torch.randn(columns, width, generator=generator).to("cuda", dtype)
    return wide[:rows, :width], w_NK, torch.randn(columns, generator=generator).to("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "width"), SHAPES.values(), ids=SHAPES)
def test_bits_of_the_general_kernel(columns: int, width: int, dtype: torch.dtype) -> None:
    """For each number of rows, with and without bias; rows below y stay as they were; a result in fp32 too."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("written for Hopper")
    for rows in range(1, 9):
        x_MK, w_NK, bias_N = drawn(rows, columns, width, dtype)
        assert resident_serves(x_MK, w_NK)
        for bias, out_dtype in ((None, dtype), (bias_N, dtype), (bias_N, torch.float32)):
            y_MN = torch.full((rows + 8, columns), torch.nan, dtype=out_dtype, device="cuda")
            launch_resident(x_MK, w_NK, bias, y_MN[:rows])
            general_MN = linear_triton(x_MK, w_NK, bias, out_dtype=out_dtype, tile=GENERAL)
            assert_same_bits(y_MN[:rows], general_MN)
            assert_same_bits(linear_triton(x_MK, w_NK, bias, out_dtype=out_dtype), general_MN)
            assert bool(y_MN[rows:].isnan().all())
        exact = functional.linear(x_MK.double(), w_NK.double())
        assert_close_as_torch(linear_triton(x_MK, w_NK), functional.linear(x_MK, w_NK), exact)


@pytest.mark.gpu
def test_a_row_among_many_has_the_same_bits() -> None:
    x_MK, w_NK, _ = drawn(100, 2048, 4096, torch.bfloat16)
    whole_MN = linear_triton(x_MK, w_NK)
    for rows in (1, 5, 8, 9):
        assert_same_bits(linear_triton(x_MK[-rows:], w_NK), whole_MN[-rows:])


@pytest.mark.gpu
def test_what_it_cannot_read_goes_to_the_general_kernel() -> None:
    """Rows that begin at odd places or are odd strides apart, and more than 8 of them."""
    wide = torch.randn(9, 2048 + 24, device="cuda").bfloat16()
    w_NK = torch.randn(64, 2048, device="cuda").bfloat16()
    for x_MK in (wide[:4, :2048], wide[0:1, 1:2049], wide[:, :2048].contiguous()):
        assert not resident_serves(x_MK, w_NK)
        assert_same_bits(linear_triton(x_MK, w_NK), linear_triton(x_MK, w_NK, tile=GENERAL))


@aot
@pytest.mark.parametrize("stages", [1, 7, 16])
@pytest.mark.parametrize("bias", [None, "*bf16"])
def test_compiles(stages: int, bias: str | None) -> None:
    args: dict[str, object] = {"x_ptr": "*bf16", "w_ptr": "*bf16", "bias_ptr": bias, "y_ptr": "*fp32"}
    args |= {"num_rows": "i32", "width": "i32", "stride_xm": "i32", "stride_wn": "i32", "stride_ym": "i32"}
    args |= {"STAGES": stages, "ROW_STAGES": 3, "BLOCK_K": 256, "PDL": True}
    ptx = compile_gluon_ahead(_resident_kernel, args, num_warps=1)
    before, _, behind = ptx.partition("griddepcontrol.wait")
    assert before.count("cp.async.cg") == 16 * stages, "weights are asked for before the kernels before this one end"
    assert behind.count("mma.sync.aligned.m16n8k16") == 16
