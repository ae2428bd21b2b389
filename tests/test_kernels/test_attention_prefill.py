"""Prefill attention, whole and in merged parts: against fp64 and the reference; the same bits however it is cut."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from kernels.attention_merge import merge_attention, merge_attention_triton
from kernels.attention_prefill import (
    attention_prefill,
    attention_prefill_reference,
    attention_prefill_triton,
)
from kernels.attention_prefill_tiles import _prefill_kernel, prefill_tile
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, max_rel
from tests.paged_cache import assert_accurate, dense_attention, draw, index, paged_cache, starts

SHAPES = [
    # page, heads, kv heads, width, value width, window, offsets, query lens
    pytest.param(16, 2, 2, 32, 32, 0, [0, 0, 0], [1, 127, 3], id="group1-one-row-and-below-a-tile"),
    pytest.param(17, 3, 1, 40, 40, 0, [40, 0, 16, 17], [16, 16, 16, 7], id="C38-prefixes-40-0-16-17-odd-page"),
    pytest.param(64, 7, 1, 96, 24, 0, [0, 100], [0, 29], id="group7-narrow-values-empty-chunk"),
    pytest.param(1, 1, 1, 24, 16, 0, [2, 0], [3, 5], id="page1"),
    pytest.param(16, 2, 1, 32, 32, 1, [0, 70], [20, 3], id="window-of-one"),
    pytest.param(16, 2, 1, 32, 32, 20, [0, 128], [65, 33], id="window-skips-tiles"),
    pytest.param(16, 1, 1, 16, 16, 4096, [0, 100], [33, 5], id="window-above-every-length"),
    pytest.param(16, 1, 1, 16, 16, 0, [0], [129], id="T129-one-above-a-tile"),
    pytest.param(16, 1, 1, 16, 16, 0, [0], [128], id="T128-a-whole-tile"),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def scale_of(width: int) -> float:
    return width**-0.5


def draw_case(page, heads, kv_heads, width, value_width, lens, dtype, device):
    """Whole sequences: their caches, and one query per position as a slice of wider rows."""
    sizes = {"page": page, "kv_heads": kv_heads, "width": width, "value_width": value_width}
    cache = paged_cache(lens, **sizes, dtype=dtype, device=device)
    queries = [draw(n, heads + 1, width, dtype=dtype, device=device, seed=70 + b) for b, n in enumerate(lens)]
    return [q[:, :heads] for q in queries], cache


def run(attend, queries, cache, chunks, *, window=0, rows=None, slack=0):
    """(out, lse) of the chunks (offset, query len), one for each sequence of `rows` (None: all)."""
    rows = list(range(len(chunks))) if rows is None else rows
    device = cache.kv_lens_B.device
    lens = [length for _, length in chunks]
    q_THC = torch.cat([queries[b][first : first + length] for b, (first, length) in zip(rows, chunks)])
    return attend(
        q_THC,
        cache.k_cache_NPGC,
        cache.v_cache_NPGV,
        cache.block_tables_BM[rows],
        starts(lens, device),
        index([first for first, _ in chunks], device),
        index([first + length for first, length in chunks], device),
        scale=scale_of(q_THC.shape[2]),
        window=window,
        max_query_len=max(lens, default=0) + slack,
        max_kv_len=max([sum(chunk) for chunk in chunks], default=0) + slack,
    )


def public(*args, **kwargs):
    return attention_prefill(*args, **kwargs, return_lse=True)


def exact(queries, cache, chunks, window, dtype=torch.float64):
    parts = []
    for q, k, v, (first, length) in zip(queries, cache.keys, cache.values, chunks):
        end, scale = first + length, scale_of(q.shape[2])
        plan = {"scale": scale, "query_offset": first, "window": window, "dtype": dtype}
        parts.append(dense_attention(q[first:end], k[:end], v[:end], **plan))
    return tuple(torch.cat(part) for part in zip(*parts))


@pytest.mark.parametrize(("page", "heads", "kv_heads", "width", "value_width", "window", "offsets", "lens"), SHAPES)
def test_kernel(backend, page, heads, kv_heads, width, value_width, window, offsets, lens):
    chunks = list(zip(offsets, lens))
    sizes = (page, heads, kv_heads, width, value_width, [sum(chunk) for chunk in chunks])
    queries, cache = draw_case(*sizes, backend.dtype, backend.device)
    out_THV, lse_TH = run(attention_prefill_triton, queries, cache, chunks, window=window, slack=40)
    wanted, wanted_lse = exact(queries, cache, chunks, window)
    assert_accurate(out_THV.to(backend.dtype), exact(queries, cache, chunks, window, backend.dtype)[0], wanted)
    assert max_rel(lse_TH, wanted_lse) < TOLERANCE[backend.dtype]
    reference, reference_lse = run(attention_prefill_reference, queries, cache, chunks, window=window)
    assert max_rel(out_THV, reference) < TOLERANCE[backend.dtype]
    assert max_rel(lse_TH, reference_lse) < 2e-6


@pytest.mark.parametrize("attend", [public, attention_prefill_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page", "heads", "kv_heads", "width", "value_width", "window", "offsets", "lens"), SHAPES)
def test_reference(attend, dtype, page, heads, kv_heads, width, value_width, window, offsets, lens):
    chunks = list(zip(offsets, lens))
    sizes = (page, heads, kv_heads, width, value_width, [sum(chunk) for chunk in chunks])
    queries, cache = draw_case(*sizes, dtype, "cpu")
    out_THV, lse_TH = run(attend, queries, cache, chunks, window=window)
    assert out_THV.dtype == lse_TH.dtype == torch.float32
    wanted, wanted_lse = exact(queries, cache, chunks, window)
    assert max_rel(out_THV, wanted) < 2e-6 and max_rel(lse_TH, wanted_lse) < 2e-6


def check_two_parts(attend, dtype, device):
    """Keys whose last 8 columns, the same for all heads, lie in a tensor of their own: the bits of whole keys."""
    queries, cache = draw_case(16, 4, 2, 24, 16, [40, 17], dtype, device)
    rest_NPR = cache.k_cache_NPGC[:, :, 0, 16:].clone()
    cache.k_cache_NPGC[..., 16:] = rest_NPR[:, :, None]
    whole = run(attend, queries, cache, [(8, 32), (0, 17)])

    def in_parts(q_THC, k_cache_NPGC, *args, **kwargs):
        return attend(q_THC, k_cache_NPGC[..., :16], *args, **kwargs, k_rest_NPR=rest_NPR)

    for one, other in zip(run(in_parts, queries, cache, [(8, 32), (0, 17)]), whole):
        assert_same_bits(one, other)


def test_kernel_with_keys_in_two_parts(backend):
    check_two_parts(attention_prefill_triton, backend.dtype, backend.device)


@pytest.mark.parametrize("attend", [public, attention_prefill_reference])
def test_reference_with_keys_in_two_parts(attend):
    check_two_parts(attend, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "value_width"), [(128, 128), (192, 128), (64, 64), (80, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_for_the_models_widths(width, value_width, dtype):
    chunks = [(1000, 300), (0, 129), (511, 1)]
    queries, cache = draw_case(16, 8, 2, width, value_width, [sum(c) for c in chunks], dtype, "cuda")
    out_THV, _ = run(attention_prefill_triton, queries, cache, chunks)
    wanted, _ = exact(queries, cache, chunks, 0)
    assert_accurate(out_THV.to(dtype), exact(queries, cache, chunks, 0, dtype)[0], wanted)


def check_cuts(page, heads, kv_heads, width, value_width, window, lens, dtype, device):
    """Whole prompts in one batch; then each alone, cut in equal chunks and at random points."""
    queries, cache = draw_case(page, heads, kv_heads, width, value_width, lens, dtype, device)
    whole = run(public, queries, cache, [(0, n) for n in lens], window=window)
    assert not whole[0].isnan().any()
    dice = random.Random(0)
    for b, length in enumerate(lens):
        rows = slice(sum(lens[:b]), sum(lens[: b + 1]))
        cuts = [list(range(0, length, chunk)) for chunk in (1, 16, 17, 64) if chunk > 1 or length <= 130]
        cuts += [[0, *sorted(dice.sample(range(1, length), min(3, length - 1)))] for _ in range(2) if length > 1]
        for firsts in [*cuts, [0]]:
            chunks = list(zip(firsts, [end - first for first, end in zip(firsts, [*firsts[1:], length])]))
            # All chunks of a prompt in one call: the cache already holds its keys, kv_len says how many are there.
            parts = run(public, queries, cache, chunks, window=window, rows=[b] * len(chunks), slack=300)
            assert_same_bits(parts[0], whole[0][rows])
            assert_same_bits(parts[1], whole[1][rows])
        tail = run(public, queries, cache, [(length - 1, 1)], window=window, rows=[b])
        assert_same_bits(tail[0], whole[0][rows][-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), [(8, 8, 32, 32), (3, 1, 40, 24)])
def test_reference_gives_the_same_bits_however_a_prompt_is_cut(dtype, window, heads, kv_heads, width, value_width):
    check_cuts(16, heads, kv_heads, width, value_width, window, [1, 57, 130, 33], dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), [(32, 4, 128, 128), (16, 16, 192, 128)])
def test_kernel_gives_the_same_bits_however_a_prompt_is_cut(window, heads, kv_heads, width, value_width):
    lens = [1, 57, 130, 700]
    check_cuts(16, heads, kv_heads, width, value_width, window, lens, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_kernel_gives_a_prompt_the_same_bits_alone_and_among_64():
    lens = [1 + 37 * b % 700 for b in range(64)]
    queries, cache = draw_case(16, 32, 4, 128, 128, lens, torch.bfloat16, "cuda")
    together = run(public, queries, cache, [(0, n) for n in lens])
    for b, length in enumerate(lens):
        alone = run(public, queries, cache, [(0, length)], rows=[b])
        assert_same_bits(alone[0], together[0][sum(lens[:b]) : sum(lens[: b + 1])])


PREFIXES = [40, 0, 16, 17]


def check_C38(attend, merge, workspace, chunk, dtype, device):
    """Every prefix of C38 and its new chunk, keys taken `workspace` positions at a time and merged, for each sequence
    alone and for all four together: equal to the whole attention. Sequences that have no keys left in a round join it.
    """
    ends = [prefix + chunk for prefix in PREFIXES]
    # Values narrower than keys, read as a slice of wider rows.
    queries, cache = draw_case(workspace, 2, 2, 24, 16, ends, dtype, device)
    for rows in ([0, 1, 2, 3], [0], [1], [2], [3]):
        chunks = [(PREFIXES[b], chunk) for b in rows]
        q_THC = torch.cat([queries[b][first : first + chunk] for b, (first, _) in zip(rows, chunks)])
        merged = None
        for start in range(0, max(ends[b] for b in rows), workspace):
            page = start // workspace
            part = attend(
                q_THC,
                cache.k_cache_NPGC,
                cache.v_cache_NPGV,
                cache.block_tables_BM[rows, page : page + 1].contiguous(),
                starts([chunk] * len(rows), device),
                index([first for first, _ in chunks], device),
                index([min(max(ends[b] - start, 0), workspace) for b in rows], device),
                scale=scale_of(24),
                max_query_len=chunk,
                max_kv_len=workspace,
                kv_starts_B=index([start] * len(rows), device),
            )
            empty = part[1] == -torch.inf
            assert (part[0][empty] == 0).all()
            # What an empty part holds must not matter; the two sides of the merge have different strides.
            part[0][empty] = torch.nan
            wide = torch.full((*part[0].shape[:2], 40), torch.nan, device=device)
            wide[..., 3:19] = part[0]
            strided_lse = torch.stack([part[1], part[1].new_full(part[1].shape, torch.nan)], dim=-1)[..., 0]
            merged = part if merged is None else merge(*merged, wide[..., 3:19], strided_lse)
        plans = [{"scale": scale_of(24), "query_offset": PREFIXES[b]} for b in rows]
        wanted = [
            dense_attention(queries[b][PREFIXES[b] :], cache.keys[b], cache.values[b], **plan)
            for b, plan in zip(rows, plans)
        ]
        assert max_rel(merged[0], torch.cat([out for out, _ in wanted])) < TOLERANCE[dtype]
        assert max_rel(merged[1], torch.cat([lse for _, lse in wanted])) < TOLERANCE[dtype]


@pytest.mark.parametrize("workspace", [16, 39, 40])
def test_C38_kernels_merge_empty_parts_as_nothing(backend, workspace):
    """A workspace of 39 leaves the longest prefix one token over."""
    check_C38(attention_prefill_triton, merge_attention_triton, workspace, 16, backend.dtype, backend.device)


@pytest.mark.parametrize("chunk", [1, 16, 17, 64])
@pytest.mark.parametrize("workspace", [16, 39, 40, 41])
def test_C38_references_merge_empty_parts_as_nothing(workspace, chunk):
    check_C38(attention_prefill_reference, merge_attention, workspace, chunk, torch.float32, "cpu")


@pytest.mark.parametrize("attend", [attention_prefill, attention_prefill_reference])
def test_no_rows(attend):
    queries, cache = draw_case(16, 2, 1, 16, 8, [5, 3], torch.float32, "cpu")
    out = run(attend, queries, cache, [(5, 0), (0, 0)])
    assert (out[0] if isinstance(out, tuple) else out).shape == (0, 2, 8)


def test_kernel_with_no_rows(backend):
    queries, cache = draw_case(16, 2, 1, 16, 8, [5, 3], backend.dtype, backend.device)
    assert run(attention_prefill_triton, queries, cache, [(5, 0), (0, 0)])[0].shape == (0, 2, 8)


def check_given_place(attend, dtype, device):
    """The rows behind others of one tensor: the same bits, also where a chunk sees no key, and nothing else written."""
    queries, cache = draw_case(16, 2, 1, 32, 32, [20, 9], dtype, device)
    chunks = [(3, 17), (0, 9)]
    wanted_THV, _ = run(attend, queries, cache, chunks)
    whole_THV = torch.full((3 + 26 + 2, 2, 32), torch.nan, device=device)
    place_THV = whole_THV[3:-2]
    result_THV, _ = run(partial(attend, out_THV=place_THV), queries, cache, chunks)
    assert result_THV.data_ptr() == place_THV.data_ptr()
    assert_same_bits(place_THV, wanted_THV)
    assert bool(whole_THV[:3].isnan().all()) and bool(whole_THV[-2:].isnan().all())


def test_kernel_writes_where_it_is_told(backend):
    check_given_place(attention_prefill_triton, backend.dtype, backend.device)


def test_reference_writes_where_it_is_told():
    check_given_place(attention_prefill_reference, torch.float32, "cpu")


@pytest.mark.gpu
def test_C16_last_block_of_a_cache_above_two_to_the_31():
    page, heads, width = 16, 8, 128
    num_blocks = 2**31 // (2 * page * heads * width) + 2
    cache = torch.full((num_blocks, 2, page, heads, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache[-1] = draw(2, page, heads, width, dtype=torch.bfloat16, device="cuda")
    q_THC = draw(page, 32, width, dtype=torch.bfloat16, device="cuda", seed=1)
    table_BM = index([num_blocks - 1], "cuda").view(1, 1)
    plan = (table_BM, starts([page], "cuda"), index([0], "cuda"), index([page], "cuda"))
    bounds = {"max_query_len": page, "max_kv_len": page}
    out = attention_prefill(q_THC, cache[:, 0], cache[:, 1], *plan, scale=0.1, **bounds)
    wanted = dense_attention(q_THC, cache[-1, 0], cache[-1, 1], scale=0.1, query_offset=0)[0]
    assert max_rel(out, wanted) < TOLERANCE[torch.bfloat16]


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COMPILED = [(arch, "bf16", width, "bf16") for arch in ARCHS for width in (128, 192)]
COMPILED += [(arch, dtype, 128, "fp8e4nv") for arch in ARCHS if arch >= 89 for dtype in ("bf16", "fp16", "fp32")]
COMPILED += [(80, "fp16", 80, "fp16"), (80, "fp32", 128, "fp32")]


@aot
@pytest.mark.parametrize(("arch", "dtype", "width", "cached"), COMPILED)
def test_kernels_compile_ahead_of_time(arch, dtype, width, cached):
    pointers = {"q_ptr": f"*{dtype}", "k_ptr": f"*{cached}", "v_ptr": f"*{cached}", "out_ptr": f"*{dtype}"}
    pointers |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), None if cached == dtype else "*fp32")
    indices = dict.fromkeys(
        ("tables_ptr", "query_starts_ptr", "query_offsets_ptr", "kv_lens_ptr", "kv_starts_ptr"), "*i32"
    )
    if width == 128:
        indices["kv_starts_ptr"] = None
    numbers = {"lse_ptr": "*fp32", "scale_log2": "fp32", "num_heads": "i32"}
    strides = {
        f"stride_{name}": "i32" for name in ("qt", "qh", "kn", "kp", "kg", "vn", "vp", "vg", "sn", "sp", "sg", "tb")
    }
    sizes = {"GROUP": 8, "PACK": 8, "PAGE": 16, "WIDTH": width, "VALUE_WIDTH": min(width, 128)}
    sizes |= {"WINDOW": 0 if width == 192 else 4096, "PDL": arch >= 90}
    tile = prefill_tile(DTYPES[dtype], width, min(width, 128), arch // 10)
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_C": tile.block_k, "BLOCK_V": 128}
    args = {**pointers, **indices, **numbers, **strides, **sizes, **blocks, "BLOCK_REST": 64 if width == 192 else 16}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compile_ahead(_prefill_kernel, arch, args, **options)
