"""Tile sizes of the matrix kernels, chosen from what the host knows: rows, columns, dtype and the kind of GPU.

Knows sizes; launches nothing. No choice here changes a result: the sum over K runs in ascending order for every tile.
Rules first, each beside the measurement that set it; where `launch.tune` found a tile that beats the rule on a card,
its table in kernels/tuned/ says so, one file a card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import log2
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2

TUNED_FOLDER = Path(__file__).parent / "tuned"

Form = Literal["pointers", "tma", "specialized", "swapped"]
"""How a grouped product reads: every thread by addresses; weights in blocks by the copy engine (TMA); so with warps of
their own for it (kernels/grouped_gemm_specialized.py); or so with weights as the tensor core's rows
(kernels/grouped_gemm_swapped.py)."""

_LARGE_SHARED_MEMORY = (9, 10)
"""Major compute capabilities (H100, B200) whose programs may take over 200 KiB of shared memory; elsewhere 99 KiB."""


@dataclass(frozen=True)
class TileConfig:
    """A matrix kernel's tile: rows x columns of the output per program, the step along K, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    form: Form = "pointers"

    @property
    def name(self) -> str:
        """
        >>> TileConfig(16, 64, 128, 4, 5).name, TileConfig(128, 256, 64, 8, 4, "tma").name
        ('16x64x128 w4 s5', '128x256x64 w8 s4 tma')
        """
        sizes = f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages}"
        return sizes if self.form == "pointers" else f"{sizes} {self.form}"

    def shared_bytes(self, num_products: int, element_size: int = 2) -> int:
        """Of all stages, when a program multiplies `num_products` weight matrices at once."""
        return self.num_stages * (self.block_m + num_products * self.block_n) * self.block_k * element_size


def tile_of_name(name: str) -> TileConfig:
    """The inverse of `TileConfig.name`.

    >>> tile_of_name("128x256x64 w8 s4 tma")
    TileConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4, form='tma')
    """
    sizes, warps, stages, *form = name.split()
    block_m, block_n, block_k = map(int, sizes.split("x"))
    assert form in ([], ["tma"], ["specialized"], ["swapped"]), f"{name!r} is no tile"
    return TileConfig(block_m, block_n, block_k, int(warps[1:]), int(stages[1:]), *form)  # pyright: ignore


def device_generation(x: Tensor) -> int:
    """The major compute capability of x's GPU; 0 on a CPU, where the interpreter runs and any tile will do."""
    return _capability(x.device)[0] if x.is_cuda else 0


# Asked at every launch, and the driver's answers cost as much as the launch.


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; on a CPU 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def device_table(device: torch.device) -> Mapping[str, Mapping[int, TileConfig]]:
    """The tuned table of this card; empty where it has none."""
    return read_table(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}


def table_file(device_name: str) -> Path:
    """Where a card's table lies, by the name the driver gives it."""
    return TUNED_FOLDER / f"{device_name.replace(' ', '_')}.json"


def read_table(device_name: str) -> dict[str, dict[int, TileConfig]]:
    """operation (`operation_name`) -> total rows -> tile."""
    path = table_file(device_name)
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        operation: {int(rows): tile_of_name(name) for rows, name in by_rows.items()}
        for operation, by_rows in table.items()
    }


def operation_name(num_slots: int, num_columns: int, width: int, num_products: int, dtype: torch.dtype) -> str:
    """What a tuned tile is for.

    >>> operation_name(128, 768, 2048, 2, torch.bfloat16)
    'bfloat16 S128 N2x768 K2048'
    """
    products = "2x" if num_products == 2 else ""
    return f"{str(dtype).removeprefix('torch.')} S{num_slots} N{products}{num_columns} K{width}"


def nearest_tile(by_rows: Mapping[int, TileConfig], num_rows: int) -> TileConfig | None:
    """The tile tuned for the number of rows nearest to this one, if that is at most twice or at least half of it.

    >>> nearest_tile({8: TileConfig(16, 32, 128, 4, 4)}, 12).name, nearest_tile({8: TileConfig(16, 32, 128, 4, 4)}, 17)
    ('16x32x128 w4 s4', None)
    """
    if num_rows <= 0 or not by_rows:
        return None
    rows = min(by_rows, key=lambda rows: abs(log2(rows / num_rows)))
    return by_rows[rows] if 0.5 <= rows / num_rows <= 2 else None


