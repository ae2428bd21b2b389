"""What the two MLA decode kernels for Hopper share: pieces of work, copies of latents by TMA, queries, results.

Knows pages, lengths and heads; multiplies nothing. L = 512 and R = 64, DeepSeek's: a latent and its rotary key are nine
chunks of 64 columns, each [64 keys, 64] in shared memory, swizzled by 128 bytes as wgmma reads it.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.split_kv import split_bounds

OF_THE_BATCH = ["num_pieces", "num_sequences", "num_splits", "stride_tb"]
"""Arguments that change from step to step: nothing is compiled for their values."""

_bounds = gluon.jit(split_bounds.fn)


@gluon.jit
def piece_of(index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN: gl.constexpr, FEW_SPLITS: gl.constexpr):
    """(first key, end, number of splits, split, sequence, head tile)"""
    head_tile = index % head_tiles
    sequence = (index // head_tiles) % num_sequences
    split = index // (head_tiles * num_sequences)
    kv_len = gl.load(kv_lens_ptr + sequence)
    first, end, splits = _bounds(kv_len, split, SPLIT_LEN, FEW_SPLITS, 0)
    return first, end, splits, split, sequence.to(gl.int64), head_tile


@gluon.jit
def copy_latents(
    desc,
    tables_ptr,
    kv_lens_ptr,
    num_pieces,
    num_sequences,
    head_tiles,
    stride_tb,
    left,
    right,
    pe,
    full,
    empty,
    PAGE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
):
    """Latents as [stage * chunk, 64 keys, 64 columns]: four chunks left, four right, one of rotary keys."""
    ROWS: gl.constexpr = PAGE if PAGE < 64 else 64
    STAGES: gl.constexpr = pe.shape[0]
    tiles = 0
    for index in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        first, end, _, _, sequence, _ = piece_of(index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN, FEW_SPLITS)
        table_ptr = tables_ptr + sequence * stride_tb
        for start in range(first, end, 64):
            stage = tiles % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((tiles // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 64 * 576 * 2)
            for i in gl.static_range(64 // ROWS):
                # A page behind the end is not read: the last one that has keys comes once more.
                key = gl.minimum(start + i * ROWS, (end - 1) // ROWS * ROWS)
                row = gl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
                for c in gl.static_range(4):
                    place = left.index(stage * 4 + c).slice(i * ROWS, ROWS, dim=0)
                    tma.async_copy_global_to_shared(desc, [row, c * 64], bar, place)
                place = pe.index(stage).slice(i * ROWS, ROWS, dim=0)
                tma.async_copy_global_to_shared(desc, [row, 512], bar, place)
                for c in gl.static_range(4):
                    place = right.index(stage * 4 + c).slice(i * ROWS, ROWS, dim=0)
                    tma.async_copy_global_to_shared(desc, [row, 256 + c * 64], bar, place)
            tiles += 1


@gluon.jit
def zero_rows(chunks, stage, count):
    """Rows from `count` on of a stage's four chunks."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    there = (gl.arange(0, 64, gl.SliceLayout(1, COPY)) < count)[:, None]
    for c in gl.static_range(4):
        chunk = chunks.index(stage * 4 + c)
        chunk.store(gl.where(there, chunk.load(COPY), 0.0).to(chunk.dtype))


@gluon.jit
def fill_queries(ptr, chunks, head0, num_heads, stride_h, COUNT: gl.constexpr, FIRST: gl.constexpr):
    """COUNT chunks of 64 columns, rows of heads; rows from H on are zero."""
    ROWS: gl.constexpr = chunks.shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = head0 + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    ptrs = ptr + (head * stride_h)[:, None] + gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    for c in gl.static_range(COUNT):
        chunks.index(FIRST + c).store(gl.load(ptrs + c * 64, mask=(head < num_heads)[:, None], other=0.0))


@gluon.jit
def write_part(out, head, column, num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr):
    """`head` and `column` are shaped to broadcast to out's shape."""
    inside = (head < num_heads) & (column >= 0)
    if splits <= 1:
        whole_ptrs = out_ptr + (sequence * num_heads + head) * 512 + column
        gl.store(whole_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part_ptrs = parts_ptr + ((sequence * num_splits + split) * num_heads + head) * 512 + column
        gl.store(part_ptrs, out.to(parts_ptr.dtype.element_ty), mask=inside)
