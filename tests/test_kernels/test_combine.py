"""The weighted sum: hand-worked, against fp64 next to torch, and in the order of the router."""

from __future__ import annotations

import pytest
import torch

from kernels.combine import (
    _combine_kernel,
    _combine_norm_kernel,
    combine,
    combine_norm,
    combine_norm_reference,
    combine_norm_triton,
    combine_reference,
    combine_triton,
)
from kernels.rmsnorm import rmsnorm_residual_reference, rmsnorm_residual_triton
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_close_as_torch, assert_same_as_separate, assert_same_bits
from tests.shapes import HIDDEN, NUM_TOKENS


def test_hand_worked():
    """Token 0 takes rows 2 and 0; token 1 row 1 alone; token 2 nothing, its NaN weight notwithstanding."""
    y_RD = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0], [torch.nan, torch.nan]])
    rows_TK = torch.tensor([[2, 0], [-1, 1], [-1, -1]], dtype=torch.int32)
    weights_TK = torch.tensor([[0.5, 0.25], [torch.nan, 2.0], [torch.nan, 1.0]])
    assert combine(y_RD, rows_TK, weights_TK).tolist() == [[50.25, 100.5], [20.0, 40.0], [0.0, 0.0]]


def draw(num_tokens: int, top_k: int, width: int, dtype: torch.dtype, device: str):
    """Every third (t, k) is elsewhere; two rows that nobody asks for are NaN; y is a view into wider, NaN rows."""
    generator = torch.Generator().manual_seed(0)
    num_rows = num_tokens * top_k
    y_RD = torch.full((num_rows + 2, width + 8), torch.nan, dtype=dtype)
    y_RD[:num_rows, :width] = torch.randn(num_rows, width, generator=generator).to(dtype)
    rows_TK = torch.randperm(num_rows, generator=generator).view(num_tokens, top_k).to(torch.int32)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator)
    elsewhere_TK = torch.arange(num_rows).view(num_tokens, top_k) % 3 == 1
    weights_TK[elsewhere_TK], rows_TK[elsewhere_TK] = torch.nan, -1
    return y_RD.to(device)[:, :width], rows_TK.to(device), weights_TK.to(device)


def plain(y_RD, rows_TK, weights_TK, dtype: torch.dtype) -> torch.Tensor:
    """Gather and multiply and sum by torch, in `dtype`."""
    terms_TKD = y_RD[rows_TK.long().clamp_min(0)].to(dtype) * weights_TK.to(dtype).unsqueeze(-1)
    return terms_TKD.masked_fill((rows_TK < 0).unsqueeze(-1), 0.0).sum(dim=1)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_kernel_for_numbers_of_tokens(backend, num_tokens):
    operands = draw(num_tokens, 2, 40, backend.dtype, backend.device)
    ours = combine_triton(*operands)
    assert ours.dtype == backend.dtype and ours.shape == (num_tokens, 40)
    assert_close_as_torch(ours, plain(*operands, torch.float32).to(backend.dtype), plain(*operands, torch.float64))


@pytest.mark.parametrize("width", HIDDEN)
@pytest.mark.parametrize("top_k", [1, 8, 60])
def test_C43_kernel_for_widths_and_choices(backend, width, top_k):
    operands = draw(3, top_k, width, backend.dtype, backend.device)
    torchs, exact = plain(*operands, torch.float32).to(backend.dtype), plain(*operands, torch.float64)
    assert_close_as_torch(combine_triton(*operands), torchs, exact)
    assert_close_as_torch(combine_triton(*operands)[:, -1], torchs[:, -1], exact[:, -1], factor=4.0)
    assert_close_as_torch(combine_reference(*operands), torchs, exact)


def test_the_sum_goes_in_routing_order(backend):
    """2^25 + 1 - 2^25 in fp32 is 0 in the order given, 1 in the other: neither placement nor size may change it."""
    y_RD = torch.ones(3, 32, dtype=backend.dtype, device=backend.device)
    for rows in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        rows_TK = torch.tensor([rows], dtype=torch.int32, device=backend.device)
        for weights, total in (([2.0**25, 1.0, -(2.0**25)], 0.0), ([2.0**25, -(2.0**25), 1.0], 1.0)):
            weights_TK = torch.tensor([weights], device=backend.device)
            for run in (combine_triton, combine_reference):
                assert run(y_RD, rows_TK, weights_TK).unique().tolist() == [total]


def test_no_rows_at_all(backend):
    """A rank that received nothing still gives every token a sum: zero."""
    rows_TK = torch.full((5, 2), -1, dtype=torch.int32, device=backend.device)
    weights_TK = torch.full((5, 2), torch.nan, device=backend.device)
    y_RD = torch.empty(0, 24, dtype=backend.dtype, device=backend.device)
    for run in (combine_triton, combine_reference):
        assert_same_bits(run(y_RD, rows_TK, weights_TK), torch.zeros_like(run(y_RD, rows_TK, weights_TK)))