def grouped_tile(
    num_rows: int,
    num_slots: int,
    num_columns: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_products: int,
    gathered: bool,
    by_blocks: bool,
) -> TileConfig:
    """The tile of a grouped product: the tuned one of this card, else the rule's.

    The host knows the mean of rows a slot alone; an uneven routing costs time, never a wrong result. `by_blocks`: the
    copy engine can read these operands.
    """
    operation = operation_name(num_slots, num_columns, width, num_products, dtype)
    tuned = nearest_tile(device_table(device).get(operation, {}), num_rows)
    if tuned is not None and (by_blocks or tuned.form == "pointers"):
        return tuned
    generation = _capability(device)[0] if device.type == "cuda" else 0
    if dtype == torch.float32:
        return _fp32_tile(cdiv(num_rows, num_slots), num_products)
    return grouped_rule(
        num_rows,
        num_slots,
        generation,
        num_products=num_products,
        slot_bytes=num_products * num_columns * width * dtype.itemsize,
        gathered=gathered,
        by_blocks=by_blocks,
    )


MANY_ROWS = 512
"""Up to so many rows a slot on average, tiles of 64 rows win; above, larger ones."""

CACHED_BYTES = 16 << 20
"""So large a slot's weights stay in the L2 cache (60 MB) while its rows are multiplied, beside rows and results."""


def packs_rows(num_rows: int, num_slots: int, num_columns: int, generation: int) -> bool:
    """Whether rows that a product would gather are copied in order first (kernels/copy_rows.py): many of 16 bits,
    each for many columns, where blocks are read by the copy engine.

    Measured on an H200, first products, gathered by 64x128x64 s5 / copied and in order, microseconds: mixtral (14336
    columns, 4096 rows) 12752 / 138 + 12288. With fewer columns the copy costs more than it saves: dsv3-ep8 (2048)
    12389 / 950 + 11994, dsv2-lite (1408) 987 / 88 + 933, qwen3 (768) 1469 / 251 + 1373.
    """
    return generation >= 9 and cdiv(num_rows, num_slots) > MANY_ROWS and num_columns >= 8192


