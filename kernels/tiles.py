"""Tile sizes of the matrix kernels, chosen from what the host knows: rows, dtype and the kind of GPU.

Knows sizes; launches nothing. No choice here changes a result: the sum over K runs in ascending order for every tile.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """One matrix kernel's tile: rows x columns of the output per program, the step along K, warps and pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
