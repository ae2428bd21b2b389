"""The tensors behind the KV cache: one per layer, allocated once. Knows a layout and a device; nothing of owners."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kv_cache.layout import KVLayout, LayerCache

logger = logging.getLogger(__name__)


class KVPool:
    """`num_blocks` blocks in every layer. `layers[i]` is layer i's tensor, shaped by the layout; `caches[i]` its views.
    Scales of a whole layer are the pool's own too: views stay good as long as the pool lives.

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
        self._told = 0
        self.saturated_L: Tensor | None = None
        if layout.quantization == "fp8-layer":
            self.saturated_L = torch.zeros(layout.num_layers, dtype=torch.int64, device=device)
        self.caches: tuple[LayerCache, ...] = tuple(self._view(index) for index in range(layout.num_layers))

    def _view(self, index: int) -> LayerCache:
        layout, layer = self.layout, self.layers[index]
        scales = (
            layout.scales(layer) if layout.has_scales else layout.given_scales(index, self.num_blocks, layer.device)
        )
        saturated_1 = None if self.saturated_L is None else self.saturated_L[index : index + 1]
        return LayerCache(layout.values(layer), layout.quantization, scales, saturated_1)

    def count_saturated(self) -> int:
        """How many entries the scales of their layers did not reach so far; waits for the device. A warning says where
        whenever there are new ones."""
        counts = [] if self.saturated_L is None else self.saturated_L.tolist()
        total = sum(counts)
        if total > self._told:
            self._told = total
            worst = max(range(len(counts)), key=counts.__getitem__)
            logger.warning(
                "%d entries of keys and values lay beyond %g times the scale of their layer and were cut to it, most "
                "of them (%d) in layer %d; use larger scales (cache.scales), or cache.dtype=fp8, which needs none.",
                *(total, torch.finfo(self.layout.dtype).max, counts[worst], worst),
            )
        return total

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block
