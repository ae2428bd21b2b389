"""How MLA decode with few heads deals out its work: runs of tiles, and the copies of a run's latents by TMA.

Knows lengths and pages; multiplies nothing. The tiles (of 64 keys) of all sequences stand in one row, in order, behind
those of each a place more, for what its beginning and end take, and are dealt out in runs of equal length, one to a
program. A program works on the splits that begin in its run. So all programs have as much to do, whatever the lengths,
most sequences of a large batch are one program's from their first split to their last, and queries are fetched once.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from kernels.mla_pieces import copy_chunks, rows_of_tile
from kernels.split_kv import split_bounds

_bounds = gluon.jit(split_bounds.fn)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def tiles_of(kv_len):
    """Tiles of a sequence; one of no length has one, in which its zeros are written."""
    return gl.maximum(gl.cdiv(kv_len, 64), 1)


@gluon.jit
def places_of(kv_len):
    """Places of a sequence in the row: its tiles, and one: fetching queries, and dividing and writing results, take as
    long as a tile. Without it programs with many short sequences end last.

    One H200, 16 heads, us, so / without: 512 sequences of 69 to 1036 keys, 573 on average, 109.7 / 129.9 (76 by bytes),
    200 of 382 to 1328 68.0 / 71.0, 256 x 576 53.3 / 53.6, 512 x 600 113.8 / 111.1; with two places 108.4, 68.4, 53.5,
    113.6. Layers of dsv2-lite with runs that begin a place early / not / without either: 512 rows 535.9 / 537.5 /
    560.1, 384 501.9 / 501.6 / 513.1, 320 472.4 / 473.4 / 481.4, 256 411.5 / 412.8 / 412.0, 64 337.0 / 339.4 / 337.4.
    """
    return tiles_of(kv_len) + 1


@gluon.jit
def find_run(
    kv_lens_ptr, num_sequences, num_splits, run, num_runs, SPLIT_LEN: gl.constexpr, FEW_SPLITS: gl.constexpr
):  # fmt: skip
    """(first place of a run, its end, first sequence, end of the sequences, places before that one). By four warps.

    Where there are runs enough for all splits, a run is one split, and lengths of others are not looked at. Sequences
    of one length are dealt out whole, so that nothing is left to merge, where runs are a sixteenth longer at most."""
    if num_sequences * num_splits <= num_runs:
        sequence = run % num_sequences
        split_len, _, _ = _bounds(gl.load(kv_lens_ptr + sequence), 1, SPLIT_LEN, FEW_SPLITS, 0)
        begin = run // num_sequences * (split_len // 64)
        end = begin + split_len // 64
        last = sequence + 1
        before = 0
    else:
        SEQUENCE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
        b = gl.arange(0, 256, SEQUENCE)
        total = 0
        most = 0
        for base in range(0, num_sequences, 256):
            there = base + b < num_sequences
            kv_len = gl.load(kv_lens_ptr + base + b, mask=there, other=0)
            places = gl.where(there, places_of(kv_len), 0)
            total += gl.sum(places, axis=0)
            most = gl.maximum(most, gl.max(places, axis=0))
        length = gl.cdiv(total, num_runs)
        whole = gl.cdiv(length, most) * most
        length = gl.where((total == most * num_sequences) & (16 * whole <= 17 * length), whole, length)
        # In the place before a sequence no split begins: a run that has none before its first sequence ends with no
        # half of a split more than its length.
        begin = run * length - 1
        end = begin + length
        sequence = 0
        last = num_sequences
        before = 0
        seen = 0
        for base in range(0, num_sequences, 256):
            there = base + b < num_sequences
            kv_len = gl.load(kv_lens_ptr + base + b, mask=there, other=0)
            places = gl.where(there, places_of(kv_len), 0)
            after = seen + gl.associative_scan(places, 0, _add)
            passed = there & (after <= begin)
            sequence += gl.sum(passed.to(gl.int32), axis=0)
            before = gl.maximum(before, gl.max(gl.where(passed, after, 0), axis=0))
            seen += gl.sum(places, axis=0)
    return begin, end, sequence, last, before


@gluon.jit
def splits_of_run(kv_len, before, begin, end, SPLIT_LEN: gl.constexpr, FEW_SPLITS: gl.constexpr):
    """(first split of a sequence that begins in the run [begin, end), end of these, splits with a key, their length)

    `before`: places before the sequence. One without keys has a split that the program must write."""
    split_len, _, splits = _bounds(kv_len, 1, SPLIT_LEN, FEW_SPLITS, 0)
    tiles = split_len // 64
    first = gl.cdiv(gl.maximum(begin - before, 0), tiles)
    last = gl.minimum(gl.maximum(splits, 1), gl.cdiv(end - before, tiles))
    return first, last, splits, split_len


@gluon.jit
def copy_latents(
    desc,
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
    PAGE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The tiles of a run. Chunks are [stage * chunk, 64 keys, 64 columns]: four left, which are full together with one
    of rotary keys, and four right. A sequence's newest key may be the launch before's work; tiles without it are copied
    while that one still runs."""
    STAGES: gl.constexpr = pe.shape[0]
    tiles = 0
    while (before < stop) & (sequence < last_sequence):
        kv_len = gl.load(kv_lens_ptr + sequence)
        first, last, _, split_len = splits_of_run(kv_len, before, begin, stop, SPLIT_LEN, FEW_SPLITS)
        table_ptr = tables_ptr + sequence.to(gl.int64) * stride_tb
        end = gl.minimum(last * split_len, kv_len)
        for start in range(first * split_len, end, 64):
            # Rows are looked up before the wait for room, which takes as long.
            row0, row1, row2, row3 = rows_of_tile(table_ptr, start, end, PAGE)
            if PDL:  # noqa: SIM102 - decided when the kernel is compiled
                if start + 64 >= kv_len:
                    gdc_wait()
            stage, phase = tiles % STAGES, ((tiles // STAGES) & 1) ^ 1
            bar = full_left.index(stage)
            mbarrier.wait(empty_left.index(stage), phase)
            mbarrier.expect(bar, 64 * 320 * 2)
            copy_chunks(desc, row0, row1, row2, row3, 0, left, stage * 4, bar, 4, PAGE)
            mbarrier.wait(empty_pe.index(stage), phase)
            copy_chunks(desc, row0, row1, row2, row3, 512, pe, stage, bar, 1, PAGE)
            bar = full_right.index(stage)
            mbarrier.wait(empty_right.index(stage), phase)
            mbarrier.expect(bar, 64 * 256 * 2)
            copy_chunks(desc, row0, row1, row2, row3, 256, right, stage * 4, bar, 4, PAGE)
            tiles += 1
        before += places_of(kv_len)
        sequence += 1
