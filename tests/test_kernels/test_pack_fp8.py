"""Quantised rows in the order of their slots: the very bits, unused entries wild and unread."""

from __future__ import annotations

import pytest
import torch

from kernels.pack_fp8 import _pack_rows_kernel, pack_rows, pack_rows_reference, pack_rows_triton
from kernels.quantize import FP8, Quantized, quantize_rows
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits
from tests.shapes import WILD_INDEX

BACKENDS = [
    pytest.param(pack_rows_reference, "cpu", id="reference"),
    pytest.param(pack_rows_triton, "cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param(pack_rows, "cuda", marks=pytest.mark.gpu, id="gpu"),
]


def draw_rows(num_rows: int, width: int, device: str) -> Quantized:
    q = quantize_rows(torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0)))
    return Quantized(q.values.to(device), q.scales.to(device))


def spaced(x: Quantized) -> Quantized:
    """The same as rows of wider ones, a row's scales together behind its values, with NaN around them."""
    (rows, width), groups = x.values.shape, x.scales.shape[0]
    values = torch.full((rows, width + 7), 0x7F, dtype=torch.uint8, device=x.values.device).view(FP8)[:, :width]
    scales = torch.full((rows, groups + 3), torch.nan, device=x.scales.device)[:, 1 : 1 + groups].T
    values.view(torch.uint8).copy_(x.values.view(torch.uint8))
    return Quantized(values, scales.copy_(x.scales))


@pytest.mark.parametrize("width", [96, 128, 2880, 41])
@pytest.mark.parametrize("used", [0, 1, 15, 16, 17, 129])
@pytest.mark.parametrize(("run", "device"), BACKENDS)
def test_rows_and_scales_move_together(run, device, used, width):
    x = spaced(draw_rows(50, width, device))
    index = torch.randint(0, 50, (used,), generator=torch.Generator().manual_seed(1))
    index_R = torch.cat([index, torch.full((9,), WILD_INDEX)]).to(device, torch.int32)
    offsets_S1 = torch.tensor([0, used // 3, used], dtype=torch.int32, device=device)
    packed = run(x, index_R, offsets_S1)
    assert packed.values.shape == (used + 9, width) and packed.scales.shape == (x.scales.shape[0], used + 9)
    rows = index.to(device)
    assert_same_bits(packed.values[:used].view(torch.uint8), x.values.view(torch.uint8)[rows])
    assert_same_bits(packed.scales[:, :used], x.scales[:, rows])


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_unused_rows_are_not_written(device):
    """Seven rows of forty are used; the others of a poisoned result stay as they were."""
    x = draw_rows(50, 256, device)
    index_R = torch.zeros(40, dtype=torch.int32, device=device)
    last = torch.tensor([7], dtype=torch.int32, device=device)
    values = torch.full((40, 256), 0x7F, dtype=torch.uint8, device=device)
    scales = torch.full((2, 40), torch.nan, device=device)
    options = {"ROWS": 16, "GROUPS": 8, "PDL": False}
    _pack_rows_kernel[(3,)](x.values, x.scales, index_R, last, values.view(FP8), scales, 256, 50, 1, 40, 256, **options)
    assert bool(scales[:, 7:].isnan().all()) and bool(scales[:, :7].isfinite().all())
    assert bool((values[7:] == 0x7F).all())
    assert_same_bits(values[:7], x.values.view(torch.uint8)[:1].expand(7, -1))


@aot
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch >= 89])
def test_compiles(arch, aligned):
    args: dict[str, object] = {"x_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "index_ptr": "*i32", "last_ptr": "*i32"}
    args |= {"out_ptr": "*fp8e4nv", "out_scale_ptr": "*fp32", "stride_x": "i32", "scale_stride_g": "i32"}
    args |= {"scale_stride_x": "i32", "num_rows": "i32", "width": "i32"}
    args |= {"ROWS": 16, "GROUPS": 8, "PDL": arch >= 90}
    assert compile_ahead(_pack_rows_kernel, arch, args, aligned=aligned)
