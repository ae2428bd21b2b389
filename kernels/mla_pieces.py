"""What the two MLA decode kernels for Hopper share: copies of latents by TMA, rows to be zeroed.

Knows pages and lengths; multiplies nothing. L = 512 and R = 64, DeepSeek's: a latent and its rotary key are nine
chunks of 64 columns, each [64 keys, 64] in shared memory, swizzled by 128 bytes as wgmma reads it.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


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
