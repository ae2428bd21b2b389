"""The slots that stay on a GPU and those that come in for others, decided and copied by the GPU itself.

Knows layers, places and streams; knows nothing of what is computed. The tables of slot_tables.py are on the device, and
kernels read missing bundles from pinned host memory: no step waits for the host, which only launches. For each layer:

    main stream    place l   fetch l   products l .... attention l + 1    place l + 1   (landed)   fetch l + 1
    side stream       guess l + 1      copy what was guessed ............................|

`place` calls off guesses that were wrong, so that what is asked for never waits behind them for long. Nothing is read
before it has landed: products come behind `fetch`, which waits for the side stream. Nothing is overwritten while it is
read: the last products of a layer come before its next guesses. The tables say which slot is in which place; ranges are
made from them alone, so a product reads no place whose slot is not the one it wants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from expert_parallel.copy_engine import CopyFigures
from expert_parallel.held_slots import SlotFigures
from expert_parallel.slot_buffer import Bundle
from kernels.checks import cdiv
from kernels.fetch_bundles import MOST_TENSORS, fetch_bundles, flat_rows, num_pieces
from kernels.slot_guesses import guess_ahead
from kernels.slot_places import place_slots
from kernels.slot_tables import COUNTS, STAMPS, STAMPS_AT, TIMES, Places, numbers_length

SlotTable = Sequence[int | None]
"""By place the slot in it, or by slot the expert behind it."""


@dataclass
class _Layer:
    places: Places
    sources: list[Tensor]
    targets: list[Tensor]
    # Of guesses that no call has come for: listed, and copied; what the side stream reads for them lives until then.
    listed: torch.cuda.Event | None = None
    landed: torch.cuda.Event | None = None
    reads: list[object] = field(default_factory=list)
    used: torch.cuda.Event | None = None  # the last call's products


class DeviceSlots:
    """`held[layer]`: tensors [G, ...] on the device, G of each layer its own; `hosts[layer]`: the same bundles' rows in
    host memory, pinned."""

    def __init__(self, held: Mapping[int, Bundle], hosts: Mapping[int, Bundle], num_slots: int) -> None:
        first = next(iter(held.values()))
        self.num_slots = num_slots
        self.bundle_bytes = sum(tensor[0].nbytes for tensor in first)
        device = first[0].device
        most = max(tensors[0].shape[0] for tensors in held.values())
        self._numbers_LX = _rows(len(held), numbers_length(num_slots, most), torch.int32, device)
        self._shares_LS1 = _rows(len(held), num_slots + 1, torch.float32, device)
        self._counts_LX = _rows(len(held), STAMPS_AT + len(STAMPS), torch.int64, device)
        self._shares_LS1[:, -1] = 1.0  # before anything is known a guess counts as right, and no slot as used
        self._layers: dict[int, _Layer] = {}
        for at, (layer, tensors) in enumerate(held.items()):
            tables = (self._numbers_LX[at], self._shares_LS1[at], self._counts_LX[at])
            places = Places(*tables, num_slots, tensors[0].shape[0])
            for name in ("slot_at", "place_of"):
                places.part(name).fill_(-1)
            targets = [flat_rows(tensor) for tensor in tensors]
            self._layers[layer] = _Layer(places, [flat_rows(tensor) for tensor in hosts[layer]], targets)
        self.pieces = num_pieces(next(iter(self._layers.values())).targets)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.was_called = False  # since `slots`: the tables may have changed

    @staticmethod
    def serves(num_slots: int, held: Mapping[int, Bundle]) -> bool:
        """Whether every layer has places, and tables and tensors of a size that the kernels take."""
        have_places = all(tensors[0].shape[0] > 0 and len(tensors) <= MOST_TENSORS for tensors in held.values())
        return have_places and num_slots < 1024

    def put(self, layer: int, slots: SlotTable, rows: Sequence[int], experts: SlotTable) -> None:
        """Which slot is in each place, in which row of host memory each slot's bundle is, and which expert it is of."""
        places = self._layers[layer].places
        place_of = [-1] * self.num_slots
        for place, slot in enumerate(slots):
            if slot is not None:
                place_of[slot] = place
        for name, numbers in (
            ("slot_at", [-1 if slot is None else slot for slot in slots]),
            ("place_of", place_of),
            ("row_of", list(rows)),
            ("expert_of", [-2 if expert is None else expert for expert in experts]),
        ):
            places.part(name).copy_(torch.tensor(numbers, dtype=torch.int32))
        places.numbers[:4] = 0  # guesses are of what was there

    def slots(self) -> dict[int, SlotTable]:
        """The slot in each place of every layer. Waits for the device."""
        for mine in self._layers.values():
            self._join(mine)
        tables = iter(torch.cat([mine.places.part("slot_at") for mine in self._layers.values()]).tolist())
        self.was_called = False
        return {
            layer: [None if slot < 0 else slot for slot in islice(tables, mine.places.num_places)]
            for layer, mine in self._layers.items()
        }

    def num_rounds(self, layer: int, num_rows: int) -> int:
        """That a call of so many rows can need; one that nothing is left for changes nothing."""
        return cdiv(min(self.num_slots, num_rows), self._layers[layer].places.num_places)

    def bring(self, layer: int, offsets_S1: Tensor, *, first: bool) -> Tensor:
        """ranges int32 [G, 2] of the first or the next round of a call: products launched before the next is asked for
        may read them, and the places whose rows they name."""
        mine, self.was_called = self._layers[layer], True
        if first:
            self._wait(None if self._captured() else mine.used)
            self._wait(mine.listed)
        place_slots(mine.places, offsets_S1, pieces=self.pieces, first=first)
        self._join(mine)
        fetch_bundles(mine.places, mine.sources, mine.targets)
        return mine.places.part("ranges")

    def used(self, layer: int) -> None:
        """All products of a call are launched. The next call may come on another stream; captured ones come on one."""
        self._layers[layer].used = None if self._captured() else self.mark()

    def mark(self) -> torch.cuda.Event | None:
        """What was launched so far, as what `look_ahead` begins behind."""
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._side.device))
        return event

    def look_ahead(
        self,
        layer: int,
        before: int,
        *,
        guess: Callable[[], Tensor | None],
        behind: torch.cuda.Event | None,
        last_1: Tensor | None,
    ) -> None:
        """Copy what a layer's next call will likely ask for beside what is launched from here on on this stream.

        `guess` launches what gives logical experts [X, K] (of rows before last_1[0]), `behind` a mark, and holds what
        that reads. `before`: the layer whose call this is.
        """
        mine, fetched = self._layers[layer], self.mark()
        with torch.cuda.stream(self._side) if self._side is not None else contextlib.nullcontext():
            self._wait(behind)
            ids_XK = guess()
            if ids_XK is None:
                return
            guess_ahead(mine.places, ids_XK, last_1)
            mine.listed = self.mark()
            self._wait(fetched)
            fetch_bundles(mine.places, mine.sources, mine.targets, before=self._layers[before].places)
            mine.landed = self.mark()
        mine.reads += [guess, ids_XK, last_1]

    def slot_figures(self) -> SlotFigures:
        """Of all layers. Waits for the device."""
        counts = dict(zip(COUNTS, self._counts_LX[:, : len(COUNTS)].sum(0).tolist()))
        del counts["fetched"], counts["ahead"]
        return SlotFigures(**counts)

    def copy_figures(self) -> CopyFigures:
        """Of all layers; times up to each one's last call but one. Waits for the device."""
        counts = dict(zip(COUNTS + TIMES, self._counts_LX[:, :STAMPS_AT].sum(0).tolist()))
        num_copies = counts["fetched"] + counts["ahead"]
        begun_L, ended_L = (self._counts_LX[:, len(COUNTS) + TIMES.index(name)].tolist() for name in ("first", "last"))
        span = max(ended_L) - min((begun for begun in begun_L if begun), default=max(ended_L))
        busy, stall, due = (counts[name] / 1e9 for name in ("busy", "stall", "due"))
        return CopyFigures(num_copies, num_copies * self.bundle_bytes, busy, span / 1e9, stall, due)

    def reset(self) -> None:
        """Count from here on."""
        self._counts_LX.zero_()

    def _join(self, mine: _Layer) -> None:
        """What is launched from here on comes after the copies of guesses."""
        self._wait(mine.landed)
        mine.listed = mine.landed = None
        mine.reads.clear()

    def _captured(self) -> bool:
        return self._side is not None and torch.cuda.is_current_stream_capturing()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None and self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_event(event)


def _rows(number: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [number, length], each row on 16 bytes: kernels that take one are compiled anew where it lies otherwise."""
    multiple = 16 // dtype.itemsize
    return torch.zeros((number, cdiv(length, multiple) * multiple), dtype=dtype, device=device)[:, :length]