def test_nan_weight_of_a_real_row_is_seen(backend):
    """The router marks a bad token with NaN weights: its result is NaN, its neighbour's is not."""
    y_RD = torch.ones(4, 16, dtype=backend.dtype, device=backend.device)
    rows_TK = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=backend.device)
    weights_TK = torch.tensor([[torch.nan, torch.nan], [0.5, 0.5]], device=backend.device)
    for run in (combine_triton, combine_reference):
        out_TD = run(y_RD, rows_TK, weights_TK)
        assert bool(torch.isnan(out_TD[0]).all()) and out_TD[1].unique().tolist() == [1.0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bits_do_not_depend_on_the_tokens_beside(device):
    y_RD, rows_TK, weights_TK = draw(129, 4, 96, torch.bfloat16, device)
    whole = combine(y_RD, rows_TK, weights_TK)
    for token in (0, 64, 128):
        one = slice(token, token + 1)
        assert_same_bits(combine(y_RD, rows_TK[one].clone(), weights_TK[one].clone()), whole[one])


def norm_operands(num_tokens: int, width: int, dtype: torch.dtype, device: str, *, shared: bool):
    """(residual, norm weight, eps, shared rows or None); the rows are views into wider, NaN rows."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.full((2, num_tokens, width + 8), torch.nan, dtype=dtype)
    wide[..., :width] = torch.randn(2, num_tokens, width, generator=generator).to(dtype)
    residual_TD, shared_TD = wide.to(device)[..., :width]
    norm_D = (1 + 0.3 * torch.randn(width, generator=generator)).to(device, dtype)
    return residual_TD, norm_D, 1e-6, shared_TD if shared else None


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "with-shared"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "width"),
    [
        pytest.param(0, 2, 16, id="no-tokens"),
        pytest.param(1, 8, 2048, id="qwen3"),
        pytest.param(17, 2, 40, id="several-rows-a-program"),
        pytest.param(3, 6, 2880, id="odd-width"),
        pytest.param(2, 17, 4096, id="more-experts-than-are-unrolled"),
    ],
)
def test_combine_norm_has_the_bits_of_the_separate_kernels(backend, num_tokens, top_k, width, shared):
    operands = draw(num_tokens, top_k, width, backend.dtype, backend.device)
    residual_TD, norm_D, eps, shared_TD = norm_operands(num_tokens, width, backend.dtype, backend.device, shared=shared)
    combined_TD = combine_triton(*operands)
    if shared_TD is not None:
        combined_TD += shared_TD
    wanted = rmsnorm_residual_triton(combined_TD, residual_TD, norm_D, eps)
    ours = combine_norm_triton(*operands, residual_TD, norm_D, eps, shared_TD)
    for each, want in zip(ours, wanted):
        assert_same_as_separate(each, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_norm_is_the_sum_then_the_norm(dtype):
    """Rounded in between, as each is alone."""
    operands = draw(5, 3, 24, dtype, "cpu")
    residual_TD, norm_D, eps, shared_TD = norm_operands(5, 24, dtype, "cpu", shared=True)
    ours = combine_norm(*operands, residual_TD, norm_D, eps, shared_TD)
    wanted = rmsnorm_residual_reference(combine(*operands) + shared_TD, residual_TD, norm_D, eps)
    for each, want in zip(ours, wanted):
        assert_same_bits(each, want)


def test_combine_norm_refuses_a_residual_of_other_rows():
    operands = draw(5, 3, 24, torch.float32, "cpu")
    residual_TD, norm_D, eps, _ = norm_operands(4, 24, torch.float32, "cpu", shared=False)
    with pytest.raises(AssertionError, match="residual and norm are"):
        combine_norm_reference(*operands, residual_TD, norm_D, eps)


@pytest.mark.gpu
def test_C16_rows_beyond_2_31_elements():
    """131,073 x 8 rows of 2048: the last token's rows lie past 2^31 elements."""
    num_tokens, top_k, width = 131_073, 8, 2048
    y_RD = torch.randn(num_tokens * top_k, width, dtype=torch.bfloat16, device="cuda")
    rows_TK = torch.arange(num_tokens * top_k, device="cuda").view(num_tokens, top_k).to(torch.int32)
    weights_TK = torch.rand(num_tokens, top_k, device="cuda")
    last = slice(num_tokens - 100, num_tokens)
    expected = plain(y_RD, rows_TK[last], weights_TK[last], torch.float64)
    torchs = plain(y_RD, rows_TK[last], weights_TK[last], torch.float32).to(y_RD.dtype)
    assert_close_as_torch(combine(y_RD, rows_TK, weights_TK)[last], torchs, expected)


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    args: dict[str, object] = {"y_ptr": "*bf16", "row_ptr": "*i32", "weights_ptr": "*fp32", "out_ptr": "*bf16"}
    args |= {"num_columns": "i32", "stride_y": "i32", "TOP_K": 8, "PDL": arch >= 90}
    assert compile_ahead(_combine_kernel, arch, args | {"BLOCK_D": 1024})
    args |= {"IN_ORDER": False}
    args |= dict.fromkeys(("shared_ptr", "residual_ptr", "norm_ptr", "sum_ptr"), "*bf16")
    args |= dict.fromkeys(("num_tokens", "stride_shared", "stride_residual"), "i32") | {"eps": "fp32"}
    assert compile_ahead(_combine_norm_kernel, arch, args | {"BLOCK_R": 1, "BLOCK_D": 8192}, num_warps=8)
    assert compile_ahead(_combine_norm_kernel, arch, args | {"IN_ORDER": True, "BLOCK_R": 1, "BLOCK_D": 8192})
    args |= {"TOP_K": 60, "shared_ptr": None, "BLOCK_R": 8, "BLOCK_D": 128}
    assert compile_ahead(_combine_norm_kernel, arch, args)
