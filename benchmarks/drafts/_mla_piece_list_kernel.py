"""MLA decode on Hopper for more than 32 heads, in tiles of 64, by a list of pieces. Would be kernels/mla_many_heads.py.

Knows pages, pieces and heads; lengths only as a piece has them. Its idea: the sum of 64 heads, 64 x 512 in fp32, is
more than one group of warps can hold. The left group computes scores and weights and keeps the left half; it hands the
weights over to the right group, which keeps the right half and multiplies while the left one is at the next scores.

The warp that copies latents takes the pieces, from a list (mla_order.py) by a counter, and notes each on a board for
the two groups: it takes the next one when it has asked for the last latents of this one, some two tiles before the
groups are done with them. It copies queries, too, as soon as no score of the piece before is left to compute: so they
come while that one's sums are divided and written.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.mla_many_heads import _store_half
from kernels.mla_pieces import copy_chunks, rows_of_tile, zero_rows

OF_THE_BATCH = ["num_splits", "stride_tb"]
"""Arguments that change from step to step: nothing is compiled for their values."""

# s[p] = scale * log2(e) * (q_latent . c[p] + q_pe . k_pe[p]); out = sum_p 2^s[p] c[p] / sum_p 2^s[p];
#   lse = log2(sum_p 2^s[p]), over a split of the keys; a sequence of one split is done then
#   latent_desc [B, H, L], pe_desc [B, H, R] in boxes of 1 x 64 x 64, zeros from H on; desc: the cache as rows
#   [N * P, L + R], boxes of min(PAGE, 64) x 64; tables_ptr int32 [B, M]; pieces_ptr int32 [I, 4] and counts_ptr int32
#   [4], a PieceList; out_ptr [B, H, L], parts_ptr [B, S, H, L], lse_ptr fp32 [B, S, H] contiguous
#   grid: one program a multiprocessor at most. Place i * head tiles + t is piece i of the list for head tile t, so
#   that neighbours share its latents in L2; program p begins with place p and takes others by the counter, or
#   BY_TURNS, every other turn backwards. fp32 accumulation. A tile is 64 keys; rows of keys from the split's end on
#   are zeroed in shared memory (the page behind them may hold anything) and weigh 0.

_PLACES = gl.constexpr(2)
"""Of the board: the groups are at one piece while the next is noted."""

_NOTE = gl.constexpr(6)
"""Words of a note: the list's four, the head tile, and whether there is a piece at all."""


@gluon.jit
def _note(board, turn, sequence, cut, first, end, head_tile, there):
    """By one warp, as soon as both groups have read what stood there."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    notes, noted, heard = board
    place = turn % _PLACES
    mbarrier.wait(heard.index(place), ((turn // _PLACES) & 1) ^ 1)
    zero = gl.zeros([1], gl.int32, ONE)
    notes.index(place * _NOTE).store(zero + sequence)
    notes.index(place * _NOTE + 1).store(zero + cut)
    notes.index(place * _NOTE + 2).store(zero + first)
    notes.index(place * _NOTE + 3).store(zero + end)
    notes.index(place * _NOTE + 4).store(zero + head_tile)
    notes.index(place * _NOTE + 5).store(zero + there)
    mbarrier.arrive(noted.index(place), count=1)


@gluon.jit
def _word(notes, at):
    return gl.sum(notes.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def _next_piece(board, turn):
    """(sequence, split, number of splits, first key, end, head tile, whether there is a piece). By a group of warps."""
    notes, noted, heard = board
    place = turn % _PLACES
    mbarrier.wait(noted.index(place), (turn // _PLACES) & 1)
    at = place * _NOTE
    sequence, cut, first, end = _word(notes, at), _word(notes, at + 1), _word(notes, at + 2), _word(notes, at + 3)
    head_tile, there = _word(notes, at + 4), _word(notes, at + 5)
    mbarrier.arrive(heard.index(place), count=1)
    return sequence.to(gl.int64), cut & 0xFFFF, cut >> 16, first, end, head_tile, there


@gluon.jit
def _take(counts_ptr, num_pieces):
    """The next piece beyond each program's first. Every program asks once in vain, and the last of these sets the
    counter back to zero for the launch that comes after."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    taken = gl.atomic_add(counts_ptr + 1 + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")
    taken = gl.sum(gl.where(lane == 0, taken, 0), axis=0)
    if taken == gl.maximum(num_pieces, gl.num_programs(0)) - 1:
        gl.store(counts_ptr + 1, 0)
    return gl.num_programs(0) + taken


@gluon.jit
def _copy_queries(latent_desc, pe_desc, sequence, head_tile, asks, queries, there, free):
    """The nine chunks of a piece."""
    mbarrier.wait(free, (asks & 1) ^ 1)
    mbarrier.expect(there, 64 * 576 * 2)
    for c in gl.static_range(8):
        at = [sequence, head_tile * 64, c * 64]
        tma.async_copy_global_to_shared(latent_desc, at, there, queries.index(c))
    tma.async_copy_global_to_shared(pe_desc, [sequence, head_tile * 64, 0], there, queries.index(8))


