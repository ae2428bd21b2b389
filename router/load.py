"""How many rows each expert of each layer received, counted on the device, and how even that is.

Knows layers and logical experts; knows nothing of ranks or requests. The router adds a layer's rows where it has just
chosen their experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LoadCounter:
    """Counts for every layer of the network by its index (a layer without experts stays at zero)."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device | str) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._counts_LE = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)

    def of_layer(self, layer_index: int) -> Tensor:
        """The live counts of one layer, int64 [E] on the device: what the router adds to."""
        return self._counts_LE[layer_index]

    def snapshot(self) -> Tensor:
        """Counts so far, int64 [layers, E] on the CPU. Waits for the device."""
        return self._counts_LE.cpu().clone()  # on the CPU `cpu` alone would be the live counts

    def reset(self) -> None:
        """Back to zero, in place: captured graphs go on adding to the same counts."""
        self._counts_LE.zero_()


def balancedness(counts_LX: Tensor) -> float:
    """Mean over max of the counts of a layer, averaged over the layers that saw any row; 1 is even, 1/X is one for all.

    X may be experts, slots or ranks. Without any row it is 1: nothing was uneven.
    """
    counts_LX = counts_LX.to(torch.float64)
    seen_LX = counts_LX[counts_LX.sum(dim=1) > 0]
    if seen_LX.shape[0] == 0:
        return 1.0
    return float((seen_LX.mean(dim=1) / seen_LX.max(dim=1).values).mean())
