"""Which tiles of the grouped products are worth trying, which of them wins, and the card's table of those that do.

Knows tiles, rows and seconds; times nothing, and changes no rule.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Literal

import torch

from kernels.tiles import (
    TileConfig,
    grouped_rule,
    operation_name,
    packs_rows,
    read_table,
    table_file,
    tile_of_name,
)
from launch.bench_layer import LayerShape, layer_shape
from launch.figure import short
from moe.engine.whole_file import write_whole

Product = Literal["gemm1", "gemm2"]  # gate and up with SwiGLU; down
SHARED_BYTES = 227 << 10  # of one program on a Hopper card
FINALISTS = 4
WORTH = 1.03
"""A tile enters the table where the rule takes this many times as long: less is noise."""


@dataclass(frozen=True)
class Point:
    """One product of one layer at one number of tokens. `rows`: of an expert that is hit, on average."""

    shape: str
    product: Product
    num_tokens: int
    rows: float


@dataclass
class Outcome:
    """Seconds of each tile tried, then of the finalists; the tile of the rule is called `rule`."""

    point: Point
    screened: dict[TileConfig, float] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)
    skipped: int = 0

    @property
    def best(self) -> str | None:
        """The fastest of the finalists; the rule only if none beats it."""
        return min(self.final, key=lambda name: self.final[name], default=None)

    @property
    def rule_over_best(self) -> float | None:
        return self.final["rule"] / self.final[self.best] if self.best and "rule" in self.final else None


def candidates(rows: float, num_products: int, generation: int) -> list[TileConfig]:
    """Tiles worth trying for so many rows an expert: they fit shared memory and registers, and no warp idles.

    Few rows: flat tiles of any depth. Many: large ones, in every form that the card has.
    """
    if rows <= 8:
        sizes = product((16,), (32, 64, 128), (64, 128, 256), (4,), (3, 4, 6))
    elif rows <= 96:
        sizes = product((16, 32, 64), (64, 128), (64, 128), (4,), (3, 4))
    else:
        sizes = product((64, 128), (128, 256), (64,), (4, 8), (3, 4))
    tiles = [TileConfig(m, n // num_products, k, warps, stages) for m, n, k, warps, stages in sizes]
    if generation >= 9 and rows > 4:
        tiles += [replace(tile, form="tma") for tile in tiles if tile.block_m * tile.block_n * num_products >= 32 * 128]
    if generation == 9 and rows > 8:
        sizes = product((64, 128), (64, 128, 256), (64, 128), (4,), (3, 4, 5, 6, 8))
        tiles += [TileConfig(m, n // num_products, k, warps, stages, "specialized") for m, n, k, warps, stages in sizes]
    return [tile for tile in tiles if tile.block_n >= 16 and fits(tile, num_products)]


def fits(tile: TileConfig, num_products: int) -> bool:
    """bf16 operands of all stages in shared memory, half of the results beside them; 4 to 128 fp32 sums a thread."""
    sums = tile.block_m * tile.block_n * num_products
    shared, threads = tile.shared_bytes(num_products), tile.num_warps * 32
    if tile.form == "specialized":
        shared += 2 * sums
    return shared <= SHARED_BYTES and 4 <= sums / threads <= 128


def tune_point(
    point: Point,
    tiles: Sequence[TileConfig],
    rule: TileConfig,
    time_tiles: Callable[[dict[str, TileConfig], float], dict[str, float]],
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Screen the tiles until the deadline, then settle between the best and the rule's.

    `time_tiles` gives the seconds of each named tile, measured together for so long.
    """
    outcome = Outcome(point)
    for index, tile in enumerate(tiles):
        if clock() > deadline:
            outcome.skipped = len(tiles) - index
            break
        outcome.screened[tile] = time_tiles({"tile": tile}, 0.01)["tile"]
    best = sorted(outcome.screened, key=lambda tile: outcome.screened[tile])[:FINALISTS]
    outcome.final = time_tiles({tile.name: tile for tile in best} | {"rule": rule}, 0.15)
    return outcome


def mean_rows(shape: LayerShape, num_tokens: int) -> float:
    """Rows of an expert, of all of them: the sparse end is one row, whatever the mean."""
    return max(1.0, num_tokens * shape.top_k / shape.num_experts)


def num_products(which: Product) -> int:
    """Weight matrices that a program multiplies at once."""
    return 2 if which == "gemm1" else 1


def rule_tile(shape: LayerShape, which: Product, num_tokens: int, generation: int) -> TileConfig:
    """What the rule says, whatever the table does."""
    num_rows, first = num_tokens * shape.top_k, which == "gemm1"
    gathered = first and not packs_rows(num_rows, shape.num_experts, shape.width, generation)
    products = num_products(which)
    slot_bytes = 2 * products * shape.width * shape.hidden
    return grouped_rule(
        num_rows, shape.num_experts, generation, num_products=products, slot_bytes=slot_bytes, gathered=gathered
    )


Tuned = dict[str, dict[int, TileConfig]]
"""operation -> total rows -> tile, as `kernels.tiles.read_table` gives it"""


def updated_table(table: Tuned, outcomes: Sequence[Outcome]) -> Tuned:
    """The table with each tile that beats the rule by WORTH, and without one where none does any more."""
    table = {operation: dict(by_rows) for operation, by_rows in table.items()}
    for outcome in outcomes:
        shape, which = layer_shape(outcome.point.shape), outcome.point.product
        columns, width = (shape.width, shape.hidden) if which == "gemm1" else (shape.hidden, shape.width)
        operation = operation_name(shape.num_experts, columns, width, num_products(which), torch.bfloat16)
        by_rows, num_rows = table.setdefault(operation, {}), outcome.point.num_tokens * shape.top_k
        by_rows.pop(num_rows, None)
        if outcome.best is not None and outcome.best != "rule" and (outcome.rule_over_best or 0) >= WORTH:
            by_rows[num_rows] = tile_of_name(outcome.best)
    return {operation: by_rows for operation, by_rows in table.items() if by_rows}


def write_table(device_name: str, outcomes: Sequence[Outcome]) -> str:
    """Brings the card's table in the package up to date; returns where it lies. OSError: it cannot be written there."""
    path = table_file(device_name)
    table = updated_table(read_table(device_name), outcomes)
    text = {
        operation: {str(rows): tile.name for rows, tile in sorted(by_rows.items())}
        for operation, by_rows in sorted(table.items())
    }
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(text, indent=1) + "\n")
    return str(path)


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """JSON-ready; microseconds."""
    screened = sorted(outcome.screened.items(), key=lambda item: item[1])
    return asdict(outcome.point) | {
        "best": outcome.best,
        "rule_over_best": None if outcome.rule_over_best is None else short(outcome.rule_over_best),
        "final_us": {name: short(seconds * 1e6) for name, seconds in outcome.final.items()},
        "screened_us": {tile.name: short(seconds * 1e6) for tile, seconds in screened},
        "skipped": outcome.skipped,
    }
