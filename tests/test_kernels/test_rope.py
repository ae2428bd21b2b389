"""Rotary embedding in both layouts: hand-worked, against complex multiplication in fp64, in place and nowhere else."""

from __future__ import annotations

import pytest
import torch

from kernels.rope import _rope_kernel, rope_, rope_reference_, rope_triton_
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, rel_norm
from tests.shapes import NUM_TOKENS


def angle_table(num_positions: int, rotated: int) -> torch.Tensor:
    """cos_sin_PR with the usual frequencies."""
    frequency = 10000.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def exact(x_THC, positions_T, cos_sin_PR, *, interleaved: bool) -> torch.Tensor:
    """Each pair as a complex number times cos + i sin, in fp64."""
    x = x_THC.double().cpu()
    rotated = cos_sin_PR.shape[1]
    cos, sin = cos_sin_PR.double().cpu()[positions_T.cpu()].unsqueeze(1).chunk(2, dim=-1)
    pairs = x[..., :rotated].unflatten(-1, (-1, 2)) if interleaved else x[..., :rotated].unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    flat = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat([flat, x[..., rotated:]], dim=-1)


def test_hand_worked():
    """A quarter turn takes (1, 0) to (0, 1) and (0, 1) to (-1, 0); the entry past R stays."""
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    for interleaved, turned in ((False, [-3.0, -4.0, 1.0, 2.0, 5.0]), (True, [-2.0, 1.0, -4.0, 3.0, 5.0])):
        x_THC = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]]).repeat(2, 1, 1)
        rope_(x_THC, torch.tensor([1, 0]), table, interleaved=interleaved)
        assert x_THC[0, 0].tolist() == turned
        assert x_THC[1, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def check(run, num_tokens, num_heads, width, rotated, dtype, device, *, interleaved) -> None:
    """x is cut out of a wider tensor, which must stay as it was around it."""
    generator = torch.Generator().manual_seed(0)
    around = torch.randn(num_tokens + 1, num_heads + 2, width + 8, generator=generator).to(device=device, dtype=dtype)
    before = around.clone()
    x_THC = around[:num_tokens, 1 : num_heads + 1, 4 : width + 4]
    positions_T = torch.randint(0, 50, (num_tokens,), generator=generator).to(device)
    table = torch.full((52, rotated), torch.nan, device=device)
    table[:50] = angle_table(50, rotated).to(device)
    wanted = exact(x_THC, positions_T, table, interleaved=interleaved) if num_tokens else None
    run(x_THC, positions_T, table, interleaved=interleaved)
    if wanted is not None:
        assert rel_norm(x_THC, wanted) <= 1.1 * rel_norm(wanted.to(dtype), wanted) + 1e-7
    before[:num_tokens, 1 : num_heads + 1, 4 : rotated + 4] = x_THC[..., :rotated]
    assert_same_bits(around, before)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(
    ("num_heads", "width", "rotated"),
    [
        pytest.param(1, 64, 64, id="one-head-as-k_pe"),
        pytest.param(5, 128, 128, id="whole-heads"),
        pytest.param(3, 48, 24, id="half-of-an-odd-head"),
        pytest.param(40, 256, 256, id="two-blocks-of-heads"),
        pytest.param(2, 4, 2, id="one-pair"),
    ],
)
def test_shapes_of_heads(backend, num_heads, width, rotated, interleaved):
    for run in (rope_triton_, rope_reference_):
        check(run, 3, num_heads, width, rotated, backend.dtype, backend.device, interleaved=interleaved)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_numbers_of_tokens(backend, num_tokens):
    check(rope_triton_, num_tokens, 2, 16, 8, backend.dtype, backend.device, interleaved=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_reference(dtype, interleaved):
    check(rope_reference_, 7, 3, 48, 24, dtype, "cpu", interleaved=interleaved)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_bits_do_not_depend_on_the_tokens_beside(device, interleaved):
    whole = torch.randn(129, 3, 40, generator=torch.Generator().manual_seed(0)).to(device)
    one, positions_T, table = whole[77:78].clone(), torch.arange(129, device=device), angle_table(129, 40).to(device)
    rope_(whole, positions_T, table, interleaved=interleaved)
    rope_(one, positions_T[77:78], table, interleaved=interleaved)
    assert_same_bits(one, whole[77:78])


@aot
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, interleaved):
    args: dict[str, object] = {"x_ptr": "*bf16", "positions_ptr": "*i64", "table_ptr": "*fp32", "stride_t": "i32"}
    args |= {"half": "i32", "INTERLEAVED": interleaved, "BLOCK_P": 64, "PDL": arch >= 90}
    assert compile_ahead(_rope_kernel, arch, args | {"num_heads": "i32", "stride_h": "i32", "BLOCK_H": 16})
    assert compile_ahead(_rope_kernel, arch, args | {"num_heads": 1, "stride_h": "i32", "BLOCK_H": 1}, aligned=False)
