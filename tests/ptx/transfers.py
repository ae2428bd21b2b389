"""Loads, stores, copies and barriers: `decode_transfer` gives a closure for an instruction that reaches memory.

A box that the copy engine brings comes at some later time, which the machine draws; until then its place is NaN. What a
warp's own copies bring (cp.async) is read and written at once, but nobody may rely on it before they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.ptx.memory import Barrier, Fault
from tests.ptx.program import Instruction
from tests.ptx.registers import UNSIGNED, Lanes, Names, Read, bits_of, dtype_of

Step = Callable[[Any, Lanes | None], bool | None]
"""(warp, mask); None: all lanes. True: others are to have a turn."""


def decode_transfer(names: Names, instruction: Instruction) -> Step | None:
    """None: it is none of these."""
    head, *parts = instruction.name.split(".")
    if head in ("ld", "st"):
        if parts[0] == "param":
            return _parameter(names, parts[-1], instruction.args)
        assert parts[0] in ("global", "shared", "shared::cta"), f"not known: {instruction}"
        shared, waits = parts[0] != "global", "acquire" in parts or "volatile" in parts
        make = _load if head == "ld" else _store
        return make(names, parts[-1], instruction.args, shared=shared, waits=waits)
    if head in ("atom", "red"):
        return _atomic(names, head, parts, instruction.args)
    if head == "mbarrier":
        return _barrier(names, parts, instruction)
    if instruction.name.startswith("cp.async.bulk.tensor") and "mbarrier" in instruction.name:
        return _tile(names, instruction.args)
    if instruction.name.startswith("cp.async.bulk.prefetch.L2"):
        return _prefetch(names, instruction.args)
    if instruction.name.startswith(("cp.async.ca", "cp.async.cg")):
        return _copy(names, instruction.args)
    if instruction.name.startswith("cp.async.mbarrier.arrive.noinc"):
        return _arrive_after_copies(names, instruction.args)
    if instruction.name.startswith("cp.async.commit_group"):
        return lambda warp, mask: warp.copies.commit()
    if instruction.name.startswith("cp.async.wait_"):
        left = 0 if instruction.name.endswith("all") else int(instruction.args[0])
        return lambda warp, mask: warp.copies.wait(left)
    if instruction.name.startswith(("fence.proxy.async", "fence.mbarrier_init")):
        return lambda warp, mask: warp.cta.clocks.fence(warp.index)
    return None


def _parameter(names: Names, kind: str, args: tuple[str, ...]) -> Step:
    write, name, dtype = names.writer(args[0]), args[1].strip("[] "), dtype_of(kind)
    unsigned = UNSIGNED[bits_of(kind)]

    def load(warp: Any, mask: Lanes | None) -> None:
        value = warp.cta.params[name]
        if isinstance(value, float):
            value = int(np.float32(value).view(np.uint32))
        write(warp, np.full(32, value & ((1 << unsigned.itemsize * 8) - 1), unsigned).view(dtype), mask)

    return load


def _load(names: Names, kind: str, args: tuple[str, ...], *, shared: bool, waits: bool) -> Step:
    writers, address = names.writers(args[0]), names.address(args[1])
    dtype = dtype_of(kind)
    size = dtype.itemsize * len(writers)

    def load(warp: Any, mask: Lanes | None) -> bool:
        at = address(warp)
        if mask is not None:
            at = at[mask]
        if shared:
            memory = warp.cta.shared
            memory.read(warp.index, memory.granules(at, size))
            rows = memory.data.reshape(-1, size)[at // size]
        else:
            rows = warp.cta.memory.load(at, size)
        if mask is not None:
            whole = np.zeros((32, size), np.uint8)
            whole[mask] = rows
            rows = whole
        values = rows.view(dtype)
        for index, write in enumerate(writers):
            write(warp, np.ascontiguousarray(values[:, index]), mask)
        return waits

    return load


def _store(names: Names, kind: str, args: tuple[str, ...], *, shared: bool, waits: bool) -> Step:
    address, reads = names.address(args[0]), names.readers(args[1], f"b{bits_of(kind)}")

    def store(warp: Any, mask: Lanes | None) -> None:
        at = address(warp)
        rows = np.stack([read(warp) for read in reads], 1).view(np.uint8)
        if mask is not None:
            at, rows = at[mask], rows[mask]
        if shared:
            warp.cta.shared.write(warp.index, at, rows)
        else:
            warp.cta.memory.store(at, rows)
            warp.cta.happened()

    return store


def _atomic(names: Names, head: str, parts: list[str], args: tuple[str, ...]) -> Step:
    assert parts[0] == "global", f"an atomic of {parts}"
    kind, operation = parts[-1], parts[-2]
    *to, place, value = args if head == "atom" and operation != "cas" else (None, *args)
    write = names.writer(to[0]) if head == "atom" else None
    address, read, dtype = names.address(place), names.reader(value, kind), dtype_of(kind)
    apply = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}
    change = apply.get(operation) or {"exch": lambda old, new: new}[operation]

    def atomic(warp: Any, mask: Lanes | None) -> bool:
        at, values, before = address(warp), read(warp), np.zeros(32, dtype)
        for lane in range(32) if mask is None else np.nonzero(mask)[0]:
            ((_, table, row),) = warp.cta.memory.rows(at[lane : lane + 1], dtype.itemsize)
            before[lane] = table[row[0]].view(dtype)[0]
            table[row[0]] = np.array([change(before[lane], values[lane])], dtype).view(np.uint8)
        if write is not None:
            write(warp, before, mask)
        warp.cta.happened()
        return True

    return atomic


def _prefetch(names: Names, args: tuple[str, ...]) -> Step:
    """Has no effect, but its bounds."""
    address, size = names.address(args[0]), names.reader(args[1], "u32")

    def prefetch(warp: Any, mask: Lanes | None) -> None:
        own = slice(None) if mask is None else mask
        for at, length in zip(address(warp)[own], size(warp)[own]):
            if at % 16 or length % 16:
                raise Fault(f"{length} bytes at {at} are asked for ahead: neither may be but a multiple of 16")
            warp.cta.memory.span(int(at), int(length))

    return prefetch


def _lanes(mask: Lanes | None) -> int:
    return 32 if mask is None else int(np.count_nonzero(mask))


def _one(values: Lanes, mask: Lanes | None) -> int:
    """Of the lanes that take part, what all of them say."""
    own = values if mask is None else values[mask]
    if (own != own[0]).any():
        raise Fault("the lanes of a warp do not agree")
    return int(own[0])


def _barrier(names: Names, parts: list[str], instruction: Instruction) -> Step:
    what, args = parts[0], instruction.args
    address = names.address(args[0] if what in ("init", "inval") else args[1])
    if what == "init":
        return lambda warp, mask: warp.cta.make_barrier(warp, _one(address(warp), mask), int(args[1]))
    if what == "inval":
        return lambda warp, mask: warp.cta.drop_barrier(_one(address(warp), mask))
    if what in ("try_wait", "test_wait"):
        write, parity = names.writer(args[0]), names.reader(args[2], "b32")

        def test(warp: Any, mask: Lanes | None) -> bool:
            told = warp.cta.barrier(warp, _one(address(warp), mask)).over(_one(parity(warp), mask))
            if told is not None:
                warp.cta.clocks.learn(warp.index, told)
            write(warp, np.full(32, told is not None), mask)
            return told is None

        return test
    assert what == "arrive", f"not known: {instruction}"
    announces = "expect_tx" in parts
    count = names.reader(args[2] if len(args) > 2 else "1", "b32")

    def arrive(warp: Any, mask: Lanes | None) -> bool:
        barrier: Barrier = warp.cta.barrier(warp, _one(address(warp), mask))
        number = _one(count(warp), mask)
        told = warp.cta.clocks.tell(warp.index)
        if announces:
            barrier.bytes += number
        for _ in range(_lanes(mask) * (1 if announces else number)):
            warp.cta.happened(barrier.arrive(told, warp.cta.clocks))
        return True

    return arrive


class Descriptor(NamedTuple):
    """A tensor that the copy engine knows: its address, extents, strides in bytes, the box of a copy, the bytes of an
    entry, and the rows of 16 bytes among which shared memory is permuted (8, 4, 2 or 1). Dimensions are the tensor's
    own, the contiguous one last."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    item: int
    swizzle: int


