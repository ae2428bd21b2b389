"""Which slot's rows a program owns: ragged rows are cut into row tiles, slot by slot, and each into column tiles.

Knows offsets and tile sizes; knows nothing of what is computed. The host never reads the offsets: it launches an upper
bound of programs, and each finds its tile by counting those of the slots before.

Where a slot's rows lie is said in one of two forms, int32 both: offsets [S + 1], ascending, where slot s has the rows
from offsets[s] to offsets[s + 1]; or ranges [S, 2], the start and end of each, in any order and anywhere. Kernels see
them as SLOT_STEP, the integers from one slot's start to the next one's: 1 or 2; the end stands behind the start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_shape


def most_row_tiles(num_rows: int, num_slots: int, block_m: int) -> int:
    """The most row tiles that `num_rows` rows can make, whatever their slots.

    Of the n = min(rows, slots) slots that can hold a row at all, each fills its tiles but for block_m - 1 rows at most.

    >>> most_row_tiles(8, 128, 16), most_row_tiles(512, 128, 16), most_row_tiles(100, 1, 32)
    (8, 152, 4)
    """
    return (num_rows + min(num_rows, num_slots) * (block_m - 1)) // block_m


@triton.jit
def tile_of_program(program, tiles_m, tiles_n, GROUP_M: tl.constexpr, GROUP_N: tl.constexpr = 1):  # pyright: ignore
    """(row tile, column tile): GROUP_M row tiles share a column's weights while those are in the L2 cache. Neighbouring
    programs have rows beside each other, or GROUP_N columns of the same rows first."""
    per_group = GROUP_M * tiles_n
    first_m = (program // per_group) * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    tile = program % per_group
    if GROUP_N == 1:
        return first_m + tile % rows, tile // rows
    else:
        first_n = tile // (rows * GROUP_N) * GROUP_N
        columns = min(tiles_n - first_n, GROUP_N)
        tile = tile % (rows * GROUP_N)
        return first_m + tile // columns, first_n + tile % columns


@triton.jit
def even_tile(tile, slot, num_rows, tiles_n, GROUPS: tl.constexpr, GROUP_M: tl.constexpr):
    """(first row, groups of 64 rows, column tile) of a slot's tile of up to GROUPS groups, each of 64 rows.

    The row tiles share the slot's groups evenly: one group alone has as many weights to wait for as three. And tiles
    are turned by the slot's number: else, of slots with equally many row tiles, the smaller ones would all fall to the
    same programs, where the number of programs is a multiple of theirs. Measured on an H200, fp8 layers with 192-row
    tiles, us, tiles filled one after another / so: dsv3-ep8 4096 tokens 3575 / 3503, 16384 13589 / 13232; qwen3 4096
    (256 rows a slot) 675 / 603, 16384 1925 / 1929; mixtral 4096 3256 / 3278.
    """
    groups = (num_rows + 63) // 64
    tiles_m = (groups + GROUPS - 1) // GROUPS
    tile_m, tile_n = tile_of_program((tile + slot) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)  # pyright: ignore
    before = groups * tile_m // tiles_m
    return before * 64, groups * (tile_m + 1) // tiles_m - before, tile_n


def check_offsets(offsets_S1: Tensor, num_slots: int) -> None:
    """AssertionError unless these are the offsets or ranges of so many slots."""
    assert_shape("offsets_S1", offsets_S1, (num_slots + 1,) if slot_step(offsets_S1) == 1 else (num_slots, 2))
    assert_dtype("offsets_S1", offsets_S1, torch.int32)
    assert offsets_S1.is_contiguous(), f"offsets_S1 has strides {offsets_S1.stride()}"


def slot_step(offsets_S1: Tensor) -> int:
    """SLOT_STEP of offsets or ranges."""
    return offsets_S1.dim()


def ranges_of(offsets_S1: Tensor) -> list[tuple[int, int]]:
    """(start, end) of each slot's rows. Reads the offsets or ranges: for the CPU only."""
    ends = offsets_S1.flatten().tolist()
    return [(ends[at], ends[at + 1]) for at in range(0, len(ends) - 1, slot_step(offsets_S1))]


def rows_out(out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`out`, checked to be so, or a new one: the rows that a product fills."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    assert_shape("out", out, shape)
    assert_dtype("out", out, dtype)
    assert out.is_contiguous(), f"out has strides {out.stride()}"
    assert out.device == device, f"out is on {out.device}, the operands on {device}"
    return out


@triton.jit
def slot_range(offsets_ptr, slot, SLOT_STEP: tl.constexpr):
    """(first row, end of the rows) of a slot."""
    return tl.load(offsets_ptr + slot * SLOT_STEP), tl.load(offsets_ptr + slot * SLOT_STEP + 1)


@triton.jit
def tiles_until_slot(
    offsets_ptr, num_slots, tiles_n, SLOT_STEP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr
):
    """int32 [BLOCK_S]: the tiles of this slot and of all before it."""
    s = tl.arange(0, BLOCK_S)
    starts = tl.load(offsets_ptr + s * SLOT_STEP, mask=s < num_slots, other=0)
    ends = tl.load(offsets_ptr + s * SLOT_STEP + 1, mask=s < num_slots, other=0)
    return tl.cumsum(tl.cdiv(ends - starts, BLOCK_M) * tiles_n, axis=0)


@triton.jit
def slot_of_program(tiles_until, program):
    """(slot, the program's number among those of its slot); a slot past the last one where there is nothing to do."""
    passed = tiles_until <= program
    slot = tl.sum(passed.to(tl.int32), axis=0)
    return slot, program - tl.max(tl.where(passed, tiles_until, 0), axis=0)


@triton.jit
def multiply(x, w, acc, SWAPPED: tl.constexpr):
    """acc + x w of x [M, K] and w [K, N]; SWAPPED: acc is [N, M], and so is the sum. The same bits either way."""
    if SWAPPED:
        return tl.dot(tl.trans(w), tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, w, acc, input_precision="ieee")


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up in fp32.

    The GPU's quick division is off by two units in the last place at most, the same ones in every kernel. Divided as
    IEEE wants it, the activation cost up to a tenth of a product with many rows (H200, 512 rows of 2048 columns: 846
    against 729 us).
    """
    return gate / (1.0 + tl.exp(-gate)) * up
