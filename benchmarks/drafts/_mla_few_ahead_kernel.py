"""The kernel of mla_few_ahead.py: kernels/mla_few_heads.py with a shorter chain from its wait to its stores.

Knows pages, lengths and heads. The same sums in the same order, so the same bits.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from kernels.barriers import barriers
from kernels.dependent_launch import wait_for_inputs
from kernels.mla_pieces import copy_chunks, rows_of_tile
from kernels.mla_runs import find_run, places_of, splits_of_run

# As kernels/mla_few_heads.py has it, but for newest_desc: the cache as rows, boxes of 8 x 64.


@gluon.jit
def _store_half(x, ptr, num_heads):
    """[256, H], to rows of 512 at `ptr`, one for each head; turned within each warp, which has 16 columns in a row, one
    sector: so no warp waits for another."""
    HIGH: gl.constexpr = [[0, 16]] if x.shape[1] == 32 else []
    COLUMNS: gl.constexpr = [[1, 0], [2, 0], [4, 0], [64, 0], [128, 0]]
    LANES: gl.constexpr = [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]]
    LINES: gl.constexpr = gl.DistributedLinearLayout(COLUMNS + HIGH, LANES, [[16, 0], [32, 0]], [], [256, x.shape[1]])
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), LINES)
    head = gl.arange(0, x.shape[1], gl.SliceLayout(0, LINES))[None, :]
    column = gl.arange(0, 256, gl.SliceLayout(1, LINES))[:, None]
    gl.store(ptr + head * 512 + column, x, mask=(head < num_heads) & (column >= 0))


@gluon.jit
def _add_split(part, weight, so_far, decay):
    return gl.fma(part.to(gl.float32), gl.zeros_like(so_far) + weight[None, :], so_far * decay[None, :])


@gluon.jit
def _fetch_queries(
    q_latent_ptr, q_pe_ptr, queries, queries_pe, sequence, num_heads, stride_lb, stride_lh, stride_rb, stride_rh
):  # fmt: skip
    """Begin to copy a sequence's nine chunks of queries, rows of heads; places of rows from H on stay as they are.

    Places are reckoned here as wgmma reads them, 16 bytes at column g of row h in place g ^ (h % 8): so all latents
    are one copy, where eight would have a barrier of all warps between each other."""
    HEADS: gl.constexpr = queries.shape[1]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [4, 1, 1], [2, 1, 0])
    dtype: gl.constexpr = queries.dtype
    group = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    value = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    places = queries._reinterpret(dtype, [8 * HEADS, 8, 8], PLAIN)
    row = gl.arange(0, 8 * HEADS, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    head = row % HEADS
    ptrs = q_latent_ptr + sequence.to(gl.int64) * stride_lb + (head * stride_lh + (group ^ (head % 8)) * 8)
    ptrs = ptrs + row // HEADS * 64 + value
    there = (head < num_heads) & (group >= 0) & (value >= 0)
    async_copy.async_copy_global_to_shared(places, ptrs, mask=there)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    ptrs = q_pe_ptr + sequence.to(gl.int64) * stride_rb + (head * stride_rh + (group ^ (head % 8)) * 8) + value
    there = (head < num_heads) & (group >= 0) & (value >= 0)
    async_copy.async_copy_global_to_shared(queries_pe._reinterpret(dtype, [HEADS, 8, 8], PLAIN), ptrs, mask=there)
    async_copy.commit_group()


@gluon.jit
def _zero_rows(half, stage, count):
    """Rows of keys from `count` on in a stage's half. A row lies in one piece in each chunk, wherever its columns."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = half._reinterpret(half.dtype, [half.shape[0], 256, 64], PLAIN).index(stage)
    there = (gl.arange(0, 128, gl.SliceLayout(1, COPY)) % 64 < count)[:, None]
    for part in gl.static_range(2):  # registers hold no more
        chunks = rows.slice(part * 128, 128, dim=0)
        chunks.store(gl.where(there, chunks.load(COPY), 0.0).to(half.dtype))


