"""fp8 rows and blocks: worked numbers, what becomes of zeros, NaN and infinities, poisoned unused rows, same bits."""

from __future__ import annotations

import pytest
import torch

from kernels import quantize
from kernels.quantize import (
    FP8,
    TINIEST,
    Quantized,
    _quantize_rows_kernel,
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
    quantize_rows_reference,
    quantize_rows_triton,
    supports_fp8,
)
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTHS = [
    pytest.param(128, id="D128-one-group"),
    pytest.param(96, id="D96-part-of-a-group"),
    pytest.param(2880, id="D2880-GPT-OSS-22.5-groups"),
    pytest.param(7168, id="D7168-DeepSeek-V3"),
    pytest.param(41, id="D41-odd"),
]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_same(ours: Quantized, expected: Quantized) -> None:
    """Scales and values, NaN equal to NaN; the sign of a NaN does not count."""
    assert_same_bits(ours.scales, expected.scales)
    assert_same_bits(ours.values.float(), expected.values.float())


@pytest.mark.parametrize("device", DEVICES)
def test_a_worked_row(device):
    """Largest 896 gives scale 2: 896 -> 448, 4 -> 2, 0.01 -> 0.005 -> 3 steps of 1/512. Group 2 is all zero."""
    x_XD = torch.zeros(1, 130, device=device)
    x_XD[0, :3] = torch.tensor([-896.0, 4.0, 0.01])
    q = quantize_rows(x_XD)
    assert q.scales[:, 0].tolist() == [2.0, float(torch.tensor(TINIEST) / 448)]
    assert q.values[0, :4].float().tolist() == [-448.0, 2.0, 3 / 512, 0.0]
    assert not q.values[0, 128:].float().any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_values_come_back_within_half_a_step(device, dtype, width):
    """e4m3 has 3 bits behind the first: half a step is 2^-4 of a value, below 2^-6 of the scale half of 2^-9."""
    x_XD = draw(37, width, dtype=dtype, device=device)
    x_XD[3] *= 1e4 if dtype != torch.float16 else 100
    x_XD[4] *= 1e-4
    q = quantize_rows(x_XD)
    assert q.values.dtype == FP8 and q.scales.shape == (-(-width // 128), 37)
    scale_XD = q.scales.T.repeat_interleave(128, 1)[:, :width]
    error_XD = (dequantize_rows(q) - x_XD.float()).abs()
    assert bool((error_XD <= torch.maximum(x_XD.float().abs() * 2**-4, scale_XD * 2**-10) * 1.001).all())
    largest = torch.nn.functional.pad(q.values.float().abs(), (0, -width % 128)).unflatten(1, (-1, 128)).amax(-1)
    assert bool((largest == 448).all())


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_make_every_product_of_their_group_nan(device):
    x_XD = draw(3, 256, dtype=torch.float32, device=device)
    x_XD[0, 5], x_XD[1, 200] = torch.nan, torch.inf
    back_XD = dequantize_rows(quantize_rows(x_XD))
    assert bool(back_XD[0, 5].isnan()) and bool(back_XD[1, 200].isnan())
    assert bool(back_XD[0, :5].isfinite().all()) and bool(back_XD[0, 128:].isfinite().all())
    assert bool(back_XD[1, 128:].isnan().all()) and bool(back_XD[1, :128].isfinite().all())
    assert bool(back_XD[2].isfinite().all())


@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("device", DEVICES)
def test_bits_of_a_row_do_not_depend_on_the_others(device, num_rows):
    x_XD = draw(130, 300, device=device)
    whole, part = quantize_rows(x_XD), quantize_rows(x_XD[:num_rows].clone())
    assert_same(part, Quantized(whole.values[:num_rows], whole.scales[:, :num_rows]))


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_gives_the_bits_of_the_reference(dtype, width):
    """In a strided view, with a zero row, a NaN and an infinity."""
    x_XD = draw(77, width + 3, dtype=dtype, device="cuda")[:, :width]
    x_XD[3], x_XD[5, 1], x_XD[6, 2] = 0, torch.nan, torch.inf
    ours = quantize_rows_triton(x_XD)
    assert_same(Quantized(ours.values.cpu(), ours.scales.cpu()), quantize_rows_reference(x_XD.cpu()))


@pytest.mark.gpu
def test_C16_rows_beyond_2_31_elements():
    x_XD = torch.zeros(300_000, 7168, dtype=torch.bfloat16, device="cuda")
    assert x_XD.numel() > 2**31
    x_XD[-5:] = draw(5, 7168, device="cuda")
    q = quantize_rows(x_XD)
    assert_same(Quantized(q.values[-5:], q.scales[:, -5:]), quantize_rows(x_XD[-5:].clone()))


@pytest.mark.parametrize("shape", [(128, 128), (40, 96), (300, 200), (3, 257, 130)])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_a_weight(device, shape):
    """Edge blocks on both sides have their own scale; blocks differ in size by powers of ten."""
    w_ND = draw(*shape, dtype=torch.float32, device=device)
    w_ND[..., 128:, :] *= 100
    w_ND[..., 128:] *= 0.01
    q = quantize_blocks(w_ND)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert q.values.shape == shape and q.values.dtype == FP8 and q.scales.shape == grid
    for m in range(grid[-2]):
        for g in range(grid[-1]):
            block = w_ND[..., 128 * m : 128 * m + 128, 128 * g : 128 * g + 128]
            # On a GPU torch divides by a number by multiplying with its reciprocal.
            assert_same_bits(q.scales[..., m, g].cpu(), block.abs().amax((-2, -1)).cpu() / 448)
    error_ND = (dequantize_blocks(*q) - w_ND).abs()
    scale_ND = q.scales.repeat_interleave(128, -2)[..., : shape[-2], :].repeat_interleave(128, -1)[..., : shape[-1]]
    assert bool((error_ND <= torch.maximum(w_ND.abs() * 2**-4, scale_ND * 2**-10) * 1.001).all())


def test_a_large_weight_is_quantised_piece_by_piece_to_the_same_bits(monkeypatch):
    w_ND = draw(2, 700, 200)
    whole = quantize_blocks(w_ND)
    monkeypatch.setattr(quantize, "_MOST_AT_ONCE", 1)
    pieces = quantize_blocks(w_ND)
    assert_same_bits(pieces.values.float(), whole.values.float())
    assert_same_bits(pieces.scales, whole.scales)


def test_a_weight_without_rows():
    q = quantize_blocks(torch.empty(0, 256, 128))
    assert q.values.shape == (0, 256, 128) and q.scales.shape == (0, 2, 1)


def test_the_cpu_has_fp8():
    assert supports_fp8(torch.device("cpu"))


@aot
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch >= 89])
def test_compiles(arch, aligned):
    args: dict[str, object] = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "num_rows": "i32"}
    args |= {"width": "i32", "stride_x": "i32", "ROWS": 32, "TINIEST": TINIEST, "PDL": arch >= 90}
    assert compile_ahead(_quantize_rows_kernel, arch, args, aligned=aligned)
