"""Prefill attention on Hopper: against fp64, the same bits however a prompt is cut, and what it leaves to the other."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.attention_prefill import attention_prefill
from kernels.attention_prefill_hopper import _prefill_kernel, runs_on_hopper
from kernels.prefill_order import PIECE_ROWS, heads_of_piece, order_pieces
from tests.aot import aot
from tests.compare import assert_same_bits, max_rel
from tests.gluon_aot import box, compile_gluon_ahead
from tests.paged_cache import assert_accurate, dense_attention, draw, index, paged_cache, starts

SHAPES = [
    # heads, kv heads, width, value width, page, window
    pytest.param(32, 4, 128, 128, 16, 0, id="qwen3"),
    pytest.param(32, 8, 128, 128, 16, 100, id="mixtral-window"),
    pytest.param(16, 16, 192, 128, 64, 0, id="mla-expanded"),
    pytest.param(7, 1, 64, 64, 256, 0, id="seven-heads-page-above-a-tile"),
    pytest.param(12, 4, 128, 64, 8, 1, id="three-heads-a-group-window-of-one"),
]
ENDS = [700, 129, 1, 64, 0, 300]


def run(queries, cache, chunks, *, window=0, rows=None, slack=0, kv_starts=None, kv_lens=None, listed=False):
    """(out in fp32, lse) of chunks (offset, length), one for each sequence of `rows`. `listed`: in the order of a list
    of pieces."""
    rows = list(range(len(chunks))) if rows is None else rows
    lens = [length for _, length in chunks]
    q_THC = torch.cat([queries[b][first : first + length] for b, (first, length) in zip(rows, chunks)])
    assert runs_on_hopper(q_THC, cache.k_cache_NPGC, cache.v_cache_NPGV)
    pieces_I = None
    if listed:
        offsets, ends = [first for first, _ in chunks], [sum(chunk) for chunk in chunks]
        key_starts = [0] * len(chunks) if kv_starts is None else kv_starts.tolist()
        keys = ends if kv_lens is None else kv_lens.tolist()
        num_queries = PIECE_ROWS // heads_of_piece(q_THC.shape[1], cache.k_cache_NPGC.shape[2])
        pieces_I = index(order_pieces(lens, offsets, key_starts, keys, num_queries), "cuda")
    return attention_prefill(
        q_THC,
        cache.k_cache_NPGC,
        cache.v_cache_NPGV,
        cache.block_tables_BM[rows],
        starts(lens, "cuda"),
        index([first for first, _ in chunks], "cuda"),
        index([sum(chunk) for chunk in chunks], "cuda") if kv_lens is None else kv_lens,
        scale=q_THC.shape[2] ** -0.5,
        window=window,
        max_query_len=max(lens) + slack,
        max_kv_len=max(sum(chunk) for chunk in chunks) + slack,
        kv_starts_B=kv_starts,
        pieces_I=pieces_I,
        return_lse=True,
    )


def draw_case(heads, kv_heads, width, value_width, page, dtype=torch.bfloat16):
    sizes = {"page": page, "kv_heads": kv_heads, "width": width, "value_width": value_width}
    cache = paged_cache(ENDS, **sizes, dtype=dtype, device="cuda")
    return [draw(n, heads, width, dtype=dtype, device="cuda", seed=70 + b) for b, n in enumerate(ENDS)], cache


def exact(queries, cache, chunks, window, dtype=torch.float64):
    parts = []
    for q, k, v, (first, length) in zip(queries, cache.keys, cache.values, chunks):
        end = first + length
        plan = {"scale": q.shape[2] ** -0.5, "query_offset": first, "window": window, "dtype": dtype}
        parts.append(dense_attention(q[first:end], k[:end], v[:end], **plan))
    return tuple(torch.cat(part) for part in zip(*parts))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width", "page", "window"), SHAPES)
def test_whole_prompts(dtype, heads, kv_heads, width, value_width, page, window):
    """Pages hold NaN behind every prompt, tables hold wild ids behind every last page."""
    queries, cache = draw_case(heads, kv_heads, width, value_width, page, dtype)
    chunks = [(0, end) for end in ENDS]
    out_THV, lse_TH = run(queries, cache, chunks, window=window, slack=300)
    wanted, wanted_lse = exact(queries, cache, chunks, window)
    assert_accurate(out_THV.to(dtype), exact(queries, cache, chunks, window, dtype)[0], wanted)
    assert max_rel(lse_TH, wanted_lse) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width", "page", "window"), SHAPES)
def test_a_row_has_the_same_bits_alone_together_and_chunked(heads, kv_heads, width, value_width, page, window):
    queries, cache = draw_case(heads, kv_heads, width, value_width, page)
    out_THV, lse_TH = run(queries, cache, [(0, end) for end in ENDS], window=window)
    cuts = [0, 1, 33, 160, 161, 400, 700]
    parts = [
        run(queries, cache, [(first, end - first)], window=window, rows=[0]) for first, end in itertools.pairwise(cuts)
    ]
    assert_same_bits(torch.cat([part[0] for part in parts]), out_THV[:700])
    assert_same_bits(torch.cat([part[1] for part in parts]), lse_TH[:700])
    # Later chunks of three sequences in another order, and one that has no rows.
    chunks, rows = [(200, 100), (0, 0), (100, 29), (699, 1)], [5, 3, 1, 0]
    mixed, _ = run(queries, cache, chunks, window=window, rows=rows, slack=77)
    first_row = starts(ENDS).tolist()
    wanted = [out_THV[first_row[b] + at : first_row[b] + at + length] for b, (at, length) in zip(rows, chunks)]
    assert_same_bits(mixed, torch.cat(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width", "page", "window"), SHAPES)
def test_a_list_of_pieces_changes_no_bit(heads, kv_heads, width, value_width, page, window):
    """Chunks of all lengths, one without rows, some behind older keys."""
    queries, cache = draw_case(heads, kv_heads, width, value_width, page)
    chunks = [(0, 700), (100, 29), (0, 0), (0, 64), (0, 0), (17, 283)]
    plain, listed = (run(queries, cache, chunks, window=window, listed=each) for each in (False, True))
    for one, other in zip(plain, listed):
        assert bool(one.isfinite().any())
        assert_same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [False, True])
def test_rounds_of_keys_that_begin_later(listed):
    """The expanded keys of a round: kv_starts above 0, a sequence without keys in it, queries before its first key."""
    queries, cache = draw_case(4, 4, 192, 128, 64)
    rows, round_start = [0, 1, 5], 128
    tables = cache.block_tables_BM[rows][:, round_start // 64 :].contiguous()
    lens = [max(ENDS[b] - round_start, 0) for b in rows]
    part = type(cache)(cache.k_cache_NPGC, cache.v_cache_NPGV, tables, index(lens, "cuda"), (), ())
    chunks = [(100, 600), (0, 129), (290, 10)]
    out_THV, lse_TH = run(
        [queries[b] for b in rows],
        part,
        chunks,
        kv_starts=index([round_start] * 3, "cuda"),
        kv_lens=part.kv_lens_B,
        listed=listed,
    )
    wanted = [
        dense_attention(
            queries[b][first : first + length],
            cache.keys[b][round_start:],
            cache.values[b][round_start:],
            scale=192**-0.5,
            query_offset=first,
            kv_start=round_start,
        )
        for b, (first, length) in zip(rows, chunks)
    ]
    empty = torch.cat([lse for _, lse in wanted]) == -torch.inf
    assert bool(empty.any()) and bool((lse_TH[empty] == -torch.inf).all()) and bool((out_THV[empty] == 0).all())
    assert max_rel(out_THV, torch.cat([out for out, _ in wanted])) < 2e-2
    assert max_rel(lse_TH[~empty], torch.cat([lse for _, lse in wanted])[~empty]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "pitch"), [(16, 192), (64, 320)])
def test_keys_in_two_parts_are_attended_as_whole_ones(page, pitch):
    """The last 64 columns of all heads' keys are one tensor; keys and values of a head lie side by side."""
    queries, cache = draw_case(6, 6, 192, 128, page)
    num_blocks = cache.k_cache_NPGC.shape[0]
    both_NPGX = torch.full((num_blocks, page, 6, 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    rest_NPX = torch.full((num_blocks, page, pitch), torch.nan, dtype=torch.bfloat16, device="cuda")
    rest_NPR = rest_NPX[..., 128:192]
    both_NPGX[..., :128], both_NPGX[..., 128:] = cache.k_cache_NPGC[..., :128], cache.v_cache_NPGV
    rest_NPR.copy_(cache.k_cache_NPGC[:, :, 0, 128:])
    k_NPGC = torch.cat([both_NPGX[..., :128], rest_NPR[:, :, None].expand(-1, -1, 6, -1)], dim=3)
    chunks = [(0, end) for end in ENDS[:-1]] + [(100, 200)]
    operands = (cache.block_tables_BM, starts([length for _, length in chunks], "cuda"))
    operands += (index([first for first, _ in chunks], "cuda"), index(ENDS, "cuda"))
    bounds = {"scale": 0.07, "max_query_len": 700, "max_kv_len": 700, "return_lse": True}
    q_THC = torch.cat([q[first : first + length] for q, (first, length) in zip(queries, chunks)])
    k_NPGn, v_NPGV = both_NPGX.split(128, dim=3)
    assert runs_on_hopper(q_THC, k_NPGn, v_NPGV, rest_NPR)
    parts = attention_prefill(q_THC, k_NPGn, v_NPGV, *operands, **bounds, k_rest_NPR=rest_NPR)
    whole = attention_prefill(q_THC, k_NPGC, v_NPGV, *operands, **bounds)
    for one, other in zip(parts, whole):
        assert bool(one.isfinite().any())
        assert_same_bits(one, other)


def test_a_cpu_and_odd_shapes_are_left_to_the_other_kernel():
    cache = paged_cache([5], page=16, width=128)
    assert not runs_on_hopper(draw(5, 1, 128), cache.k_cache_NPGC, cache.v_cache_NPGV)


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "width", "value_width"), [(17, 128, 128), (16, 96, 64), (4, 64, 64)])
def test_odd_shapes_are_left_to_the_other_kernel(page, width, value_width):
    sizes = {"page": page, "width": width, "value_width": value_width, "dtype": torch.bfloat16, "device": "cuda"}
    cache = paged_cache([5], **sizes)
    q_THC = draw(5, 1, width, dtype=torch.bfloat16, device="cuda")
    assert not runs_on_hopper(q_THC, cache.k_cache_NPGC, cache.v_cache_NPGV)