@gluon.jit
def _put(x, parts):
    """A warp's maxima or sums of each head, to what all warps put."""
    parts._reinterpret(gl.float32, [4, x.shape[1]], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])).store(x)


@gluon.jit
def _of_warps(parts, HEAD: gl.constexpr):
    """What each warp has put."""
    return parts.index(0).load(HEAD), parts.index(1).load(HEAD), parts.index(2).load(HEAD), parts.index(3).load(HEAD)


@gluon.jit
def _total(totals, HEAD: gl.constexpr):
    """In the order of a reduction by the compiler, which takes three barriers for this one."""
    a, b, c, d = _of_warps(totals, HEAD)
    return (a + c) + (b + d)


@gluon.jit
def _weigh_scores(s, start, end, maximum, scale_log2, largest, totals, weights):
    """(new maximum, decay): of a tile's scores the weights go to shared memory, each warp's sum of them to `totals`."""
    HEADS: gl.constexpr = s.shape[1]
    KEY: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    HEAD: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    there = (start + gl.arange(0, 64, KEY) < end)[:, None]
    s = gl.where(there, s * scale_log2, float("-inf"))
    _put(gl.max(s.reshape([4, 16, HEADS]), axis=1), largest)
    a, b, c, d = _of_warps(largest, HEAD)
    new_maximum = gl.maximum(maximum, gl.maximum(gl.maximum(a, c), gl.maximum(b, d)))
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(s - base[None, :])
    _put(gl.sum(p.reshape([4, 16, HEADS]), axis=1), totals)
    weights.store(p.to(weights.dtype))
    return new_maximum, gl.exp2(maximum - base)