def grouped_rule(
    num_rows: int,
    num_slots: int,
    generation: int,
    *,
    num_products: int,
    slot_bytes: int,
    gathered: bool,
    by_blocks: bool = True,
) -> TileConfig:
    """The rule for 16-bit operands; `slot_bytes`: of the weights of one slot.

    Measured on an H200 over the layers qwen3 (128 experts), mixtral (8) and dsv3-ep8 (32), the two products one after
    the other, microseconds:
    - 1 token: 16x32x256 s3 and 16x32x256 s4 take 27.2 / 173.9 / 172.8 (the weights alone 17.1 / 159 / 159), 16x32x128
      s6 and 16x64x128 s6 26.2 / 177.5 / 174.4; of ten other pairs the best 25.3 / 171 / 167, each time another one.
    - 8 tokens: 127 / 598 / 584 and 125 / 591 / 582 (110 / 578 / 576).
    - With operands swapped (8-row tiles), in a later run: qwen3 / dsv2-lite / mixtral, 1 token, 25.2 / 32.2 / 168.3
      before (weights 17.1 / 23.5 / 159.4); 8x32x256 w2 s3 for the first product alone 24.6 / 31.6 / 165.3, 8x64x128 w4
      s6 for the second alone 24.9 / 31.4 / 167.9. 8 tokens, 118.4 / 146.0 / 505.3 before: first 117.0 / 142.5 / 501.5,
      8x64x128 w4 s4 for the second 117.4 / 143.9 / 502.7.
    - 16 rows a slot: tma 32x64x128 s3 and 32x128x128 s3 take 297 / 653 / 652 (273 / 638 / 638); pointers 306 / 678 /
      679. Beside specialized 64x64x128 s4 and 64x128x128 s4, two products of 256 tokens: qwen3 (16 rows) 193 + 102 and
      194 + 102, dsv2-lite (24 rows) 182 + 96 and 179 + 94.
    - 64 rows: specialized 128x64x64 s6 and 128x128x64 s6 take 343 / 772 / 779; 64x64x128 s4 and 64x128x128 s4 349 /
      785 / 780; tma 362 / 790 / 791.
    - 64 rows again, the card at its power limit, mixtral, in brackets the clock: layers with attention, specialized
      128x64x64 s6 and 128x128x64 s6 946 to 977 (1488 MHz), swapped 128x128x64 s4 and 128x256x64 s4 930 to 946 (1547),
      two groups of rows on one tile of weights, not swapped, 938 to 989 (1527); the layer from pack to norm at 96 rows
      782, 768, 761. Of it 22 are products and 20 rows that are read: without them 694. Weights by 128 of K: 1063. At 32
      rows swapped loses to specialized 64x64x128 s4 (691, 667), and with small slots to specialized tiles of 128 rows
      (qwen3, 64 rows: 361, 349), for its groups write out at once.
    - 256 rows: specialized 64x128x64 s5 and 64x256x64 s5 take 705 / 1593 / 1566; tma 740 / 1876 / 1764.
    - More rows, the card at its power limit (a library product of 8192^3 at 570 to 675 TFLOP/s beside them). First
      products, gathered, specialized 64x128x64 s5 / tma 128x128x64 w8 s3: 512 rows, qwen3 729 / 844; 768, dsv2-lite
      987 / 1126; 1024, qwen3 1469 / 1674; 4096, mixtral 12752 / 13569, dsv3-ep8 12389 / 12867. In order, specialized
      128x64x64 s6 / tma 128x128x64 w8 s4, by K: 2048, qwen3 1373 / 1484, dsv2-lite 933 / 1003; 4096, mixtral 12586 /
      12288; 7168, dsv3-ep8 13780 / 11994.
    - Second products, specialized 64x256x64 s5 / specialized 128x128x64 s6 / tma 128x256x64 w8 s4: 512 rows, qwen3 366
      / 370 / 434, mixtral 833 / 877 / 892; by K: 768, qwen3 745 / 706 / 842; 1408, dsv2-lite 480 / 487 / 533; 2048,
      dsv3-ep8 7618 / 6333 / 6490; 14336, mixtral 6429 / 6590 / 6424.
    - Of many rows in their place, graphs of layers from pack to norm, us a layer, specialized 64x128x64 s5 with
      128x128x64 s6 / with 64x256x64 s5 / tma 128x128x64 w8 with 128x256x64 w8, launched as each is (the specialized
      form into an empty card: grouped_gemm_specialized.py says why; before it was, it lost 20 to 50 % in its place):
      768 rows, dsv2-lite 1588, 1601 / 1587 / 1645, 1653; 1024, qwen3 2343 / - / 2455; 512, qwen3 - / 1250 / 1295.
      Where a slot's weights exceed the cache tma wins: mixtral, 2048 rows (first products in order), 9783 / 10104 with
      tma for the first / 9031; dsv3-ep8, 4096 rows, 21788 (in order) / - / 18739.
    - One slot, rows in order, gate and up of F columns, D 2048, F 10944 / 2816: 64 rows, specialized 64x64x128 s4 37.6
      / 18.6, 128x64x64 s6 43.8 / 20.6; 4096 rows, specialized 128x64x64 s6 520 / 138, tma 522 / 154, pointers 686 / 193
      (the library without the activation 490 / 136).
    - F 2816 in its place, beside the router, whose launches find less room beside a specialized form's registers;
      layers of dsv2-lite, specialized 64x64x128 s4 / pointers 64x64x64 s4 / 64x32x128 s4: 64 rows 335.2 / 331.3 /
      330.4, 32 rows 316.3 / 311.4 / 310.3, 24 rows 297.4 / - / 291.3 (F 10944, beside nothing, no difference); 256
      rows, specialized 64x128x64 s5 / tma 64x64x64 s4 / pointers 64x64x64 s4: 400.4 / 399.3 / 404.4.
    """
    rows = cdiv(num_rows, num_slots)
    # Rows of several slots are uneven: a tile as high as the mean would leave half of the slots with a second one.
    ragged = num_slots > 1
    if generation < 9 or not by_blocks or rows <= (8 if ragged else 16):
        return _pointer_rule(num_rows, rows, generation, num_products)
    wide = 2 // num_products
    if not ragged and rows <= 64:
        return TileConfig(next_power_of_2(rows), 32 * wide, 128, 4, 4)
    if rows <= (16 if generation == 9 else 24):
        return TileConfig(32, 64 * wide, 128, 4, 3, "tma")
    if generation == 9 and rows <= 48:
        return TileConfig(64, 64 * wide, 128, 4, 4, "specialized")
    if generation == 9 and rows <= 96:
        if ragged and slot_bytes > CACHED_BYTES:
            return TileConfig(128, 128 * wide, 64, 4, 4, "swapped")
        return TileConfig(128, 64 * wide, 64, 4, 6, "specialized")
    if generation == 9 and rows <= MANY_ROWS:
        return TileConfig(64, 128 * wide, 64, 4, 5, "specialized")
    if rows <= 96:
        return TileConfig(64, 128 * wide, 64, 8, 4, "tma")
    if generation == 9 and num_products == 2 and not ragged:
        return TileConfig(128, 64, 64, 4, 6, "specialized")
    if generation == 9 and ragged and slot_bytes <= CACHED_BYTES:
        if num_products == 1:
            return TileConfig(128, 128, 64, 4, 6, "specialized")
        if gathered:
            return TileConfig(64, 128, 64, 4, 5, "specialized")
    return TileConfig(128, 128 * wide, 64, 8, 3 if gathered else 4, "tma")


