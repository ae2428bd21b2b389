"""Experts whose weights lie in host memory, behind the same call as those on the GPU: rows in, rows out, the same bits.

Knows rows, slots and which copies to ask for; the seams it stands on are slot_buffer.py (tags), chunk_stream.py,
held_slots.py and copy_engine.py of expert_parallel/. Of each layer some slots are held on the device; the others come

    in the stream way   all of them, chunk by chunk through two buffers: nothing is asked of the routing, the host
                        waits for nothing, and the copies never pause
    in the cache way    those that have rows: the host reads the offsets, lets the missing ones take the place of held
                        ones that have none, and, where that does not do, passes the rest through the buffers; then it
                        fetches what the next layer will likely ask for. Products of slots that are there start at once
    where kernels can   the same, decided and copied on the device (device_slots.py): the host waits for nothing
    read host memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expert_parallel.chunk_stream import ChunkStream
from expert_parallel.copy_engine import CopyEngine, CopyFigures
from expert_parallel.device_slots import DeviceSlots
from expert_parallel.dispatcher import ExpertInput
from expert_parallel.held_slots import HeldSlots, SlotFigures
from expert_parallel.offload_figures import OffloadFigures
from expert_parallel.offload_plan import OffloadPlan
from expert_parallel.slot_buffer import HostSource, SlotBuffer
from kernels.quantize import FP8
from moe.model.host_experts import HostExperts
from moe.model.slot_products import Fp8Products, PlainProducts, SlotProducts
from router.gate import Router

BundleShapes = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shape, without the slot, and dtype of each tensor of a bundle: w13, w2, and in fp8 the scales of both."""