@gluon.jit
def _multiply_values(half, weights, acc, STEP: gl.constexpr):
    """acc + latents transposed x weights, 16 keys after the 16 before; with a STEP of 16, sums of four times 64 columns
    in turn, so that none waits for itself."""
    for k in gl.static_range(64 // STEP):
        rows = half.slice(k * STEP, STEP, dim=0).permute((1, 0))
        acc = warpgroup_mma(rows, weights.slice(k * STEP, STEP, dim=0), acc, is_async=True)
    return acc


@gluon.jit
def _multiply_two(first, second, q, s, s_next, use_acc, STEP: gl.constexpr):
    """A chunk of scores of two tiles, STEP columns of each in turn: of 16, a sum of one does not wait for itself."""
    for k in gl.static_range(64 // STEP):
        columns = q.slice(k * STEP, STEP, dim=1).permute((1, 0))
        more = use_acc or k > 0
        s = warpgroup_mma(first.slice(k * STEP, STEP, dim=1), columns, s, use_acc=more, is_async=True)
        s_next = warpgroup_mma(second.slice(k * STEP, STEP, dim=1), columns, s_next, use_acc=more, is_async=True)
    return s, s_next


@gluon.jit
def _close(maximum, total, sum_left, sum_right):
    """(logarithm, and both halves, divided)"""
    total = gl.where(total == 0.0, 1.0, total)
    inverse = 1.0 / total
    return maximum + gl.log2(total), sum_left * inverse[None, :], sum_right * inverse[None, :]


@gluon.jit
def _store_split(
    sum_left, sum_right, lse, out_ptr, parts_ptr, lse_ptr, row, part_row, num_heads, one_split
):  # fmt: skip
    if one_split:
        _store_half(sum_left, out_ptr + row * 512, num_heads)
        _store_half(sum_right, out_ptr + row * 512 + 256, num_heads)
    else:
        head = gl.arange(0, lse.shape[0], lse.type.layout)
        gl.store(lse_ptr + part_row + head, lse, mask=head < num_heads)
        _store_half(sum_left, parts_ptr + part_row * 512, num_heads)
        _store_half(sum_right, parts_ptr + part_row * 512 + 256, num_heads)


@gluon.jit
def _attend_two(
    q_latent_ptr, q_pe_ptr, out_ptr, parts_ptr, lse_ptr, whole_ptr, scale_log2, num_splits, num_heads, stride_lb,
    stride_lh, stride_rb, stride_rh, sequence, split, splits, first, end, queries, queries_pe, left, right, left_chunks,
    right_chunks, pe, largest, totals, weights, full_left, full_right, FOLD: gl.constexpr, STEP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A run of one split of two tiles: both are on their way from the outset, and nothing comes after. The sums of both
    tiles' scores take turns, so that none waits for itself; the first product with values has the second softmax
    beside it."""
    HEADS: gl.constexpr = queries.shape[1]
    dtype: gl.constexpr = queries.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, MMA)
    # The second tile's weights lie where the first one's rotary keys have been.
    next_weights = pe.index(0)._reinterpret(dtype, [64, HEADS], weights.layout)
    wait_for_inputs(PDL)  # lengths, and all keys but the newest, are older than the launch before
    _fetch_queries(
        q_latent_ptr, q_pe_ptr, queries, queries_pe, sequence, num_heads, stride_lb, stride_lh, stride_rb, stride_rh
    )
    async_copy.wait_group(0)
    fence_async_shared()
    s = gl.zeros([64, HEADS], gl.float32, MMA)
    s_next = gl.zeros([64, HEADS], gl.float32, MMA)
    mbarrier.wait(full_left.index(0), 0)
    mbarrier.wait(full_left.index(1), 0)
    for c in gl.static_range(4):
        s, s_next = _multiply_two(
            left_chunks.index(c), left_chunks.index(4 + c), queries.index(c), s, s_next, c > 0, STEP
        )
    s, s_next = _multiply_two(pe.index(0), pe.index(1), queries_pe, s, s_next, True, STEP)
    mbarrier.wait(full_right.index(0), 0)
    mbarrier.wait(full_right.index(1), 0)
    for c in gl.static_range(4):
        s, s_next = _multiply_two(
            right_chunks.index(c), right_chunks.index(4 + c), queries.index(4 + c), s, s_next, True, STEP
        )
    s, s_next = warpgroup_mma_wait(0, deps=[s, s_next])
    if first + 128 > end:
        _zero_rows(left, 1, end - first - 64)
        _zero_rows(right, 1, end - first - 64)
    maximum = gl.full([HEADS], float("-inf"), gl.float32, HEAD)
    total = gl.zeros([HEADS], gl.float32, HEAD)
    maximum, decay = _weigh_scores(s, first, end, maximum, scale_log2, largest, totals, weights)
    fence_async_shared()
    sum_left = gl.zeros([256, HEADS], gl.float32, MMA)
    sum_right = gl.zeros([256, HEADS], gl.float32, MMA)
    sum_left = _multiply_values(left.index(0), weights, sum_left, STEP)
    sum_right = _multiply_values(right.index(0), weights, sum_right, STEP)
    total = total * decay + _total(totals, HEAD)
    maximum, decay = _weigh_scores(s_next, first + 64, end, maximum, scale_log2, largest, totals, next_weights)
    fence_async_shared()
    sum_left, sum_right = warpgroup_mma_wait(0, deps=[sum_left, sum_right])
    sum_left = _multiply_values(left.index(1), next_weights, sum_left * decay[None, :], STEP)
    sum_right = _multiply_values(right.index(1), next_weights, sum_right * decay[None, :], STEP)
    total = total * decay + _total(totals, HEAD)
    sum_left, sum_right = warpgroup_mma_wait(0, deps=[sum_left, sum_right])
    lse, sum_left, sum_right = _close(maximum, total, sum_left, sum_right)
    row = sequence.to(gl.int64) * num_heads
    part_row = (sequence.to(gl.int64) * num_splits + split) * num_heads
    if split == 0:
        gl.store(whole_ptr + sequence, (splits == 1).to(gl.int32) * FOLD)
    _store_split(sum_left, sum_right, lse, out_ptr, parts_ptr, lse_ptr, row, part_row, num_heads, splits <= 1)


@gluon.jit
def _attend_runs(
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
    queries_pe,
    left,
    right,
    left_chunks,
    right_chunks,
    pe,
    largest,
    totals,
    weights,
    full_left,
    full_right,
    empty_left,
    empty_right,
    empty_pe,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    FOLD: gl.constexpr,
    STEP: gl.constexpr,
    PDL: gl.constexpr,
):
    """All heads at once, keys as rows: scores [64 keys, H], the sum [L, H] in two halves."""
    HEADS: gl.constexpr = queries.shape[1]
    STAGES: gl.constexpr = pe.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, MMA)
    tiles = 0
    fetched = -1
    while (before < stop) & (sequence < last_sequence):
        kv_len = gl.load(kv_lens_ptr + sequence)
        first_split, last_split, splits, split_len = splits_of_run(kv_len, before, begin, stop, SPLIT_LEN, FEW_SPLITS)
        before += places_of(kv_len)
        if first_split < last_split:
            whole = ((first_split == 0) & (last_split >= splits)).to(gl.int32) * FOLD
            row = sequence.to(gl.int64) * num_heads
            if fetched == -1:
                wait_for_inputs(PDL)
            if fetched != sequence:
                _fetch_queries(
                    q_latent_ptr, q_pe_ptr, queries, queries_pe, sequence, num_heads, stride_lb, stride_lh, stride_rb,
                    stride_rh,
                )  # fmt: skip
                fetched = sequence
            if first_split == 0:
                gl.store(whole_ptr + sequence, whole)
            async_copy.wait_group(0)
            fence_async_shared()
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
                    s = warpgroup_mma(pe.index(stage), queries_pe.permute((1, 0)), s, is_async=True)
                    mbarrier.wait(full_right.index(stage), phase)
                    for c in gl.static_range(4):
                        q = queries.index(4 + c).permute((1, 0))
                        s = warpgroup_mma(right_chunks.index(stage * 4 + c), q, s, is_async=True)
                    s = warpgroup_mma_wait(0, deps=[s])
                    if start + 64 > end:
                        _zero_rows(left, stage, end - start)
                        _zero_rows(right, stage, end - start)
                    maximum, decay = _weigh_scores(s, start, end, maximum, scale_log2, largest, totals, weights)
                    fence_async_shared()
                    more = (before < stop) & (sequence + 1 < last_sequence)
                    if (start + 64 >= end) & (split + 1 == last_split) & more:
                        # No score of this sequence is left to compute: the next one's queries come meanwhile.
                        fetched = sequence + 1
                        _fetch_queries(
                            q_latent_ptr, q_pe_ptr, queries, queries_pe, fetched, num_heads, stride_lb, stride_lh,
                            stride_rb, stride_rh,
                        )  # fmt: skip
                    sum_left = _multiply_values(left.index(stage), weights, sum_left * decay[None, :], STEP)
                    sum_right = _multiply_values(right.index(stage), weights, sum_right * decay[None, :], STEP)
                    mbarrier.arrive(empty_pe.index(stage))
                    total = total * decay + _total(totals, HEAD)
                    sum_left, sum_right = warpgroup_mma_wait(64 // STEP, deps=[sum_left, sum_right])
                    mbarrier.arrive(empty_left.index(stage))
                    sum_left, sum_right = warpgroup_mma_wait(0, deps=[sum_left, sum_right])
                    mbarrier.arrive(empty_right.index(stage))
                    tiles += 1
                lse, sum_left, sum_right = _close(maximum, total, sum_left, sum_right)
                if (splits <= 1) | (whole == 0):
                    part_row = (sequence.to(gl.int64) * num_splits + split) * num_heads
                    _store_split(
                        sum_left, sum_right, lse, out_ptr, parts_ptr, lse_ptr, row, part_row, num_heads, splits <= 1
                    )
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
    if fetched == -1:
        wait_for_inputs(PDL)  # of a run with nothing in it
    async_copy.wait_group(0)


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
    queries_pe,
    left,
    right,
    left_chunks,
    right_chunks,
    pe,
    largest,
    totals,
    weights,
    full_left,
    full_right,
    empty_left,
    empty_right,
    empty_pe,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    FOLD: gl.constexpr,
    STEP: gl.constexpr,
    PDL: gl.constexpr,
):
    """A run of one split of two tiles, or any other."""
    two = False
    split, first, end, splits = 0, 0, 0, 0
    if (before == 0) & (sequence + 1 == last_sequence):
        kv_len = gl.load(kv_lens_ptr + sequence)
        split, last_split, splits, split_len = splits_of_run(kv_len, before, begin, stop, SPLIT_LEN, FEW_SPLITS)
        first = split * split_len
        end = gl.minimum(first + split_len, kv_len)
        two = (split + 1 == last_split) & (end > first + 64) & (end <= first + 128)
    if two:
        _attend_two(
            q_latent_ptr, q_pe_ptr, out_ptr, parts_ptr, lse_ptr, whole_ptr, scale_log2, num_splits, num_heads,
            stride_lb, stride_lh, stride_rb, stride_rh, sequence, split, splits, first, end, queries,
            queries_pe, left, right, left_chunks, right_chunks, pe, largest, totals, weights, full_left, full_right,
            FOLD, STEP, PDL,
        )  # fmt: skip
    else:
        _attend_runs(
            q_latent_ptr, q_pe_ptr, kv_lens_ptr, out_ptr, parts_ptr, lse_ptr, whole_ptr, scale_log2, num_splits,
            num_heads, stride_lb, stride_lh, stride_rb, stride_rh, begin, stop, sequence, last_sequence, before,
            queries, queries_pe, left, right, left_chunks, right_chunks, pe, largest, totals, weights, full_left,
            full_right, empty_left, empty_right, empty_pe, SPLIT_LEN, FEW_SPLITS, FOLD, STEP, PDL,
        )  # fmt: skip


@gluon.jit
def _copy_again(newest_desc, row, column, chunks, place, bar, COUNT: gl.constexpr):
    """Eight rows, the newest key among them, of COUNT chunks; place: of these rows in the first chunk."""
    rows = chunks._reinterpret(chunks.dtype, [chunks.shape[0] * 8, 8, 64], chunks.layout)
    for c in gl.static_range(COUNT):
        tma.async_copy_global_to_shared(newest_desc, [row, column + c * 64], bar, rows.index(place + c * 8))


@gluon.jit
def _copy_latents(
    desc,
    newest_desc,
    tables_ptr,
    kv_lens_ptr,
    stride_tb,
    begin,
    stop,
    sequence,
    last_sequence,
    before,
    left,
    right,
    pe,
    full_left,
    full_right,
    empty_left,
    empty_right,
    empty_pe,
    early,
    PAGE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """`copy_latents` of kernels/mla_runs.py; where the ring still has room for a sequence's last tile before the wait,
    that one is copied too, and the eight rows of the newest key once again behind the wait."""
    STAGES: gl.constexpr = pe.shape[0]
    tiles = 0
    waited = not PDL
    while (before < stop) & (sequence < last_sequence):
        kv_len = gl.load(kv_lens_ptr + sequence)
        first, last, _, split_len = splits_of_run(kv_len, before, begin, stop, SPLIT_LEN, FEW_SPLITS)
        table_ptr = tables_ptr + sequence.to(gl.int64) * stride_tb
        end = gl.minimum(last * split_len, kv_len)
        for start in range(first * split_len, end, 64):
            # Rows are looked up before the wait for room, which takes as long.
            row0, row1, row2, row3 = rows_of_tile(table_ptr, start, end, PAGE)
            stage, phase = tiles % STAGES, ((tiles // STAGES) & 1) ^ 1
            again = False
            bar_left, bar_right = full_left.index(stage), full_right.index(stage)
            if PDL:  # noqa: SIM102 - decided when the kernel is compiled
                if (start + 64 >= kv_len) & (waited == 0):
                    if tiles < STAGES:
                        # All of it early, by a barrier of its own; nobody else knows.
                        mbarrier.expect(early, 64 * 576 * 2)
                        copy_chunks(desc, row0, row1, row2, row3, 0, left, stage * 4, early, 4, PAGE)
                        copy_chunks(desc, row0, row1, row2, row3, 512, pe, stage, early, 1, PAGE)
                        copy_chunks(desc, row0, row1, row2, row3, 256, right, stage * 4, early, 4, PAGE)
                        newest = kv_len - 1
                        row = gl.load(table_ptr + newest // PAGE) * PAGE + newest % PAGE // 8 * 8
                        group = (newest - start) // 8
                        mbarrier.wait(early, 0)
                        gdc_wait()
                        mbarrier.expect(bar_left, 8 * 320 * 2)
                        _copy_again(newest_desc, row, 0, left, stage * 32 + group, bar_left, 4)
                        _copy_again(newest_desc, row, 512, pe, stage * 8 + group, bar_left, 1)
                        mbarrier.expect(bar_right, 8 * 256 * 2)
                        _copy_again(newest_desc, row, 256, right, stage * 32 + group, bar_right, 4)
                        again = True
                    gdc_wait()
                    waited = True
            if again == 0:
                mbarrier.wait(empty_left.index(stage), phase)
                mbarrier.expect(bar_left, 64 * 320 * 2)
                copy_chunks(desc, row0, row1, row2, row3, 0, left, stage * 4, bar_left, 4, PAGE)
                mbarrier.wait(empty_pe.index(stage), phase)
                copy_chunks(desc, row0, row1, row2, row3, 512, pe, stage, bar_left, 1, PAGE)
                mbarrier.wait(empty_right.index(stage), phase)
                mbarrier.expect(bar_right, 64 * 256 * 2)
                copy_chunks(desc, row0, row1, row2, row3, 256, right, stage * 4, bar_right, 4, PAGE)
            tiles += 1
        before += places_of(kv_len)
        sequence += 1


@gluon.jit(do_not_specialize=["num_sequences", "num_splits", "stride_tb"])
def few_ahead_kernel(
    q_latent_ptr,
    q_pe_ptr,
    desc,
    newest_desc,
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
    STEP: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    STAGES: gl.constexpr = 2  # a third was not faster: two keep the memory busy
    FOLD: gl.constexpr = BLOCK_H == 16  # registers hold a split's sum and the merged one of no more heads
    K: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    queries = gl.allocate_shared_memory(dtype, [8, BLOCK_H, 64], K)
    queries_pe = gl.allocate_shared_memory(dtype, [BLOCK_H, 64], K)
    left = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    right = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    pe = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], K)
    left_chunks = left._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    right_chunks = right._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    weights = gl.allocate_shared_memory(dtype, [64, BLOCK_H], gl.NVMMASharedLayout(2 * BLOCK_H, 16, 2))
    largest = gl.allocate_shared_memory(gl.float32, [4, BLOCK_H], PARTS)
    totals = gl.allocate_shared_memory(gl.float32, [4, BLOCK_H], PARTS)
    full_left, full_right, empty_left, empty_right, empty_pe = barriers(STAGES, (1, 1, 1, 1, 1))
    early = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(early, count=1)
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
                queries, queries_pe, left, right, left_chunks, right_chunks, pe, largest, totals, weights, full_left,
                full_right, empty_left, empty_right, empty_pe, SPLIT_LEN, FEW_SPLITS, FOLD, STEP, PDL,
            )),
            (_copy_latents, (
                desc, newest_desc, tables_ptr, kv_lens_ptr, stride_tb, begin, stop, sequence, last_sequence, before,
                left_chunks, right_chunks, pe, full_left, full_right, empty_left, empty_right, empty_pe, early, PAGE,
                SPLIT_LEN, FEW_SPLITS, PDL,
            )),
        ],
        [1],
        [40],
    )
    # fmt: on
