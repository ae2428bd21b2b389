"""Ragged fp8 products against fp64 of the dequantised operands, next to torch; bits whatever tile, batch and kernel.

The interpreter computes no bf16 and casts fp8 wrongly, but multiplies fp8 operands made elsewhere, in fp16: exact for
e4m3. So the kernels run there with operands that torch quantised and fp32 results.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.fp8_tiles import FewRowsTile, Fp8Tile, fp8_tile, quantizes_swiglu
from kernels.grouped_gemm_fp8 import (
    _few_rows_kernel,
    grouped_gemm_fp8,
    grouped_gemm_fp8_reference,
    grouped_gemm_fp8_triton,
    grouped_gemm_swiglu_quantized,
)
from kernels.grouped_gemm_fp8_resident import ResidentTile
from kernels.grouped_gemm_fp8_specialized import Fp8ProductTile, SpecializedTile, _fp8_specialized_kernel
from kernels.grouped_gemm_fp8_tma import ManyRowsTile, _many_rows_kernel
from kernels.quantize import (
    FP8,
    Quantized,
    QuantizedBlocks,
    dequantize_blocks,
    dequantize_rows,
    quantize_rows,
)
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, max_rel
from tests.fp8_operands import check, draw_blocks, draw_rows, offsets_of
from tests.gluon_aot import box, compile_gluon_ahead
from tests.shapes import HIDDEN, INTERMEDIATE, NUM_TOKENS, WILD_INDEX

BACKENDS = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]
FEW_TILES = [
    FewRowsTile(16, 64, 4, 6),
    FewRowsTile(16, 128, 4, 4),
    FewRowsTile(32, 64, 4, 4),
    FewRowsTile(64, 128, 8, 3),
    FewRowsTile(16, 64, 4, 4, tma=False),
]
MANY_TILES = [ManyRowsTile(64, 64, 4, 3), ManyRowsTile(128, 64, 8, 3), SpecializedTile(2, 6), SpecializedTile(3, 5)]
"""For packed rows."""


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("width", "columns"), [(96, 40), (200, 96), (256, 130)])
def test_reference_numbers(width, columns, parts, indexed, out_dtype):
    """Edge blocks on both sides, gate and up with blocks of their own, an expert without rows."""
    options = {"device": "cpu", "out_dtype": out_dtype, "indexed": indexed}
    check(grouped_gemm_fp8_reference, (2, 0, 33, 1), parts, width, columns, **options)


@pytest.mark.parametrize("parts", [1, 2])
def test_reference_bits_do_not_depend_on_the_rows_beside(parts):
    x, w = draw_rows(80, 200, "cpu"), draw_blocks(3, parts, 40, 200, "cpu")
    whole = grouped_gemm_fp8_reference(x, w, offsets_of((7, 70, 3), "cpu"), num_rows=80, out_dtype=torch.float32)
    for row in (7, 8, 40, 76):
        one = Quantized(x.values[row : row + 1].clone(), x.scales[:, row : row + 1].clone())
        y = grouped_gemm_fp8_reference(one, w, offsets_of((0, 1, 0), "cpu"), num_rows=1, out_dtype=torch.float32)
        assert_same_bits(y, whole[row : row + 1])


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("device", BACKENDS)
def test_numbers_of_rows(device, parts, num_tokens):
    """All rows to one slot, among slots without any; more rows than one tile holds."""
    tile = FewRowsTile(64, 64, 4, 2, tma=False) if device == "cpu" else None
    counts = (0, num_tokens, 0)
    options = {"device": device, "out_dtype": torch.float32 if device == "cpu" else torch.bfloat16, "tile": tile}
    check(grouped_gemm_fp8_triton, counts, parts, 128, 32, indexed=True, **options)


@pytest.mark.parametrize("width", HIDDEN)
@pytest.mark.parametrize("intermediate", INTERMEDIATE)
@pytest.mark.parametrize("device", BACKENDS)
def test_C43_widths_that_no_tile_divides(device, width, intermediate):
    """Both products of an expert: D -> 2F and F -> D, the last column looked at by itself."""
    tile = FewRowsTile(16, 128, 4, 2, tma=False) if device == "cpu" else None
    options = {"device": device, "out_dtype": torch.float32 if device == "cpu" else torch.bfloat16, "tile": tile}
    check(grouped_gemm_fp8_triton, (2, 0, 3), 2, width, intermediate, indexed=True, **options)
    check(grouped_gemm_fp8_triton, (2, 0, 3), 1, intermediate, width, indexed=False, **options)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("device", BACKENDS)
def test_tiles_of_packed_rows(device, parts):
    """The kernel for many rows: a slot's last tile reaches into the next one's rows, columns and width into nothing."""
    options = {"device": device, "out_dtype": torch.float32 if device == "cpu" else torch.bfloat16, "indexed": False}
    check(grouped_gemm_fp8_triton, (2, 0, 70, 5), parts, 208, 80, tile=ManyRowsTile(64, 64, 4, 2), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 3, 60, 160, 257, 384])
def test_C43_numbers_of_slots(slots):
    counts = [1 + s % 2 if s % 3 == (slots - 1) % 3 or s == 0 else 0 for s in range(slots)]
    options = {"device": "cuda", "out_dtype": torch.bfloat16}
    check(grouped_gemm_fp8_triton, counts, 2, 128, 128, indexed=True, **options)
    check(grouped_gemm_fp8_triton, [40 * count for count in counts], 1, 128, 128, indexed=False, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*FEW_TILES, *MANY_TILES], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("width", "columns"), [(2048, 768), (2880, 704), (96, 48), (7168, 256)])
def test_numbers_of_every_tile(width, columns, parts, tile):
    indexed = isinstance(tile, FewRowsTile)
    options = {"device": "cuda", "out_dtype": torch.bfloat16, "indexed": indexed, "tile": tile}
    check(grouped_gemm_fp8_triton, (7, 0, 131, 62), parts, width, columns, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("width", "columns"), [(2048, 768), (2880, 704), (768, 2048)])
def test_bits_do_not_depend_on_tile_kernel_or_batch(width, columns, parts):
    """On wgmma: operands swapped or not, TMA or pointers, alone or among 256."""
    x, w = draw_rows(256, width, "cuda"), draw_blocks(3, parts, columns, width, "cuda")
    offsets_S1 = offsets_of((3, 247, 6), "cuda")

    def run(x: Quantized, offsets_S1: torch.Tensor, num_rows: int, tile: Fp8Tile | None) -> torch.Tensor:
        return grouped_gemm_fp8_triton(x, w, offsets_S1, num_rows=num_rows, out_dtype=torch.bfloat16, tile=tile)

    whole = run(x, offsets_S1, 256, None)
    for tile in (*FEW_TILES, FewRowsTile(16, 64 // parts, 4, 3), *MANY_TILES):
        assert_same_bits(run(x, offsets_S1, 256, tile), whole)
    for row in (3, 100, 249):
        one = Quantized(x.values[row : row + 1].clone(), x.scales[:, row : row + 1].clone())
        for tile in (None, *MANY_TILES):
            assert_same_bits(run(one, offsets_of((0, 1, 0), "cuda"), 1, tile), whole[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("unroll", [2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_several_steps_an_iteration(parts, unroll):
    """Same bits; the last columns of the width are nothing."""
    x, w, offsets_S1 = (
        draw_rows(20, 4000, "cuda"),
        draw_blocks(3, parts, 256, 4000, "cuda"),
        offsets_of((3, 0, 17), "cuda"),
    )
    one, more = (
        grouped_gemm_fp8_triton(
            x, w, offsets_S1, num_rows=20, out_dtype=torch.bfloat16, tile=FewRowsTile(16, 64, 4, 3, unroll=number)
        )
        for number in (1, unroll)
    )
    assert_same_bits(more, one)
    options = {"device": "cuda", "out_dtype": torch.bfloat16, "indexed": True}
    check(
        grouped_gemm_fp8_triton, (7, 0, 31), parts, 4096, 256, tile=FewRowsTile(16, 64, 4, 3, unroll=unroll), **options
    )


def test_few_programs_ask_for_several_steps_of_long_rows_together(monkeypatch):
    """Of a card with 132 multiprocessors."""
    monkeypatch.setattr("kernels.fp8_tiles.device_generation", lambda x: 9)
    monkeypatch.setattr("kernels.fp8_tiles.num_multiprocessors", lambda device: 132)
    x = torch.empty(1, device="meta")

    def tile(num_rows: int, slots: int, parts: int, columns: int, width: int) -> Fp8Tile:
        values = torch.empty(slots, parts * columns, width, device="meta")
        return fp8_tile(x, QuantizedBlocks(values, torch.empty(slots, parts, 1, 1, device="meta")), num_rows)

    assert tile(2, 8, 1, 4096, 14336) == FewRowsTile(16, 64, 4, 3, unroll=4)  # 128 programs, one a multiprocessor
    assert tile(4, 8, 1, 4096, 14336) == FewRowsTile(16, 64, 4, 6)  # 256
    assert tile(2, 8, 2, 14336, 4096) == FewRowsTile(16, 64, 4, 3, unroll=2)  # 448
    assert tile(4, 8, 2, 14336, 4096) == FewRowsTile(16, 64, 4, 3)  # 896
    assert tile(8, 32, 2, 2048, 7168) == FewRowsTile(16, 64, 4, 3, unroll=2)  # 256
    assert tile(8, 32, 2, 2048, 7168 - 128) == FewRowsTile(16, 64, 4, 6)  # 55 steps
    assert tile(8, 128, 2, 768, 2048) == FewRowsTile(16, 64, 4, 6)  # 16 steps
    assert tile(128, 8, 1, 4096, 14336) == FewRowsTile(32, 128, 4, 2, unroll=2)
    assert tile(128, 8, 2, 14336, 4096) == FewRowsTile(32, 64, 4, 3)


def test_weights_stay_for_many_short_rows(monkeypatch):
    """And the first product is quantised where it is made from more rows on, but for so many that they pass more than
    once by weights that no cache keeps."""
    monkeypatch.setattr("kernels.fp8_tiles.device_generation", lambda x: 9)
    x = torch.empty(1, device="meta")

    def weights(slots: int, parts: int, columns: int, width: int) -> QuantizedBlocks:
        values = torch.empty(slots, parts * columns, width, device="meta")
        return QuantizedBlocks(values, torch.empty(slots, parts, 1, 1, device="meta"))

    for width, num_rows, stays in ((768, 8192, True), (1024, 8192, True), (1152, 8192, False), (768, 8064, False)):
        assert isinstance(fp8_tile(x, weights(128, 1, 2048, width), num_rows), ResidentTile) == stays
    assert not isinstance(fp8_tile(x, weights(128, 2, 768, 768), 32768), ResidentTile)
    for num_rows, sizes, fused in (
        (32768, (128, 2, 768, 2048), True),
        (16384, (128, 2, 768, 2048), False),
        (131072, (32, 2, 2048, 7168), True),
        (8192, (8, 2, 14336, 4096), True),
        (32768, (8, 2, 14336, 4096), False),
        (32768, (128, 2, 768, 2056), False),
    ):
        assert quantizes_swiglu(x, weights(*sizes), num_rows) == fused


def test_a_tile_that_would_leave_wgmma_is_refused():
    """32 rows of weights: mma.sync would take them, whose bits differ."""
    x, w = draw_rows(4, 128, "cpu"), draw_blocks(1, 1, 64, 128, "cpu")
    with pytest.raises(AssertionError, match=r"mma\.sync gives other bits"):
        grouped_gemm_fp8_triton(
            x, w, offsets_of((4,), "cpu"), num_rows=4, out_dtype=torch.bfloat16, tile=FewRowsTile(16, 32, 4, 4)
        )


def expert_rows(x_TD, w13: QuantizedBlocks, w2: QuantizedBlocks, offsets_S1, row_index_R, num_rows: int):
    """Both products, as the model calls them."""
    options = {"row_index_R": row_index_R, "num_rows": num_rows, "dtype": x_TD.dtype}
    h = grouped_gemm_swiglu_quantized(quantize_rows(x_TD), w13, offsets_S1, **options)
    return grouped_gemm_fp8(h, w2, offsets_S1, num_rows=num_rows, out_dtype=x_TD.dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_tokens", [1, 65, 300])
def test_two_products_of_an_expert(device, num_tokens):
    """bf16 rows in and out, against the same in fp64 with nothing rounded: fp8 costs a few percent a product.

    Rows are packed on the way (300 tokens, many rows a slot) or gathered by index.
    """
    w13, w2 = draw_blocks(3, 2, 192, 256, device), draw_blocks(3, 1, 256, 192, device, seed=2)
    x_TD = torch.randn(num_tokens, 256, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    index = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(4)).to(device)
    counts = (num_tokens - num_tokens // 3, 0, num_tokens // 3)
    spare = torch.full((7,), WILD_INDEX, dtype=torch.int32, device=device)
    y_RD = expert_rows(
        x_TD, w13, w2, offsets_of(counts, device), torch.cat([index.to(torch.int32), spare]), num_tokens + 7
    )[:num_tokens]
    start = 0
    for slot, count in enumerate(counts):
        w13_ND = dequantize_blocks(w13.values[slot].unflatten(0, (2, -1)), w13.scales[slot]).flatten(0, 1).double()
        w2_ND = dequantize_blocks(w2.values[slot][None], w2.scales[slot])[0].double()
        gate, up = (x_TD[index[start : start + count]].double() @ w13_ND.T).chunk(2, -1)
        exact = (functional.silu(gate) * up) @ w2_ND.T
        if count:
            error = (y_RD[start : start + count].double() - exact).norm() / exact.norm()
            assert float(error) < 0.06, float(error)
        start += count


@pytest.mark.gpu
def test_bits_of_an_expert_alone_packed_and_gathered():
    """The choice between packed and gathered rows is the batch's; the bits are not."""
    w13, w2 = draw_blocks(4, 2, 384, 512, "cuda"), draw_blocks(4, 1, 512, 384, "cuda", seed=2)
    x_TD = torch.randn(1024, 512, generator=torch.Generator().manual_seed(3)).to("cuda", torch.bfloat16)
    index_R = torch.arange(1024, dtype=torch.int32, device="cuda")
    assert isinstance(fp8_tile(x_TD, w13, 1024), ManyRowsTile) and isinstance(fp8_tile(x_TD, w13, 8), FewRowsTile)
    whole = expert_rows(x_TD, w13, w2, offsets_of((512, 0, 512, 0), "cuda"), index_R, 1024)
    for start, end in ((0, 1), (100, 108), (511, 512), (300, 400)):
        offsets_S1 = offsets_of((end - start, 0, 0, 0), "cuda")
        part = expert_rows(x_TD[start:end].clone(), w13, w2, offsets_S1, index_R[: end - start], end - start)
        assert_same_bits(part, whole[start:end])


