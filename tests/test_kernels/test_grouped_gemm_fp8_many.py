"""The fp8 products of very many rows: quantised where they are made, and weights that stay for all rows of a slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl

from kernels.fp8_tiles import FewRowsTile
from kernels.grouped_gemm_fp8 import grouped_gemm_fp8_triton, grouped_gemm_swiglu_quantized
from kernels.grouped_gemm_fp8_resident import ResidentTile, _fp8_resident_kernel
from kernels.grouped_gemm_fp8_swiglu import SwigluTile, _fp8_swiglu_kernel, launch_swiglu_quantized
from kernels.quantize import FP8, Quantized, dequantize_rows, quantize_rows, quantize_rows_reference
from tests.aot import aot
from tests.compare import assert_same_bits
from tests.fp8_operands import check, draw_blocks, draw_rows, offsets_of, plain
from tests.gluon_aot import box, compile_gluon_ahead
from tests.shapes import WILD_INDEX

RESIDENT = ResidentTile(8, 3)
UNEVEN = (1000, 0, 129, 64, 65, 1, 700, 0, 191, 192, 193, 2000)
"""Some hundreds of tiles over all multiprocessors, of slots with many rows, few and none; the last rows 1 to 64 of a
group; slots after which another group has the next turn."""


def test_definition_of_the_quantised_product():
    """On the CPU: the product in the model's dtype, then quantised; against plain torch."""
    x, w, counts = draw_rows(40, 200, "cpu"), draw_blocks(3, 2, 150, 200, "cpu"), (7, 0, 33)
    q = grouped_gemm_swiglu_quantized(x, w, offsets_of(counts, "cpu"), num_rows=40, dtype=torch.bfloat16)
    exact = plain(x, w, counts, torch.arange(40), torch.float64)
    assert q.values.shape == (40, 150) and q.scales.shape == (2, 40)
    assert float((dequantize_rows(q) - exact).abs().max() / exact.abs().max()) < 0.05
    expected = quantize_rows_reference(exact.bfloat16())
    assert float((q.scales / expected.scales - 1).abs().max()) < 0.02


def quantised_both_ways(counts, width: int, columns: int, *, indexed: bool, dtype=torch.bfloat16):
    """(in one launch, product and quantisation apart) of the rows that slots have; the others' indices are wild."""
    used, slots = sum(counts), len(counts)
    x, w = draw_rows(used + 5, width, "cuda"), draw_blocks(slots, 2, columns, width, "cuda")
    for slot, count in enumerate(counts):
        if count == 0:
            w.values[slot] = torch.full(w.values[slot].shape, torch.nan).to(FP8).cuda()
            w.scales[slot] = torch.nan
    offsets_S1 = offsets_of(counts, "cuda")
    index_R = None
    if indexed:
        index = torch.randperm(used, generator=torch.Generator().manual_seed(2)) + 2
        index_R = torch.cat([index, torch.full((5,), WILD_INDEX)]).to("cuda", torch.int32)
    options: dict[str, Any] = {"num_rows": used + 5, "out_dtype": dtype}
    one = launch_swiglu_quantized(x, w, offsets_S1, index_R, used + 5, dtype)
    h_RF = grouped_gemm_fp8_triton(
        x, w, offsets_S1, row_index_R=index_R, tile=FewRowsTile(16, 64, 4, 4, tma=width % 16 == 0), **options
    )
    return [Quantized(q.values[:used], q.scales[:, :used]) for q in (one, quantize_rows(h_RF))]


