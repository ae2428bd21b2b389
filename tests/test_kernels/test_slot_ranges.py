"""Slots whose rows lie anywhere: another order than their slots, some slots at a time, the bits of all in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.fp8_tiles import FewRowsTile
from kernels.grouped_gemm import (
    grouped_gemm_reference,
    grouped_gemm_swiglu_reference,
    grouped_gemm_swiglu_triton,
    grouped_gemm_triton,
)
from kernels.grouped_gemm_fp8 import grouped_gemm_fp8, grouped_gemm_fp8_triton
from kernels.grouped_gemm_fp8_tma import ManyRowsTile
from kernels.quantize import QuantizedBlocks, quantize_blocks, quantize_rows
from kernels.row_tiles import ranges_of
from kernels.tiles import TileConfig
from tests.compare import assert_same_bits

COUNTS = (17, 0, 40, 1, 0, 20, 9)
ROUNDS = ((5, 0, 3), (6, 1), (2, 4))
"""Each slot once, in no order: as many calls as there are rounds."""


def operands(dtype: torch.dtype, width: int, columns: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_XD, w_SND, offsets, row index."""
    generator = torch.Generator().manual_seed(0)
    used = sum(COUNTS)
    x_XD = torch.randn(used, width, generator=generator).to(device, dtype)
    w_SND = (torch.randn(len(COUNTS), columns, width, generator=generator) / width**0.5).to(device, dtype)
    offsets_S1 = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return x_XD, w_SND, offsets_S1, torch.randperm(used, generator=generator).to(device, torch.int32)


def ranges(offsets_S1: Tensor, slots: tuple[int, ...]) -> Tensor:
    """[S, 2] of these slots."""
    index = torch.tensor(slots, device=offsets_S1.device)
    return torch.stack((offsets_S1[index], offsets_S1[index + 1]), dim=1)


def check(run, dtype: torch.dtype, device: str, *, columns: int, indexed: bool, **options) -> None:
    x_XD, w_SND, offsets_S1, index_R = operands(dtype, 72, columns, device)
    options |= {"row_index_R": index_R if indexed else None, "num_rows": index_R.shape[0] + 3}
    if indexed:
        options["row_index_R"] = torch.cat([index_R, index_R.new_zeros(3)])
    else:
        x_XD = torch.cat([x_XD, x_XD[:3]])
    whole = run(x_XD, w_SND, offsets_S1, **options)
    out = torch.full_like(whole, 77)
    for slots in ROUNDS:
        held = w_SND[list(slots)]
        assert run(x_XD, held, ranges(offsets_S1, slots), out=out, **options) is out
    used = index_R.shape[0]
    assert_same_bits(out[:used], whole[:used])
    assert (out[used:] == 77).all(), "rows of no slot were written"


RUNS = [
    pytest.param(grouped_gemm_triton, grouped_gemm_reference, 40, id="plain"),
    pytest.param(grouped_gemm_swiglu_triton, grouped_gemm_swiglu_reference, 80, id="swiglu"),
]
SMALL = TileConfig(16, 32, 32, 4, 2)


@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "in-order"])
@pytest.mark.parametrize("form", ["pointers", "tma"])
@pytest.mark.parametrize(("triton_op", "reference", "columns"), RUNS)
def test_slots_in_any_order(backend, triton_op, reference, columns, form, indexed):
    tile = TileConfig(16, 32, 32, 8, 2, "tma") if form == "tma" else SMALL
    check(triton_op, backend.dtype, backend.device, columns=columns, indexed=indexed, tile=tile)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("triton_op", "reference", "columns"), RUNS)
def test_reference(triton_op, reference, columns, dtype):
    for indexed in (True, False):
        check(reference, dtype, "cpu", columns=columns, indexed=indexed)


@pytest.mark.gpu
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(("triton_op", "reference", "columns"), RUNS)
def test_every_form_on_the_device(triton_op, reference, columns, at):
    products = columns // 40
    tile = (
        TileConfig(16, 64, 64, 4, 4),
        TileConfig(64, 128 // products, 64, 8, 3, "tma"),
        TileConfig(64, 128 // products, 64, 4, 3, "tma"),
        TileConfig(128, 128 // products, 64, 4, 4, "specialized"),
        TileConfig(128, 256 // products, 64, 4, 4, "swapped"),
    )[at]
    for indexed in (True, False):
        check(triton_op, torch.bfloat16, "cuda", columns=columns, indexed=indexed, tile=tile)


def check_fp8(run, device: str, *, parts: int, indexed: bool, **options) -> None:
    x_XD, w_SND, offsets_S1, index_R = operands(torch.float32, 208, 80 * parts, device)
    x, num_rows = quantize_rows(x_XD), x_XD.shape[0]
    blocks = quantize_blocks(w_SND.unflatten(1, (parts, -1)))
    w = QuantizedBlocks(blocks.values.flatten(1, 2), blocks.scales)
    options |= {"row_index_R": index_R if indexed else None, "num_rows": num_rows, "out_dtype": torch.float32}
    whole = run(x, w, offsets_S1, **options)
    out = torch.full_like(whole, 77)
    for slots in ROUNDS:
        index = torch.tensor(slots, device=device)
        held = QuantizedBlocks(w.values.view(torch.uint8)[index].view(w.values.dtype), w.scales[index])
        run(x, held, ranges(offsets_S1, slots), out=out, **options)
    assert_same_bits(out, whole)


@pytest.mark.parametrize("parts", [1, 2])
def test_reference_in_fp8(parts):
    for indexed in (True, False):
        check_fp8(grouped_gemm_fp8, "cpu", parts=parts, indexed=indexed)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
def test_fp8_on_the_device(parts):
    for tile in (FewRowsTile(16, 64, 4, 4), FewRowsTile(32, 128 // parts, 4, 3)):
        for indexed in (True, False):
            check_fp8(grouped_gemm_fp8_triton, "cuda", parts=parts, indexed=indexed, tile=tile)
    tile = ManyRowsTile(64, 128 // parts, 4, 3)
    check_fp8(grouped_gemm_fp8_triton, "cuda", parts=parts, indexed=False, tile=tile)
    with pytest.raises(AssertionError, match="packed before"):
        check_fp8(grouped_gemm_fp8_triton, "cuda", parts=parts, indexed=True, tile=tile)


def test_ranges_on_the_host():
    assert ranges_of(torch.tensor([0, 3, 3, 8], dtype=torch.int32)) == [(0, 3), (3, 3), (3, 8)]
    assert ranges_of(torch.tensor([[3, 8], [0, 3]], dtype=torch.int32)) == [(3, 8), (0, 3)]
