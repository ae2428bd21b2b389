"""How many rows each expert of each layer received, counted on the device, and how even that is.

Knows layers, slots and logical experts; knows nothing of ranks or requests. A layer's dispatch has counted already: the
offsets of its slots are running sums of rows. They are noted, and added to the sums of all steps at the end of each, in
one launch for all layers; what they say of a slot is worked out when somebody asks, or when its expert leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.add_offsets import add_offsets


class LoadCounter:
    """Counts for every layer of the network by its index (a layer without experts stays at zero).

    `experts_of_slots`: for each layer the logical expert of each slot here, None for an empty one; as many slots in
    every layer. Left out, slot e holds expert e.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        device: torch.device | str,
        experts_of_slots: Mapping[int, Sequence[int | None]] | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        if experts_of_slots is None:
            experts_of_slots = dict.fromkeys(range(num_layers), range(num_experts))
        self.experts_of_slots = {layer: tuple(experts) for layer, experts in experts_of_slots.items()}
        numbers = {len(experts) for experts in self.experts_of_slots.values()}
        assert len(numbers) == 1, f"layers with {sorted(numbers)} slots; every layer has as many"
        # Row p: the sums of the offsets of the layer that came p-th in each step.
        self._offsets_PS1 = torch.zeros((num_layers, numbers.pop() + 1), dtype=torch.int64, device=device)
        self._layers: list[int] = []
        self._of_this_step: list[tuple[int, Tensor]] = []
        # What slots counted for experts that have left them.
        self._earlier_LE = torch.zeros((num_layers, num_experts), dtype=torch.int64)

    def start_step(self) -> None:
        """Forget what was noted of a step that ended in a fault."""
        self._of_this_step = []

    def add(self, layer_index: int, offsets_S1: Tensor) -> None:
        """Note what one layer dispatched in this step: int32 [S + 1], slot s has rows offsets[s] to offsets[s + 1]."""
        self._of_this_step.append((layer_index, offsets_S1))

    def end_step(self) -> None:
        """Add up what was noted. No host sync. Every step goes through the same layers, in the same order."""
        layers, of_this_step = [layer for layer, _ in self._of_this_step], self._of_this_step
        self._of_this_step = []
        if not layers:
            return
        assert not self._layers or layers == self._layers, f"layers {layers} after steps of layers {self._layers}"
        self._layers = layers
        add_offsets(self._offsets_PS1, [offsets_S1 for _, offsets_S1 in of_this_step])

    def snapshot(self) -> Tensor:
        """Counts so far, int64 [layers, E] on the CPU. Waits for the device."""
        counts_PS = self._offsets_PS1.cpu().diff(dim=1)
        counts_LE = self._earlier_LE.clone()
        for row, layer in enumerate(self._layers):
            self._add_slots(counts_LE, layer, counts_PS[row])
        return counts_LE

    def place(self, layer: int, experts: Sequence[int | None]) -> None:
        """The slots of a layer hold other experts from now on. In place: captured graphs go on adding to the same sums.
        Waits for the device."""
        assert len(experts) == len(self.experts_of_slots[layer]), f"layer {layer}: the number of slots never changes"
        if layer in self._layers:
            sums_S1 = self._offsets_PS1[self._layers.index(layer)]
            self._add_slots(self._earlier_LE, layer, sums_S1.cpu().diff())
            sums_S1.zero_()
        self.experts_of_slots[layer] = tuple(experts)

    def _add_slots(self, counts_LE: Tensor, layer: int, counts_S: Tensor) -> None:
        """An empty slot has no rows."""
        held = [(slot, expert) for slot, expert in enumerate(self.experts_of_slots[layer]) if expert is not None]
        if held:  # nothing where there are more ranks than experts
            slots, experts = (torch.tensor(each, dtype=torch.int64) for each in zip(*held))
            counts_LE[layer].index_add_(0, experts, counts_S[slots])

    def reset(self) -> None:
        """Back to zero, in place: captured graphs go on adding to the same sums."""
        self._offsets_PS1.zero_()
        self._earlier_LE.zero_()


def balancedness(counts_LX: Tensor) -> float:
    """Mean over max of the counts of a layer, averaged over the layers that saw any row; 1 is even, 1/X is one for all.

    X may be experts, slots or ranks. Without any row it is 1: nothing was uneven.
    """
    counts_LX = counts_LX.to(torch.float64)
    seen_LX = counts_LX[counts_LX.sum(dim=1) > 0]
    if seen_LX.shape[0] == 0:
        return 1.0
    return float((seen_LX.mean(dim=1) / seen_LX.max(dim=1).values).mean())
