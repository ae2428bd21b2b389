"""Ragged products: reference and kernel against fp64 next to torch, unused rows poisoned, bits whatever the tile."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.grouped_gemm import (
    _grouped_gemm_kernel,
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_swiglu,
    grouped_gemm_swiglu_reference,
    grouped_gemm_swiglu_triton,
    grouped_gemm_triton,
)
from kernels.tiles import TileConfig, grouped_rule, packs_rows
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_close_as_torch, assert_same_bits, max_rel
from tests.shapes import HIDDEN, INTERMEDIATE, NUM_TOKENS, WILD_INDEX

SMALL_TILE = TileConfig(16, 32, 32, 4, 2)
"""Several row and column tiles out of little work."""

SWAPPED_TILE = TileConfig(8, 32, 32, 2, 2)
"""Of 8 rows: the weights are the first operand."""

WIDE_TILE = TileConfig(16, 128, 64, 4, 2)
"""Few steps for the interpreter, which takes its time by the step."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def int32(values, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def plain(x_XD, w_SND, counts, index=None, *, swiglu: bool = False) -> torch.Tensor:
    """The used rows by plain torch in the operands' own dtype, the activation in fp32 (or fp64) as the op promises."""
    rows, parts, start = x_XD if index is None else x_XD[index.long()], [], 0
    for slot, count in enumerate(counts):
        part = rows[start : start + count]
        if swiglu:
            wide = torch.promote_types(part.dtype, torch.float32)
            gate, up = (part.to(wide) @ w_SND[slot].to(wide).T).chunk(2, dim=-1)
            parts.append((functional.silu(gate) * up).to(part.dtype))
        else:
            parts.append(part @ w_SND[slot].T)
        start += count
    return torch.cat(parts)


def offsets_of(counts, device: str = "cpu") -> torch.Tensor:
    return int32([0, *torch.tensor(counts).cumsum(0).tolist()], device)


