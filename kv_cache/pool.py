"""The tensors behind the KV cache: one per layer, allocated once. Knows a layout and a device; nothing of owners."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_cache.layout import KVLayout, LayerCache


class KVPool:
    """`num_blocks` blocks in every layer. `layers[i]` is layer i's tensor, shaped by the layout; `caches[i]` its views.

    Zeros, not `empty`: on the CPU zero pages take memory only once they are written.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str) -> None:
        assert num_blocks > 0, "a pool without blocks holds nothing"
        self.layout = layout
        self.num_blocks = num_blocks
        shape = layout.layer_shape(num_blocks)
        self.layers: tuple[Tensor, ...] = tuple(
            torch.zeros(shape, dtype=layout.layer_dtype, device=device) for _ in range(layout.num_layers)
        )
        self.caches: tuple[LayerCache, ...] = tuple(layout.view(layer) for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block
