"""The unsplit product: reference and kernel against fp64 next to torch, and a row's bits whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.linear import (
    CPU_BLOCK,
    _linear_kernel,
    head_linear,
    head_linear_reference,
    head_linear_triton,
    linear,
    linear_reference,
    linear_triton,
)
from kernels.routing import RoutingRule, route
from kernels.tiles import TileConfig, linear_tile
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_close_as_torch, assert_same_bits
from tests.shapes import HIDDEN, NUM_TOKENS

CHAIN = {torch.float32: 1, torch.float16: 0, torch.bfloat16: 0}
"""Whether rounding along the sum over K shows: in fp32 torch may split that sum, which rounds less than a long one."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def poisoned_rows(x_MK: torch.Tensor, extra: int = 16) -> torch.Tensor:
    """x as a view into wider rows whose other columns are NaN, with NaN rows below."""
    wide = torch.full((x_MK.shape[0] + 2, x_MK.shape[1] + extra), torch.nan, dtype=x_MK.dtype, device=x_MK.device)
    wide[: x_MK.shape[0], : x_MK.shape[1]] = x_MK
    return wide[: x_MK.shape[0], : x_MK.shape[1]]


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_kernel_for_numbers_of_rows(backend, num_tokens):
    x_MK = draw(num_tokens, 72, dtype=backend.dtype, device=backend.device)
    w_NK = draw(40, 72, dtype=backend.dtype, device=backend.device, seed=1)
    ours = linear_triton(poisoned_rows(x_MK), poisoned_rows(w_NK))
    assert ours.shape == (num_tokens, 40) and ours.dtype == backend.dtype
    exact = functional.linear(x_MK.double(), w_NK.double())
    assert_close_as_torch(ours, functional.linear(x_MK, w_NK), exact, chain=CHAIN[backend.dtype] * 72)


@pytest.mark.parametrize("width", HIDDEN)
@pytest.mark.parametrize("num_columns", [3, 60, 257])
def test_C43_kernel_for_router_shapes(backend, width, num_columns):
    """Router logits: 3, 60 or 257 experts, hidden 96 and 2880; the last column is looked at by itself."""
    x_MK = draw(3, width, dtype=backend.dtype, device=backend.device)
    w_NK = draw(num_columns, width, dtype=backend.dtype, device=backend.device, seed=1)
    bias_N = draw(num_columns, dtype=backend.dtype, device=backend.device, seed=2)
    ours = linear_triton(x_MK, w_NK, bias_N)
    torchs = functional.linear(x_MK, w_NK, bias_N)
    exact = functional.linear(x_MK.double(), w_NK.double(), bias_N.double())
    assert_close_as_torch(ours, torchs, exact, chain=CHAIN[backend.dtype] * x_MK.shape[1])
    assert float((ours[:, -1].double() - exact[:, -1]).abs().max()) <= float(exact.abs().max()) * 1e-2


@pytest.mark.parametrize("num_columns", [3, 40])
def test_reference_is_close_to_torch(num_columns):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x_MK, w_NK, bias_N = (
            draw(67, 96, dtype=dtype),
            draw(num_columns, 96, dtype=dtype),
            draw(num_columns, dtype=dtype),
        )
        exact = functional.linear(x_MK.double(), w_NK.double(), bias_N.double())
        assert_close_as_torch(linear(x_MK, w_NK, bias_N), functional.linear(x_MK, w_NK, bias_N), exact)


@pytest.mark.parametrize("num_rows", [1, 8, 11])
def test_swapped_operands(backend, num_rows):
    """Tiles of 8 rows, one and two of them, over widths that they divide and not, with a bias."""
    for width, columns, tile in ((72, 40, TileConfig(8, 16, 32, 1, 3)), (64, 32, TileConfig(8, 32, 64, 2, 3))):
        x_MK = draw(num_rows, width, dtype=backend.dtype, device=backend.device)
        w_NK = draw(columns, width, dtype=backend.dtype, device=backend.device, seed=1)
        bias_N = draw(columns, dtype=backend.dtype, device=backend.device, seed=2)
        ours = linear_triton(poisoned_rows(x_MK), poisoned_rows(w_NK), bias_N, tile=tile)
        exact = functional.linear(x_MK.double(), w_NK.double(), bias_N.double())
        torchs = functional.linear(x_MK, w_NK, bias_N)
        assert_close_as_torch(ours, torchs, exact, chain=CHAIN[backend.dtype] * width)


