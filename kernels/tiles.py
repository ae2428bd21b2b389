"""Tile sizes of the matrix kernels, chosen from what the host knows: rows, dtype and the kind of GPU.

Knows sizes; launches nothing. No choice here changes a result: the sum over K runs in ascending order for every tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import next_power_of_2

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


def device_generation(x: Tensor) -> int:
    """The major compute capability of x's GPU; 0 on a CPU, where the interpreter runs and any tile will do."""
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0


def matrix_tile(rows: int, dtype: torch.dtype, generation: int, *, num_products: int = 1) -> TileConfig:
    """The tile for about `rows` rows per weight matrix, of which a program multiplies `num_products` at once.

    Few rows: the time goes into reading weights, so the tile is flat and deep. Many rows: it goes into the products, so
    the tile is large. Chosen to fit shared memory, stages x (block_m + num_products x block_n) x block_k x 2 bytes; not
    yet tuned on a GPU.
    """
    roomy = generation in _LARGE_SHARED_MEMORY
    if dtype == torch.float32:
        return TileConfig(min(64, max(16, next_power_of_2(rows))), 64 // num_products, 32, 4, 2)
    if rows <= 64:
        return TileConfig(max(16, next_power_of_2(rows)), 128 // num_products, 64, 4, 4 if roomy else 3)
    if roomy:
        return TileConfig(128, 256 // num_products, 64, 8, 3)
    return TileConfig(128, 128 // num_products, 32, 8, 3)
