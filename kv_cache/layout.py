"""Bytes and shape of one block of the KV cache: the only place that computes them.

Knows layers, heads, widths and dtypes; knows nothing of devices, requests or which block belongs to whom.

GQA keeps keys and values of every position, MLA the latent and the shared rotary key side by side:
    GQA: [N, 2, P, G, C]   keys are [:, 0], values [:, 1]
    MLA: [N, P, L + R]     latent first, rotary key last
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's block of `block_size` positions, the same in all `num_layers` layers."""

    num_layers: int
    block_size: int
    position_shape: tuple[int, ...]  # GQA: (G, C); MLA: (L + R,)
    parts: int  # GQA: 2, keys and values; MLA: 1
    dtype: torch.dtype

    @classmethod
    def gqa(cls, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayout:
        return cls(num_layers, block_size, (num_kv_heads, head_dim), 2, dtype)

    @classmethod
    def mla(cls, num_layers: int, block_size: int, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> KVLayout:
        return cls(num_layers, block_size, (latent_dim + rope_dim,), 1, dtype)

    def __post_init__(self) -> None:
        size = self.block_size
        if not 1 <= size <= 256 or size & (size - 1):
            raise ValueError(
                f"cache.block_size={size} must be a power of two from 1 to 256, so that tiles at fixed positions hold "
                "whole blocks; 16 is a good choice."
            )
        assert self.num_layers > 0 and all(extent > 0 for extent in self.position_shape), f"empty layout: {self}"

    def layer_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's tensor of `num_blocks` blocks."""
        if self.parts == 1:
            return (num_blocks, self.block_size, *self.position_shape)
        return (num_blocks, self.parts, self.block_size, *self.position_shape)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one position takes in all layers."""
        return self.num_layers * self.parts * math.prod(self.position_shape) * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all layers."""
        return self.bytes_per_token * self.block_size
