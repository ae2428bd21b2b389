"""MLA decode on Hopper for up to 32 heads, which are too few to be the rows of a product.

Knows pages, lengths and heads. Its idea: wgmma wants 64 rows, so the rows are keys: scores are latents x queries, the
sum is latents transposed x weights, and every latent is read just twice from shared memory. A sequence whose splits are
all one program's is merged as it goes, in registers, as the merge of written splits would do it.
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
from kernels.mla_pieces import zero_rows
from kernels.mla_runs import copy_latents, find_run, places_of, splits_of_run

# s[p] = scale * log2(e) * (q_latent . c[p] + q_pe . k_pe[p]); out = sum_p 2^s[p] c[p] / sum_p 2^s[p];
#   lse = log2(sum_p 2^s[p]), over a split of the keys; kernels/mla_merge.py says how splits are merged
#   q_latent_ptr [B, H, L], q_pe_ptr [B, H, R], last stride 1; desc: the cache as rows [N * P, L + R], boxes of
#   min(PAGE, 64) x 64; tables_ptr int32 [B, M], kv_lens_ptr int32 [B]; out_ptr [B, H, L], parts_ptr [B, S, H, L],
#   lse_ptr fp32 [B, S, H], whole_ptr int32 [B] contiguous: 1 where out is written already, though of several splits
#   grid: one program a multiprocessor at most, each with a run of splits (kernels/mla_runs.py). fp32 accumulation. A
#   tile is 64 keys; rows of keys from the split's end on are zeroed in shared memory (the page behind them may hold
#   anything) and weigh 0.


@gluon.jit
def _store_half(x, ptr, num_heads):
    """[256, H], to rows of 512 at `ptr`, one for each head; turned, so that a warp writes whole lines."""
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [1, 4], [0, 1])
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), LINES)
    head = gl.arange(0, x.shape[1], gl.SliceLayout(0, LINES))[None, :]
    column = gl.arange(0, 256, gl.SliceLayout(1, LINES))[:, None]
    gl.store(ptr + head * 512 + column, x, mask=(head < num_heads) & (column >= 0))


@gluon.jit
def _add_split(part, weight, so_far, decay):
    return gl.fma(part.to(gl.float32), gl.zeros_like(so_far) + weight[None, :], so_far * decay[None, :])


@gluon.jit
def _fetch_queries(
    q_latent_ptr, q_pe_ptr, queries, sequence, num_heads, stride_lb, stride_lh, stride_rb, stride_rh
):  # fmt: skip
    """Begin to copy a sequence's nine chunks of queries, rows of heads; places of rows from H on stay as they are."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = gl.arange(0, queries.shape[1], gl.SliceLayout(1, COPY))
    column = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    there = (head < num_heads)[:, None]
    ptrs = q_latent_ptr + sequence.to(gl.int64) * stride_lb + (head * stride_lh)[:, None] + column
    for c in gl.static_range(8):
        async_copy.async_copy_global_to_shared(queries.index(c), ptrs + c * 64, mask=there)
    ptrs = q_pe_ptr + sequence.to(gl.int64) * stride_rb + (head * stride_rh)[:, None] + column
    async_copy.async_copy_global_to_shared(queries.index(8), ptrs, mask=there)
    async_copy.commit_group()


