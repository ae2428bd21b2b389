"""Global and shared memory of the machine, which object to what a card would let pass.

Global memory is the tensors' own storages: whatever lies outside of them, or is not aligned, is a fault. What programs
do to it is not checked for races; they are interleaved, and that is all.

Shared memory belongs to one program. Its warps (`Clocks`) know of each other's work by barriers alone, and who reads or
writes what another has written or may still read, without one between them, is at fault. So is who reads what nobody
wrote; it holds NaN in every format. Two granules of one byte are one, and the threads of a warp are one. The tensor
core and the copy engine reach it through another path (the async proxy), which sees ordinary writes only past a fence:
that is checked for what they read, not for what they overwrite. Several warps may write the same bytes; who reads them
needs a barrier behind one of the last two.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.ptx.registers import SHARED_BASE, Lanes

_NEVER = np.iinfo(np.int32).max
"""A clock that nobody has seen: what is under way."""

_UNDER_WAY, _NOBODY = -2, -1
"""Instead of a writer."""


class Fault(AssertionError):
    """The kernel does what it must not."""


class Global:
    """The storages that a launch was given, by address. A row of each as bytes."""

    def __init__(self, tensors: list[Tensor]) -> None:
        found: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                found[storage.data_ptr()] = (storage.data_ptr() + storage.nbytes(), whole.numpy())
        self._starts = sorted(found)
        self._ends = [found[start][0] for start in self._starts]
        self._bytes = [found[start][1] for start in self._starts]

    def rows(self, addresses: Lanes, size: int) -> list[tuple[Any, NDArray[np.uint8], Lanes]]:
        """`size` bytes from each address, as (which of the addresses, [n, size] of a storage, which rows of it)."""
        if (addresses & (size - 1)).any():
            raise Fault(f"global memory: an address that is no multiple of {size}")
        out, which = [], np.arange(len(addresses))
        while len(which):
            index = bisect_right(self._starts, int(addresses[which[0]])) - 1
            start, end = self._starts[max(index, 0)], self._ends[max(index, 0)]
            own = (addresses[which] >= start) & (addresses[which] + size <= end)
            if not own[0]:
                raise Fault(f"global memory: {size} bytes at {int(addresses[which[0]] - start)} of {end - start}")
            held = self._bytes[index]
            table = held[: len(held) // size * size].reshape(-1, size)
            out.append((which[own], table, (addresses[which[own]] - start) // size))
            which = which[~own]
        return out

    def span(self, address: int, size: int) -> NDArray[np.uint8]:
        """So many bytes in a row."""
        index = max(bisect_right(self._starts, address) - 1, 0)
        start, end = self._starts[index], self._ends[index]
        if not (start <= address and address + size <= end):
            raise Fault(f"global memory: {size} bytes at {address - start} of {end - start}")
        return self._bytes[index][address - start : address - start + size]

    def load(self, addresses: Lanes, size: int) -> NDArray[np.uint8]:
        """[n, size]"""
        parts = self.rows(addresses, size)
        if len(parts) == 1:
            return parts[0][1][parts[0][2]]
        out = np.empty((len(addresses), size), np.uint8)
        for which, table, rows in parts:
            out[which] = table[rows]
        return out

    def store(self, addresses: Lanes, values: NDArray[np.uint8]) -> None:
        for which, table, rows in self.rows(addresses, values.shape[1]):
            table[rows] = values[which]


class Released(NamedTuple):
    """What those who pass a barrier know from then on."""

    seen: NDArray[np.int32]
    fenced: NDArray[np.int32]


class Clocks:
    """What each warp has seen of the others, and of what the copies of each barrier have brought.

    `seen[w, a]`: the last of the steps of actor a that warp w knows to be over; `fenced[w, a]`: that the async proxy
    sees, too. Actors are the warps, then of each barrier the copy engine and the threads' own copies, then each warp's
    copies under way, and at last two that nobody is. A warp's own clock steps on when it tells others.
    """

    def __init__(self, num_warps: int, num_barriers: int) -> None:
        self.num_warps = num_warps
        self.num_actors = 2 * num_warps + 2 * num_barriers
        self.seen = np.zeros((num_warps, self.num_actors + 2), np.int32)
        self.seen[np.arange(num_warps), np.arange(num_warps)] = 1
        self.seen[:, _NOBODY] = self.seen[:, _UNDER_WAY] = -1
        self.fenced = np.zeros_like(self.seen)
        self.fenced[:, num_warps : num_warps + 2 * num_barriers : 2] = _NEVER

    def engine(self, barrier: int) -> int:
        """The actor of copies that the copy engine makes for this barrier."""
        return self.num_warps + 2 * barrier

    def threads(self, barrier: int) -> int:
        """The actor of copies that threads have asked for, and for which they arrive at this barrier."""
        return self.num_warps + 2 * barrier + 1

    def copies(self, warp: int) -> int:
        """The actor of copies that this warp has asked for and not waited for: nobody sees it."""
        return self.num_actors - self.num_warps + warp

    def now(self, warp: int) -> int:
        return int(self.seen[warp, warp])

    def tell(self, warp: int) -> Released:
        told = Released(self.seen[warp].copy(), self.fenced[warp].copy())
        self.seen[warp, warp] += 1
        return told

    def learn(self, warp: int, told: Released) -> None:
        np.maximum(self.seen[warp], told.seen, out=self.seen[warp])
        np.maximum(self.fenced[warp], told.fenced, out=self.fenced[warp])

    def fence(self, warp: int) -> None:
        """What this warp knows to be over is seen by the async proxy."""
        np.maximum(self.fenced[warp], self.seen[warp], out=self.fenced[warp])


class Shared:
    """A program's shared memory. Addresses begin with SHARED_BASE; a granule has two bytes."""

    def __init__(self, num_bytes: int, clocks: Clocks) -> None:
        self.clocks = clocks
        self.end = SHARED_BASE + num_bytes
        self.data = np.full((self.end + 1023) // 1024 * 1024, 0xFF, np.uint8)
        granules = len(self.data) // 2
        self._writer = np.full(granules, _NOBODY, np.int16)
        self._clock = np.zeros(granules, np.int32)
        # Who wrote the same before, without hearing of it: either may be relied on.
        self._also, self._also_clock = self._writer.copy(), self._clock.copy()
        self._twice = False
        self._reads = np.zeros((granules, clocks.num_warps), np.int32)
        self._spans = {size: np.arange(max(1, size // 2)) for size in (1, 2, 4, 8, 16)}

    def granules(self, addresses: Lanes, size: int) -> Lanes:
        """[n, granules] of `size` bytes from each address."""
        if (addresses & (size - 1)).any():
            raise Fault(f"shared memory: an address that is no multiple of {size}")
        low, high = int(addresses.min()), int(addresses.max())
        if low < SHARED_BASE or high + size > self.end:
            raise Fault(
                f"shared memory: {low - SHARED_BASE} to {high + size - SHARED_BASE} of {self.end - SHARED_BASE}"
            )
        return (addresses >> 1)[:, None] + self._spans[size]

    def _unseen(self, granules: Any, *known: NDArray[np.int32]) -> NDArray[np.bool_]:
        writers, clocks = self._writer[granules], self._clock[granules]
        unseen = clocks > known[0][writers]
        for more in known[1:]:
            unseen |= clocks > more[writers]
        if self._twice and unseen.any():
            writers, clocks = self._also[granules], self._also_clock[granules]
            unseen &= np.logical_or.reduce([clocks > one[writers] for one in known])
        return unseen

    def read(self, warp: int, granules: Any) -> None:
        """An ordinary read."""
        unseen = self._unseen(granules, self.clocks.seen[warp])
        if unseen.any():
            raise Fault(self._why(warp, "reads", self._writer[granules][unseen]))
        self._reads[granules, warp] = self.clocks.now(warp)

    def write(self, warp: int, addresses: Lanes, rows: NDArray[np.uint8], *, copied: bool = False) -> Lanes:
        """Ordinary writes, [n, size] of bytes at n addresses; `copied`: a copy that this warp asks for, over when
        `copied` says so. Several may write what lies there already, over each other's reads too. Gives granules."""
        granules, held = self.granules(addresses, rows.shape[1]), self.data.reshape(-1, rows.shape[1])
        places = addresses // rows.shape[1]
        actor, clock = (self.clocks.copies(warp), _NEVER) if copied else (warp, self.clocks.now(warp))
        before = self._writer[granules]
        if np.array_equal(held[places], rows) and (before >= 0).all():
            self._twice = True
            self._also[granules], self._also_clock[granules] = before, self._clock[granules]
        else:
            self._may_write(warp, granules)
            self._also[granules] = _NOBODY
            held[places] = rows
        self._writer[granules], self._clock[granules] = actor, clock
        return granules

    def _may_write(self, warp: int, granules: Any) -> None:
        seen, writers = self.clocks.seen[warp], self._writer[granules]
        unseen = self._unseen(granules, seen) & (writers != _NOBODY)
        if unseen.any():
            raise Fault(self._why(warp, "overwrites", writers[unseen]))
        reads = self._reads[granules] > seen[: self.clocks.num_warps]
        if reads.any():
            readers = np.nonzero(reads.reshape(-1, self.clocks.num_warps).any(0))[0]
            raise Fault(f"shared memory: warp {warp} overwrites what warps {readers.tolist()} may still read")

    def await_box(self, warp: int, granules: Any) -> None:
        """The copy engine begins: until it has ended nobody may touch what it fills."""
        self._may_write(warp, granules)
        self._writer[granules], self._clock[granules] = _UNDER_WAY, 0
        self._also[granules] = _NOBODY

    def filled(self, granules: Any, actor: int, clock: int) -> None:
        """By the copy engine."""
        self._writer[granules], self._clock[granules] = actor, clock

    def copied(self, warp: int, granules: Any, actor: int, clock: int) -> None:
        """Copies of this warp are over."""
        copies = self.clocks.copies(warp)
        for writers, clocks in ((self._writer, self._clock), (self._also, self._also_clock)):
            own = granules[writers[granules] == copies]
            writers[own], clocks[own] = actor, clock

    def unready(self, warp: int, granules: Any) -> NDArray[np.bool_]:
        """Which of them the tensor core, asked by this warp, cannot rely on."""
        unseen = self._unseen(granules, self.clocks.seen[warp], self.clocks.fenced[warp])
        return unseen & (self._writer[granules] != _NOBODY)

    def begin_read(self, warp: int, granules: Any) -> None:
        """The tensor core reads from now on."""
        bad = self.unready(warp, granules)
        if bad.any():
            raise Fault(self._why(warp, "multiplies", self._writer[granules][bad]))
        self._reads[granules, warp] = _NEVER

    def end_read(self, warp: int, granules: Any) -> None:
        self._reads[granules, warp] = self.clocks.now(warp)

    def still_reads(self, warp: int, granules: Any) -> None:
        self._reads[granules, warp] = _NEVER

    def _why(self, warp: int, does: str, writers: Lanes) -> str:
        writer, num_warps = int(writers.reshape(-1)[0]), self.clocks.num_warps
        if writer == _NOBODY:
            what = "nobody has written"
        elif writer == _UNDER_WAY:
            what = "a copy still fills"
        elif writer == warp:
            what = "it has written itself and not fenced"
        elif writer >= self.clocks.copies(0):
            what = f"a copy of warp {writer - self.clocks.copies(0)} still fills"
        elif writer < num_warps:
            what = f"warp {writer} has written, without a barrier (or, for the tensor core, a fence) between them"
        else:
            what = f"copies of barrier {(writer - num_warps) // 2} bring, without having waited for it (or fenced it)"
        return f"shared memory: warp {warp} {does} what {what}"


class Barrier:
    """A barrier in shared memory (mbarrier): a round ends when all have arrived and all announced bytes are there."""

    def __init__(self, index: int, count: int, rounds: int, made_by: int, made_at: int) -> None:
        self.index, self.count = index, count
        self.rounds = rounds
        """Ended rounds, those of barriers that lay here before included."""
        self.first = rounds
        self.pending, self.bytes = count, 0
        self.made_by, self.made_at = made_by, made_at
        self._told: list[Released] = []
        self._released: dict[int, Released] = {}

    def over(self, parity: int) -> Released | None:
        """What the end of the last round of this parity has told; None: it goes on. The round before the first is over
        and tells nothing: it is what an empty stage is waited for by."""
        if (self.rounds - self.first) & 1 == parity:
            return None
        nothing = np.full(1, -1, np.int32)
        return self._released.get(parity, Released(nothing, nothing))

    def arrive(self, told: Released | None, clocks: Clocks) -> bool:
        """Whether the round has ended."""
        if self.pending == 0:
            raise Fault(f"barrier {self.index}: more arrivals than the {self.count} of a round")
        if told is not None:
            self._told.append(told)
        self.pending -= 1
        return self.settle(clocks)

    def settle(self, clocks: Clocks) -> bool:
        if self.pending or self.bytes:
            return False
        seen = np.zeros(clocks.num_actors + 2, np.int32)
        fenced = np.zeros_like(seen)
        for told in self._told:
            np.maximum(seen, told.seen, out=seen)
            np.maximum(fenced, told.fenced, out=fenced)
        seen[[clocks.engine(self.index), clocks.threads(self.index)]] = self.rounds + 1
        seen[_NOBODY] = seen[_UNDER_WAY] = -1
        self._released[(self.rounds - self.first) & 1] = Released(seen, fenced)
        self._told, self.pending = [], self.count
        self.rounds += 1
        return True
