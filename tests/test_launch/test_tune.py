"""Candidates fit the card; the sweep keeps to its time and finds the fastest of what it timed."""

from __future__ import annotations

import pytest
import torch

from kernels.tiles import TileConfig
from launch import tune
from launch.bench_layer import LayerShape, layer_shape
from launch.tune import Outcome, Point, as_dict, candidates, fits, mean_rows, tile_name, tune_point

POINT = Point("qwen3", "gemm1", 8, 1.2)
TILES = [TileConfig(16, n, 64, 4, 3) for n in (32, 64, 128)]


def test_candidates_fit() -> None:
    for rows in (1, 40, 1000):
        for num_products in (1, 2):
            tiles = candidates(rows, num_products)
            assert 10 <= len(tiles) <= 60 and len(set(tiles)) == len(tiles)
            for tile in tiles:
                shared = tile.num_stages * (tile.block_m + num_products * tile.block_n) * tile.block_k * 2
                assert shared <= 232_448  # what a program may have on a Hopper card
    # 4 stages of (128 + 2 x 256) x 128 x 2 bytes are 640 KiB; 128 x 256 sums over 4 warps are 256 a thread.
    assert not fits(TileConfig(128, 256, 128, 8, 4), 2)
    assert not fits(TileConfig(128, 256, 32, 4, 3), 1)


def test_rows_of_an_expert() -> None:
    assert mean_rows(layer_shape("qwen3"), 1) == 1.0
    assert mean_rows(layer_shape("mixtral"), 16384) == 4096


def test_the_fastest_of_the_final_wins_over_a_lucky_screening() -> None:
    """The middle tile screens best, but the last is faster where it counts."""
    screen = {tile_name(tile): seconds for tile, seconds in zip(TILES, (3.0, 1.0, 2.0))}
    final = {tile_name(tile): seconds for tile, seconds in zip(TILES, (3.0, 2.5, 2.0))}

    def time_tiles(named: dict[str, TileConfig | None], seconds: float) -> dict[str, float]:
        if list(named) == ["tile"]:
            tile = named["tile"]
            assert tile is not None
            return {"tile": screen[tile_name(tile)]}
        assert next(iter(named)) == tile_name(TILES[1]) and named["rule"] is None
        return {name: final.get(name, 2.4) for name in named}

    outcome = tune_point(POINT, TILES, time_tiles, deadline=1.0, clock=lambda: 0.0)
    assert outcome.best == tile_name(TILES[2]) and outcome.rule_over_best == pytest.approx(1.2)
    assert list(as_dict(outcome)["screened_us"]) == [tile_name(TILES[at]) for at in (1, 2, 0)]


def test_the_time_is_kept() -> None:
    """A clock that ticks at every look: two tiles are screened, the others are counted as skipped."""
    ticks = iter(range(10))
    outcome = tune_point(
        POINT, TILES, lambda named, _: dict.fromkeys(named, 1.0), deadline=1.5, clock=lambda: float(next(ticks))
    )
    assert len(outcome.screened) == 2 and outcome.skipped == 1
    nothing = tune_point(POINT, TILES, lambda named, _: dict.fromkeys(named, 1.0), deadline=-1.0, clock=lambda: 0.0)
    assert nothing.best == "rule" and nothing.skipped == 3  # the rule is timed even so


def test_an_outcome_without_times() -> None:
    assert Outcome(POINT).best is None and Outcome(POINT).rule_over_best is None


def test_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["shape=qwen3"]) == 2
    assert "the keys are shapes" in capsys.readouterr().err
    assert tune.main(["shapes=nothing"]) == 2
    assert "use mixtral" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_sweep_on_the_gpu() -> None:
    tuner = tune.Tuner(torch.device("cuda"), workers=4, seconds=2.0, console=tune.Console())
    small = LayerShape("small", 8, 2, 256, 128)
    first, second = tuner.run([small], [4], ["gemm1", "gemm2"])
    assert first.best is not None and second.best is not None
    assert first.screened and (first.rule_over_best or 0) >= 1 - 1e-9
