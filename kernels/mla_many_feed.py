"""How MLA decode with many heads deals out its work: pieces from a list, and their latents and queries by TMA.

Knows pages and pieces; multiplies nothing. One warp takes the pieces, from a list (mla_order.py) by a counter, and
notes each on a board for the two groups that multiply: it takes the next one when it has asked for the last latents of
this one, some two tiles before the groups are done with them. It copies queries, too, as soon as no score of the piece
before is left to compute: so they come while that one's sums are divided and written.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from kernels.mla_pieces import copy_chunks, rows_of_tile

PLACES = gl.constexpr(2)
"""Of the board: the groups are at one piece while the next is noted."""

NOTE = gl.constexpr(6)
"""Words of a note: the list's four, the head tile, and whether there is a piece at all."""


@gluon.jit
def _note(board, turn, sequence, cut, first, end, head_tile, there):
    """By one warp, as soon as both groups have read what stood there."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    notes, noted, heard = board
    place = turn % PLACES
    mbarrier.wait(heard.index(place), ((turn // PLACES) & 1) ^ 1)
    zero = gl.zeros([1], gl.int32, ONE)
    notes.index(place * NOTE).store(zero + sequence)
    notes.index(place * NOTE + 1).store(zero + cut)
    notes.index(place * NOTE + 2).store(zero + first)
    notes.index(place * NOTE + 3).store(zero + end)
    notes.index(place * NOTE + 4).store(zero + head_tile)
    notes.index(place * NOTE + 5).store(zero + there)
    mbarrier.arrive(noted.index(place), count=1)


@gluon.jit
def _word(notes, at):
    return gl.sum(notes.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def next_piece(board, turn):
    """(sequence, split, number of splits, first key, end, head tile, whether there is a piece). By a group of warps."""
    notes, noted, heard = board
    place = turn % PLACES
    mbarrier.wait(noted.index(place), (turn // PLACES) & 1)
    at = place * NOTE
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
def copy_latents(
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
        if PDL:
            gdc_wait()  # the launch of the same list before this one has left the counter at zero
        piece = _take(counts_ptr, num_pieces)
    if gl.program_id(0) >= num_pieces:  # it has not asked in vain yet
        if PDL:
            gdc_wait()
        _take(counts_ptr, num_pieces)
    _note(board, turn, 0, 0, 0, 0, 0, 0)
