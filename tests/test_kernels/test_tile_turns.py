"""Who makes a tile, and when its kernel is launched, changes no bit of it."""

from __future__ import annotations

import pytest
import torch

from kernels import tile_turns
from kernels.grouped_gemm_specialized import launch_specialized
from kernels.tiles import TileConfig
from tests.compare import assert_same_bits

TILES = [
    TileConfig(64, 128, 64, 4, 5, "specialized"),
    TileConfig(64, 256, 64, 4, 5, "specialized"),
    TileConfig(128, 64, 64, 4, 6, "specialized"),
    TileConfig(128, 128, 64, 4, 6, "specialized"),
]


def test_many_tiles_wait_for_the_end_of_the_kernel_before(monkeypatch):
    monkeypatch.setattr(tile_turns, "dependent_launch", lambda x: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(tile_turns, "num_multiprocessors", lambda device: 10)
    x = torch.zeros(1)
    assert tile_turns.launch_options(x, 39) == {"PDL": True, "launch_pdl": True}
    assert tile_turns.launch_options(x, 40) == {"PDL": False}


COUNTS = [(1000, 0, 129, 64, 65, 1, 700, 0, 127, 128, 0), (3, 0, 1), (0, 0), (5000,)]
"""Many tiles a program, fewer tiles than programs, none, one slot."""


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "in-order"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tiles_taken_by_whoever_is_free(counts, indexed, tile):
    swiglu, rows, columns, width = tile.block_m * tile.block_n == 8192, sum(counts), 1024, 320
    generator = torch.Generator(device="cuda").manual_seed(1)
    x_XD = torch.randn(rows + 7, width, generator=generator, device="cuda").bfloat16()
    w_SND = torch.randn(len(counts), columns * (1 + swiglu), width, generator=generator, device="cuda").bfloat16()
    offsets_S1 = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    index_R = torch.randperm(rows + 7, generator=generator, device="cuda").to(torch.int32) if indexed else None
    results = []
    for counted in (False, True, True):
        y_RN = torch.full((rows + 7, columns), torch.nan, dtype=torch.bfloat16, device="cuda")
        launch_specialized(x_XD, w_SND, offsets_S1, index_R, y_RN, tile, swiglu=swiglu, group_m=8, counted=counted)
        results.append(y_RN)
    assert not results[0][:rows].isnan().any() and results[0][rows:].isnan().all()
    for result in results[1:]:
        assert_same_bits(result[:rows], results[0][:rows])
        assert result[rows:].isnan().all()
