"""What the two MLA decode kernels for Hopper share: copies of latents by TMA, queries, rows to be zeroed.

Knows pages, lengths and heads; multiplies nothing. L = 512 and R = 64, DeepSeek's: a latent and its rotary key are nine
chunks of 64 columns, each [64 keys, 64] in shared memory, swizzled by 128 bytes as wgmma reads it.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from kernels.split_kv import split_bounds

OF_THE_BATCH = ["num_pieces", "num_sequences", "num_splits", "stride_tb"]
"""Arguments that change from step to step: nothing is compiled for their values."""

bounds = gluon.jit(split_bounds.fn)


@gluon.jit
def _page_row(table_ptr, key, end, PAGE: gl.constexpr):
    """The row of a key in the cache. A page behind the end is not read: the last one that has keys comes once more."""
    ROWS: gl.constexpr = PAGE if PAGE < 64 else 64
    key = gl.minimum(key, (end - 1) // ROWS * ROWS)
    return gl.load(table_ptr + key // PAGE) * PAGE + key % PAGE


@gluon.jit
def rows_of_tile(table_ptr, start, end, PAGE: gl.constexpr):
    """The rows in the cache of a tile's first key and, with pages of less than 64, of its other pages' first keys."""
    row0 = _page_row(table_ptr, start, end, PAGE)
    row1, row2, row3 = row0, row0, row0
    if PAGE <= 32:
        row1 = _page_row(table_ptr, start + PAGE, end, PAGE)
    if PAGE == 16:
        row2 = _page_row(table_ptr, start + 32, end, PAGE)
        row3 = _page_row(table_ptr, start + 48, end, PAGE)
    return row0, row1, row2, row3


@gluon.jit
def copy_chunks(
    desc, row0, row1, row2, row3, column, chunks, first_chunk, bar, COUNT: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """A tile's COUNT chunks of 64 columns, from as many pages as it takes."""
    ROWS: gl.constexpr = PAGE if PAGE < 64 else 64
    for c in gl.static_range(COUNT):
        chunk = chunks.index(first_chunk + c)
        at = column + c * 64
        tma.async_copy_global_to_shared(desc, [row0, at], bar, chunk.slice(0, ROWS, dim=0))
        if ROWS <= 32:
            tma.async_copy_global_to_shared(desc, [row1, at], bar, chunk.slice(ROWS, ROWS, dim=0))
        if ROWS == 16:
            tma.async_copy_global_to_shared(desc, [row2, at], bar, chunk.slice(32, ROWS, dim=0))
            tma.async_copy_global_to_shared(desc, [row3, at], bar, chunk.slice(48, ROWS, dim=0))


@gluon.jit
def zero_rows(chunks, stage, count):
    """Rows from `count` on of a stage's four chunks."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    there = (gl.arange(0, 64, gl.SliceLayout(1, COPY)) < count)[:, None]
    for c in gl.static_range(4):
        chunk = chunks.index(stage * 4 + c)
        chunk.store(gl.where(there, chunk.load(COPY), 0.0).to(chunk.dtype))


@gluon.jit
def fetch_queries(
    q_latent_ptr, q_pe_ptr, queries, sequence, head0, num_heads, stride_lb, stride_lh, stride_rb, stride_rh
):  # fmt: skip
    """Begin to copy a sequence's nine chunks of queries, rows of heads; places of rows from H on stay as they are."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = head0 + gl.arange(0, queries.shape[1], gl.SliceLayout(1, COPY))
    column = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    there = (head < num_heads)[:, None]
    ptrs = q_latent_ptr + sequence.to(gl.int64) * stride_lb + (head * stride_lh)[:, None] + column
    for c in gl.static_range(8):
        async_copy.async_copy_global_to_shared(queries.index(c), ptrs + c * 64, mask=there)
    ptrs = q_pe_ptr + sequence.to(gl.int64) * stride_rb + (head * stride_rh)[:, None] + column
    async_copy.async_copy_global_to_shared(queries.index(8), ptrs, mask=there)
    async_copy.commit_group()
