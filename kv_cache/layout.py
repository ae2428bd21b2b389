"""Bytes and shape of one block of the KV cache: the only place that computes them.

Knows layers, heads, widths and dtypes; knows nothing of devices, requests or which block belongs to whom.

GQA keeps keys and values of every position, MLA the latent and the shared rotary key side by side:
    GQA: [N, 2, P, G, C]   keys are [:, 0], values [:, 1]
    MLA: [N, P, L + R]     latent first, rotary key last
A cache that is quantised by position has its scales in the block, behind its values, so that whoever moves a block
moves both: a layer is then bytes, [N, block], and `values` and `scales` are views of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Quantization = Literal["none", "fp8", "fp8-layer", "int4"]
"""fp8: e4m3, a scale for each position and head. fp8-layer: e4m3, scales of the whole layer, kept outside the cache.
int4: two entries of a head in a byte (c low, c + C / 2 high), a step and a least value for each position and head."""

_SCALE_NUMBERS = {"none": 0, "fp8": 1, "fp8-layer": 0, "int4": 2}
_ALIGNMENT = 16  # bytes: what a kernel loads at once begins at a multiple of it


class LayerCache(NamedTuple):
    """One layer's tensor as attention sees it: views of the entries, and of the scales where a block holds any."""

    values: Tensor
    """GQA [N, 2, P, G, C]; MLA [N, P, L + R]."""
    scales: Tensor | None = None
    """fp32. GQA [N, 2, P, G]; MLA [N, P, 2]."""


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's block of `block_size` positions, the same in all `num_layers` layers."""

    num_layers: int
    block_size: int
    position_shape: tuple[int, ...]  # of the entries as stored. GQA: (G, C); MLA: (L + R,)
    parts: int  # GQA: 2, keys and values; MLA: 1
    dtype: torch.dtype  # of the entries as stored
    quantization: Quantization = "none"
    scale_groups: int = 0  # GQA: G; MLA: 2, the latent's and the rotary key's

    @classmethod
    def gqa(
        cls,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        quantization: Quantization = "none",
    ) -> KVLayout:
        """`dtype` is the model's, which an unquantised cache has too."""
        if quantization == "int4" and head_dim % 2:
            raise ValueError(
                f"cache.dtype=int4 packs two entries of a head in a byte, and this model's head_dim={head_dim} is odd; "
                "use cache.dtype=fp8 or auto."
            )
        stored = head_dim // 2 if quantization == "int4" else head_dim
        shape = (num_kv_heads, stored)
        return cls(num_layers, block_size, shape, 2, _stored_dtype(dtype, quantization), quantization, num_kv_heads)

    @classmethod
    def mla(
        cls,
        num_layers: int,
        block_size: int,
        latent_dim: int,
        rope_dim: int,
        dtype: torch.dtype,
        quantization: Quantization = "none",
    ) -> KVLayout:
        """`dtype` is the model's, which an unquantised cache has too."""
        if quantization == "int4":
            raise ValueError(
                "cache.dtype=int4 is not offered for latent attention, whose latents are compressed already; "
                "use cache.dtype=fp8 or auto."
            )
        shape = (latent_dim + rope_dim,)
        return cls(num_layers, block_size, shape, 1, _stored_dtype(dtype, quantization), quantization, 2)

    def __post_init__(self) -> None:
        size = self.block_size
        if not 1 <= size <= 256 or size & (size - 1):
            raise ValueError(
                f"cache.block_size={size} must be a power of two from 1 to 256, so that tiles at fixed positions hold "
                "whole blocks; 16 is a good choice."
            )
        assert self.num_layers > 0 and all(extent > 0 for extent in self.position_shape), f"empty layout: {self}"

    @property
    def has_scales(self) -> bool:
        """Whether a block holds scales behind its values."""
        return _SCALE_NUMBERS[self.quantization] > 0

    @property
    def layer_dtype(self) -> torch.dtype:
        """Of one layer's tensor."""
        return torch.uint8 if self.has_scales else self.dtype

    def layer_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's tensor of `num_blocks` blocks."""
        if self.has_scales:
            return (num_blocks, self._layer_block_bytes)
        return (num_blocks, *self._block_shape)

    def values(self, layer: Tensor) -> Tensor:
        """The entries of one layer's tensor: [N, 2, P, G, C] or [N, P, L + R], a view of it."""
        if not self.has_scales:
            return layer
        return layer[:, : self._value_bytes].view(self.dtype).unflatten(1, self._block_shape)

    def scales(self, layer: Tensor) -> Tensor | None:
        """The scales of one layer's tensor, fp32: GQA [N, 2, P, G] or, in int4, [N, 2, P, G, 2] (step, least value);
        MLA [N, P, 2] (latent, rotary key). A view of it; None where the block holds none."""
        if not self.has_scales:
            return None
        scales = layer[:, self._scales_start : self._scales_start + self._scale_bytes].view(torch.float32)
        return scales.unflatten(1, self._scale_shape)

    def view(self, layer: Tensor) -> LayerCache:
        """`values` and `scales` of one layer's tensor."""
        return LayerCache(self.values(layer), self.scales(layer))

    @property
    def _block_shape(self) -> tuple[int, ...]:
        return (*((self.parts,) if self.parts > 1 else ()), self.block_size, *self.position_shape)

    @property
    def _scale_shape(self) -> tuple[int, ...]:
        numbers = _SCALE_NUMBERS[self.quantization]
        parts = (self.parts,) if self.parts > 1 else ()
        return (*parts, self.block_size, self.scale_groups, *((numbers,) if numbers > 1 else ()))

    @property
    def _value_bytes(self) -> int:
        """Of one layer's block."""
        return math.prod(self._block_shape) * self.dtype.itemsize

    @property
    def _scales_start(self) -> int:
        return -(-self._value_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def _scale_bytes(self) -> int:
        return 4 * math.prod(self._scale_shape)

    @property
    def _layer_block_bytes(self) -> int:
        if not self.has_scales:
            return self._value_bytes
        return -(-(self._scales_start + self._scale_bytes) // _ALIGNMENT) * _ALIGNMENT

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one position takes in all layers, its share of the block's padding included."""
        return self.bytes_per_block / self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all layers."""
        return self.num_layers * self._layer_block_bytes


def _stored_dtype(dtype: torch.dtype, quantization: Quantization) -> torch.dtype:
    return {"none": dtype, "int4": torch.uint8}.get(quantization, torch.float8_e4m3fn)
