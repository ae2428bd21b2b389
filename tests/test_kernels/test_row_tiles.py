"""Ragged rows cut into tiles: the bound is the most there can be, and every tile belongs to exactly one program."""

# Kernels and their launches are no plain Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import doctest
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from kernels import row_tiles
from kernels.checks import cdiv, next_power_of_2
from kernels.row_tiles import even_tile, most_row_tiles, slot_of_program, tile_of_program, tiles_until_slot


def splits(num_rows: int, num_slots: int) -> Iterator[tuple[int, ...]]:
    """All ways to spread rows over slots."""
    if num_slots == 1:
        yield (num_rows,)
        return
    for first in range(num_rows + 1):
        for others in splits(num_rows - first, num_slots - 1):
            yield (first, *others)


@pytest.mark.parametrize("block_m", [1, 2, 3, 4])
@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_the_bound_is_met_and_never_passed(num_slots, block_m):
    for num_rows in range(10):
        most = max(sum(cdiv(count, block_m) for count in split) for split in splits(num_rows, num_slots))
        assert most_row_tiles(num_rows, num_slots, block_m) == most


def test_worked_examples():
    assert doctest.testmod(row_tiles).failed == 0


@triton.jit
def _owners_kernel(
    offsets_ptr,
    out_ptr,
    num_slots,
    tiles_n,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """out int32 [programs, 3]: slot, row tile, column tile; untouched where there is nothing to do."""
    program = tl.program_id(0)
    slot, tile = slot_of_program(tiles_until_slot(offsets_ptr, num_slots, tiles_n, 1, BLOCK_S, BLOCK_M), program)
    if slot >= num_slots:
        return
    rows = tl.load(offsets_ptr + slot + 1) - tl.load(offsets_ptr + slot)
    tile_m, tile_n = tile_of_program(tile, tl.cdiv(rows, BLOCK_M), tiles_n, GROUP_M, GROUP_N)  # pyright: ignore
    tl.store(out_ptr + program * 3, slot)
    tl.store(out_ptr + program * 3 + 1, tile_m)
    tl.store(out_ptr + program * 3 + 2, tile_n)


@pytest.mark.parametrize("counts", [(5,), (0, 3, 0, 0, 9, 1, 0), (0, 0, 0), (4, 4, 4), (0, 17)])
@pytest.mark.parametrize("tiles_n", [1, 3])
@pytest.mark.parametrize("group_n", [1, 2])
def test_every_tile_has_one_owner_slot_by_slot(backend, counts, tiles_n, group_n):
    if backend.dtype != torch.float32:
        pytest.skip("no data of the model's dtype here")
    block_m, num_rows = 4, sum(counts) + 2
    programs = most_row_tiles(num_rows, len(counts), block_m) * tiles_n
    offsets_S1 = torch.tensor([0, *counts]).cumsum(0).to(backend.device, torch.int32)
    owners = torch.full((programs, 3), -1, dtype=torch.int32, device=backend.device)
    sizes = {"BLOCK_S": next_power_of_2(len(counts)), "BLOCK_M": block_m, "GROUP_M": 2, "GROUP_N": group_n}
    _owners_kernel[(programs,)](offsets_S1, owners, len(counts), tiles_n, **sizes)
    found = [tuple(owner) for owner in owners.tolist() if owner[0] >= 0]
    expected = [
        (s, m, n) for s, count in enumerate(counts) for m in range(cdiv(count, block_m)) for n in range(tiles_n)
    ]
    assert sorted(found) == expected and [slot for slot, _, _ in found] == [slot for slot, _, _ in expected]
    if tiles_n > 1 and counts == (5,):  # of one slot's two row tiles
        assert found[1] == ((0, 1, 0) if group_n == 1 else (0, 0, 1))


@triton.jit
def _even_kernel(out_ptr, slot, num_rows, tiles_n, GROUPS: tl.constexpr, GROUP_M: tl.constexpr):
    """out int32 [tiles, 3]: first row, groups, column tile."""
    tile = tl.program_id(0)
    first_row, groups, tile_n = even_tile(tile, slot, num_rows, tiles_n, GROUPS, GROUP_M)  # pyright: ignore
    tl.store(out_ptr + tile * 3, first_row)
    tl.store(out_ptr + tile * 3 + 1, groups)
    tl.store(out_ptr + tile * 3 + 2, tile_n)


@pytest.mark.parametrize(("num_rows", "groups"), [(1, [1]), (192, [3]), (193, [2, 2]), (1024, [2, 3, 3, 2, 3, 3])])
def test_row_tiles_share_the_groups_of_a_slot_evenly(backend, num_rows, groups):
    """Each group of each column once; the next slot begins with the next tile."""
    if backend.dtype != torch.float32:
        pytest.skip("no data of the model's dtype here")
    tiles_n, found = 3, []
    for slot in (0, 1):
        out = torch.full((len(groups) * tiles_n, 3), -1, dtype=torch.int32, device=backend.device)
        _even_kernel[(out.shape[0],)](out, slot, num_rows, tiles_n, GROUPS=3, GROUP_M=8)
        found.append([tuple(tile) for tile in out.tolist()])
    firsts = [64 * sum(groups[:m]) for m in range(len(groups))]
    assert found[0] == [(first, few, n) for n in range(tiles_n) for first, few in zip(firsts, groups)]
    assert found[1] == found[0][1:] + found[0][:1]