@pytest.mark.gpu
def test_a_nan_row_stays_in_its_row():
    w = draw_blocks(2, 1, 256, 256, "cuda")
    x_XD = torch.randn(200, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    x_XD[3, 7], x_XD[150, 0] = torch.nan, torch.inf
    for num_rows in (200, 20):
        counts = (num_rows // 2, num_rows - num_rows // 2)
        y_RN = grouped_gemm_fp8(
            quantize_rows(x_XD[:num_rows].clone()),
            w,
            offsets_of(counts, "cuda"),
            num_rows=num_rows,
            out_dtype=torch.bfloat16,
        )
        bad = y_RN.isnan().any(1).nonzero().flatten().tolist()
        assert bad == [row for row in (3, 150) if row < num_rows]
        assert bool(y_RN[bad].isnan().all())


@pytest.mark.gpu
def test_C16_weights_beyond_2_31_elements():
    """512 slots of 2048 x 4096 = 2^32 elements, scales all NaN but the last slot's, to which every row goes."""
    last = draw_blocks(1, 1, 2048, 4096, "cuda")
    w = QuantizedBlocks(
        torch.zeros(512, 2048, 4096, dtype=FP8, device="cuda"),
        torch.full((512, 1, 16, 32), torch.nan, device="cuda"),
    )
    w.values[511], w.scales[511] = last.values[0], last.scales[0]
    x = draw_rows(300, 4096, "cuda")
    expected = dequantize_rows(x) @ dequantize_blocks(last.values[0], last.scales[0, 0]).T
    for tile in (FEW_TILES[1], FEW_TILES[4], MANY_TILES[0], MANY_TILES[3]):
        y_RN = grouped_gemm_fp8_triton(
            x, w, offsets_of([0] * 511 + [300], "cuda"), num_rows=300, out_dtype=torch.bfloat16, tile=tile
        )
        assert max_rel(y_RN, expected) < 1e-2


@aot
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch >= 89])
def test_compiles_for_few_rows(arch, rows, parts):
    tma = arch >= 90
    tile = FewRowsTile(max(16, rows), 64 // parts, 4, 4 if tma else 3, tma=tma)
    args: dict[str, object] = {"x_ptr": "*fp8e4nv", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "y_ptr": "*bf16"}
    args |= {"w": f"tensordesc<fp8e4nv[{parts}, {tile.block_n}, 128]>" if tma else "*fp8e4nv", "W_DESC": tma}
    args |= {"offsets_ptr": "*i32", "index_ptr": "*i32", "num_columns": "i32", "width": "i32", "num_slots": "i32"}
    args |= {
        "PARTS": parts,
        "UNROLL": 2 if rows == 1 else 1,
        "EVEN_K": rows > 1,
        "BLOCK_S": 128,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    args |= {"num_x_rows": "i32", "SLOT_STEP": parts, "GROUP_M": 8, "PDL": arch >= 90}
    assert compile_ahead(_few_rows_kernel, arch, args, num_warps=tile.num_warps, num_stages=tile.num_stages)


@aot
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch >= 90])
def test_compiles_for_many_rows(arch, parts):
    tile = ManyRowsTile(64, 128 // parts, 4, 3)
    args: dict[str, object] = {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "offsets_ptr": "*i32", "y_ptr": "*bf16"}
    args |= {"x_desc": f"tensordesc<fp8e4nv[{tile.block_m}, 128]>", "num_x_rows": "i32", "num_columns": "i32"}
    args |= {"w_desc": f"tensordesc<fp8e4nv[{parts}, {tile.block_n}, 128]>", "width": "i32", "num_slots": "i32"}
    args |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PARTS": parts}
    args |= {"SLOT_STEP": parts, "BLOCK_S": 128, "GROUP_M": 8, "PDL": True}
    assert compile_ahead(_many_rows_kernel, arch, args, num_warps=tile.num_warps, num_stages=tile.num_stages)


@aot
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("tile", [SpecializedTile(2, 6), SpecializedTile(3, 5)], ids=str)
def test_compiles_with_warps_that_load(tile, parts):
    args: dict[str, object] = {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "offsets_ptr": "*i32", "y_ptr": "*bf16"}
    args |= {"x_desc": box("fp8e4nv", 64, 128), "w_desc": box("fp8e4nv", 128 // parts, 128), "stride_y": "i32"}
    args |= {"num_columns": "i32", "width": "i32", "num_slots": "i32", "num_x_rows": "i32", "PDL": True}
    args |= {"TILE": Fp8ProductTile(parts, tile.num_groups, 8, 1, tile.num_stages)}
    compile_gluon_ahead(_fp8_specialized_kernel, args)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("tile", [None, SpecializedTile(2, 6), SpecializedTile(3, 5)], ids=str)
def test_many_tiles_a_program(tile, parts):
    """Some hundreds of tiles over all multiprocessors, of slots with many rows, few and none; the last rows 1 to 64 of
    a group; more steps than stages and fewer."""
    counts = (1000, 0, 129, 64, 65, 1, 700, 0, 191, 192, 193, 2000)
    for width in (256, 1408):
        options = {"device": "cuda", "out_dtype": torch.bfloat16, "indexed": tile is None, "tile": tile}
        check(grouped_gemm_fp8_triton, counts, parts, width, 1056, **options)
