"""A cache in int4: what the stores write, and the kernels that read it, against fp64 over the numbers it stands for.

Nothing here is a matter of rounding modes, so the interpreter's codes are those of the reference, bit for bit. Scales
are NaN wherever nothing was written, and reach every result they touch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention_decode import attention_decode, attention_decode_reference
from kernels.attention_decode_int4 import _decode_int4_kernel
from kernels.attention_prefill import attention_prefill, attention_prefill_reference, attention_prefill_triton
from kernels.attention_prefill_int4 import _prefill_int4_kernel, _prefill_tile
from kernels.kv_int4 import Int4Scales, int4_numbers, store_int4_reference
from kernels.qk_rope_store import qk_rope_store, qk_rope_store_triton
from kernels.qk_rope_store_int4 import _qk_rope_store_int4_kernel
from tests.aot import ARCHS, aot, compile_ahead
from tests.coded_attention import check_decode, decode, prefill
from tests.compare import assert_same_bits, max_rel
from tests.paged_cache import PagedCache, assert_accurate, dense_attention, draw, paged_cache
from tests.test_kernels.test_qk_rope_store import operands as head_operands

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def coded(x_NPGC: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and scales of every row, as the store makes them; NaN where nothing was written."""
    rows = x_NPGC.flatten(0, 1)
    cache = torch.full(
        (rows.shape[0], 1, rows.shape[1], rows.shape[2] // 2), 255, dtype=torch.uint8, device=x_NPGC.device
    )
    scales = torch.full((*cache.shape[:3], 4), torch.nan, dtype=torch.bfloat16, device=x_NPGC.device)
    store_int4_reference(rows, cache, scales, torch.arange(rows.shape[0], device=x_NPGC.device))
    return cache.view(*x_NPGC.shape[:3], cache.shape[-1]), scales.view(*x_NPGC.shape[:3], 4)


def coded_cache(cache: PagedCache) -> tuple[PagedCache, Int4Scales]:
    """The cache in int4 with its scales; `keys` and `values` become what is stored, in fp64."""
    both = torch.stack((cache.k_cache_NPGC, cache.v_cache_NPGV), 1).flatten(0, 1)
    bytes_, scales = (x.unflatten(0, (-1, 2)) for x in coded(both))
    keys, values = (
        tuple(int4_numbers(*(y[:, 0] for y in coded(x[:, None]))).double() for x in of_all)
        for of_all in (cache.keys, cache.values)
    )
    parts = PagedCache(bytes_[:, 0], bytes_[:, 1], cache.block_tables_BM, cache.kv_lens_B, keys, values)
    return parts, Int4Scales(scales[:, 0], scales[:, 1])


def case(page, kv_heads, width, lens, dtype, device):
    return coded_cache(paged_cache(lens, page=page, kv_heads=kv_heads, width=width, dtype=dtype, device=device))


GQA = [
    # page, heads, kv heads, width, window, lens
    pytest.param(16, 4, 2, 32, 0, [1, 0, 127, 129], id="around-a-tile"),
    pytest.param(17, 6, 2, 34, 0, [3, 255, 257], id="odd-page-odd-halves-around-a-split"),
    pytest.param(16, 2, 1, 64, 20, [5, 21, 300], id="window-across-splits"),
]
PREFILL = [
    pytest.param(16, 4, 2, 32, 0, [1, 0, 63, 65], id="around-a-tile"),
    pytest.param(17, 3, 1, 34, 0, [3, 70], id="odd-page-odd-halves-odd-group"),
    pytest.param(16, 2, 1, 64, 20, [5, 21, 100], id="window-across-tiles"),
]
LARGE = pytest.param(16, 32, 4, 128, 0, [1, 100, 1025, 3000], id="qwen3", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("page", "heads", "kv_heads", "width", "window", "lens"), [*GQA, LARGE])
def test_decode(backend, page, heads, kv_heads, width, window, lens):
    cache, scales = case(page, kv_heads, width, lens, backend.dtype, backend.device)
    q_BHC = draw(len(lens), heads, width, dtype=backend.dtype, device=backend.device, seed=7)
    check_decode(q_BHC, cache, scales, window, TOLERANCE[backend.dtype])


@pytest.mark.parametrize(("page", "heads", "kv_heads", "width", "window", "lens"), [*PREFILL, LARGE])
def test_prefill(backend, page, heads, kv_heads, width, window, lens):
    cache, scales = case(page, kv_heads, width, lens, backend.dtype, backend.device)
    queries = [draw(n, heads, width, dtype=backend.dtype, device=backend.device, seed=b) for b, n in enumerate(lens)]
    first = [n // 3 for n in lens]
    ours, lse_TH = prefill(attention_prefill_triton, queries, cache, scales, first, window)
    (wanted, wanted_lse), (by_torch, _) = (
        map(
            torch.cat,
            zip(
                *(
                    dense_attention(q[n:], k, v, scale=0.2, query_offset=n, window=window, dtype=dtype)
                    for q, k, v, n in zip(queries, cache.keys, cache.values, first)
                )
            ),
        )
        for dtype in (torch.float64, backend.dtype)
    )
    assert_accurate(ours.to(backend.dtype), by_torch, wanted)
    assert max_rel(lse_TH, wanted_lse) < TOLERANCE[backend.dtype]
    reference, _ = prefill(attention_prefill_reference, queries, cache, scales, first, window)
    assert max_rel(ours, reference) < TOLERANCE[backend.dtype]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device, dtype):
    lens = [1, 40, 127, 300, 17]
    cache, scales = case(16, 2, 64, lens, dtype, device)
    q_BHC = draw(len(lens), 8, 64, dtype=dtype, device=device, seed=7)
    together = decode(attention_decode, q_BHC, cache, scales, 0)
    queries = [draw(n, 8, 64, dtype=dtype, device=device, seed=b) for b, n in enumerate(lens)]
    whole = prefill(attention_prefill, queries, cache, scales, [0] * len(lens), 0).split(lens)
    cut = prefill(attention_prefill, queries, cache, scales, [n // 3 for n in lens], 0)
    assert not together.isnan().any() and not cut.isnan().any()
    assert_same_bits(cut, torch.cat([rows[n // 3 :] for rows, n in zip(whole, lens)]))
    for b in range(len(lens)):
        assert_same_bits(decode(attention_decode, q_BHC, cache, scales, 0, slice(b, b + 1)), together[b : b + 1])


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rotated"),
    [
        pytest.param(4, 2, 64, 64, id="whole-heads"),
        pytest.param(9, 3, 46, 24, id="half-of-an-odd-head-and-an-odd-block-of-heads"),
        pytest.param(32, 4, 128, 128, id="qwen3", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
def test_the_store_writes_codes_and_scales(backend, heads, kv_heads, width, rotated, interleaved, norms):
    """Of the very rows that the same step stores in a cache of its own dtype; queries come out the same."""
    sizes = (6, heads, kv_heads, width, rotated, backend.dtype, backend.device)
    args = head_operands(*sizes, norms=norms, interleaved=interleaved)
    args[2][1, 0] = 0.0  # a row of zeros
    args[2][2, 0, 0] = torch.inf
    plain_q = qk_rope_store_triton(*args)
    caches, scales = empty_caches(args[5])
    assert_same_bits(qk_rope_store_triton(*args[:5], *caches, args[7], scales), plain_q)
    for ours, of_rows, plain in zip(caches, scales, args[5:7]):
        wanted, wanted_scales = coded(plain)
        written = ~plain.isnan().all(-1)  # a row with an infinity is turned to one with NaN, which is no row of NaN
        assert_same_bits(of_rows[written], wanted_scales[written])
        assert_same_bits(ours[written], wanted[written])
        assert bool(of_rows[~written].isnan().all()) and bool((ours[~written] == 255).all())


def empty_caches(like_NPGC: Tensor) -> tuple[tuple[Tensor, Tensor], Int4Scales]:
    """Views of one tensor each, as the pool's are."""
    num_blocks, page, kv_heads, width = like_NPGC.shape
    shape = (num_blocks, 2, page, kv_heads)
    cache = torch.full((*shape, width // 2), 255, dtype=torch.uint8, device=like_NPGC.device)
    scales = torch.full((*shape, 4), torch.nan, dtype=torch.bfloat16, device=like_NPGC.device)
    return (cache[:, 0], cache[:, 1]), Int4Scales(scales[:, 0], scales[:, 1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_stores_what_the_plain_one_holds(interleaved):
    args = head_operands(6, 4, 2, 48, 24, torch.bfloat16, "cpu", norms=True, interleaved=interleaved)
    plain_q = qk_rope_store(*args)
    caches, scales = empty_caches(args[5])
    assert_same_bits(qk_rope_store(*args[:5], *caches, args[7], scales), plain_q)
    for ours, of_rows, plain in zip(caches, scales, args[5:7]):
        written = ~plain.isnan().any(-1)
        assert 0 < int(written.sum()) < written.numel()
        for mine, wanted in zip((ours, of_rows), coded(plain)):
            assert_same_bits(mine[written], wanted[written])
        error = (int4_numbers(ours, of_rows) - plain.float())[written].unflatten(-1, (2, -1)).abs().amax(-1)
        steps = of_rows[written].float()[:, ::2]
        assert bool((error <= 0.6 * steps).all()), "half a step, and the middle's rounding"


def test_worked_rows():
    """Halves 0 to 15 have step 1 and middle 8; equal entries need no step; a NaN or an infinity spoils its half."""
    ramp = torch.arange(16.0)
    rows = [torch.cat([ramp, ramp * 2 - 6]), torch.full((32,), 5.0), torch.cat([ramp, ramp]), torch.cat([ramp, ramp])]
    x_TXC = torch.stack(rows)[:, None]
    x_TXC[2, 0, 3], x_TXC[3, 0, 20] = torch.nan, torch.inf
    cache = torch.full((3, 2, 1, 16), 255, dtype=torch.uint8)
    scales = torch.full((3, 2, 1, 4), torch.nan, dtype=torch.bfloat16)
    store_int4_reference(x_TXC, cache, scales, torch.tensor([5, 0, 2, 3]))
    assert scales[2, 1, 0].tolist() == [1.0, 8.0, 2.0, 10.0]
    assert cache[2, 1, 0].tolist() == [code * 17 for code in range(16)]
    numbers = int4_numbers(cache, scales).flatten(0, 2)
    assert numbers[5].tolist() == rows[0].tolist() and numbers[0].tolist() == [5.0] * 32
    assert bool(numbers[2, :16].isnan().all()) and numbers[2, 16:].tolist() == ramp.tolist()
    assert numbers[3, :16].tolist() == ramp.tolist() and bool(numbers[3, 16:].isnan().all())
    assert bool(numbers[[1, 4]].isnan().all()), "slots that nobody wrote"


def test_operands_that_do_not_fit_are_refused():
    cache, scales = case(16, 1, 16, [4], torch.float32, "cpu")
    q_BHC = draw(1, 2, 16)
    with pytest.raises(AssertionError, match="scales"):
        decode(attention_decode_reference, q_BHC, cache, scales._replace(k_NPG4=scales.k_NPG4[:, :1]), 0)
    with pytest.raises(AssertionError, match="k_cache_NPGC has shape"):
        decode(attention_decode_reference, draw(1, 2, 8), cache, scales, 0)


STRIDES = ("cn", "cp", "cg", "wn", "wp", "wg")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BUILDS = [*((arch, "bf16", 128) for arch in ARCHS), (89, "fp16", 192), (80, "fp32", 96)]


@aot
@pytest.mark.parametrize(("arch", "dtype", "width"), BUILDS)
def test_decode_compiles(arch, dtype, width):
    pointers = {"q_ptr": f"*{dtype}", "k_ptr": "*u8", "v_ptr": "*u8", "k_words_ptr": "*i32", "v_words_ptr": "*i32"}
    pointers |= {"tables_ptr": "*i32", "kv_lens_ptr": "*i32", "out_ptr": f"*{dtype}"}
    pointers |= {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "scale_log2": "fp32", "num_heads": "i32"}
    strides = {f"stride_{name}": "i32" for name in ("qb", "qh", *STRIDES, "tb")}
    sizes = {"GROUP": 7, "PAGE": 16, "WIDTH": width, "WINDOW": 512, "SPLIT_LEN": 128, "FEW_SPLITS": 8}
    wide = dtype == "fp32"
    blocks = {"BLOCK_H": 16, "BLOCK_N": 32 if wide else 64, "BLOCK_C": 128 if width > 128 else 64, "PDL": arch >= 90}
    compile_ahead(_decode_int4_kernel, arch, pointers | strides | sizes | blocks, num_stages=1 if wide else 3)


@aot
@pytest.mark.parametrize(("arch", "dtype", "width"), BUILDS)
def test_prefill_compiles(arch, dtype, width):
    pointers = {"q_ptr": f"*{dtype}", "k_ptr": "*u8", "v_ptr": "*u8", "k_words_ptr": "*i32", "v_words_ptr": "*i32"}
    pointers |= dict.fromkeys(("tables_ptr", "query_starts_ptr", "query_offsets_ptr", "kv_lens_ptr"), "*i32")
    pointers |= {"kv_starts_ptr": None, "out_ptr": f"*{dtype}", "lse_ptr": "*fp32"}
    numbers = {"scale_log2": "fp32", "num_heads": "i32"}
    strides = {f"stride_{name}": "i32" for name in ("qt", "qh", *STRIDES, "tb")}
    tile = _prefill_tile(DTYPES[dtype], width)
    sizes = {"GROUP": 8, "PACK": 8, "PAGE": 16, "WIDTH": width, "WINDOW": 0 if arch == 80 else 4096, "PDL": arch >= 90}
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_C": 128 if width > 128 else 64}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compile_ahead(_prefill_int4_kernel, arch, pointers | numbers | strides | sizes | blocks, **options)


@aot
@pytest.mark.parametrize(
    ("arch", "normed", "interleaved"), [*((arch, True, False) for arch in ARCHS), (80, False, True), (90, True, True)]
)
def test_store_compiles(arch, normed, interleaved):
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*u8")
    pointers |= dict.fromkeys(("k_words_ptr", "v_words_ptr"), "*i32")
    weights = dict.fromkeys(("q_weight_ptr", "k_weight_ptr"), "*bf16" if normed else None)
    indices = {"positions_ptr": "*i64", "slots_ptr": "*i64", "table_ptr": "*fp32", "eps": "fp32"}
    sizes = dict.fromkeys(("num_heads", "num_kv_heads", "page_size"), "i32")
    sizes |= {f"stride_{name}": "i32" for name in ("qt", "qh", "kt", "kg", "vt", "vg", *STRIDES)}
    blocks = {"BLOCK_H": 8, "BLOCK_C": 128, "BLOCK_P": 32, "HALF": 32, "WIDTH": 128, "BLOCK_HALF": 64}
    args = pointers | weights | indices | sizes | blocks | {"INTERLEAVED": interleaved, "PDL": arch >= 90}
    assert compile_ahead(_qk_rope_store_int4_kernel, arch, args)
