"""Candidates fit the card; the sweep keeps to its time and finds the fastest of what it timed."""

from __future__ import annotations

import pytest
import torch

from kernels import tiles
from kernels.tiles import TileConfig
from launch import tune
from launch.bench_layer import LayerShape, layer_shape
from launch.tile_trials import (
    Outcome,
    Point,
    Product,
    as_dict,
    candidates,
    fits,
    mean_rows,
    tune_point,
    updated_table,
    write_table,
)

POINT = Point("qwen3", "gemm1", 8, 1.2)
RULE = TileConfig(16, 64, 32, 4, 2)
TILES = [TileConfig(16, n, 64, 4, 3) for n in (32, 64, 128)]


def test_candidates_fit() -> None:
    for rows in (1, 16, 40, 1000):
        for num_products in (1, 2):
            for generation in (8, 9, 10):
                tiles = candidates(rows, num_products, generation)
                assert 8 <= len(tiles) <= 90 and len(set(tiles)) == len(tiles)
                forms = {tile.form for tile in tiles}
                assert forms <= ({"pointers"} if generation == 8 else {"pointers", "tma", "specialized"})
                assert generation == 9 or "specialized" not in forms
                assert rows < 16 or generation < 9 or "tma" in forms
                for tile in tiles:
                    shared = tile.num_stages * (tile.block_m + num_products * tile.block_n) * tile.block_k * 2
                    assert shared <= 232_448  # what a program may have on a Hopper card
    # 4 stages of (128 + 2 x 256) x 128 x 2 bytes are 640 KiB; 128 x 256 sums over 4 warps are 256 a thread.
    assert not fits(TileConfig(128, 256, 128, 8, 4), 2)
    assert not fits(TileConfig(128, 256, 32, 4, 3), 1)
    # 7 stages of 32 KiB fill the memory that the results of two groups of warps need.
    assert fits(TileConfig(128, 128, 64, 4, 7), 1) and not fits(TileConfig(128, 128, 64, 4, 7, "specialized"), 1)


def test_rows_of_an_expert() -> None:
    assert mean_rows(layer_shape("qwen3"), 1) == 1.0
    assert mean_rows(layer_shape("mixtral"), 16384) == 4096


def test_the_fastest_of_the_final_wins_over_a_lucky_screening() -> None:
    """The middle tile screens best, but the last is faster where it counts."""
    screen = {tile.name: seconds for tile, seconds in zip(TILES, (3.0, 1.0, 2.0))}
    final = {tile.name: seconds for tile, seconds in zip(TILES, (3.0, 2.5, 2.0))}

    def time_tiles(named: dict[str, TileConfig], seconds: float) -> dict[str, float]:
        if list(named) == ["tile"]:
            return {"tile": screen[named["tile"].name]}
        assert next(iter(named)) == TILES[1].name and named["rule"] == RULE
        return {name: final.get(name, 2.4) for name in named}

    outcome = tune_point(POINT, TILES, RULE, time_tiles, deadline=1.0, clock=lambda: 0.0)
    assert outcome.best == TILES[2].name and outcome.rule_over_best == pytest.approx(1.2)
    assert list(as_dict(outcome)["screened_us"]) == [TILES[at].name for at in (1, 2, 0)]


def test_the_time_is_kept() -> None:
    """A clock that ticks at every look: two tiles are screened, the others are counted as skipped."""
    ticks = iter(range(10))
    outcome = tune_point(
        POINT, TILES, RULE, lambda named, _: dict.fromkeys(named, 1.0), deadline=1.5, clock=lambda: float(next(ticks))
    )
    assert len(outcome.screened) == 2 and outcome.skipped == 1
    nothing = tune_point(
        POINT, TILES, RULE, lambda named, _: dict.fromkeys(named, 1.0), deadline=-1.0, clock=lambda: 0.0
    )
    assert nothing.best == "rule" and nothing.skipped == 3  # the rule is timed even so


def test_an_outcome_without_times() -> None:
    assert Outcome(POINT).best is None and Outcome(POINT).rule_over_best is None


def test_the_table_keeps_what_beats_the_rule(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry comes, one goes since the rule is as good by now, one that was not tried stays."""
    monkeypatch.setattr(tiles, "TUNED_FOLDER", tmp_path / "tuned")
    first, second = "bfloat16 S128 N2x768 K2048", "bfloat16 S128 N2048 K768"

    def outcome(product: Product, num_tokens: int, **final: float) -> Outcome:
        names = {"fast": TILES[0].name, "rule": "rule"}
        return Outcome(Point("qwen3", product, num_tokens, 1.0), final={names[k]: v for k, v in final.items()})

    table = {first: {8: TILES[1], 64: TILES[2]}}
    outcomes = [outcome("gemm1", 1, fast=1.0, rule=1.02), outcome("gemm2", 64, fast=1.0, rule=1.2)]
    expected = {first: {64: TILES[2]}, second: {512: TILES[0]}}
    assert updated_table(table, outcomes) == expected
    assert updated_table(expected, [outcome("gemm1", 8, fast=1.0, rule=1.0)]) == {second: {512: TILES[0]}}
    write_table("Some Card", [outcome("gemm2", 64, fast=1.0, rule=1.2)])
    write_table("Some Card", [outcome("gemm1", 64, fast=1.0, rule=2.0)])
    assert tiles.read_table("Some Card") == {first: {512: TILES[0]}, second: {512: TILES[0]}}


def test_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["shape=qwen3"]) == 2
    assert "shape=qwen3 is no key of the tuner; did you mean shapes=?" in capsys.readouterr().err
    assert tune.main(["write=perhaps"]) == 2
    assert "neither true nor false" in capsys.readouterr().err
    assert tune.main(["shapes=qwen3-fp8"]) == 2
    assert "name shapes of bf16" in capsys.readouterr().err
    assert tune.main(["shapes=nothing"]) == 2
    assert "use mixtral" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_sweep_on_the_gpu() -> None:
    tuner = tune.Tuner(torch.device("cuda"), workers=4, seconds=2.0, console=tune.Console())
    small = LayerShape("small", 8, 2, 256, 128)
    first, second = tuner.run([small], [4], ["gemm1", "gemm2"])
    assert first.best is not None and second.best is not None
    assert first.screened and (first.rule_over_best or 0) >= 1 - 1e-9
