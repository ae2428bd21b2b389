"""MLA decode on Hopper for more than 32 heads, in tiles of 64, by a list of pieces.

Knows heads and pieces; lengths only as a piece has them, and no pages (mla_many_feed.py). Its idea: the sum of 64
heads, 64 x 512 in fp32, is more than one group of warps can hold. The left group computes scores and weights and keeps
the left half; it hands the weights over to the right group, which keeps the right half and multiplies while the left
one is at the next scores.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.barriers import barriers
from kernels.mla_many_feed import NOTE, PLACES, copy_latents, next_piece
from kernels.mla_pieces import zero_rows

# s[p] = scale * log2(e) * (q_latent . c[p] + q_pe . k_pe[p]); out = sum_p 2^s[p] c[p] / sum_p 2^s[p];
#   lse = log2(sum_p 2^s[p]), over a split of the keys; a sequence of one split is done then
#   latent_desc [B, H, L], pe_desc [B, H, R] in boxes of 1 x 64 x 64, zeros from H on; desc: the cache as rows
#   [N * P, L + R], boxes of min(PAGE, 64) x 64; tables_ptr int32 [B, M]; pieces_ptr int32 [I, 4] and counts_ptr int32
#   [4], a PieceList; out_ptr [B, H, L], parts_ptr [B, S, H, L], lse_ptr fp32 [B, S, H] contiguous
#   grid: one program a multiprocessor at most. Place i * head tiles + t is piece i of the list for head tile t, so
#   that neighbours share its latents in L2; program p begins with place p and takes others by the counter. fp32
#   accumulation. A tile is 64 keys; rows of keys from the split's end on are zeroed in shared memory (the page behind
#   them may hold anything) and weigh 0.

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
def _attend_left(
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_splits,
    num_heads,
    queries,
    left,
    left_chunks,
    right_chunks,
    pe,
    weights,
    row,
    full,
    empty,
    queries_there,
    queries_free,
    handed,
    taken,
    board,
    PDL: gl.constexpr,
):
    """Scores and weights of 64 heads, the left half of their sums. Hands over weights and decay, at last totals."""
    STAGES: gl.constexpr = pe.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    HEAD: gl.constexpr = gl.SliceLayout(1, S)
    SUM_HEAD: gl.constexpr = gl.SliceLayout(1, SUM)
    tiles = 0
    asks = 0
    handovers = 0
    turn = 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence, split, splits, first, end, head_tile, there = next_piece(board, turn)
    while there != 0:
        mbarrier.wait(queries_there, asks & 1, pred=first < end)
        asks += (first < end).to(gl.int32)
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
            seen = (start + gl.arange(0, 64, gl.SliceLayout(0, S)) < end)[None, :]
            s = gl.where(seen, s * scale_log2, float("-inf"))
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
            if start + 64 >= end:
                mbarrier.arrive(queries_free)  # no score is left to compute
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
        _store_half(out, head_tile * 64, 0, num_heads, num_splits, sequence, split, splits, out_ptr, parts_ptr)
        if splits > 1:
            score_head = head_tile * 64 + gl.arange(0, 64, HEAD)
            part = (sequence * num_splits + split) * num_heads + score_head
            gl.store(lse_ptr + part, maximum + gl.log2(total), mask=score_head < num_heads)
        turn += 1
        sequence, split, splits, first, end, head_tile, there = next_piece(board, turn)


@gluon.jit
def _attend_right(
    out_ptr,
    parts_ptr,
    num_splits,
    num_heads,
    right,
    weights,
    row,
    full,
    empty,
    handed,
    taken,
    board,
    PDL: gl.constexpr,
):
    """The right half of the sums."""
    STAGES: gl.constexpr = right.shape[0]
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    HEAD: gl.constexpr = gl.SliceLayout(1, SUM)
    tiles = 0
    handovers = 0
    turn = 0
    if PDL:
        gdc_wait()
    sequence, split, splits, first, end, head_tile, there = next_piece(board, turn)
    while there != 0:
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
        turn += 1
        sequence, split, splits, first, end, head_tile, there = next_piece(board, turn)


@gluon.jit(do_not_specialize=["num_splits", "stride_tb"])
def many_heads_kernel(
    latent_desc,
    pe_desc,
    desc,
    tables_ptr,
    pieces_ptr,
    counts_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_splits,
    num_heads,
    stride_tb,
    PAGE: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = latent_desc.dtype
    STAGES: gl.constexpr = 2
    head_tiles = gl.cdiv(num_heads, 64)
    K: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query_boxes = gl.allocate_shared_memory(dtype, [9, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 3))
    queries = query_boxes._reinterpret(dtype, [9, 64, 64], K)
    left = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    right = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    pe = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], K)
    left_chunks = left._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    right_chunks = right._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    weights = gl.allocate_shared_memory(dtype, [64, 64], K)
    row = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    notes = gl.allocate_shared_memory(gl.int32, [PLACES * NOTE, 1], PLAIN)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full, empty = barriers(STAGES, (1, 2))
    noted, heard = barriers(PLACES, (1, 2))
    queries_there = gl.allocate_shared_memory(gl.int64, [1], BAR)
    queries_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    handed = gl.allocate_shared_memory(gl.int64, [1], BAR)
    taken = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(queries_there, count=1)
    mbarrier.init(queries_free, count=1)
    mbarrier.init(handed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    board = (notes, noted, heard)
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_left, (
                out_ptr, parts_ptr, lse_ptr, scale_log2, num_splits, num_heads, queries, left, left_chunks,
                right_chunks, pe, weights, row, full, empty, queries_there, queries_free, handed, taken, board, PDL,
            )),
            (_attend_right, (
                out_ptr, parts_ptr, num_splits, num_heads, right, weights, row, full, empty, handed, taken, board, PDL,
            )),
            (copy_latents, (
                latent_desc, pe_desc, desc, tables_ptr, pieces_ptr, counts_ptr, head_tiles, stride_tb, query_boxes,
                left_chunks, right_chunks, pe, full, empty, queries_there, queries_free, board, PAGE, PDL,
            )),
        ],
        [4, 1],
        [208, 40],
    )
    # fmt: on