class Offload:
    """The experts of a network that live in host memory, and what of them is on the device."""

    def __init__(
        self,
        plan: OffloadPlan,
        layers: Sequence[int],
        bundle: BundleShapes,
        host: HostExperts,
        engine: CopyEngine,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.host = host
        self.engine = engine
        self.device = device
        self.width = bundle[0][0][0] // 2
        self.fp8 = bundle[0][1] == FP8

        def buffer(num_places: int) -> SlotBuffer:
            tensors = [torch.empty((num_places, *shape), dtype=dtype, device=device) for shape, dtype in bundle]
            return SlotBuffer(tensors, host.source, engine)

        self.held = {
            layer: HeldSlots(layer, buffer(plan.held_in(at)), plan.num_slots) for at, layer in enumerate(layers)
        }
        self.staging = (buffer(plan.staging_slots), buffer(plan.staging_slots))
        self.stream = ChunkStream(layers, self.staging, lambda layer: self.held[layer].passing())
        self.experts = {layer: OffloadedExperts(self, self.held[layer]) for layer in layers}
        self.on_device: DeviceSlots | None = None  # the cache way's tables, where they are there
        tensors = {layer: held.buffer.tensors for layer, held in self.held.items()}
        serves = engine.kernels_read_host and DeviceSlots.serves(plan.num_slots, tensors)
        if serves and isinstance(host.source, HostSource):
            self.on_device = DeviceSlots(tensors, host.source.bundles, plan.num_slots)
        self._table: dict[int, Sequence[int | None]] = {}  # logical experts by slot

    @property
    def gpu_bytes(self) -> int:
        """Of the buffers on the device."""
        buffers = [*self.staging, *(held.buffer for held in self.held.values())]
        return sum(tensor.nbytes for buffer in buffers for tensor in buffer.tensors)

    @property
    def bundle_bytes(self) -> int:
        """Of one slot of a layer."""
        return sum(tensor[0].nbytes for tensor in self.staging[0].tensors)

    @property
    def host_bytes(self) -> int:
        """Of host memory, this rank's part."""
        return self.host.num_bytes

    def connect(self, gates: Mapping[int, Router], experts: Mapping[int, Sequence[int | None]]) -> None:
        """Each layer guesses what the next one asks for, by that one's gate on its own rows. `experts[layer][slot]`."""
        layers, self._table = list(self.held), dict(experts)
        for layer, following in pairwise(layers):
            self.experts[layer].following = Following(self.held[following], gates[following], experts[following])

    def fill(self) -> None:
        """Once the source is: the first slots of each layer are held to begin with."""
        at_a_time = self.plan.staging_slots
        for held in self.held.values():
            first = range(len(held.slots))
            for at in range(0, len(first), at_a_time):
                held.fetch(first[at : at + at_a_time], first[at : at + at_a_time])
        self.engine.drain()
        for layer in self.held:
            self._tell_device(layer)
        self.engine.reset()

    def place(self, layer: int, before: Sequence[int | None], experts: Sequence[int | None]) -> None:
        """Other experts are behind some of this layer's slots: `experts[slot]`, where it was `before[slot]`.

        Where bytes in host memory changed for it, `drain` came before.
        """
        self.settle()
        self.stream.give_up()
        self.host.source.place(layer, experts)
        self.held[layer].forget([slot for slot in range(len(experts)) if experts[slot] != before[slot]])
        self._table[layer] = experts
        self._tell_device(layer)
        for each in self.experts.values():
            if each.following is not None and each.following.held.layer == layer:
                each.following.place(experts)

    def settle(self) -> None:
        """What the device brought to the held places by itself is known here. Waits for it if there was any."""
        if self.on_device is not None and self.on_device.was_called:
            for layer, slots in self.on_device.slots().items():
                self.held[layer].adopt(slots)

    def drain(self) -> None:
        """Nothing is copied from host memory any more. Waits for the device."""
        self.engine.drain()
        self.settle()

    def captures(self, num_rows: int) -> bool:
        """Whether a step whose layers have so many rows may be captured: then the device decides what is copied, and
        what it holds is its own business until `settle`."""
        few = num_rows < self.plan.num_slots and not self.plan.streams(num_rows)
        return few and self.on_device is not None

    def replayed(self) -> None:
        """A captured step ran: the held places may have changed."""
        assert self.on_device is not None, "a step was captured in which the host decides"
        self.on_device.was_called = True

    def _tell_device(self, layer: int) -> None:
        if self.on_device is not None:
            _, rows = self.host.source.find(layer, range(self.plan.num_slots))
            self.on_device.put(layer, self.held[layer].slots, rows, self._table[layer])

    def statistics(self) -> OffloadFigures:
        """Since `fill` or `reset`, of all layers. Waits for the device where that counts."""
        parts = [OffloadFigures(held.figures, CopyFigures()) for held in self.held.values()]
        parts.append(OffloadFigures(SlotFigures(), self.engine.figures()))
        if self.on_device is not None:
            parts.append(OffloadFigures(self.on_device.slot_figures(), self.on_device.copy_figures()))
        return OffloadFigures.together(parts)

    def reset(self) -> None:
        """Count from here on. Waits for the device."""
        self.engine.reset()
        if self.on_device is not None:
            self.on_device.reset()
        for held in self.held.values():
            held.figures = SlotFigures()


class Following:
    """The next layer with experts, as the layer before it sees it."""

    def __init__(self, held: HeldSlots, gate: Router, experts: Sequence[int | None]) -> None:
        self.held = held
        self.gate = gate
        self.place(experts)

    def place(self, experts: Sequence[int | None]) -> None:
        """Which logical expert is in each slot here."""
        self._slot_of = {expert: slot for slot, expert in enumerate(experts) if expert is not None}

    def guess(self, inputs: ExpertInput) -> Tensor | None:
        """The logical experts [X, K] that its gate would pick for this layer's rows; None for rows in fp8."""
        return self.gate(inputs.rows_XD).expert_ids_TK if inputs.scales_GX is None else None

    def look_ahead(self, expert_ids: Sequence[int]) -> None:
        guessed = {self._slot_of[expert] for expert in expert_ids if expert in self._slot_of}
        self.held.look_ahead(sorted(guessed))


class OffloadedExperts:
    """The experts of one layer."""

    def __init__(self, offload: Offload, held: HeldSlots) -> None:
        self.offload = offload
        self.held = held
        self.following: Following | None = None  # that guesses are for
        self._order: list[int] = []
        self._order_X = torch.empty(0, dtype=torch.int32, device=offload.device)

    def __call__(self, inputs: ExpertInput) -> Tensor:
        """y_RD as `Experts` gives it."""
        products = (Fp8Products if self.offload.fp8 else PlainProducts)(inputs, self.offload.width)
        if inputs.num_rows:
            if self.offload.plan.streams(inputs.num_rows):
                self.offload.settle()
                self._stream(inputs, products)
            elif self.offload.on_device is not None:
                self._cache_on_device(self.offload.on_device, inputs, products)
            else:
                self._cache(inputs, products)
        return products.y_RD

    def _cache_on_device(self, slots: DeviceSlots, inputs: ExpertInput, products: SlotProducts) -> None:
        """Guesses are copied behind what this call misses, beside its last products."""
        held, following, routed = self.held, self.following, slots.mark()
        last = slots.num_rounds(held.layer, inputs.num_rows) - 1
        for number in range(last + 1):
            ranges_G2 = slots.bring(held.layer, inputs.offsets_S1, first=number == 0)
            if number == last and following is not None and self._is_few(inputs):
                layers = {"layer": following.held.layer, "before": held.layer}
                # Without an index, rows past the last slot's mean nothing.
                last_1 = inputs.offsets_S1[-1:] if inputs.row_index_R is None else None
                slots.look_ahead(**layers, guess=partial(following.guess, inputs), behind=routed, last_1=last_1)
            products.multiply(held.buffer.tensors, ranges_G2)
        slots.used(held.layer)

    def _stream(self, inputs: ExpertInput, products: SlotProducts) -> None:
        """Held slots, then all others as they come. Ranges are gathered on the device."""
        held, buffer = self.held, self.held.buffer
        ranges_X2 = self._in_order(inputs.offsets_S1)
        if held.place_of:
            slots, places = list(held.place_of), list(held.place_of.values())
            buffer.ready(held.layer, slots, places)
            products.multiply(buffer.tensors, ranges_X2[: len(held.slots)])
            buffer.read(places)
        first = len(held.slots)
        for chunk, slots in self.offload.stream.chunks(held.layer):
            number = len(slots)
            products.multiply([tensor[:number] for tensor in chunk.tensors], ranges_X2[first : first + number])
            first += number

    def _in_order(self, offsets_S1: Tensor) -> Tensor:
        """int32 [G + passing, 2]: the rows of the slot in each held place, none in empty ones, then of the others."""
        none = self.offload.plan.num_slots
        order = [none if slot is None else slot for slot in self.held.slots] + self.held.passing()
        if order != self._order:
            self._order, self._order_X = order, _to_device(order, offsets_S1.device)
        ranges_S2 = torch.stack((offsets_S1[:-1], offsets_S1[1:]), dim=1)
        return F.pad(ranges_S2, (0, 0, 0, 1)).index_select(0, self._order_X)

    def _cache(self, inputs: ExpertInput, products: SlotProducts) -> None:
        """Copies are asked for in the order of their use: what this call misses, then what the next layer may want."""
        held, staging = self.held, self.offload.staging
        ranges, guessed = self._read(inputs)
        needed = [slot for slot, (start, end) in enumerate(ranges) if start < end]
        hits, misses = held.ask(needed)
        places = held.places_for(len(misses), keep=needed)
        fetched, rest = misses[: len(places)], misses[len(places) :]
        late = [slot for slot in hits if held.buffer.on_its_way(held.place_of[slot])]  # fetched ahead, not there yet
        for slot, place in zip(fetched, places):
            held.fetch([slot], [place])
        rounds = [rest[at : at + len(staging[0].tags)] for at in range(0, len(rest), len(staging[0].tags))]
        if rounds:
            self.offload.stream.give_up()
        for chunk, buffer in zip(rounds, staging):
            buffer.fill(held.layer, chunk, range(len(chunk)))
        if self.following is not None:
            self.following.look_ahead(guessed)
        there = [slot for slot in hits if slot not in late]
        parts = [self._held_part(there, slice(0, len(held.slots)))] if there else []
        for slot in late + fetched:
            place = held.place_of[slot]
            parts.append(self._held_part([slot], slice(place, place + 1)))
        parts += [
            _Part(staging[number % 2], chunk, range(len(chunk)), slice(0, len(chunk)), is_late=number >= 2)
            for number, chunk in enumerate(rounds)
        ]
        self._multiply(parts, ranges, products, inputs.offsets_S1.device)

    def _held_part(self, slots: list[int], window: slice) -> _Part:
        return _Part(self.held.buffer, slots, [self.held.place_of[slot] for slot in slots], window)

    def _multiply(
        self, parts: list[_Part], ranges: Sequence[tuple[int, int]], products: SlotProducts, device: torch.device
    ) -> None:
        """One copy takes the ranges of all parts to the device."""
        flat = [each for part in parts for each in part.ranges(ranges)]
        ranges_X2 = _to_device(flat, device)
        first = 0
        for part in parts:
            if part.is_late:
                part.buffer.fill(self.held.layer, part.slots, part.places)
            part.buffer.ready(self.held.layer, part.slots, part.places)
            number = part.window.stop - part.window.start
            weights = [tensor[part.window] for tensor in part.buffer.tensors]
            products.multiply(weights, ranges_X2[first : first + number])
            part.buffer.read(part.places)
            first += number

    def _read(self, inputs: ExpertInput) -> tuple[list[tuple[int, int]], list[int]]:
        """(the rows of each slot, logical experts that the next layer may ask for). Waits for the device, once."""
        following = self.following if self._is_few(inputs) else None
        ids_XK = None if following is None else following.guess(inputs)
        numbers = [inputs.offsets_S1] if ids_XK is None else [inputs.offsets_S1, ids_XK.flatten()]
        flat = torch.cat(numbers).tolist()
        ends, ids = flat[: len(inputs.offsets_S1)], flat[len(inputs.offsets_S1) :]
        if ids_XK is not None and inputs.row_index_R is None:
            ids = ids[: ends[-1] * ids_XK.shape[1]]  # rows past the last slot's mean nothing
        return list(pairwise(ends)), ids

    def _is_few(self, inputs: ExpertInput) -> bool:
        """With as many rows as slots nearly everything is asked for, and a guess says nothing."""
        return inputs.num_rows < self.offload.plan.num_slots


@dataclass(frozen=True)
class _Part:
    """What one pair of products works on: slots, where they are in a buffer, and the places whose weights it gets."""

    buffer: SlotBuffer
    slots: Sequence[int]
    places: Sequence[int]
    window: slice
    is_late: bool = False  # copied only when an earlier part has left the buffer

    def ranges(self, of_slots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of each place of the window; those of no slot of this part have no rows."""
        slot_at = dict(zip(self.places, self.slots))
        places = range(self.window.start, self.window.stop)
        return [of_slots[slot_at[place]] if place in slot_at else (0, 0) for place in places]


def _to_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """int32, without waiting for the device."""
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
