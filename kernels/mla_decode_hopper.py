"""Absorbed latent attention on Hopper (H100, H200): tiles by TMA, products by wgmma, in Gluon. Same result as
`kernels/mla_decode.py`, whose reference defines it; bits of its own.

Knows pages, lengths and heads. Its idea: one warp copies pages ahead of the others, from one piece of work into the
next; a latent is copied once and serves both products. Up to 32 heads, keys are the rows of the products (wgmma wants
64 rows, and so every latent is read just twice from shared memory); more heads come in tiles of 64 rows, whose two
halves of the sum two groups of warps keep.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch
from kernels.split_kv import SplitRule, split_bounds
from kernels.tiles import device_generation

_FEW_HEADS = 32

_OF_THE_BATCH = ["num_pieces", "num_sequences", "num_splits", "stride_tb"]

_bounds = gluon.jit(split_bounds.fn)


def runs_on_hopper(q_latent_BHL: Tensor, q_pe_BHR: Tensor, cache_NPX: Tensor) -> bool:
    """Whether these kernels take this model's operands on this GPU: never a matter of the batch."""
    num_blocks, page_size, width = cache_NPX.shape
    return (
        device_generation(q_latent_BHL) == 9
        and q_latent_BHL.dtype in (torch.bfloat16, torch.float16)
        and q_latent_BHL.shape[2] == 512
        and q_pe_BHR.shape[2] == 64
        and page_size % 16 == 0
        and (page_size % 64 == 0 or 64 % page_size == 0)
        and cache_NPX.stride() == (page_size * width, width, 1)
        and cache_NPX.data_ptr() % 16 == 0
    )


# s[p] = scale * log2(e) * (q_latent . c[p] + q_pe . k_pe[p]); out = sum_p 2^s[p] c[p] / sum_p 2^s[p];
#   lse = log2(sum_p 2^s[p]), over a split of the keys; a sequence of one split is done then
#   q_latent_ptr [B, H, L], q_pe_ptr [B, H, R], last stride 1; desc: the cache as rows [N * P, L + R], boxes of ROWS x 64; tables_ptr int32 [B, M], kv_lens_ptr int32 [B]; out_ptr [B, H, L], parts_ptr
#   [B, S, H, L], lse_ptr fp32 [B, S, H] contiguous
#   grid: one program a multiprocessor at most; program i takes the pieces i, i + grid, ... of S x B x head tiles, a
#   piece being a split of a sequence for BLOCK_H heads. fp32 accumulation. A tile is 64 keys; rows of keys from the
#   split's end on are zeroed in shared memory (the page behind them may hold anything) and weigh 0.