@pytest.mark.gpu
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(
    ("counts", "width", "columns"),
    [
        (UNEVEN, 256, 1056),  # more tiles than programs, fewer steps than stages
        (UNEVEN, 1408, 352),  # more steps than stages
        ((7, 0, 131, 62), 2880, 704),  # no whole block of columns
        ((3, 0, 70), 96, 48),  # gate, up and the next slot's gate in one box of weights
        ((0, 1, 0), 7168, 256),
    ],
)
def test_quantised_where_it_is_made_has_the_bits_of_quantised_after(counts, width, columns, indexed):
    one, two = quantised_both_ways(counts, width, columns, indexed=indexed)
    assert_same_bits(one.scales, two.scales)
    assert_same_bits(one.values.view(torch.uint8), two.values.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_quantised_from_rows_of_other_dtypes(dtype):
    one, two = quantised_both_ways((130, 65), 512, 256, indexed=True, dtype=dtype)
    assert_same_bits(one.scales, two.scales)
    assert_same_bits(one.values.view(torch.uint8), two.values.view(torch.uint8))


@pytest.mark.gpu
def test_a_nan_stays_in_its_row_of_the_quantised_product():
    x, w = draw_rows(200, 256, "cuda"), draw_blocks(1, 2, 256, 256, "cuda")
    x.scales[1, 3] = torch.nan
    q = launch_swiglu_quantized(x, w, offsets_of((200,), "cuda"), None, 200, torch.bfloat16)
    bad = q.values.float().isnan().any(1)
    assert bad.nonzero().flatten().tolist() == [3] and bool(q.values[3].float().isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "columns"), [(128, 256), (768, 2048), (1024, 1056), (704, 2880), (96, 40)])
def test_numbers_where_weights_stay(width, columns):
    options = {"device": "cuda", "out_dtype": torch.bfloat16, "indexed": False, "tile": RESIDENT}
    for counts in (UNEVEN, (7, 0, 131, 62), (0, 300, 0), (0, 0, 1)):
        check(grouped_gemm_fp8_triton, counts, 1, width, columns, **options)


@pytest.mark.gpu
def test_bits_where_weights_stay():
    """As the kernel for few rows gives them, and a row alone."""
    counts, rows = (3, 247, 0, 6, 400), 656
    x, w, offsets_S1 = draw_rows(rows, 768, "cuda"), draw_blocks(5, 1, 2048, 768, "cuda"), offsets_of(counts, "cuda")
    options: dict[str, Any] = {"out_dtype": torch.bfloat16}
    whole = grouped_gemm_fp8_triton(x, w, offsets_S1, num_rows=rows, tile=RESIDENT, **options)
    few = grouped_gemm_fp8_triton(x, w, offsets_S1, num_rows=rows, tile=FewRowsTile(16, 64, 4, 4), **options)
    assert_same_bits(whole, few)
    for row, slot in ((0, 0), (100, 1), (655, 4)):
        one = Quantized(x.values[row : row + 1].clone(), x.scales[:, row : row + 1].clone())
        alone = offsets_of([int(i == slot) for i in range(5)], "cuda")
        y_1N = grouped_gemm_fp8_triton(one, w, alone, num_rows=1, tile=RESIDENT, **options)
        assert_same_bits(y_1N, whole[row : row + 1])


@aot
@pytest.mark.parametrize("gather", [True, False])
def test_compiles_the_quantised_product(gather):
    args: dict[str, object] = {"x": "*fp8e4nv" if gather else box("fp8e4nv", 64, 128), "x_scale_ptr": "*fp32"}
    args |= {"w_desc": box("fp8e4nv", 128, 128), "w_scale_ptr": "*fp32", "offsets_ptr": "*i32", "num_rows": "i32"}
    args |= {"index_ptr": "*i32" if gather else None, "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "num_columns": "i32"}
    args |= {"width": "i32", "num_slots": "i32", "num_x_rows": "i32", "PDL": True}
    args |= {"TILE": SwigluTile(gl.bfloat16, 1e-30, 8, 1, 4, 200)}
    compile_gluon_ahead(_fp8_swiglu_kernel, args)


@aot
def test_compiles_where_weights_stay():
    args: dict[str, object] = {"x_desc": box("fp8e4nv", 64, 128), "w_desc": box("fp8e4nv", 128, 128), "y_ptr": "*bf16"}
    args |= {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "offsets_ptr": "*i32", "stride_y": "i32"}
    args |= {"num_columns": "i32", "width": "i32", "num_slots": "i32", "num_x_rows": "i32", "SLOT_STEP": 2}
    args |= {"W_STAGES": RESIDENT.w_stages, "X_STAGES": RESIDENT.x_stages, "PDL": True}
    compile_gluon_ahead(_fp8_resident_kernel, args)