def check(run, counts, width, columns, *, dtype, device, swiglu, indexed, spare=5, **options) -> None:
    """`run` over rows with `spare` unused ones: their index is wild, rows of x that no index names are NaN."""
    used = sum(counts)
    w_SND = draw(len(counts), columns, width, dtype=dtype, device=device, seed=1) / width**0.5
    for slot, count in enumerate(counts):
        if count == 0:
            w_SND[slot] = torch.nan
    if indexed:
        x_XD = torch.full((used + 3, width), torch.nan, dtype=dtype, device=device)
        x_XD[2 : used + 2] = draw(used, width, dtype=dtype, device=device)
        index = torch.randperm(used, generator=torch.Generator().manual_seed(2)).to(device) + 2
        index_R = torch.cat([index.to(torch.int32), int32([WILD_INDEX] * spare, device)])
    else:
        x_XD = torch.full((used + spare, width), torch.nan, dtype=dtype, device=device)
        x_XD[:used] = draw(used, width, dtype=dtype, device=device)
        index, index_R = torch.arange(used, device=device), None
    ours = run(x_XD, w_SND, offsets_of(counts, device), row_index_R=index_R, num_rows=used + spare, **options)
    assert ours.shape == (used + spare, columns // 2 if swiglu else columns) and ours.dtype == dtype
    torchs = plain(x_XD, w_SND, counts, index, swiglu=swiglu)
    exact = plain(x_XD.double(), w_SND.double(), counts, index, swiglu=swiglu)
    if used:
        # In fp32 torch may split the sum over D, which rounds less than one long sum.
        assert_close_as_torch(ours[:used], torchs, exact, chain=width if dtype == torch.float32 else 0)
        assert max_rel(ours[:used, -1], exact[:, -1]) < 2e-2


OPS = [
    pytest.param(grouped_gemm_triton, grouped_gemm_reference, False, id="plain"),
    pytest.param(grouped_gemm_swiglu_triton, grouped_gemm_swiglu_reference, True, id="swiglu"),
]
COUNTS = {
    "an-expert-without-rows": (3, 0, 18, 1),
    "all-rows-on-one": (0, 0, 37, 0),
    "three-experts": (16, 17, 15),
    "last-slots-empty": (5, 0, 0),
    "no-rows-at-all": (0, 0, 0),
    "one-slot": (33,),
}


@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "in-order"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_ragged_rows(backend, triton_op, reference, swiglu, counts, indexed):
    options = {"dtype": backend.dtype, "device": backend.device, "swiglu": swiglu, "indexed": indexed}
    check(triton_op, counts, 40, 72, tile=SMALL_TILE, **options)
    check(triton_op, counts, 40, 72, tile=SWAPPED_TILE, **options)


@pytest.mark.parametrize("num_warps", [4, 8], ids=["a-tile-a-program", "persistent-where-in-order"])
@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "in-order"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_ragged_rows_by_tma(backend, triton_op, reference, swiglu, counts, indexed, num_warps):
    """Blocks at the edges (D 40, N 72) are filled up with zeros."""
    if backend.device == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("TMA begins with compute capability 9")
    tile = TileConfig(16, 32, 32, num_warps, 2, "tma")
    options = {"dtype": backend.dtype, "device": backend.device, "swiglu": swiglu, "indexed": indexed}
    check(triton_op, counts, 40, 72 if not swiglu else 144, tile=tile, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_reference_ragged_rows(triton_op, reference, swiglu, counts, dtype):
    for indexed in (True, False):
        check(reference, counts, 40, 72, dtype=dtype, device="cpu", swiglu=swiglu, indexed=indexed)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_numbers_of_rows(backend, num_tokens):
    """With the tile of the rule, all on the middle one of three experts."""
    check(
        grouped_gemm_swiglu_triton,
        (0, num_tokens, 0),
        32,
        32,
        dtype=backend.dtype,
        device=backend.device,
        swiglu=True,
        indexed=True,
        spare=0,
    )


@pytest.mark.parametrize("num_slots", [3, 60, 257])
def test_C43_numbers_of_experts(backend, num_slots):
    """Every third expert has rows; the first and the last among them."""
    if backend.dtype == torch.float16:
        pytest.skip("the number of experts does not meet the dtype; fp32 covers it")
    counts = [1 + s % 2 if s % 3 == (num_slots - 1) % 3 or s == 0 else 0 for s in range(num_slots)]
    options = {"dtype": backend.dtype, "device": backend.device, "swiglu": False, "indexed": True}
    check(grouped_gemm_triton, counts, 16, 16, **options)


@pytest.mark.parametrize("width", HIDDEN)
@pytest.mark.parametrize("intermediate", INTERMEDIATE)
def test_C43_widths_that_no_tile_divides(backend, width, intermediate):
    """Both products of an expert: D -> 2F and F -> D, the last column looked at by itself."""
    tile = WIDE_TILE if backend.device == "cpu" else None
    options = {"dtype": backend.dtype, "device": backend.device, "indexed": True, "tile": tile}
    check(grouped_gemm_swiglu_triton, (2, 0, 3), width, 2 * intermediate, swiglu=True, **options)
    check(grouped_gemm_triton, (2, 0, 3), intermediate, width, swiglu=False, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_reference_bits_do_not_depend_on_the_rows_beside(triton_op, reference, swiglu, dtype):
    """A row of expert 1, alone and among others, at another place in its block."""
    x_XD, w_SND = draw(80, 24, dtype=dtype), draw(3, 10, 24, dtype=dtype, seed=1)
    whole = reference(x_XD, w_SND, int32([0, 7, 77, 80]), num_rows=80)
    for row in (7, 8, 40, 76):
        one = reference(x_XD[row : row + 1].clone(), w_SND, int32([0, 0, 1, 1]), num_rows=1)
        assert_same_bits(one, whole[row : row + 1])


TILES = [TileConfig(m, n, k, 4, 2) for m in (16, 32, 64, 128) for n, k in ((32, 32), (64, 64), (128, 32))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_bits_do_not_depend_on_tile_or_batch(triton_op, reference, swiglu, dtype):
    x_XD, w_SND = draw(256, 2880, dtype=dtype, device="cuda"), draw(3, 512, 2880, dtype=dtype, device="cuda", seed=1)
    offsets_S1 = int32([0, 3, 250, 256], "cuda")
    whole = triton_op(x_XD, w_SND, offsets_S1, num_rows=256)
    swapped = [TileConfig(8, 32, 256, 2, 3), TileConfig(8, 64, 128, 4, 4), TileConfig(8, 16, 128, 1, 6)]
    tiles = [*TILES, *([] if dtype == torch.float32 else [*swapped, *BLOCK_TILES[swiglu]])]
    for tile in tiles:
        assert_same_bits(triton_op(x_XD, w_SND, offsets_S1, num_rows=256, tile=tile), whole)
    for row in (3, 100, 249):
        one = triton_op(x_XD[row : row + 1].clone(), w_SND, int32([0, 0, 1, 1], "cuda"), num_rows=1)
        assert_same_bits(one, whole[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_rows_of_one_slot_have_the_same_bits_in_every_tile_of_the_rule(triton_op, reference, swiglu):
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    x_XD, w_SND = draw(600, 2048, **bf16), draw(1, 2816, 2048, **bf16, seed=1)
    whole = triton_op(x_XD, w_SND, int32([0, 600], "cuda"), num_rows=600)
    for rows in (1, 8, 16, 17, 33, 64, 65, 96, 200):
        ours = triton_op(x_XD[:rows].clone(), w_SND, int32([0, rows], "cuda"), num_rows=rows)
        assert_same_bits(ours, whole[:rows])


BLOCK_TILES = {
    swiglu: [
        TileConfig(32, 128 // products, 128, 4, 3, "tma"),
        TileConfig(128, 256 // products, 64, 8, 4, "tma"),
        TileConfig(64, 128 // products, 128, 4, 4, "specialized"),
        TileConfig(64, 256 // products, 64, 4, 5, "specialized"),
        TileConfig(128, 128 // products, 64, 4, 6, "specialized"),
        TileConfig(128, 256 // products, 64, 4, 4, "swapped"),
    ]
    for swiglu, products in ((False, 1), (True, 2))
}
"""The forms that read blocks by the copy engine, each in the sizes of the rule: plain, and with gate and up."""


@pytest.mark.gpu
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "in-order"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_ragged_rows_by_blocks(triton_op, reference, swiglu, counts, indexed, at):
    """Widths that no tile divides (D 200, N 136): the blocks at the edges are filled up with zeros."""
    tile = BLOCK_TILES[swiglu][at]
    for dtype in (torch.bfloat16, torch.float16):
        options = {"dtype": dtype, "device": "cuda", "swiglu": swiglu, "indexed": indexed, "tile": tile}
        check(triton_op, counts, 200, 272 if swiglu else 136, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_many_tiles_a_program(triton_op, reference, swiglu, at):
    """Some 400 tiles over all multiprocessors, of slots with many rows, few and none; the last rows half a tile."""
    counts = (1000, 0, 129, 64, 65, 1, 700, 0, 127, 128, 0, 80, 81, 96, 97)
    options = {"dtype": torch.bfloat16, "device": "cuda", "swiglu": swiglu, "tile": BLOCK_TILES[swiglu][at]}
    for indexed in (True, False):
        check(triton_op, counts, 512, 4096, indexed=indexed, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 4096])
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_many_rows_are_copied_in_order(triton_op, reference, swiglu, width):
    """Of many columns, for a short sum and a long one. Bits are those of gathered rows, of few, and of one."""
    columns = 16384 if swiglu else 8192
    counts = (1600, 0, 200)
    options = {"dtype": torch.bfloat16, "device": "cuda", "swiglu": swiglu, "indexed": True}
    check(triton_op, counts, width, columns, **options)
    x_XD = draw(700, width, dtype=torch.bfloat16, device="cuda")
    w_SND = draw(4, columns, width, dtype=torch.bfloat16, device="cuda", seed=1)
    index_R = (torch.arange(1801, device="cuda") * 37 % 700).to(torch.int32)
    assert packs_rows(1801, 3, 8192, 9) and not packs_rows(1801, 4, 8192, 9)
    whole = triton_op(x_XD, w_SND[:3], offsets_of((1200, 0, 601), "cuda"), row_index_R=index_R, num_rows=1801)
    ranges_S2 = int32([[0, 1200], [1200, 1200], [1200, 1801]], "cuda")
    assert_same_bits(triton_op(x_XD, w_SND[:3], ranges_S2, row_index_R=index_R, num_rows=1801), whole)
    gathered = triton_op(x_XD, w_SND, offsets_of((1200, 0, 601, 0), "cuda"), row_index_R=index_R, num_rows=1801)
    assert_same_bits(gathered, whole)
    for row, slot in ((0, 0), (1199, 0), (1200, 2), (1800, 2)):
        one = triton_op(x_XD, w_SND[slot][None], int32([0, 1], "cuda"), row_index_R=index_R[row:][:1], num_rows=1)
        assert_same_bits(one, whole[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize(("triton_op", "reference", "swiglu"), OPS)
def test_operands_that_no_block_can_read_take_pointers(triton_op, reference, swiglu):
    """Rows of 36 columns are 72 bytes, no multiple of 16."""
    options = {"dtype": torch.bfloat16, "device": "cuda", "swiglu": swiglu, "indexed": True}
    check(triton_op, (100, 80), 36, 72, tile=BLOCK_TILES[swiglu][0], **options)
    check(triton_op, (1000, 80), 36, 72, **options)


@pytest.mark.gpu
def test_C16_rows_beyond_2_31_elements():
    """131,073 tokens x 8 experts x 2048 columns = 2^31 + 2^14 elements, written and then read back as rows."""
    num_tokens, top_k, width = 131_073, 8, 2048
    num_rows = num_tokens * top_k
    assert num_rows * width > 2**31
    x_XD = torch.randn(num_tokens, width, dtype=torch.bfloat16, device="cuda") / width**0.5
    w_SND = torch.randn(2, width, width, dtype=torch.bfloat16, device="cuda")
    row_index_R = (torch.arange(num_rows, device="cuda") % num_tokens).to(torch.int32)
    offsets_S1 = int32([0, 1000, num_rows], "cuda")
    y_RN = grouped_gemm(x_XD, w_SND, offsets_S1, row_index_R=row_index_R, num_rows=num_rows)
    last = slice(num_rows - 300, num_rows)
    expected = x_XD[row_index_R[last].long()].float() @ w_SND[1].float().T
    assert max_rel(y_RN[last], expected) < 1e-2
    z_RN = grouped_gemm_swiglu(y_RN, w_SND[:, :256].contiguous(), offsets_S1, num_rows=num_rows)
    gate, up = (y_RN[last].float() @ w_SND[1, :256].float().T).chunk(2, dim=-1)
    assert max_rel(z_RN[last], functional.silu(gate) * up) < 1e-2


@pytest.mark.gpu
def test_C16_weights_beyond_2_31_elements():
    """512 experts of 2048 x 4096 = 2^32 elements, all NaN but the last, to which every row goes."""
    w_SND = torch.full((512, 2048, 4096), torch.nan, dtype=torch.bfloat16, device="cuda")
    w_SND[511] = draw(2048, 4096, dtype=torch.bfloat16, device="cuda") / 64
    x_XD = draw(40, 4096, dtype=torch.bfloat16, device="cuda", seed=1)
    offsets_S1 = int32([0] * 512 + [40], "cuda")
    expected = x_XD.float() @ w_SND[511].float().T
    assert max_rel(grouped_gemm(x_XD, w_SND, offsets_S1, num_rows=40), expected) < 1e-2
    gate, up = expected.chunk(2, dim=-1)
    assert max_rel(grouped_gemm_swiglu(x_XD, w_SND, offsets_S1, num_rows=40), functional.silu(gate) * up) < 1e-2


@aot
def test_compiles_for_one_slot_and_one_column():
    """Triton compiles an argument that is 1 into the kernel."""
    args: dict[str, object] = {"num_columns": 1, "width": "i32", "num_slots": "i32", "EVEN": False, "PDL": True}
    args |= {"stride_x": "i32", "stride_ws": "i32", "stride_wn": "i32", "stride_y": 1}
    args |= {"x_ptr": "*bf16", "w_ptr": "*bf16", "offsets_ptr": "*i32", "index_ptr": "*i32", "y_ptr": "*bf16"}
    args |= {"SWIGLU": True, "SLOT_STEP": 1, "BLOCK_S": 1, "GROUP_M": 8, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
    args |= {"OLD_OFFSETS": False, "TELL": 0}
    assert compile_ahead(_grouped_gemm_kernel, 90, args, aligned=False)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 24, 64, 65])
def test_a_second_product_of_few_rows_waits_for_the_first(num_rows):
    """Placed before the first has ended, and with its offsets read by then: replayed often, new rows in every turn."""
    w13, w2 = (draw(8, *of, dtype=torch.bfloat16, device="cuda", seed=1) for of in ((1024, 1024), (1024, 512)))
    offsets = int32([num_rows * slot // 8 for slot in range(9)], "cuda")
    x = draw(num_rows, 1024, dtype=torch.bfloat16, device="cuda")

    def pair(old_offsets: bool) -> torch.Tensor:
        h = grouped_gemm_swiglu_triton(x, w13, offsets, num_rows=num_rows)
        return grouped_gemm_triton(h, w2, offsets, num_rows=num_rows, old_offsets=old_offsets)

    pair(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [pair(True) for _ in range(5)]
    for seed in range(20):
        x.copy_(draw(num_rows, 1024, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        expected = pair(False)
        for ours in results:
            assert_same_bits(ours, expected)


@aot
@pytest.mark.parametrize("swiglu", [False, True], ids=["plain", "swiglu"])
@pytest.mark.parametrize(("rows", "even"), [(1, True), (4096, True), (4096, False)])
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, rows, even, swiglu):
    """The rule's tile for a few rows; for many the largest one of cards without TMA."""
    products = 2 if swiglu else 1
    tile = grouped_rule(rows, 1, min(arch // 10, 8), num_products=products, slot_bytes=1 << 24, gathered=swiglu)
    args: dict[str, object] = {
        "num_columns": "i32",
        "width": "i32",
        "num_slots": "i32",
        "EVEN": even,
        "PDL": arch >= 90,
    }
    args |= {"stride_x": "i32", "stride_ws": "i64", "stride_wn": "i32", "stride_y": "i32"}
    args |= {"x_ptr": "*bf16", "w_ptr": "*bf16", "offsets_ptr": "*i32", "y_ptr": "*bf16"}
    args |= {"index_ptr": "*i32" if swiglu else None, "SWIGLU": swiglu, "SLOT_STEP": 1, "BLOCK_S": 128, "GROUP_M": 8}
    args |= {"OLD_OFFSETS": not swiglu, "TELL": 2}
    args |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    assert compile_ahead(_grouped_gemm_kernel, arch, args, num_warps=tile.num_warps, num_stages=tile.num_stages)