@gluon.jit
def _copy_latents(
    latent_desc,
    pe_desc,
    desc,
    tables_ptr,
    pieces_ptr,
    counts_ptr,
    head_tiles,
    stride_tb,
    queries,
    left,
    right,
    pe,
    full,
    empty,
    queries_there,
    queries_free,
    board,
    PAGE: gl.constexpr,
    BY_TURNS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Latents as [stage * chunk, 64 keys, 64 columns]: four chunks left, four right, one of rotary keys. The list, and
    all keys but a sequence's newest, are older than the launch before, and read while that one still runs. Queries
    come behind a piece's first tile, for which there is room before there is any for them; at the beginning, where the
    launch before has yet to write them, behind the second."""
    STAGES: gl.constexpr = pe.shape[0]
    tiles = 0
    asks = 0
    turn = 0
    num_pieces = gl.load(counts_ptr) * head_tiles
    piece = gl.program_id(0)
    while piece < num_pieces:
        piece_ptr = pieces_ptr + piece // head_tiles * 4
        sequence, cut = gl.load(piece_ptr), gl.load(piece_ptr + 1)
        first, end = gl.load(piece_ptr + 2), gl.load(piece_ptr + 3)
        _note(board, turn, sequence, cut, first, end, piece % head_tiles, 1)
        table_ptr = tables_ptr + sequence.to(gl.int64) * stride_tb
        ask_behind = gl.where((turn == 0) & (first + 64 < end), first + 64, first)
        for start in range(first, end, 64):
            # Rows are looked up before the wait for room, which takes as long.
            row0, row1, row2, row3 = rows_of_tile(table_ptr, start, end, PAGE)
            if PDL:  # noqa: SIM102 - decided when the kernel is compiled
                if (start + 64 >= end) & ((cut & 0xFFFF) + 1 >= cut >> 16):
                    gdc_wait()
            stage = tiles % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((tiles // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 64 * 576 * 2)
            copy_chunks(desc, row0, row1, row2, row3, 0, left, stage * 4, bar, 4, PAGE)
            copy_chunks(desc, row0, row1, row2, row3, 512, pe, stage, bar, 1, PAGE)
            copy_chunks(desc, row0, row1, row2, row3, 256, right, stage * 4, bar, 4, PAGE)
            tiles += 1
            if start == ask_behind:
                if PDL:
                    gdc_wait()
                _copy_queries(
                    latent_desc, pe_desc, sequence, piece % head_tiles, asks, queries, queries_there, queries_free
                )
                asks += 1
        turn += 1
        if BY_TURNS:
            own = gl.program_id(0)
            piece = turn * gl.num_programs(0) + gl.where(turn % 2 == 1, gl.num_programs(0) - 1 - own, own)
        else:
            if PDL:
                gdc_wait()  # the launch of the same list before this one has left the counter at zero
            piece = _take(counts_ptr, num_pieces)
    if not BY_TURNS:  # noqa: SIM102
        if gl.program_id(0) >= num_pieces:  # it has not asked in vain yet
            if PDL:
                gdc_wait()
            _take(counts_ptr, num_pieces)
    _note(board, turn, 0, 0, 0, 0, 0, 0)


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
    sequence, split, splits, first, end, head_tile, there = _next_piece(board, turn)
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
        sequence, split, splits, first, end, head_tile, there = _next_piece(board, turn)


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
    sequence, split, splits, first, end, head_tile, there = _next_piece(board, turn)
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
        sequence, split, splits, first, end, head_tile, there = _next_piece(board, turn)


@gluon.jit(do_not_specialize=OF_THE_BATCH)
def listed_heads_kernel(
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
    BY_TURNS: gl.constexpr,
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
    notes = gl.allocate_shared_memory(gl.int32, [_PLACES * _NOTE, 1], PLAIN)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    noted = gl.allocate_shared_memory(gl.int64, [_PLACES, 1], BAR)
    heard = gl.allocate_shared_memory(gl.int64, [_PLACES, 1], BAR)
    queries_there = gl.allocate_shared_memory(gl.int64, [1], BAR)
    queries_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    handed = gl.allocate_shared_memory(gl.int64, [1], BAR)
    taken = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(_PLACES):
        mbarrier.init(noted.index(i), count=1)
        mbarrier.init(heard.index(i), count=2)
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
            (_copy_latents, (
                latent_desc, pe_desc, desc, tables_ptr, pieces_ptr, counts_ptr, head_tiles, stride_tb, query_boxes,
                left_chunks, right_chunks, pe, full, empty, queries_there, queries_free, board, PAGE, BY_TURNS, PDL,
            )),
        ],
        [4, 1],
        [208, 40],
    )
    # fmt: on
