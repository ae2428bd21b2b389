"""Which kernel multiplies how many fp8 rows, and with which tile: rules from shapes, with what was measured.

Knows rows, slots and the sizes of weights; computes nothing. Whatever the tile, the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.checks import cdiv, next_power_of_2
from kernels.grouped_gemm_fp8_resident import ResidentTile
from kernels.grouped_gemm_fp8_specialized import SpecializedTile
from kernels.grouped_gemm_fp8_tma import ManyRowsTile
from kernels.quantize import GROUP, QuantizedBlocks
from kernels.tiles import CACHED_BYTES, MANY_ROWS, device_generation, num_multiprocessors

_RESIDENT_STEPS = 8
"""Rows of up to so many K steps: their weights stay in shared memory."""

_LONG_STEPS = 32
"""Rows of weights of so many K steps: where few programs read them, several steps' bytes of a row are asked for
together."""


@dataclass(frozen=True)
class FewRowsTile:
    """Rows x output columns of a program, warps, pipeline stages of `unroll` K steps each, which divides the steps;
    `tma`: the weights come as TMA tiles."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    unroll: int = 1
    tma: bool = True


Fp8Tile = FewRowsTile | ManyRowsTile | ResidentTile | SpecializedTile


def fp8_tile(x: Tensor, w: QuantizedBlocks, num_rows: int) -> Fp8Tile:
    """The tile of a product with w, from the mean number of rows of a slot.

    Measured on an H200, both products of a layer of DeepSeek-V3's shape (32 slots), us, by rows a slot: tiles of 16, 32
    rows, packed: 16: 366, 363, 370; 32: 464, 410, 370; 64: 744, 555, 413. Of 128 slots of Qwen3's: 4: 157, 175, 175;
    16: 184, 180, 183. Few programs want more stages, many fewer, that all are there at once. Second products, 6 (4) / 3
    stages: mixtral 1 token 36 / 53, 8 tokens 145 / 110; dsv3-ep8 36 / 32, 106 / 105; qwen3 8 tokens (26) / 23, 64 (57)
    / 51. First: dsv3-ep8 8 tokens, 4 / 3: 218 / 208; qwen3 8 tokens 45 / 47.
    Long rows of weights, 256 or 512 bytes of a row asked for together, layers of one token, stages x K steps: mixtral's
    second product 6 x 1 98.5, 3 x 2 100.6, 4 x 2 96.2, 3 x 4 95.3, with 3 x 2 of its first too 93.6 (before it 32
    columns, 3 x 1); dsv3-ep8's first 6 x 1 96.3, 3 x 2 93.9, 3 x 4 95.8; of 16 steps, qwen3's first, 6 x 1 21.7, 3 x 2
    22.1. 16 rows a slot, mixtral's second, 3 x 1 364.7, 2 x 2 359.2; 64 rows 425, 519.
    From 512 rows on three groups beside tiles of 64: qwen3 529 + 317 and 547 + 352 (512), mixtral 2204 + 1036 and 2547
    + 1189 (1024); 256 rows 380 and 303. Weights that stay, qwen3's second product: layers of 64 rows a slot 234.3 /
    224.9, of 32 194.7 / 193.2, of 256 558 / 522 (176 / 134 alone).
    """
    num_slots, parts, _, _ = w.scales.shape
    width, rows = w.values.shape[-1], cdiv(num_rows, num_slots)
    if device_generation(x) < 9 or width % 16:
        return FewRowsTile(min(64, max(16, next_power_of_2(rows))), 64 // parts, 4, 3, tma=False)
    steps = cdiv(width, GROUP)
    if rows >= 64 and parts == 1 and steps <= _RESIDENT_STEPS and device_generation(x) == 9:
        return ResidentTile(_RESIDENT_STEPS, 3)
    if rows >= MANY_ROWS and device_generation(x) == 9:
        return SpecializedTile(3, 5)
    if rows > 16:
        return ManyRowsTile(64, 128 // parts, 4, 3)
    if rows > 8:
        several = parts == 1 and steps >= _LONG_STEPS and steps % 2 == 0
        return FewRowsTile(32, 128 // parts, 4, 2, unroll=2) if several else FewRowsTile(32, 128 // parts, 4, 3)
    few = num_rows <= 16
    block_n = 64 if few else 128 // parts
    shared, multiprocessors = 227 << 10, num_multiprocessors(x.device)

    def at_once(columns: int, stages: int) -> bool:
        """Whether shared memory holds a tile for every program of so many columns."""
        programs = min(num_rows, num_slots) * cdiv(w.values.shape[1] // parts, columns)
        return programs <= shared // (stages * (parts * columns + 16) * GROUP) * multiprocessors

    if few and steps >= _LONG_STEPS and steps % 4 == 0 and at_once(block_n, 12 if parts == 1 else 3):
        return FewRowsTile(16, block_n, 4, 3, unroll=4 // parts)
    if at_once(block_n, 6):
        return FewRowsTile(16, block_n, 4, 6 if steps >= 16 else 4)
    return FewRowsTile(16, block_n, 4, 4 if parts == 2 and steps <= 16 else 3)


def most_rows_apart(num_rows: int, num_slots: int, slot_bytes: int) -> int:
    """The most rows, of up to so many, whose first product is packed before and quantised after it: all, or those too
    few to be quantised where they are made (grouped_gemm_fp8_swiglu.py). `slot_bytes`: of its weights of one slot.

    Measured on an H200, whole layers, us, apart / in one: qwen3 (second products whose weights stay) 64 rows a slot 225
    / 240, 128 rows 325 / 324, 256 rows 522 / 484, 1024 rows 1820 / 1623; dsv3-ep8 256 rows 1064 / 1024, 1024 rows 3425
    / 3150, 4096 rows 13016 / 12741; mixtral 256 rows 1011 / 950, 1024 rows 3108 / 3075, 4096 rows 12208 / 13399: 1024
    rows at a time go through the weights, which no cache keeps for the next ones. By two groups that share 256 rows of
    weights second products lose: dsv3-ep8 3675, mixtral 3570.
    """
    least, most = 192 * num_slots, num_rows if slot_bytes <= 2 * CACHED_BYTES else 1024 * num_slots
    return least - 1 if least <= num_rows <= most else num_rows


def quantizes_swiglu(x: Tensor, w: QuantizedBlocks, num_rows: int) -> bool:
    """Whether the first product of so many rows is quantised where it is made: on compute capability 9."""
    apart = most_rows_apart(num_rows, w.scales.shape[0], w.values.shape[1] * w.values.shape[2])
    return apart < num_rows and device_generation(x) == 9 and w.values.shape[-1] % 16 == 0
