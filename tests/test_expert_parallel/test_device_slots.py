"""Tables of layers lie so that one kernel serves them all. What they hold is tested with slot_places.py's kernels."""

from __future__ import annotations

import torch

from expert_parallel.device_slots import DeviceSlots


def test_every_layer_s_tables_lie_on_16_bytes() -> None:
    """With sizes of which none does by itself; a kernel is compiled for each way its pointers are aligned."""
    layers, slots, places = range(5), 6, 3
    held = {layer: [torch.zeros(places, 8)] for layer in layers}
    on_device = DeviceSlots(held, {layer: [torch.zeros(slots, 8)] for layer in layers}, slots)
    assert on_device.slots() == {layer: [None] * places for layer in layers}
    for layer in layers:
        on_device.put(layer, [2, layer, None], range(slots), range(slots))
        tables = on_device._layers[layer].places
        assert all(each.data_ptr() % 16 == 0 for each in (tables.numbers, tables.shares_S1, tables.counts))
        assert tables.shares_S1.tolist() == [0.0] * slots + [1.0]
    assert on_device.slots() == {layer: [2, layer, None] for layer in layers}
    assert on_device.copy_figures().num_copies == 0