def _pointer_rule(num_rows: int, rows: int, generation: int, num_products: int) -> TileConfig:
    roomy = generation in _LARGE_SHARED_MEMORY
    if rows <= 16:
        # One row tile for each slot, also where routing is uneven. A single slot's rows are all there are.
        if roomy and (rows <= 2 or num_rows <= 8):
            stages = 6 if num_rows <= 8 else 4
            return TileConfig(8, 32, 256, 2, 3) if num_products == 2 else TileConfig(8, 64, 128, 4, stages)
        block_n = 64 // num_products
        return TileConfig(16, block_n, 128, 4, 6) if roomy else TileConfig(16, block_n, 64, 4, 4)
    if rows <= 64:
        return TileConfig(max(16, next_power_of_2(rows)), 128 // num_products, 64, 4, 4 if roomy else 3)
    if roomy:
        return TileConfig(128, 256 // num_products, 64, 8, 3)
    return TileConfig(128, 128 // num_products, 32, 8, 3)


def _fp32_tile(rows: int, num_products: int) -> TileConfig:
    return TileConfig(min(64, max(16, next_power_of_2(rows))), 64 // num_products, 32, 4, 2)


def linear_tile(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    generation: int,
    multiprocessors: int,
    *,
    num_heads: int = 1,
) -> TileConfig:
    """The tile of a plain product, or of one for each head: the largest one of which most multiprocessors get one.

    Measured on an H200, weights [N, K], microseconds (in brackets the library's).
    8 rows: [5120, 2048] 16x32x128 s5 9.1 (8.5); [2048, 4096] 16x16x256 s8 9.3 (98); [6144, 4096] 16x64x128 17.0 (18.3);
    [4096, 4096] 16x32x128 s5 12.1 (21.5); [151936, 2048] 16x64x128 146 (162).
    Up to 8 rows, behind a norm of 1.3 us, with operands swapped: 8x16x256 w1 s4, in brackets the tiles above: [5120,
    2048] 8.0 (9.5), [2048, 4096] 10.4 (10.1), [3648, 2048] 7.0 (7.6), [2048, 2048] 6.6 (6.7), [2048, 2816] 8.0 (7.9),
    [6144, 4096] 15.5 (17.0), [4096, 4096] 11.7 (12.8). 8x64x256 w4 s4, a quarter of the programs: 8.3, 10.0, 7.1, 6.5,
    7.8, 15.5, 11.8. From the L2 cache they take 6.6, 10.2, 6.4, 6.4, 7.9, 13.4, 10.3: 16 entries of K wait for the 16
    before them, whose sum takes 33 cycles.
    64 rows: [5120, 2048] 64x64x128 9.2 (9.4); [2048, 4096] 64x32x128 s6 10.8 (9.6); [4096, 4096] 64x32x128 s6 13.0
    (13.0); [151936, 2048] 64x128x64 s5 160 (171).
    """
    if dtype == torch.float32:
        return _fp32_tile(num_rows, 1)
    roomy = generation in _LARGE_SHARED_MEMORY
    enough = 0.6 * multiprocessors

    def programs(block_m: int, block_n: int) -> int:
        return cdiv(num_rows, block_m) * cdiv(num_columns, block_n) * num_heads

    if roomy and num_rows <= 8 and num_heads == 1 and programs(8, 16) <= 4 * multiprocessors:
        # Where there is one warp a multiprocessor or less, four warps of a few multiprocessors read as fast.
        four = programs(8, 16) <= multiprocessors and programs(8, 64) >= 32
        return TileConfig(8, 64, 256, 4, 4) if four else TileConfig(8, 16, 256, 1, 4)
    if num_rows <= 64:
        block_m = 16 if num_rows <= 16 else 64  # 32 rows by 32-row tiles: 12.2 us for [5120, 2048], by 64-row ones 9.4
        if not roomy:
            return TileConfig(block_m, next((n for n in (64, 32) if programs(block_m, n) >= enough), 16), 64, 4, 3)
        if block_m > 16 and programs(block_m, 128) >= 8 * enough:
            return TileConfig(block_m, 128, 64, 4, 5)
        if programs(block_m, 64) >= enough:
            return TileConfig(block_m, 64, 128, 4, 4)
        if programs(block_m, 32) >= enough or block_m > 16:
            return TileConfig(block_m, 32, 128, 4, 5 if block_m == 16 else 6)
        return TileConfig(16, 16, 256, 4, 8)
    if roomy and programs(128, 256) >= enough:
        return TileConfig(128, 256, 64, 8, 3)
    if programs(128, 128) >= enough:
        return TileConfig(128, 128, 64 if roomy else 32, 8, 3)
    for block_n in (64, 32):
        if programs(64, block_n) >= enough:
            return TileConfig(64, block_n, 128 if roomy else 64, 4, 4 if roomy else 3)
    # Few columns, as the router's: its time is that of one program, whatever the tile.
    return TileConfig(16, 16, 256 if roomy else 128, 4, 4)
