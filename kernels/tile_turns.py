"""Which tile a program that stays on its multiprocessor takes next: every so-manieth, or the next that nobody has yet.

Knows slots, rows and tiles; computes nothing. Multiprocessors are not equally fast: those that share their way to
memory with more others take longer for the same tiles. With a counter in global memory whoever is done takes the next
tile. Who makes a tile changes none of its bits.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.dependent_launch import dependent_launch
from kernels.tiles import num_multiprocessors

MANY_TILES = 4
"""From so many tiles a multiprocessor on, a kernel is launched when the one before it has ended, not beside its end.

Beside it, programs take the multiprocessors as these come free, in no order, and neighbours, which read the same
weights and rows at the same time, lie far apart: what one of them fetches serves the others no more. Measured on an
H200 in graphs of whole layers (pack to norm), us a layer, so / beside: qwen3 with 8192 tokens 1234 / 1502 (first
products 770 / 890), 16384 tokens 2343 / 2858; dsv2-lite with 8192 1588 / 1890; dsv3-ep8 with 16384 21788 / 28768.
"""


def launch_options(x: Tensor, tiles: int) -> dict[str, Any]:
    """Of a kernel that owns the multiprocessors until `tiles` are done."""
    return {"PDL": False} if tiles >= MANY_TILES * num_multiprocessors(x.device) else dependent_launch(x)


@gluon.jit
def advance(offsets_ptr, slot, passed, program, num_slots, tiles_n, SLOT_STEP: gl.constexpr, BLOCK_M: gl.constexpr):
    """From a slot at or before the program's: (its slot, tiles of the slots before it, first row, end of its rows)."""
    start = gl.load(offsets_ptr + slot * SLOT_STEP)
    end = gl.load(offsets_ptr + slot * SLOT_STEP + 1)
    own = (end - start + BLOCK_M - 1) // BLOCK_M * tiles_n
    while (slot < num_slots) & (program >= passed + own):
        passed += own
        slot += 1
        if SLOT_STEP == 1:
            start = end
            end = gl.load(offsets_ptr + min(slot + 1, num_slots))
        else:
            start = gl.load(offsets_ptr + min(slot, num_slots - 1) * SLOT_STEP)
            end = gl.load(offsets_ptr + min(slot, num_slots - 1) * SLOT_STEP + 1)
        own = (end - start + BLOCK_M - 1) // BLOCK_M * tiles_n
    return slot, passed, start, end


# The warps that load take the tiles and tell those that multiply by a board of BOARD places in shared memory: `notes`
# int32 [BOARD, 128], and of each place a barrier for "noted" and one for "read". Only the first number of a place
# counts: its thread is also the one that arrives at the barriers.

BOARD = gl.constexpr(4)


@gluon.jit
def make_board():
    """An empty one; for kernels whose parts all have four warps."""
    notes = gl.allocate_shared_memory(gl.int32, [BOARD, 128], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    noted = gl.allocate_shared_memory(gl.int64, [BOARD, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [BOARD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BOARD):
        mbarrier.init(noted.index(i), count=1)
        mbarrier.init(read.index(i), count=1)
    return notes, noted, read


@gluon.jit
def note_tile(board, program, turn):
    """The loading warps' `turn`-th tile."""
    notes, noted, read = board
    place = turn % BOARD
    mbarrier.wait(read.index(place), (turn // BOARD & 1) ^ 1)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    notes.index(place).store(gl.full([128], program, gl.int32, LINE))
    mbarrier.arrive(noted.index(place), count=1)


@gluon.jit
def read_tile(board, turn):
    """The `turn`-th tile; each turn is read by one group of warps."""
    notes, noted, read = board
    place = turn % BOARD
    mbarrier.wait(noted.index(place), turn // BOARD & 1)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    note = notes.index(place).load(LINE)
    program = gl.max(gl.where(gl.arange(0, 128, layout=LINE) == 0, note, -1), axis=0)
    mbarrier.arrive(read.index(place), count=1)
    return program
