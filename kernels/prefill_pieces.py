"""What the Hopper prefill kernel does around its products: pieces of work, copies of keys and values by TMA, queries.

Knows pages, positions and heads; multiplies nothing. Columns lie in chunks of 64, each [rows, 64] in shared memory,
swizzled by 128 bytes as wgmma reads it.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Of the tuples below: `batch` is (query_starts_ptr, query_offsets_ptr, kv_lens_ptr, kv_starts_ptr, pieces_ptr),
# `counts` (pieces, sequences, tiles of heads), `stages` the barriers (full of keys, of values, empty of keys, of
# values). attention_prefill_hopper.py says what they point to.


@gluon.jit
def prefill_piece(index, batch, counts, PACK: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr):
    """(sequence, first head, first row of the chunk, its length, first query of the piece in the chunk, its position,
    and of keys: position of the first in the table, first seen, end in the table, first tile, end of the tiles)

    The fewer keys a piece sees, the later it comes: as `order_pieces` has listed them, or else by their place in a
    chunk as long as the longest, and then those of shorter chunks are empty. Programs take turns, each turn the other
    way round: were it always the same way, the first program would have the longer piece each time, and the others
    would wait for it.
    """
    QUERIES: gl.constexpr = 128 // PACK
    query_starts_ptr, query_offsets_ptr, kv_lens_ptr, kv_starts_ptr, pieces_ptr = batch
    num_pieces, num_sequences, head_tiles = counts
    turn = index // gl.num_programs(0)
    backwards = (turn % 2 == 1) & ((turn + 1) * gl.num_programs(0) <= num_pieces)
    index = gl.where(backwards, (2 * turn + 1) * gl.num_programs(0) - 1 - index, index)
    if pieces_ptr is None:
        sequence = index % num_sequences
        head0 = index // num_sequences % head_tiles * PACK
        in_chunk = (num_pieces - 1 - index) // (num_sequences * head_tiles) * QUERIES
    else:
        listed = gl.load(pieces_ptr + index // head_tiles)
        sequence = listed & 0xFFFF
        head0 = index % head_tiles * PACK
        in_chunk = (listed >> 16) * QUERIES
    first_row = gl.load(query_starts_ptr + sequence)
    query_len = gl.load(query_starts_ptr + sequence + 1) - first_row
    kv_start = 0
    if kv_starts_ptr is not None:
        kv_start = gl.load(kv_starts_ptr + sequence)
    kv_end = kv_start + gl.load(kv_lens_ptr + sequence)
    query = gl.load(query_offsets_ptr + sequence) + in_chunk
    first = kv_start
    if WINDOW > 0:
        first = gl.maximum(first, query - WINDOW + 1)
    end = gl.minimum(kv_end, query + gl.minimum(query_len - in_chunk, QUERIES))
    begin = gl.where(first < end, first // BLOCK_N * BLOCK_N, end)
    return sequence, head0, first_row, query_len, in_chunk, query, kv_start, first, kv_end, begin, end


@gluon.jit
def _copy_tile(
    desc,
    rest_desc,
    table_ptr,
    chunks,
    bar,
    stage,
    start,
    kv_start,
    first_page,
    last_page,
    ratio,
    rest_ratio,
    column,
    PAGE: gl.constexpr,
    REST: gl.constexpr,
):
    """One tile of a kv head; its last REST chunks come from a tensor of their own, which all heads share."""
    BLOCK_N: gl.constexpr = chunks.shape[1]
    ROWS: gl.constexpr = PAGE if PAGE < BLOCK_N else BLOCK_N
    COUNT: gl.constexpr = chunks.shape[0] // 2
    for i in gl.static_range(BLOCK_N // ROWS):
        index = gl.maximum(start + i * ROWS - kv_start, 0)
        page = gl.minimum(gl.maximum(index // PAGE, first_page), last_page)
        block = gl.load(table_ptr + page)
        row = block * ratio + index % PAGE
        for c in gl.static_range(COUNT - REST):
            place = chunks.index(stage * COUNT + c).slice(i * ROWS, ROWS, dim=0)
            tma.async_copy_global_to_shared(desc, [row, column + c * 64], bar, place)
        for c in gl.static_range(REST):
            place = chunks.index(stage * COUNT + COUNT - REST + c).slice(i * ROWS, ROWS, dim=0)
            tma.async_copy_global_to_shared(rest_desc, [block * rest_ratio + index % PAGE, c * 64], bar, place)


@gluon.jit
def copy_keys_and_values(
    descs,
    tables_ptr,
    batch,
    counts,
    ratios,
    strides,
    key_chunks,
    value_chunks,
    stages,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    REST: gl.constexpr,
):
    """Of each piece the tiles of its kv head. `descs`, `ratios`: of keys, values and the last columns of keys, and rows
    from block to block; `strides`: between heads of keys, of values, and between tables."""
    k_desc, v_desc, rest_desc = descs
    k_ratio, v_ratio, rest_ratio = ratios
    stride_kg, stride_vg, stride_tb = strides
    full_keys, full_values, empty_keys, empty_values = stages
    BLOCK_N: gl.constexpr = key_chunks.shape[1]
    tiles = 0
    for piece in range(gl.program_id(0), counts[0], gl.num_programs(0)):
        sequence, head0, _, _, _, _, kv_start, first, kv_end, begin, end = prefill_piece(
            piece, batch, counts, PACK, WINDOW, BLOCK_N
        )
        kv_head = head0 // GROUP
        table_ptr = tables_ptr + sequence.to(gl.int64) * stride_tb
        first_page, last_page = (first - kv_start) // PAGE, (kv_end - 1 - kv_start) // PAGE
        for start in range(begin, end, BLOCK_N):
            stage, phase = tiles % 2, ((tiles // 2) & 1) ^ 1
            bar = full_keys.index(stage)
            mbarrier.wait(empty_keys.index(stage), phase)
            mbarrier.expect(bar, key_chunks.shape[0] // 2 * BLOCK_N * 128)
            _copy_tile(
                k_desc, rest_desc, table_ptr, key_chunks, bar, stage, start, kv_start, first_page, last_page, k_ratio,
                rest_ratio, kv_head * stride_kg, PAGE, REST,
            )  # fmt: skip
            bar = full_values.index(stage)
            mbarrier.wait(empty_values.index(stage), phase)
            mbarrier.expect(bar, value_chunks.shape[0] // 2 * BLOCK_N * 128)
            _copy_tile(
                v_desc, v_desc, table_ptr, value_chunks, bar, stage, start, kv_start, first_page, last_page, v_ratio,
                v_ratio, kv_head * stride_vg, PAGE, 0,
            )  # fmt: skip
            tiles += 1


@gluon.jit
def fetch_queries(
    q_ptr,
    chunks,
    first_chunk,
    first_row,
    query_len,
    in_chunk,
    head0,
    strides,
    HALF: gl.constexpr,
    PACK: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Begin to copy a group's 64 rows to the chunks from `first_chunk` on; places of rows past the chunk stay as is.
    `strides`: between q's rows and heads."""
    stride_qt, stride_qh = strides
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, COPY))
    query = in_chunk + m // PACK
    ptrs = q_ptr + ((first_row + query).to(gl.int64) * stride_qt + (head0 + m % PACK) * stride_qh)[:, None]
    ptrs += gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    there = (query < query_len)[:, None]
    for c in gl.static_range(COUNT):
        async_copy.async_copy_global_to_shared(chunks.index(first_chunk + c), ptrs + c * 64, mask=there)
    async_copy.commit_group()


@gluon.jit
def zero_values(chunks, stage, start, first, end, COUNT: gl.constexpr):
    """Values of keys outside [first, end), which may be anything. Both groups may do so at once."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = start + gl.arange(0, chunks.shape[1], gl.SliceLayout(1, COPY))
    there = ((key >= first) & (key < end))[:, None]
    for c in gl.static_range(COUNT):
        chunk = chunks.index(stage * COUNT + c)
        chunk.store(gl.where(there, chunk.load(COPY), 0.0).to(chunk.dtype))
    fence_async_shared()
