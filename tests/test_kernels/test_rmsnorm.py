"""RMS normalisation against fp64 next to torch, in strided views, with and without the residual."""

from __future__ import annotations

import pytest
import torch

from kernels.rmsnorm import (
    _rmsnorm_kernel,
    rmsnorm,
    rmsnorm_reference,
    rmsnorm_residual,
    rmsnorm_residual_reference,
    rmsnorm_residual_triton,
    rmsnorm_triton,
)
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_close_as_torch, assert_same_bits
from tests.shapes import HIDDEN, NUM_TOKENS

EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def plain(x_C: torch.Tensor, weight_C: torch.Tensor, wide: torch.dtype = torch.float32) -> torch.Tensor:
    """The formula of transformers' norms: statistics in `wide`, the cast before the weight."""
    x = x_C.to(wide)
    return weight_C * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).to(x_C.dtype)


def check(run, x_C: torch.Tensor) -> None:
    weight_C = draw(x_C.shape[-1], dtype=x_C.dtype, device=x_C.device.type, seed=1)
    ours = run(x_C, weight_C, EPS)
    assert ours.dtype == x_C.dtype and ours.shape == x_C.shape and ours.is_contiguous()
    assert_close_as_torch(ours, plain(x_C, weight_C), plain(x_C.double(), weight_C.double(), torch.float64))


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_numbers_of_rows(backend, num_tokens):
    check(rmsnorm_triton, draw(num_tokens, 96, dtype=backend.dtype, device=backend.device))


@pytest.mark.parametrize("width", [*HIDDEN, 1, 128, 7168])
def test_widths(backend, width):
    for run in (rmsnorm_triton, rmsnorm_reference):
        check(run, draw(3, width, dtype=backend.dtype, device=backend.device))


def test_strided_views(backend):
    """Heads cut out of a fused projection, a latent cut out of a row, one row alone, four dimensions; NaN around."""
    fused = torch.full((5, 4, 48), torch.nan, dtype=backend.dtype, device=backend.device)
    fused[:, 1:3, 8:40] = draw(5, 2, 32, dtype=backend.dtype, device=backend.device)
    for run in (rmsnorm_triton, rmsnorm_reference):
        check(run, fused[:, 1:3, 8:40])
        check(run, fused[:, 2, 8:40])
        check(run, fused[0, 1, 8:40])
        check(run, fused[:, 1:3, 8:40].unflatten(0, (5, 1)))


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_residual(backend, num_tokens):
    """The sum is rounded to the model dtype before it is normalised, and the operands stay as they were."""
    wide_TD = torch.full((num_tokens, 72), torch.nan, dtype=backend.dtype, device=backend.device)
    wide_TD[:, :40] = draw(num_tokens, 40, dtype=backend.dtype, device=backend.device)
    x_TD, weight_D = wide_TD[:, :40], draw(40, dtype=backend.dtype, device=backend.device, seed=2)
    residual_TD = draw(num_tokens, 40, dtype=backend.dtype, device=backend.device, seed=1) * 3
    x_before, residual_before = x_TD.clone(), residual_TD.clone()
    for run in (rmsnorm_residual_triton, rmsnorm_residual_reference):
        y_TD, new_residual_TD = run(x_TD, residual_TD, weight_D, EPS)
        assert_same_bits(new_residual_TD, x_TD + residual_TD)
        summed = (x_TD + residual_TD).double()
        assert_close_as_torch(
            y_TD, plain(x_TD + residual_TD, weight_D), plain(summed, weight_D.double(), torch.float64)
        )
    assert_same_bits(x_TD, x_before)
    assert_same_bits(residual_TD, residual_before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [40, 96, 2880])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_rows_beside(device, width, dtype):
    x_TD = draw(129, width, dtype=dtype, device=device)
    weight_D, residual_TD = (
        draw(width, dtype=dtype, device=device, seed=1),
        draw(129, width, dtype=dtype, device=device),
    )
    whole, whole_residual = rmsnorm(x_TD, weight_D, EPS), rmsnorm_residual(x_TD, residual_TD, weight_D, EPS)[0]
    for start, end in ((0, 1), (128, 129), (5, 70)):
        rows = slice(start, end)
        assert_same_bits(rmsnorm(x_TD[rows].clone(), weight_D, EPS), whole[rows])
        part = rmsnorm_residual(x_TD[rows].clone(), residual_TD[rows].clone(), weight_D, EPS)[0]
        assert_same_bits(part, whole_residual[rows])


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    args: dict[str, object] = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "y_ptr": "*bf16", "sum_ptr": "*bf16"}
    args |= {"num_rows": "i32", "num_columns": "i32", "stride_outer": "i32", "eps": "fp32", "PDL": arch >= 90}
    plain_args = {"residual_ptr": None, "num_inner": "i32", "stride_inner": "i32", "stride_residual": "i32"}
    fused_args = {"residual_ptr": "*bf16", "num_inner": 1, "stride_inner": "i32", "stride_residual": "i32"}
    assert compile_ahead(_rmsnorm_kernel, arch, args | plain_args | {"BLOCK_R": 8, "BLOCK_C": 128})
    assert compile_ahead(_rmsnorm_kernel, arch, args | fused_args | {"BLOCK_R": 1, "BLOCK_C": 8192}, num_warps=8)
