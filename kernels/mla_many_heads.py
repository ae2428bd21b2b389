"""MLA decode on Hopper for more than 32 heads, in tiles of 64.

Knows pages, lengths and heads. Its idea: the sum of 64 heads, 64 x 512 in fp32, is more than one group of warps can
hold. The left group computes scores and weights and keeps the left half; it hands the weights over to the right group,
which keeps the right half and multiplies while the left one is at the next scores.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.barriers import barriers
from kernels.dependent_launch import wait_for_inputs
from kernels.mla_pieces import OF_THE_BATCH, bounds, copy_chunks, fetch_queries, rows_of_tile, zero_rows

# s[p] = scale * log2(e) * (q_latent . c[p] + q_pe . k_pe[p]); out = sum_p 2^s[p] c[p] / sum_p 2^s[p];
#   lse = log2(sum_p 2^s[p]), over a split of the keys; a sequence of one split is done then
#   q_latent_ptr [B, H, L], q_pe_ptr [B, H, R], last stride 1; desc: the cache as rows [N * P, L + R], boxes of
#   min(PAGE, 64) x 64; tables_ptr int32 [B, M], kv_lens_ptr int32 [B]; out_ptr [B, H, L], parts_ptr [B, S, H, L],
#   lse_ptr fp32 [B, S, H] contiguous
#   grid: one program a multiprocessor at most; program i takes the pieces i, i + grid, ... of S x B x head tiles, a
#   piece being a split of a sequence for BLOCK_H heads. fp32 accumulation. A tile is 64 keys; rows of keys from the
#   split's end on are zeroed in shared memory (the page behind them may hold anything) and weigh 0.


_LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
"""A half's sums as wgmma leaves them, [64 heads, 256], but with four neighbouring columns in a thread: four threads
write a whole sector of 32 bytes where they wrote two halves. They swap by shuffles; shared memory has no room left."""


@gluon.jit
def _store_half(out, head0, column0, num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr):
    """A split's 64 heads x 256 columns."""
    head = head0 + gl.arange(0, 64, gl.SliceLayout(1, _LINES))[:, None]
    column = column0 + gl.arange(0, 256, gl.SliceLayout(0, _LINES))[None, :]
    inside = (head < num_heads) & (column >= 0)
    if splits <= 1:
        whole_ptrs = out_ptr + (sequence * num_heads + head) * 512 + column
        gl.store(whole_ptrs, gl.convert_layout(out.to(out_ptr.dtype.element_ty), _LINES), mask=inside)
    else:
        part_ptrs = parts_ptr + ((sequence * num_splits + split) * num_heads + head) * 512 + column
        gl.store(part_ptrs, gl.convert_layout(out.to(parts_ptr.dtype.element_ty), _LINES), mask=inside)


@gluon.jit
def _piece_of(index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN: gl.constexpr, FEW_SPLITS: gl.constexpr):
    """(first key, end, number of splits, split, sequence, head tile)"""
    head_tile = index % head_tiles
    sequence = (index // head_tiles) % num_sequences
    split = index // (head_tiles * num_sequences)
    kv_len = gl.load(kv_lens_ptr + sequence)
    first, end, splits = bounds(kv_len, split, SPLIT_LEN, FEW_SPLITS, 0)
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
    STAGES: gl.constexpr = pe.shape[0]
    tiles = 0
    for index in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        first, end, _, _, sequence, _ = _piece_of(index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN, FEW_SPLITS)
        table_ptr = tables_ptr + sequence * stride_tb
        for start in range(first, end, 64):
            # Rows are looked up before the wait for room, which takes as long.
            row0, row1, row2, row3 = rows_of_tile(table_ptr, start, end, PAGE)
            stage = tiles % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((tiles // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 64 * 576 * 2)
            copy_chunks(desc, row0, row1, row2, row3, 0, left, stage * 4, bar, 4, PAGE)
            copy_chunks(desc, row0, row1, row2, row3, 512, pe, stage, bar, 1, PAGE)
            copy_chunks(desc, row0, row1, row2, row3, 256, right, stage * 4, bar, 4, PAGE)
            tiles += 1


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
    """Scores and weights of 64 heads, the left half of their sums. Hands over weights and decay, at last totals."""
    STAGES: gl.constexpr = pe.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    HEAD: gl.constexpr = gl.SliceLayout(1, S)
    SUM_HEAD: gl.constexpr = gl.SliceLayout(1, SUM)
    tiles = 0
    handovers = 0
    for index in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        first, end, splits, split, sequence, head_tile = _piece_of(
            index, kv_lens_ptr, num_sequences, head_tiles, SPLIT_LEN, FEW_SPLITS
        )
        if (first < end) | (split == 0):
            head0 = head_tile * 64
            fetch_queries(
                q_latent_ptr, q_pe_ptr, queries, sequence, head0, num_heads, stride_lb, stride_lh, stride_rb, stride_rh
            )
            async_copy.wait_group(0)
            fence_async_shared()
            maximum = gl.full([64], float("-inf"), gl.float32, HEAD)
            total = gl.zeros([64], gl.float32, HEAD)
            out = gl.zeros([64, 256], gl.float32, SUM)
            for start in range(first, end, 64):
                stage = tiles % STAGES
                mbarrier.wait(full.index(stage), (tiles // STAGES) & 1)
                if start + 64 > end:
                    zero_rows(left_chunks, stage, end - start)
                    zero_rows(right_chunks, stage, end - start)
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
            out = out / gl.convert_layout(total, SUM_HEAD)[:, None]
            _store_half(out, head0, 0, num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr)
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
        first, end, splits, split, sequence, head_tile = _piece_of(
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
            out = out / total[:, None]
            _store_half(out, head_tile * 64, 256, num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr)


@gluon.jit(do_not_specialize=OF_THE_BATCH)
def many_heads_kernel(
    q_latent_ptr,
    q_pe_ptr,
    desc,
    tables_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_sequences,
    num_splits,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    stride_tb,
    num_pieces,
    PAGE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    PDL: gl.constexpr,
):
    wait_for_inputs(PDL)
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    STAGES: gl.constexpr = 2
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
    full, empty = barriers(STAGES, (1, 2))
    handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(handed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_left, (
                q_latent_ptr, q_pe_ptr, kv_lens_ptr, out_ptr, parts_ptr, lse_ptr, scale_log2, num_pieces,
                num_sequences, head_tiles, num_splits, num_heads, stride_lb, stride_lh, stride_rb, stride_rh, queries,
                left, left_chunks, right_chunks, pe, weights, row, full, empty, handed, taken, SPLIT_LEN, FEW_SPLITS,
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
