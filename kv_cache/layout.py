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
int4: two entries of a head in a byte (c low, c + C / 2 high), for each position, head and half a step and a middle."""

_NUMBERS_AND_DTYPE = {"fp8": (1, torch.float32), "int4": (4, torch.bfloat16)}  # of the scales of a position's head
_ALIGNMENT = 16  # bytes: what a kernel loads at once begins at a multiple of it


class LayerScales(NamedTuple):
    """Scales that hold for a whole layer in e4m3: of keys and of values; the latents of MLA take the keys'."""

    key: float
    value: float


class LayerCache(NamedTuple):
    """One layer's tensor as attention sees it: views of the entries, and of the scales where it has any."""

    values: Tensor
    """GQA [N, 2, P, G, C]; MLA [N, P, L + R]."""
    quantization: Quantization = "none"
    scales: Tensor | None = None
    """fp8, fp8-layer: fp32, GQA [N, 2, P, G], MLA [N, P, 2]. int4: bfloat16 [N, 2, P, G, 4]."""
    saturated_1: Tensor | None = None
    """fp8-layer: int64 [1], how many entries lay beyond what the layer's scales reach."""


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
    layer_scales: tuple[LayerScales, ...] = ()  # fp8-layer: of each layer

    @classmethod
    def gqa(
        cls,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        quantization: Quantization = "none",
        layer_scales: tuple[LayerScales, ...] = (),
    ) -> KVLayout:
        """`dtype` is the model's, which an unquantised cache has too; `layer_scales`: of fp8-layer, one a layer."""
        if quantization == "int4" and head_dim % 2:
            raise ValueError(
                f"cache.dtype=int4 packs two entries of a head in a byte, and this model's head_dim={head_dim} is odd; "
                "use cache.dtype=fp8 or auto."
            )
        stored = head_dim // 2 if quantization == "int4" else head_dim
        shape, stored_dtype = (num_kv_heads, stored), _stored_dtype(dtype, quantization)
        return cls(num_layers, block_size, shape, 2, stored_dtype, quantization, num_kv_heads, layer_scales)

    @classmethod
    def mla(
        cls,
        num_layers: int,
        block_size: int,
        latent_dim: int,
        rope_dim: int,
        dtype: torch.dtype,
        quantization: Quantization = "none",
        layer_scales: tuple[LayerScales, ...] = (),
    ) -> KVLayout:
        """`dtype` is the model's, which an unquantised cache has too; `layer_scales`: of fp8-layer, one a layer."""
        if quantization == "int4":
            raise ValueError(
                "cache.dtype=int4 is not offered for latent attention, whose latents are compressed already; "
                "use cache.dtype=fp8 or auto."
            )
        shape, stored_dtype = (latent_dim + rope_dim,), _stored_dtype(dtype, quantization)
        return cls(num_layers, block_size, shape, 1, stored_dtype, quantization, 2, layer_scales)

    def __post_init__(self) -> None:
        size = self.block_size
        if not 1 <= size <= 256 or size & (size - 1):
            raise ValueError(
                f"cache.block_size={size} must be a power of two from 1 to 256, so that tiles at fixed positions hold "
                "whole blocks; 16 is a good choice."
            )
        assert self.num_layers > 0 and all(extent > 0 for extent in self.position_shape), f"empty layout: {self}"
        wanted = self.num_layers if self.quantization == "fp8-layer" else 0
        assert len(self.layer_scales) == wanted, f"{len(self.layer_scales)} layers have scales, wanted {wanted}"

    @property
    def has_scales(self) -> bool:
        """Whether a block holds scales behind its values."""
        return self.quantization in _NUMBERS_AND_DTYPE

    @property
    def salt(self) -> tuple[str, ...]:
        """What of this the content of a block depends on, for the keys of a prefix cache."""
        return (self.quantization, *(f"{number:.9g}" for scales in self.layer_scales for number in scales))

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
        """The scales in one layer's tensor: fp32, GQA [N, 2, P, G] and MLA [N, P, 2] (latent, rotary key), or in int4
        bfloat16 [N, 2, P, G, 4] (step and middle of each half). A view of it; None where the block holds none."""
        if not self.has_scales:
            return None
        _, dtype = _NUMBERS_AND_DTYPE[self.quantization]
        scales = layer[:, self._scales_start : self._scales_start + self._scale_bytes].view(dtype)
        return scales.unflatten(1, self._scale_shape)

    def given_scales(self, index: int, num_blocks: int, device: torch.device | str) -> Tensor | None:
        """The scales of the whole layer `index` as if a block held them: fp32 GQA [N, 2, P, G], MLA [N, P, 2], all
        positions one number in memory. None where there are none."""
        if self.quantization != "fp8-layer":
            return None
        key, value = self.layer_scales[index]
        if self.parts == 1:
            return torch.tensor((key, key), dtype=torch.float32, device=device).expand(num_blocks, self.block_size, 2)
        scales_2 = torch.tensor((key, value), dtype=torch.float32, device=device)
        return scales_2.view(1, 2, 1, 1).expand(num_blocks, 2, self.block_size, self.scale_groups)

    @property
    def _block_shape(self) -> tuple[int, ...]:
        return (*((self.parts,) if self.parts > 1 else ()), self.block_size, *self.position_shape)

    @property
    def _scale_shape(self) -> tuple[int, ...]:
        numbers, _ = _NUMBERS_AND_DTYPE[self.quantization]
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
        _, dtype = _NUMBERS_AND_DTYPE[self.quantization]
        return dtype.itemsize * math.prod(self._scale_shape)

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