def permuted(addresses: Lanes, swizzle: int) -> Lanes:
    """Where shared memory holds what belongs at these addresses: groups of 16 bytes change places."""
    return addresses ^ (((addresses >> 7) & (swizzle - 1)) << 4)


def _tile(names: Names, args: tuple[str, ...]) -> Step:
    """The copy engine fills a box, with zeros where it lies beside the tensor, and counts its bytes at a barrier."""
    to, ready = names.address(args[0]), names.address(args[2])
    name, places = args[1].strip("[] ").split(",", 1)
    descriptor = names.reader(name.strip(), "u64")
    reads: list[Read] = names.readers(places.strip(), "s32")

    def copy(warp: Any, mask: Lanes | None) -> None:
        if _lanes(mask) != 1:
            raise Fault(f"a box is asked for by {_lanes(mask)} lanes")
        cta = warp.cta
        tensor: Descriptor = cta.descriptors[_one(descriptor(warp), mask)]
        first = [_one(read(warp), mask) for read in reversed(reads)]
        barrier: Barrier = cta.barrier(warp, _one(ready(warp), mask))
        if cta.clocks.fenced[warp.index, barrier.made_by] < barrier.made_at:
            raise Fault("the copy engine is given a barrier whose making no fence has shown to it")
        start, size = _one(to(warp), mask), int(np.prod(tensor.box)) * tensor.item
        if start % 128:
            raise Fault(f"a box at {start}, which is no multiple of 128")
        chunks = permuted(np.arange(start, start + size, 16), tensor.swizzle)
        granules = cta.shared.granules(chunks, 16)
        cta.shared.await_box(warp.index, granules)
        cta.shared.data.reshape(-1, 16)[chunks >> 4] = 0xFF

        def arrives() -> None:
            cta.shared.data.reshape(-1, 16)[chunks >> 4] = _box(cta.memory, tensor, first).reshape(-1, 16)
            cta.shared.filled(granules, cta.clocks.engine(barrier.index), barrier.rounds + 1)
            barrier.bytes -= size
            barrier.settle(cta.clocks)

        cta.flights.append(arrives)

    return copy


