"""MLA decode on Hopper for up to 32 heads, which are too few to be the rows of a product.

Knows pages, lengths and heads. Its idea: wgmma wants 64 rows, so the rows are keys: scores are latents x queries, the
sum is latents transposed x weights, and every latent is read just twice from shared memory.
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

from kernels.mla_pieces import OF_THE_BATCH, copy_latents, fill_queries, piece_of, write_part, zero_rows

# s[p] = scale * log2(e) * (q_latent . c[p] + q_pe . k_pe[p]); out = sum_p 2^s[p] c[p] / sum_p 2^s[p];
#   lse = log2(sum_p 2^s[p]), over a split of the keys; a sequence of one split is done then
#   q_latent_ptr [B, H, L], q_pe_ptr [B, H, R], last stride 1; desc: the cache as rows [N * P, L + R], boxes of
#   min(PAGE, 64) x 64; tables_ptr int32 [B, M], kv_lens_ptr int32 [B]; out_ptr [B, H, L], parts_ptr [B, S, H, L],
#   lse_ptr fp32 [B, S, H] contiguous
#   grid: one program a multiprocessor at most; program i takes the pieces i, i + grid, ... of S x B x head tiles, a
#   piece being a split of a sequence for BLOCK_H heads. fp32 accumulation. A tile is 64 keys; rows of keys from the
#   split's end on are zeroed in shared memory (the page behind them may hold anything) and weigh 0.


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
        first, end, splits, split, sequence, _ = piece_of(index, kv_lens_ptr, num_sequences, 1, SPLIT_LEN, FEW_SPLITS)
        if (first < end) | (split == 0):
            fill_queries(q_latent_ptr + sequence * stride_lb, queries, 0, num_heads, stride_lh, 8, 0)
            fill_queries(q_pe_ptr + sequence * stride_rb, queries, 0, num_heads, stride_rh, 1, 8)
            fence_async_shared()
            maximum = gl.full([HEADS], float("-inf"), gl.float32, HEAD)
            total = gl.zeros([HEADS], gl.float32, HEAD)
            sum_left = gl.zeros([256, HEADS], gl.float32, MMA)
            sum_right = gl.zeros([256, HEADS], gl.float32, MMA)
            for start in range(first, end, 64):
                stage = tiles % STAGES
                mbarrier.wait(full.index(stage), (tiles // STAGES) & 1)
                if start + 64 > end:
                    zero_rows(left_chunks, stage, end - start)
                    zero_rows(right_chunks, stage, end - start)
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
            write_part(sum_left / total[None, :], head[None, :], column, *where)
            write_part(sum_right / total[None, :], head[None, :], column + 256, *where)
            if splits > 1:
                part = (sequence * num_splits + split) * num_heads + head
                gl.store(lse_ptr + part, maximum + gl.log2(total), mask=head < num_heads)


@gluon.jit(do_not_specialize=OF_THE_BATCH)
def few_heads_kernel(
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
                q_latent_ptr, q_pe_ptr, kv_lens_ptr, out_ptr, parts_ptr, lse_ptr, scale_log2, num_pieces,
                num_sequences, num_splits, num_heads, stride_lb, stride_lh, stride_rb, stride_rh, queries,
                left, right, left_chunks, right_chunks, pe, weights, full, empty, SPLIT_LEN, FEW_SPLITS,
            )),
            (copy_latents, (
                desc, tables_ptr, kv_lens_ptr, num_pieces, num_sequences, 1, stride_tb, left_chunks, right_chunks, pe,
                full, empty, PAGE, SPLIT_LEN, FEW_SPLITS,
            )),
        ],
        [1],
        [32],
    )
    # fmt: on
