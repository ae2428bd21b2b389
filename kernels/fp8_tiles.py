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
    / 51. First: dsv3-ep8 8 tokens, 4 / 3: 218 / 208; qwen3 8 tokens 45 / 47. Halves of a tile, where all are there at
    once: of mixtral's first product, 1 token, 448 programs of 64 columns are 3 or 4 a multiprocessor, 896 of 32 6 or 7;
    a layer 100.5 / 98.6. Programs that have many steps and a multiprocessor of their own ask for 512 bytes of a row of
    weights together, for 256 where there are two: layers of one token, mixtral's second product, stages x K steps: 6 x
    1 96.3, 3 x 2 98.4, 4 x 2 94.0, 6 x 2 94.2, 3 x 4 93.2; dsv3-ep8's first, 6 x 1 93.6, 3 x 2 91.6.
    From 512 rows on three groups beside tiles of 64: qwen3 529 + 317 and 547 + 352 (512), mixtral 2204 + 1036 and 2547
    + 1189 (1024); 256 rows 380 and 303. Weights that stay, qwen3's second product: layers of 64 rows a slot 234.3 /
    224.9, of 256 572 / 535 (176 / 142 alone).
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
        return FewRowsTile(32, 128 // parts, 4, 3)
    few = num_rows <= 16
    block_n = 64 if few else 128 // parts
    shared, multiprocessors = 227 << 10, num_multiprocessors(x.device)

    def at_once(columns: int, stages: int) -> bool:
        """Whether shared memory holds a tile for every program of so many columns."""
        programs = min(num_rows, num_slots) * cdiv(w.values.shape[1] // parts, columns)
        return programs <= shared // (stages * (parts * columns + 16) * GROUP) * multiprocessors

    if steps >= 32 and steps % 4 == 0 and at_once(block_n, 12):
        return FewRowsTile(16, block_n, 4, 3, unroll=4)
    if steps >= 32 and steps % 2 == 0 and parts == 2 and at_once(block_n, 6):
        return FewRowsTile(16, block_n, 4, 3, unroll=2)
    if at_once(block_n, 6):
        return FewRowsTile(16, block_n, 4, 6 if steps >= 16 else 4)
    if few and parts == 2 and at_once(32, 3):
        return FewRowsTile(16, 32, 4, 3)
    return FewRowsTile(16, block_n, 4, 4 if parts == 2 and steps <= 16 else 3)


def quantizes_swiglu(x: Tensor, w: QuantizedBlocks, num_rows: int) -> bool:
    """Whether the first product of so many rows is quantised where it is made (grouped_gemm_fp8_swiglu.py).

    Measured on an H200, whole layers of qwen3 with weights that stay behind it, us, product after packing and before
    quantising / all in one: 64 rows a slot 225 / 240, 256 rows 535 / 506, 1024 rows 1847 / 1662.
    """
    num_slots, slot_bytes = w.scales.shape[0], w.values.shape[1] * w.values.shape[2]
    many = cdiv(num_rows, num_slots) >= 192 and slot_bytes <= CACHED_BYTES
    return many and device_generation(x) == 9 and w.values.shape[-1] % 16 == 0