def _box(memory: Any, tensor: Descriptor, first: list[int]) -> Lanes:
    """uint8, the box's rows one behind the other."""
    *outer, width = tensor.box
    out = np.zeros((int(np.prod(outer)), width * tensor.item), np.uint8)
    low, high = max(0, -first[-1]), min(width, tensor.shape[-1] - first[-1])
    for row, index in enumerate(np.ndindex(*outer)):
        place = [begin + step for begin, step in zip(first, index)]
        if low < high and all(0 <= at < extent for at, extent in zip(place, tensor.shape)):
            at = tensor.address + sum(at * stride for at, stride in zip(place, tensor.strides))
            at += (first[-1] + low) * tensor.item
            out[row, low * tensor.item : high * tensor.item] = memory.span(at, (high - low) * tensor.item)
    return out


class Copies:
    """A warp's ordinary copies into shared memory (cp.async): those not committed, and the groups that are."""

    def __init__(self, warp: Any) -> None:
        self._warp = warp
        self._open: list[Lanes] = []
        self._groups: list[list[Lanes]] = []

    def begin(self, to: Lanes, source: Lanes, reads: Lanes, size: int) -> None:
        """What it reads is read at once, and is not to be relied on before the copy is over."""
        cta = self._warp.cta
        rows = np.zeros((len(to), size), np.uint8)
        if reads.any():
            rows[reads] = cta.memory.load(source[reads], size)
        self._open.append(cta.shared.write(self._warp.index, to, rows, copied=True))

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, left: int) -> None:
        """Until no more groups than these are under way: their bytes are as if this warp had written them."""
        while len(self._groups) > left:
            self._end(self._groups.pop(0), self._warp.index, self._warp.cta.clocks.now(self._warp.index))

    def hand_over(self, barrier: Barrier, arrivals: int) -> None:
        """The barrier hears of it when all are over."""
        copies, self._open = [*(copy for group in self._groups for copy in group), *self._open], []
        self._groups = []
        cta = self._warp.cta

        def arrives() -> None:
            self._end(copies, cta.clocks.threads(barrier.index), barrier.rounds + 1)
            for _ in range(arrivals):
                barrier.arrive(None, cta.clocks)

        cta.flights.append(arrives)

    def _end(self, copies: list[Lanes], actor: int, clock: int) -> None:
        for granules in copies:
            self._warp.cta.shared.copied(self._warp.index, granules, actor, clock)


def _copy(names: Names, args: tuple[str, ...]) -> Step:
    """16, 8 or 4 bytes a lane, or as many zeros."""
    to, source, size = names.address(args[0]), names.address(args[1]), int(args[2], 0)
    length = names.reader(args[3] if len(args) > 3 else args[2], "u32")

    def copy(warp: Any, mask: Lanes | None) -> None:
        own = slice(None) if mask is None else mask
        lengths = length(warp)[own]
        assert ((lengths == 0) | (lengths == size)).all(), "a copy of a part is not known"
        warp.copies.begin(to(warp)[own], source(warp)[own], lengths > 0, size)

    return copy


def _arrive_after_copies(names: Names, args: tuple[str, ...]) -> Step:
    address = names.address(args[0])

    def arrive(warp: Any, mask: Lanes | None) -> bool:
        warp.copies.hand_over(warp.cta.barrier(warp, _one(address(warp), mask)), _lanes(mask))
        return True

    return arrive