@gluon.jit
def _piece(index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN: gl.constexpr, FEW_SPLITS: gl.constexpr):
    """(first key, end, number of splits, split, sequence, head tile)"""
    head_tile = index % head_tiles
    sequence = (index // head_tiles) % num_sequences
    split = index // (head_tiles * num_sequences)
    kv_len = gl.load(kv_lens_ptr + sequence)
    first, end, splits = _bounds(kv_len, split, SPLIT_LEN, FEW_SPLITS, 0)
    return first, end, splits, split, sequence.to(gl.int64), head_tile


@gluon.jit
def _copy_latents(
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
        first, end, _, _, sequence, _ = _piece(index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN, FEW_SPLITS)
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
def _zero_rows(chunks, stage, count):
    """Rows from `count` on of a stage's four chunks."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    there = (gl.arange(0, 64, gl.SliceLayout(1, COPY)) < count)[:, None]
    for c in gl.static_range(4):
        chunk = chunks.index(stage * 4 + c)
        chunk.store(gl.where(there, chunk.load(COPY), 0.0).to(chunk.dtype))


@gluon.jit
def _fill_queries(ptr, chunks, head0, num_heads, stride_h, COUNT: gl.constexpr, FIRST: gl.constexpr):
    """COUNT chunks of 64 columns, rows of heads; rows from H on are zero."""
    ROWS: gl.constexpr = chunks.shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = head0 + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    ptrs = ptr + (head * stride_h)[:, None] + gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    for c in gl.static_range(COUNT):
        chunks.index(FIRST + c).store(gl.load(ptrs + c * 64, mask=(head < num_heads)[:, None], other=0.0))


@gluon.jit
def _write(out, head, column, num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr):
    """`head` and `column` are shaped to broadcast to out's shape."""
    inside = (head < num_heads) & (column >= 0)
    if splits <= 1:
        whole_ptrs = out_ptr + (sequence * num_heads + head) * 512 + column
        gl.store(whole_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part_ptrs = parts_ptr + ((sequence * num_splits + split) * num_heads + head) * 512 + column
        gl.store(part_ptrs, out.to(parts_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _attend_few(
    q_latent_ptr,
    q_pe_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_pieces,
    num_sequences,
    num_splits,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    queries,
    left,
    right,
    left_chunks,
    right_chunks,
    pe,
    weights,
    full,
    empty,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
):
    """All heads at once, keys as rows: scores [64 keys, H], the sum [L, H] in two halves."""
    HEADS: gl.constexpr = queries.shape[1]
    STAGES: gl.constexpr = pe.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    HEAD: gl.constexpr = gl.SliceLayout(0, MMA)
    head = gl.arange(0, HEADS, HEAD)
    tiles = 0
    for index in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        first, end, splits, split, sequence, _ = _piece(index, kv_lens_ptr, num_sequences, 1, SPLIT_LEN, FEW_SPLITS)
        if (first < end) | (split == 0):
            _fill_queries(q_latent_ptr + sequence * stride_lb, queries, 0, num_heads, stride_lh, 8, 0)
            _fill_queries(q_pe_ptr + sequence * stride_rb, queries, 0, num_heads, stride_rh, 1, 8)
            fence_async_shared()
            maximum = gl.full([HEADS], float("-inf"), gl.float32, HEAD)
            total = gl.zeros([HEADS], gl.float32, HEAD)
            sum_left = gl.zeros([256, HEADS], gl.float32, MMA)
            sum_right = gl.zeros([256, HEADS], gl.float32, MMA)
            for start in range(first, end, 64):
                stage = tiles % STAGES
                mbarrier.wait(full.index(stage), (tiles // STAGES) & 1)
                if start + 64 > end:
                    _zero_rows(left_chunks, stage, end - start)
                    _zero_rows(right_chunks, stage, end - start)
                    fence_async_shared()
                s = gl.zeros([64, HEADS], gl.float32, MMA)
                for c in gl.static_range(4):
                    q = queries.index(c).permute((1, 0))
                    s = warpgroup_mma(left_chunks.index(stage * 4 + c), q, s, use_acc=c > 0, is_async=True)
                for c in gl.static_range(4):
                    q = queries.index(4 + c).permute((1, 0))
                    s = warpgroup_mma(right_chunks.index(stage * 4 + c), q, s, is_async=True)
                s = warpgroup_mma(pe.index(stage), queries.index(8).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                there = (start + gl.arange(0, 64, KEY) < end)[:, None]
                s = gl.where(there, s * scale_log2, float("-inf"))
                new_maximum = gl.maximum(maximum, gl.max(s, axis=0))
                base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                p = gl.exp2(s - base[None, :])
                decay = gl.exp2(maximum - base)
                total = total * decay + gl.sum(p, axis=0)
                maximum = new_maximum
                weights.store(p.to(weights.dtype))
                fence_async_shared()
                sum_left = sum_left * decay[None, :]
                sum_right = sum_right * decay[None, :]
                token_left = warpgroup_mma(left.index(stage).permute((1, 0)), weights, sum_left, is_async=True)
                token_right = warpgroup_mma(right.index(stage).permute((1, 0)), weights, sum_right, is_async=True)
                sum_left, sum_right = warpgroup_mma_wait(0, deps=[token_left, token_right])
                mbarrier.arrive(empty.index(stage))
                tiles += 1
            total = gl.where(total == 0.0, 1.0, total)
            column = gl.arange(0, 256, KEY)[:, None]
            where = (num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr)
            _write(sum_left / total[None, :], head[None, :], column, *where)
            _write(sum_right / total[None, :], head[None, :], column + 256, *where)
            if splits > 1:
                part = (sequence * num_splits + split) * num_heads + head
                gl.store(lse_ptr + part, maximum + gl.log2(total), mask=head < num_heads)


@gluon.jit(do_not_specialize=_OF_THE_BATCH)
def _few_heads_kernel(
    q_latent_ptr,
    q_pe_ptr,
    desc,
    tables_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_pieces,
    num_sequences,
    num_splits,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    stride_tb,
    PAGE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    K: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [9, BLOCK_H, 64], K)
    left = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    right = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    pe = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], K)
    left_chunks = left._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    right_chunks = right._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    weights = gl.allocate_shared_memory(dtype, [64, BLOCK_H], gl.NVMMASharedLayout(2 * BLOCK_H, 16, 2))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_few, (
                q_latent_ptr, q_pe_ptr, kv_lens_ptr, out_ptr, parts_ptr, lse_ptr, scale_log2, num_pieces, num_sequences,
                num_splits, num_heads, stride_lb, stride_lh, stride_rb, stride_rh, queries, left, right, left_chunks,
                right_chunks, pe, weights, full, empty, SPLIT_LEN, FEW_SPLITS,
            )),
            (_copy_latents, (
                desc, tables_ptr, kv_lens_ptr, num_pieces, num_sequences, 1, stride_tb, left_chunks, right_chunks, pe,
                full, empty, PAGE, SPLIT_LEN, FEW_SPLITS,
            )),
        ],
        [1],
        [32],
    )
    # fmt: on


@gluon.jit
def _attend_left(
    q_latent_ptr,
    q_pe_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_pieces,
    num_sequences,
    head_tiles,
    num_splits,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    queries,
    left,
    left_chunks,
    right_chunks,
    pe,
    weights,
    row,
    full,
    empty,
    handed,
    taken,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
):
    """Scores and weights of 64 heads, and the left half of their sums. Hands weights and decay, at last totals, over."""
    STAGES: gl.constexpr = pe.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    HEAD: gl.constexpr = gl.SliceLayout(1, S)
    SUM_HEAD: gl.constexpr = gl.SliceLayout(1, SUM)
    tiles = 0
    handovers = 0
    for index in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        first, end, splits, split, sequence, head_tile = _piece(
            index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN, FEW_SPLITS
        )
        if (first < end) | (split == 0):
            head0 = head_tile * 64
            _fill_queries(q_latent_ptr + sequence * stride_lb, queries, head0, num_heads, stride_lh, 8, 0)
            _fill_queries(q_pe_ptr + sequence * stride_rb, queries, head0, num_heads, stride_rh, 1, 8)
            fence_async_shared()
            maximum = gl.full([64], float("-inf"), gl.float32, HEAD)
            total = gl.zeros([64], gl.float32, HEAD)
            out = gl.zeros([64, 256], gl.float32, SUM)
            for start in range(first, end, 64):
                stage = tiles % STAGES
                mbarrier.wait(full.index(stage), (tiles // STAGES) & 1)
                if start + 64 > end:
                    _zero_rows(left_chunks, stage, end - start)
                    _zero_rows(right_chunks, stage, end - start)
                    fence_async_shared()
                s = gl.zeros([64, 64], gl.float32, S)
                for c in gl.static_range(4):
                    k = left_chunks.index(stage * 4 + c).permute((1, 0))
                    s = warpgroup_mma(queries.index(c), k, s, use_acc=c > 0, is_async=True)
                for c in gl.static_range(4):
                    k = right_chunks.index(stage * 4 + c).permute((1, 0))
                    s = warpgroup_mma(queries.index(4 + c), k, s, is_async=True)
                s = warpgroup_mma(queries.index(8), pe.index(stage).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                there = (start + gl.arange(0, 64, gl.SliceLayout(0, S)) < end)[None, :]
                s = gl.where(there, s * scale_log2, float("-inf"))
                new_maximum = gl.maximum(maximum, gl.max(s, axis=1))
                base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                p = gl.exp2(s - base[:, None])
                decay = gl.exp2(maximum - base)
                total = total * decay + gl.sum(p, axis=1)
                maximum = new_maximum
                mbarrier.wait(taken, (handovers & 1) ^ 1)
                weights.store(p.to(weights.dtype))
                row.store(decay)
                fence_async_shared()
                mbarrier.arrive(handed)
                handovers += 1
                out = out * gl.convert_layout(decay, SUM_HEAD)[:, None]
                token = warpgroup_mma(weights, left.index(stage), out, is_async=True)
                out = warpgroup_mma_wait(0, deps=[token])
                mbarrier.arrive(empty.index(stage))
                tiles += 1
            total = gl.where(total == 0.0, 1.0, total)
            mbarrier.wait(taken, (handovers & 1) ^ 1)
            row.store(total)
            mbarrier.arrive(handed)
            handovers += 1
            head = head0 + gl.arange(0, 64, SUM_HEAD)
            column = gl.arange(0, 256, gl.SliceLayout(0, SUM))[None, :]
            where = (num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr)
            _write(out / gl.convert_layout(total, SUM_HEAD)[:, None], head[:, None], column, *where)
            if splits > 1:
                score_head = head0 + gl.arange(0, 64, HEAD)
                part = (sequence * num_splits + split) * num_heads + score_head
                gl.store(lse_ptr + part, maximum + gl.log2(total), mask=score_head < num_heads)


@gluon.jit
def _attend_right(
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    num_pieces,
    num_sequences,
    head_tiles,
    num_splits,
    num_heads,
    right,
    weights,
    row,
    full,
    empty,
    handed,
    taken,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
):
    """The right half of the sums."""
    STAGES: gl.constexpr = right.shape[0]
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    HEAD: gl.constexpr = gl.SliceLayout(1, SUM)
    tiles = 0
    handovers = 0
    for index in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        first, end, splits, split, sequence, head_tile = _piece(
            index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN, FEW_SPLITS
        )
        if (first < end) | (split == 0):
            out = gl.zeros([64, 256], gl.float32, SUM)
            for _start in range(first, end, 64):
                stage = tiles % STAGES
                mbarrier.wait(full.index(stage), (tiles // STAGES) & 1)
                mbarrier.wait(handed, handovers & 1)
                out = out * row.load(HEAD)[:, None]
                token = warpgroup_mma(weights, right.index(stage), out, is_async=True)
                out = warpgroup_mma_wait(0, deps=[token])
                mbarrier.arrive(taken)
                mbarrier.arrive(empty.index(stage))
                handovers += 1
                tiles += 1
            mbarrier.wait(handed, handovers & 1)
            total = row.load(HEAD)
            mbarrier.arrive(taken)
            handovers += 1
            head = head_tile * 64 + gl.arange(0, 64, HEAD)
            column = 256 + gl.arange(0, 256, gl.SliceLayout(0, SUM))[None, :]
            where = (num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr)
            _write(out / total[:, None], head[:, None], column, *where)


@gluon.jit(do_not_specialize=_OF_THE_BATCH)
def _many_heads_kernel(
    q_latent_ptr,
    q_pe_ptr,
    desc,
    tables_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_pieces,
    num_sequences,
    num_splits,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    stride_tb,
    PAGE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    head_tiles = gl.cdiv(num_heads, BLOCK_H)
    K: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [9, BLOCK_H, 64], K)
    left = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    right = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    pe = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], K)
    left_chunks = left._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    right_chunks = right._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    weights = gl.allocate_shared_memory(dtype, [BLOCK_H, 64], K)
    row = gl.allocate_shared_memory(gl.float32, [BLOCK_H], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    handed = gl.allocate_shared_memory(gl.int64, [1], BAR)
    taken = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(handed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_left, (
                q_latent_ptr, q_pe_ptr, kv_lens_ptr, out_ptr, parts_ptr, lse_ptr, scale_log2, num_pieces, num_sequences,
                head_tiles, num_splits, num_heads, stride_lb, stride_lh, stride_rb, stride_rh, queries, left,
                left_chunks, right_chunks, pe, weights, row, full, empty, handed, taken, SPLIT_LEN, FEW_SPLITS,
            )),
            (_attend_right, (
                kv_lens_ptr, out_ptr, parts_ptr, num_pieces, num_sequences, head_tiles, num_splits, num_heads, right,
                weights, row, full, empty, handed, taken, SPLIT_LEN, FEW_SPLITS,
            )),
            (_copy_latents, (
                desc, tables_ptr, kv_lens_ptr, num_pieces, num_sequences, head_tiles, stride_tb, left_chunks,
                right_chunks, pe, full, empty, PAGE, SPLIT_LEN, FEW_SPLITS,
            )),
        ],
        [4, 1],
        [216, 24],
    )
    # fmt: on


def mla_decode_hopper(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    out_BHL: Tensor,
    parts_BSHL: Tensor,
    lse_BSH: Tensor,
    rule: SplitRule,
    *,
    scale: float,
) -> None:
    """Fills out_BHL where a sequence has one split, parts_BSHL and lse_BSH elsewhere."""
    num_sequences, splits, num_heads, _ = parts_BSHL.shape
    page_size = cache_NPX.shape[1]
    few = num_heads <= _FEW_HEADS
    block_h = max(16, next_power_of_2(num_heads)) if few else 64
    num_pieces = num_sequences * splits * (1 if few else cdiv(num_heads, block_h))
    desc = TensorDescriptor.from_tensor(
        cache_NPX.flatten(0, 1), [min(page_size, 64), 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    programs = torch.cuda.get_device_properties(q_latent_BHL.device).multi_processor_count
    (_few_heads_kernel if few else _many_heads_kernel)[(min(num_pieces, programs),)](
        q_latent_BHL,
        q_pe_BHR,
        desc,
        block_tables_BM,
        kv_lens_B,
        out_BHL,
        parts_BSHL,
        lse_BSH,
        scale * log2(e),
        num_pieces,
        num_sequences,
        splits,
        num_heads,
        *q_latent_BHL.stride()[:2],
        *q_pe_BHR.stride()[:2],
        block_tables_BM.stride(0),
        PAGE=page_size,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        BLOCK_H=block_h,
        STAGES=2,
        num_warps=4,
        **dependent_launch(q_latent_BHL),
    )