@gluon.jit
def _attend_few(
    q_latent_ptr,
    q_pe_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    whole_ptr,
    scale_log2,
    num_splits,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    begin,
    stop,
    sequence,
    last_sequence,
    before,
    queries,
    left,
    right,
    left_chunks,
    right_chunks,
    pe,
    weights,
    full_left,
    full_right,
    empty_left,
    empty_right,
    empty_pe,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    FOLD: gl.constexpr,
    PDL: gl.constexpr,
):
    """All heads at once, keys as rows: scores [64 keys, H], the sum [L, H] in two halves."""
    HEADS: gl.constexpr = queries.shape[1]
    STAGES: gl.constexpr = pe.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    HEAD: gl.constexpr = gl.SliceLayout(0, MMA)
    head = gl.arange(0, HEADS, HEAD)
    tiles = 0
    fetched = -1
    wait_for_inputs(PDL)  # lengths, and all keys but the newest, are older than the launch before
    while (before < stop) & (sequence < last_sequence):
        kv_len = gl.load(kv_lens_ptr + sequence)
        first_split, last_split, splits, split_len = splits_of_run(kv_len, before, begin, stop, SPLIT_LEN, FEW_SPLITS)
        before += places_of(kv_len)
        if first_split < last_split:
            whole = ((first_split == 0) & (last_split >= splits)).to(gl.int32) * FOLD
            if first_split == 0:
                gl.store(whole_ptr + sequence, whole)
            if fetched != sequence:
                _fetch_queries(
                    q_latent_ptr, q_pe_ptr, queries, sequence, num_heads, stride_lb, stride_lh, stride_rb, stride_rh
                )
            async_copy.wait_group(0)
            fence_async_shared()
            row = sequence.to(gl.int64) * num_heads
            merged_maximum = gl.full([HEADS], float("-inf"), gl.float32, HEAD)
            merged_total = gl.zeros([HEADS], gl.float32, HEAD)
            merged_left = gl.zeros([256, HEADS], gl.float32, MMA)
            merged_right = gl.zeros([256, HEADS], gl.float32, MMA)
            for split in range(first_split, last_split):
                first = split * split_len
                end = gl.minimum(first + split_len, kv_len)
                maximum = gl.full([HEADS], float("-inf"), gl.float32, HEAD)
                total = gl.zeros([HEADS], gl.float32, HEAD)
                sum_left = gl.zeros([256, HEADS], gl.float32, MMA)
                sum_right = gl.zeros([256, HEADS], gl.float32, MMA)
                for start in range(first, end, 64):
                    stage, phase = tiles % STAGES, (tiles // STAGES) & 1
                    mbarrier.wait(full_left.index(stage), phase)
                    s = gl.zeros([64, HEADS], gl.float32, MMA)
                    for c in gl.static_range(4):
                        q = queries.index(c).permute((1, 0))
                        s = warpgroup_mma(left_chunks.index(stage * 4 + c), q, s, use_acc=c > 0, is_async=True)
                    s = warpgroup_mma(pe.index(stage), queries.index(8).permute((1, 0)), s, is_async=True)
                    mbarrier.wait(full_right.index(stage), phase)
                    for c in gl.static_range(4):
                        q = queries.index(4 + c).permute((1, 0))
                        s = warpgroup_mma(right_chunks.index(stage * 4 + c), q, s, is_async=True)
                    s = warpgroup_mma_wait(0, deps=[s])
                    if start + 64 > end:
                        zero_rows(left_chunks, stage, end - start)
                        zero_rows(right_chunks, stage, end - start)
                    there = (start + gl.arange(0, 64, KEY) < end)[:, None]
                    s = gl.where(there, s * scale_log2, float("-inf"))
                    new_maximum = gl.maximum(maximum, gl.max(s, axis=0))
                    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                    p = gl.exp2(s - base[None, :])
                    decay = gl.exp2(maximum - base)
                    total = total * decay + gl.sum(p, axis=0)
                    maximum = new_maximum
                    mbarrier.arrive(empty_pe.index(stage))
                    weights.store(p.to(weights.dtype))
                    fence_async_shared()
                    more = (before < stop) & (sequence + 1 < last_sequence)
                    if (start + 64 >= end) & (split + 1 == last_split) & more:
                        # No score of this sequence is left to compute: the next one's queries come meanwhile.
                        fetched = sequence + 1
                        _fetch_queries(
                            q_latent_ptr, q_pe_ptr, queries, fetched, num_heads, stride_lb, stride_lh, stride_rb,
                            stride_rh,
                        )  # fmt: skip
                    sum_left = sum_left * decay[None, :]
                    sum_right = sum_right * decay[None, :]
                    token_left = warpgroup_mma(left.index(stage).permute((1, 0)), weights, sum_left, is_async=True)
                    token_right = warpgroup_mma(right.index(stage).permute((1, 0)), weights, sum_right, is_async=True)
                    sum_left, token_right = warpgroup_mma_wait(1, deps=[token_left, token_right])
                    mbarrier.arrive(empty_left.index(stage))
                    sum_right = warpgroup_mma_wait(0, deps=[token_right])
                    mbarrier.arrive(empty_right.index(stage))
                    tiles += 1
                total = gl.where(total == 0.0, 1.0, total)
                lse = maximum + gl.log2(total)
                inverse = 1.0 / total
                sum_left = sum_left * inverse[None, :]
                sum_right = sum_right * inverse[None, :]
                if splits <= 1:
                    _store_half(sum_left, out_ptr + row * 512, num_heads)
                    _store_half(sum_right, out_ptr + row * 512 + 256, num_heads)
                elif whole == 0:
                    part_row = (sequence.to(gl.int64) * num_splits + split) * num_heads
                    _store_half(sum_left, parts_ptr + part_row * 512, num_heads)
                    _store_half(sum_right, parts_ptr + part_row * 512 + 256, num_heads)
                    gl.store(lse_ptr + part_row + head, lse, mask=head < num_heads)
                if FOLD:  # noqa: SIM102 - decided when the kernel is compiled
                    if (whole != 0) & (splits > 1):
                        new_maximum = gl.maximum(merged_maximum, lse)
                        decay = gl.exp2(merged_maximum - new_maximum)
                        weight = gl.exp2(lse - new_maximum)
                        merged_total = gl.fma(merged_total, decay, weight)
                        merged_left = _add_split(sum_left.to(parts_ptr.dtype.element_ty), weight, merged_left, decay)
                        merged_right = _add_split(sum_right.to(parts_ptr.dtype.element_ty), weight, merged_right, decay)
                        merged_maximum = new_maximum
            if FOLD:  # noqa: SIM102
                if (whole != 0) & (splits > 1):
                    _store_half(merged_left / merged_total[None, :], out_ptr + row * 512, num_heads)
                    _store_half(merged_right / merged_total[None, :], out_ptr + row * 512 + 256, num_heads)
        sequence += 1
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["num_sequences", "num_splits", "stride_tb"])
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
    num_sequences,
    num_splits,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    stride_tb,
    whole_ptr,
    PAGE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    STAGES: gl.constexpr = 2  # a third was not faster: two keep the memory busy
    FOLD: gl.constexpr = BLOCK_H == 16  # registers hold a split's sum and the merged one of no more heads
    K: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [9, BLOCK_H, 64], K)
    left = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    right = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    pe = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], K)
    left_chunks = left._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    right_chunks = right._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    weights = gl.allocate_shared_memory(dtype, [64, BLOCK_H], gl.NVMMASharedLayout(2 * BLOCK_H, 16, 2))
    full_left, full_right, empty_left, empty_right, empty_pe = barriers(STAGES, (1, 1, 1, 1, 1))
    fence_async_shared()
    begin, stop, sequence, last_sequence, before = find_run(
        kv_lens_ptr, num_sequences, num_splits, gl.program_id(0), gl.num_programs(0), SPLIT_LEN, FEW_SPLITS
    )
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_few, (
                q_latent_ptr, q_pe_ptr, kv_lens_ptr, out_ptr, parts_ptr, lse_ptr, whole_ptr, scale_log2, num_splits,
                num_heads, stride_lb, stride_lh, stride_rb, stride_rh, begin, stop, sequence, last_sequence, before,
                queries, left, right, left_chunks, right_chunks, pe, weights, full_left, full_right, empty_left,
                empty_right, empty_pe, SPLIT_LEN, FEW_SPLITS, FOLD, PDL,
            )),
            (copy_latents, (
                desc, tables_ptr, kv_lens_ptr, stride_tb, begin, stop, sequence, last_sequence, before, left_chunks,
                right_chunks, pe, full_left, full_right, empty_left, empty_right, empty_pe, PAGE, SPLIT_LEN, FEW_SPLITS,
                PDL,
            )),
        ],
        [1],
        [40],
    )
    # fmt: on
