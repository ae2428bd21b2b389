"""Tables of layers lie so that one kernel serves them all. What they hold is tested with slot_places.py's kernels."""

from __future__ import annotations

import torch

from expert_parallel.device_slots import DeviceSlots


def test_every_layer_s_tables_lie_on_16_bytes() -> None:
    """With sizes of which none does by itself; a kernel is compiled for each way its pointers are aligned. Layers have
    one to three places: none reaches into another's."""
    layers, slots, numbers = range(5), 6, [3, 1, 2, 3, 2]
    held = {layer: [torch.zeros(numbers[layer], 8)] for layer in layers}
    assert DeviceSlots.serves(slots, held) and not DeviceSlots.serves(slots, held | {5: [torch.zeros(0, 8)]})
    on_device = DeviceSlots(held, {layer: [torch.zeros(slots, 8)] for layer in layers}, slots)
    assert on_device.slots() == {layer: [None] * numbers[layer] for layer in layers}
    assert [on_device.num_rounds(layer, 5) for layer in layers] == [2, 5, 3, 2, 3]
    for layer in layers:
        on_device.put(layer, [layer, 5, None][: numbers[layer]], range(slots), range(slots))
        tables = on_device._layers[layer].places
        assert all(each.data_ptr() % 16 == 0 for each in (tables.numbers, tables.shares_S1, tables.counts))
        assert tables.shares_S1.tolist() == [0.0] * slots + [1.0]
    assert on_device.slots() == {layer: [layer, 5, None][: numbers[layer]] for layer in layers}
    assert on_device.copy_figures().num_copies == 0
