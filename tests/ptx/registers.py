"""Registers of a warp: an array of 32 lanes each, and how an instruction's operands are read from and written to them.

Knows types and spellings of operands; knows nothing of instructions. A register holds unsigned integers of its width,
or bools, whatever they mean; who reads says as what.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.program import Program

Lanes = NDArray[Any]
Read = Callable[[Any], Lanes]
"""Of a warp, the 32 values."""

UNSIGNED = {1: np.dtype(np.bool_), 8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32)}
UNSIGNED[64] = np.dtype(np.uint64)

SHARED_BASE = 1024
"""Where shared memory begins: no address is 0, and tiles lie as the copy engine wants them."""


def bits_of(kind: str) -> int:
    """Of a type as an instruction spells it: "s32", "b64", "bf16", "pred"."""
    return 1 if kind == "pred" else int(re.sub(r"\D", "", kind.replace("f32x2", "64").replace("x2", "")))


def dtype_of(kind: str) -> np.dtype:
    """As what values of this type are computed; "bf16" has none in numpy and stays as it lies."""
    bits = bits_of(kind)
    if kind[0] == "s":
        return np.dtype(f"i{bits // 8}")
    return np.dtype(f"f{bits // 8}") if kind[0] == "f" and kind != "f32x2" else UNSIGNED[bits]


def bf16_to_f32(values: Lanes) -> Lanes:
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Lanes) -> Lanes:
    """To the nearest, ties to even; every NaN becomes the one that the card writes."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


class Names:
    """The operands of one program's instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots = {name: index for index, name in enumerate(program.registers)}

    def empty(self) -> list[Lanes]:
        """Registers that nothing was written to."""
        zeros = {bits: np.zeros(32, dtype) for bits, dtype in UNSIGNED.items()}
        return [zeros[bits] for bits in self.program.registers.values()]

    def bits(self, name: str) -> int:
        return self.program.registers[name]

    def reader(self, operand: str, kind: str) -> Read:
        """The operand as `kind`; one register may be wider or narrower than what is read of it."""
        dtype = dtype_of(kind)
        if operand in self.slots:
            return self._register(self.slots[operand], self.bits(operand), dtype)
        special = {
            "%tid.x": lambda warp: warp.threads,
            "%laneid": lambda warp: warp.lanes,
            "%ctaid.x": lambda warp: warp.cta.place[0],
            "%ctaid.y": lambda warp: warp.cta.place[1],
            "%ctaid.z": lambda warp: warp.cta.place[2],
            "%nctaid.x": lambda warp: warp.cta.size[0],
            "%nctaid.y": lambda warp: warp.cta.size[1],
            "%nctaid.z": lambda warp: warp.cta.size[2],
            "%clock": lambda warp: warp.clock(),
        }.get(operand)
        if special is not None:
            return lambda warp: special(warp).view(dtype)
        if operand in self.program.params:
            return lambda warp: np.full(32, warp.cta.params[operand], dtype)
        value = constant(operand, dtype)
        return lambda _: value

    def _register(self, slot: int, bits: int, dtype: np.dtype) -> Read:
        own, wanted = UNSIGNED[bits], UNSIGNED[dtype.itemsize * 8] if dtype != np.bool_ else UNSIGNED[1]
        if own == dtype:
            return lambda warp: warp.registers[slot]
        if own == wanted:
            return lambda warp: warp.registers[slot].view(dtype)
        return lambda warp: warp.registers[slot].astype(wanted).view(dtype)

    def readers(self, operand: str, kind: str) -> list[Read]:
        """Of a list in braces, or of one."""
        return [self.reader(one, kind) for one in listed(operand)]

    def writer(self, name: str) -> Callable[[Any, Lanes, Lanes | None], None]:
        """(warp, values, mask): fills the register, where mask is not None in those lanes. Narrower values are widened,
        with their sign where they have one."""
        if name == "_":
            return lambda warp, values, mask: None
        slot, dtype = self.slots[name], UNSIGNED[self.bits(name)]
        size = dtype.itemsize
        signed = np.dtype(f"i{size}")

        def write(warp: Any, values: Lanes, mask: Lanes | None) -> None:
            if values.dtype != dtype:
                if values.dtype.itemsize == size:
                    values = values.view(dtype)
                else:
                    values = values.astype(signed).view(dtype) if values.dtype.kind == "i" else values.astype(dtype)
            warp.registers[slot] = values if mask is None else np.where(mask, values, warp.registers[slot])

        return write

    def writers(self, operand: str) -> list[Callable[[Any, Lanes, Lanes | None], None]]:
        return [self.writer(one) for one in listed(operand)]

    def address(self, operand: str) -> Read:
        """int64 of `[%r1 + 8]`, `[global_smem+64]`."""
        match = re.match(r"\[\s*([%\w.$@]+)\s*(?:\+\s*(-?\w+))?\s*\]$", operand)
        assert match is not None, f"no address: {operand}"
        kind = f"u{self.bits(match[1])}" if match[1] in self.slots else "u64"
        base, offset = self.reader(match[1], kind), int(match[2] or "0", 0)
        if kind == "u64":  # positive anyway
            return lambda warp: base(warp).view(np.int64) + offset
        return lambda warp: base(warp).astype(np.int64) + offset


def listed(operand: str) -> list[str]:
    return [one.strip() for one in operand.strip("{} ").split(",")]


def constant(operand: str, dtype: np.dtype) -> Lanes:
    """Of a literal, `0f3F800000`, `-1`, `0x7770U`, `global_smem`."""
    if operand.startswith("global_smem"):
        offset = operand.removeprefix("global_smem").strip(" +")
        return np.full(32, SHARED_BASE + int(offset or "0", 0), UNSIGNED[dtype.itemsize * 8]).view(dtype)
    if dtype == np.bool_:
        return np.full(32, int(operand, 0) != 0)
    if operand.startswith("0f"):
        return np.full(32, int(operand[2:], 16), np.uint32).view(dtype)
    bits = dtype.itemsize * 8
    return np.full(32, int(operand.rstrip("U"), 0) & ((1 << bits) - 1), UNSIGNED[bits]).view(dtype)