@pytest.mark.parametrize("width", [7, 64, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_bits_do_not_depend_on_the_rows_beside(dtype, width):
    """Any slice of the rows, at any place in its block. Widths 7 and 33 are where torch's small products differ."""
    x_MK, w_NK = draw(2 * CPU_BLOCK + 3, width, dtype=dtype), draw(5, width, dtype=dtype, seed=1)
    whole = linear(x_MK, w_NK)
    for start, end in ((0, 1), (5, 6), (31, 33), (1, 66), (40, 67)):
        assert_same_bits(linear(x_MK[start:end].clone(), w_NK), whole[start:end])


def test_operands_of_two_dtypes_are_widened(backend):
    """A 16-bit row against an fp32 weight, and 16-bit operands with an fp32 result, lose nothing to a 16-bit cast."""
    narrow = torch.float16 if backend.device == "cpu" else torch.bfloat16
    x_MK, w_NK = draw(5, 96, dtype=narrow, device=backend.device), draw(7, 96, device=backend.device, seed=1)
    for weight in (w_NK, w_NK.to(narrow)):
        exact = functional.linear(x_MK.double(), weight.double())
        for run in (linear_triton, linear_reference):
            ours = run(x_MK, weight, out_dtype=torch.float32)
            assert ours.dtype == torch.float32
            assert_close_as_torch(ours, functional.linear(x_MK.float(), weight.float()), exact, chain=96)


def test_head_linear(backend):
    """Rows are a slice of wider ones, as queries are; NaN around them."""
    wide_BHK = torch.full((5, 3, 64), torch.nan, dtype=backend.dtype, device=backend.device)
    wide_BHK[..., 8:48] = draw(5, 3, 40, dtype=backend.dtype, device=backend.device)
    x_BHK, w_HNK = wide_BHK[..., 8:48], draw(3, 24, 40, dtype=backend.dtype, device=backend.device, seed=1)
    torchs = torch.einsum("bhk,hnk->bhn", x_BHK, w_HNK)
    exact = torch.einsum("bhk,hnk->bhn", x_BHK.double(), w_HNK.double())
    for run in (head_linear_triton, head_linear_reference):
        assert_close_as_torch(run(x_BHK, w_HNK), torchs, exact, chain=CHAIN[backend.dtype] * 40)
    assert head_linear(x_BHK[:0], w_HNK).shape == (0, 3, 24)


def test_head_linear_reference_bits_do_not_depend_on_the_rows_beside():
    x_BHK, w_HNK = draw(35, 2, 24), draw(2, 16, 24, seed=1)
    whole = head_linear(x_BHK, w_HNK)
    assert_same_bits(head_linear(x_BHK[34:].clone(), w_HNK), whole[34:])


def check_C31(num_experts: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Model-dtype rows and gate: the logits are fp32, near ties survive, ids are those of fp32, alone or among 512."""
    x_MK = draw(512, width, dtype=dtype, device=device)
    w_NK = draw(num_experts, width, dtype=dtype, device=device, seed=1)
    rule = RoutingRule(top_k=min(4, num_experts))
    logits = linear(x_MK, w_NK, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert_close_as_torch(
        logits,
        functional.linear(x_MK.float(), w_NK.float()),
        functional.linear(x_MK.double(), w_NK.double()),
        chain=width,
    )
    ids = route(logits, None, rule).expert_ids_TK
    for row in (0, 31, 511):
        one = linear(x_MK[row : row + 1].clone(), w_NK, out_dtype=torch.float32)
        assert_same_bits(one, logits[row : row + 1])
        assert torch.equal(route(one, None, rule).expert_ids_TK, ids[row : row + 1])


@pytest.mark.parametrize("num_experts", [4, 60, 257])
def test_C31_router_logits_are_fp32_for_any_batch(num_experts):
    check_C31(num_experts, 96, torch.bfloat16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [4, 60, 257])
def test_C31_router_logits_are_fp32_for_any_batch_on_the_gpu(num_experts):
    check_C31(num_experts, 2880, torch.bfloat16, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_C31_near_tie_through_the_gate(device):
    """Two logits, 4.000 and 4.004, that bf16 cannot tell apart, made from bf16 operands."""
    x_MK = torch.zeros(1, 32, dtype=torch.bfloat16, device=device)
    x_MK[0, :2] = 1.0
    w_NK = torch.zeros(4, 32, dtype=torch.bfloat16, device=device)
    w_NK[0, 0], w_NK[1, 0], w_NK[1, 1], w_NK[2, 0] = 4.0, 4.0, 0.004, 1.0
    logits = linear(x_MK, w_NK, out_dtype=torch.float32)
    assert route(logits, None, RoutingRule(top_k=1)).expert_ids_TK.tolist() == [[1]]
    assert float(logits[0, 1]) == pytest.approx(4.004, abs=1e-4)


TILES = [TileConfig(m, n, k, 4, 3) for m in (16, 32, 64, 128) for n, k in ((32, 32), (64, 64), (128, 32))]
SWAPPED_TILES = [TileConfig(8, 16, 256, 1, 4), TileConfig(8, 64, 256, 4, 4), TileConfig(8, 32, 64, 2, 3)]
"""Of 8 rows: the weights are the first operand."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_tile_or_batch(dtype):
    x_MK, w_NK = draw(256, 2880, dtype=dtype, device="cuda"), draw(257, 2880, dtype=dtype, device="cuda", seed=1)
    whole = linear_triton(x_MK, w_NK)
    for tile in [*TILES, *([] if dtype == torch.float32 else SWAPPED_TILES)]:
        assert_same_bits(linear_triton(x_MK, w_NK, tile=tile), whole)
    for rows in (1, 7, 17, 100):
        assert_same_bits(linear(x_MK[-rows:].clone(), w_NK), whole[-rows:])


@aot
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 5120), (1, 2048), (64, 5120), (64, 151936), (4096, 4096), (256, 128)]
)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, rows, columns):
    tile = linear_tile(rows, columns, torch.bfloat16, arch // 10, multiprocessors=132)
    args: dict[str, object] = {"num_rows": "i32", "num_columns": "i32", "width": "i32"}
    args |= {f"stride_{name}": "i32" for name in ("xm", "xh", "wn", "wh", "ym", "yh")}
    args |= {"x_ptr": "*bf16", "w_ptr": "*bf16", "bias_ptr": "*bf16", "y_ptr": "*fp32", "WIDE": False, "GROUP_M": 8}
    args |= {"EVEN": rows == 1, "PREFETCH": 32, "PDL": arch >= 90}
    args |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    assert compile_ahead(_linear_kernel, arch, args, num_warps=tile.num_warps, num_stages=tile.num_stages)
