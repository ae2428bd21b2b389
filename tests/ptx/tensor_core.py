"""What the tensor core multiplies, and how its tiles come into registers: mma.sync, wgmma, ldmatrix, stmatrix.

An instruction's sum over its 16 (or, of 8 bits, 32) entries of K and what was there is rounded once, to fp32: order by
order of instructions is the card's, the rounding inside one is not (there, fp8 keeps about 14 bits between).

wgmma reads when it is waited for; until then its sums are NaN, and what it reads is nobody's to overwrite. Kernels let
it read rows in vain, behind those they mean (but always mean 16 at least): of rows from the 17th on, what is not ready
or is overwritten meanwhile is NaN rather than a fault. Registers that it multiplies with are read at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.ptx.memory import Fault
from tests.ptx.program import Instruction
from tests.ptx.registers import Lanes, Names, bf16_to_f32, listed
from tests.ptx.transfers import permuted

Step = Callable[[Any, Lanes | None], Any]

_GROUP, _PLACE = np.arange(32) // 4, np.arange(32) % 4
"""Of a lane: the row it holds of eight, and which of four parts of it."""

_SURE_ROWS = 16


def decode_tensor_core(names: Names, instruction: Instruction) -> Step | None:
    """None: it is none of these."""
    name, args = instruction.name, instruction.args
    if name.startswith("ldmatrix"):
        return _load_matrices(names, args, transposed=".trans" in name)
    if name.startswith("stmatrix"):
        return _store_matrices(names, args, transposed=".trans" in name)
    if name.startswith("mma.sync"):
        return _multiply(names, name, args)
    if name.startswith("wgmma.mma_async"):
        return _multiply_async(names, name, args)
    if name.startswith("wgmma.commit_group"):
        return lambda warp, mask: warp.products.commit()
    if name.startswith("wgmma.wait_group"):
        return lambda warp, mask: warp.products.wait(int(args[0]))
    return None


def _decoder(kind: str) -> Callable[[Lanes], Lanes]:
    """float64 of values as they lie."""
    if kind == "bf16":
        return lambda x: bf16_to_f32(x).astype(np.float64)
    if kind == "f16":
        return lambda x: x.view(np.float16).astype(np.float64)
    assert kind == "e4m3", f"not known: products of {kind}"
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    return lambda x: every[x]


def _load_matrices(names: Names, args: tuple[str, ...], *, transposed: bool) -> Step:
    writers, address = names.writers(args[0]), names.address(args[1])

    def load(warp: Any, mask: Lanes | None) -> None:
        if mask is not None:
            raise Fault("matrices are loaded by some lanes only")
        at, shared = address(warp)[: 8 * len(writers)], warp.cta.shared
        shared.read(warp.index, shared.granules(at, 16))
        held = shared.data.reshape(-1, 16)[at >> 4].view(np.uint16).reshape(-1, 8, 8)
        if transposed:
            held = np.ascontiguousarray(held.transpose(0, 2, 1))
        values = held.reshape(-1, 64).view(np.uint32)
        for write, value in zip(writers, values):
            write(warp, value, None)

    return load


def _store_matrices(names: Names, args: tuple[str, ...], *, transposed: bool) -> Step:
    address, reads = names.address(args[0]), names.readers(args[1], "b32")

    def store(warp: Any, mask: Lanes | None) -> None:
        if mask is not None:
            raise Fault("matrices are stored by some lanes only")
        values = np.stack([read(warp) for read in reads]).view(np.uint16).reshape(-1, 8, 8)
        if transposed:
            values = np.ascontiguousarray(values.transpose(0, 2, 1))
        warp.cta.shared.write(warp.index, address(warp)[: 8 * len(reads)], values.reshape(-1, 8).view(np.uint8))

    return store


def _fragment(values: list[Lanes], rows: int, entries: int, decode: Callable[[Lanes], Lanes]) -> Lanes:
    """float64 [rows, K] of registers: first all rows, 8 a register, of the first half of K, then of the second."""
    dtype = np.dtype(np.uint16 if entries == 2 else np.uint8)
    half = 4 * entries
    out = np.empty((rows, 2 * half))
    for index, value in enumerate(values):
        part = decode(np.ascontiguousarray(value).view(dtype)).reshape(8, half)
        row, column = 8 * (index % (rows // 8)), half * (index // (rows // 8))
        out[row : row + 8, column : column + half] = part
    return out


def _sum_places(count: int) -> tuple[list[Lanes], list[Lanes]]:
    """Of each register of sums, the row and column each lane holds."""
    rows = [_GROUP + 8 * (index // 2 % 2) for index in range(count)]
    return rows, [8 * (index // 4) + 2 * _PLACE + index % 2 for index in range(count)]


def _multiply(names: Names, name: str, args: tuple[str, ...]) -> Step:
    shape, kind = re.search(r"m16n8k(\d+)\.row\.col\.f32\.(\w+)\.", name).groups()  # type: ignore[union-attr]
    writers, sums = names.writers(args[0]), names.readers(args[3], "f32")
    left, right = names.readers(args[1], "b32"), names.readers(args[2], "b32")
    entries, decode = (4 if kind == "e4m3" else 2), _decoder(kind)
    assert int(shape) == 8 * entries and len(sums) == 4, f"not known: {name}"
    rows, columns = _sum_places(4)

    def multiply(warp: Any, mask: Lanes | None) -> None:
        if mask is not None:
            raise Fault("some lanes multiply only")
        a = _fragment([read(warp) for read in left], 16, entries, decode)
        b = _fragment([read(warp) for read in right], 8, entries, decode)
        product = a @ b.T
        for write, read, row, column in zip(writers, sums, rows, columns):
            write(warp, (read(warp) + product[row, column]).astype(np.float32), None)

    return multiply


class _Tile:
    """How a descriptor of shared memory is read: [rows, K] of a warp, as indices of entries."""

    def __init__(self, rows: int, width: int, item: int, *, transposed: bool) -> None:
        self.rows, self.width, self.item, self.transposed = rows, width, item, transposed
        self._made: dict[int, Lanes] = {}

    def entries(self, descriptor: int, first_row: int) -> Lanes:
        found = self._made.get(descriptor << 8 | first_row)
        if found is None:
            found = self._made[descriptor << 8 | first_row] = self._make(descriptor, first_row)
        return found

    def _make(self, descriptor: int, first_row: int) -> Lanes:
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        assert descriptor >> 49 & 7 == 0, f"a descriptor with an offset of its base: {descriptor:#x}"
        swizzle = {0: 1, 1: 8, 2: 4, 3: 2}[descriptor >> 62]
        span = 16 * swizzle
        row, k = first_row + np.arange(self.rows)[:, None], np.arange(self.width)[None, :]
        if self.transposed:
            atom = span // self.item
            place = row // atom * leading + row % atom * self.item + k // 8 * stride + k % 8 * span
        else:
            assert self.width * self.item <= span, f"a descriptor without swizzle: {descriptor:#x}"
            place = row // 8 * stride + row % 8 * span + k * self.item
        return permuted(start + place, swizzle) // self.item


class _Product:
    """One wgmma under way, of a warp's 16 rows."""

    def __init__(self, warp: Any, plan: Any, use: bool, left: Any, right: int) -> None:
        self.warp, self.plan, self.use = warp, plan, use
        self.left = left if isinstance(left, np.ndarray) else None
        self.right_entries = plan.right.entries(right, 0)
        first_row = 16 * (warp.index % 4)
        self.left_entries = None if self.left is not None else plan.rows.entries(left, first_row)
        self.sure = first_row < _SURE_ROWS
        parts = [self.right_entries]
        if self.left_entries is not None and self.sure:
            parts.append(self.left_entries)
        self.read = np.concatenate([self._granules(part).ravel() for part in parts])
        warp.cta.shared.begin_read(warp.index, self.read)

    def _granules(self, entries: Lanes) -> Lanes:
        granules = entries if self.plan.item == 2 else entries[:, ::2] >> 1
        self._check(granules)
        return granules

    def _check(self, granules: Lanes) -> None:
        low, high = int(granules.min()) * 2, int(granules.max()) * 2 + 2
        self.warp.cta.shared.granules(np.array([low, high - 2]), 2)

    def run(self, sums: list[Lanes]) -> list[Lanes]:
        """The registers of sums behind it."""
        shared, plan = self.warp.cta.shared, self.plan
        data = shared.data.view(np.uint16 if plan.item == 2 else np.uint8)
        left = self.left
        if left is None:
            left = plan.decode(data[self.left_entries])
            if not self.sure:
                unready = shared.unready(self.warp.index, self._granules(self.left_entries))
                if unready.any():
                    left = np.where(np.repeat(unready, left.shape[1] // unready.shape[1], 1), np.nan, left)
        out = left @ plan.decode(data[self.right_entries]).T
        if self.use:
            whole = np.empty_like(out)
            whole[plan.places] = np.stack(sums)
            out = whole + out
        return list(out[plan.places].astype(np.float32).view(np.uint32))


class Products:
    """A warp's wgmma: those not committed, and the groups that are. `_held`: the sums before those under way."""

    def __init__(self, warp: Any) -> None:
        self._warp = warp
        self._open: list[_Product] = []
        self._groups: list[list[_Product]] = []
        self._held: dict[int, Lanes] = {}
        self._unknown = np.full(32, 0xFFFFFFFF, np.uint32)

    def begin(self, product: _Product) -> None:
        registers = self._warp.registers
        for slot in product.plan.slots:
            if slot not in self._held:
                self._held[slot] = registers[slot]
                registers[slot] = self._unknown
        self._open.append(product)

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, left: int) -> bool:
        shared, index = self._warp.cta.shared, self._warp.index
        ended: list[_Product] = []
        while len(self._groups) > left:
            ended += self._groups.pop(0)
        for product in ended:
            slots = product.plan.slots
            sums = [self._held[slot].view(np.float32) for slot in slots]
            self._held.update(zip(slots, product.run(sums)))
            shared.end_read(index, product.read)
        under_way = [product for group in [*self._groups, self._open] for product in group]
        busy = {slot for product in under_way for slot in product.plan.slots}
        for product in under_way:
            shared.still_reads(index, product.read)
        for slot in {slot for product in ended for slot in product.plan.slots} - busy:
            self._warp.registers[slot] = self._held.pop(slot)
        return False


class _Plan:
    """What an instruction says of its operands."""

    def __init__(self, names: Names, name: str, args: tuple[str, ...]) -> None:
        columns, width, kind = re.search(r"m64n(\d+)k(\d+)\.f32\.(\w+)\.", name).groups()  # type: ignore[union-attr]
        self.item, self.decode = (1 if kind == "e4m3" else 2), _decoder(kind)
        self.slots = [names.slots[one] for one in listed(args[0])]
        rows, places = _sum_places(len(self.slots))
        self.places = (np.stack(rows), np.stack(places))
        from_registers = args[1].startswith("{")
        assert args[4:6] == ("1", "1"), f"not known: factors {args[4:6]}"
        turned = [one == "1" for one in args[6:]]
        turn_left, turn_right = (False, *turned) if len(turned) == 1 else (turned or (False, False))
        self.rows = None if from_registers else _Tile(16, int(width), self.item, transposed=turn_left)
        self.right = _Tile(int(columns), int(width), self.item, transposed=turn_right)


def _multiply_async(names: Names, name: str, args: tuple[str, ...]) -> Step:
    plan = _Plan(names, name, args)
    registers = names.readers(args[1], "b32") if plan.rows is None else None
    left, right = names.reader(args[1], "u64") if registers is None else None, names.reader(args[2], "u64")
    use = names.reader(args[3], "pred")

    def multiply(warp: Any, mask: Lanes | None) -> None:
        if mask is not None:
            raise Fault("some lanes multiply only")
        if registers is not None:
            a: Any = _fragment([read(warp) for read in registers], 16, 4 // plan.item, plan.decode)
        else:
            a = _same(left(warp))
        warp.products.begin(_Product(warp, plan, bool(use(warp)[0]), a, _same(right(warp))))

    return multiply


def _same(values: Lanes) -> int:
    if (values != values[0]).any():
        raise Fault("the lanes of a warp name different tiles")
    return int(values[0])