@aot
@pytest.mark.parametrize(("width", "value_width", "page", "window"), [(128, 128, 16, 0), (192, 128, 64, 4096)])
def test_kernel_compiles_ahead_of_time(width, value_width, page, window):
    pointers = {"q_ptr": "*bf16", "out_ptr": "*bf16", "lse_ptr": "*fp32", "scale_log2": "fp32"}
    descriptors = dict.fromkeys(("k_desc", "v_desc", "rest_desc"), box("bf16", min(page, 128), 64))
    names = ("tables_ptr", "query_starts_ptr", "query_offsets_ptr", "kv_lens_ptr", "kv_starts_ptr", "pieces_ptr")
    indices: dict[str, str | None] = dict.fromkeys(names, "*i32")
    indices["kv_starts_ptr" if width == 128 else "pieces_ptr"] = None
    numbers = ("num_pieces", "num_sequences", "num_heads", "k_ratio", "v_ratio", "rest_ratio")
    strides = ("stride_qt", "stride_qh", "stride_kg", "stride_vg", "stride_tb")
    sizes = {"GROUP": 8, "PACK": 8, "PAGE": page, "WIDTH": width, "VALUE_WIDTH": value_width, "WINDOW": window}
    blocks = {"REST": width // 192, "BLOCK_N": 128, "BUFFERS": 2 if width == 128 else 1, "PDL": True}
    args = {**pointers, **descriptors, **indices, **dict.fromkeys(numbers + strides, "i32"), **sizes, **blocks}
    compile_gluon_ahead(_prefill_kernel, args)
