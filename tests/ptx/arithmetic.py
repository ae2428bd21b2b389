"""What instructions do that touch registers alone: `decode_arithmetic` gives a closure for one, vectorised over lanes.

A sum, product or fused one rounds once, as the card's does; ex2, division and root are rounded properly here, and
approximated by some bits there. Denormal numbers are kept where the instruction flushes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.ptx.program import Instruction
from tests.ptx.registers import UNSIGNED, Lanes, Names, bf16_to_f32, bits_of, dtype_of, f32_to_bf16, listed

Step = Callable[[Any, Lanes | None], None]
"""(warp, mask); None: all lanes."""


def decode_arithmetic(names: Names, instruction: Instruction) -> Step | None:
    """None: it is none of these."""
    head, *parts = instruction.name.split(".")
    args = instruction.args
    if head == "mov":
        return _move(names, parts[0], args)
    if head == "setp":
        assert len(args) == 3 and "|" not in args[0], f"not known: {instruction}"
        return _elementwise(names, args, parts[-1:] * 2, _COMPARISONS[parts[0]])
    if head == "selp":
        select = lambda one, other, chosen: np.where(chosen, one, other)  # noqa: E731
        return _elementwise(names, args, (parts[0], parts[0], "pred"), select)
    if head == "cvt":
        return _convert(names, instruction)
    if head == "cvta":
        return _elementwise(names, args, ("u64",), np.copy)
    if head == "shfl":
        return _shuffle(names, parts[1], args)
    if head == "redux":
        kind = parts[-1]
        reduce = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
        whole = reduce[parts[1]].reduce
        return _elementwise(names, args[:2], (kind,), lambda x: np.full(32, whole(x), x.dtype))
    if head == "elect":
        register, predicate = args[0].split("|")
        write, elected = names.writer(register), names.writer(predicate)
        return lambda warp, mask: (write(warp, np.zeros(32, np.uint32), mask), elected(warp, warp.lanes == 0, mask))[0]
    if head in ("mul", "mad") and parts[0] in ("wide", "hi"):
        return _wide(names, head, *parts[:2], args)
    if head in _OPERATIONS or (head in ("min", "max") and parts[0] != "relu"):
        return _operation(names, head, parts, args)
    if head == "max":  # relu
        return _elementwise(names, args, parts[-1:] * 2, lambda x, y: np.maximum(np.maximum(x, y), x.dtype.type(0)))
    if head == "prmt":
        return _elementwise(names, args, ("b32",) * 3, _permute)
    if head == "bfe":
        return _elementwise(names, args, (parts[0], "u32", "u32"), _extract)
    return None


def _elementwise(names: Names, args: tuple[str, ...], kinds: Any, function: Callable[..., Lanes]) -> Step:
    """args[0] = function of the others, which are of these kinds."""
    write = names.writer(args[0])
    reads = [names.reader(arg, kind) for arg, kind in zip(args[1:], kinds, strict=True)]
    if len(reads) == 1:
        (one,) = reads
        return lambda warp, mask: write(warp, function(one(warp)), mask)
    if len(reads) == 2:
        one, other = reads
        return lambda warp, mask: write(warp, function(one(warp), other(warp)), mask)
    return lambda warp, mask: write(warp, function(*[read(warp) for read in reads]), mask)


_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": lambda x, y: (x < y) | (x > y) if x.dtype.kind == "f" else x != y,
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
}


def _quotient(x: Lanes, y: Lanes) -> Lanes:
    """Towards zero, of anything where y is zero."""
    if x.dtype.kind == "f":
        return x / y
    whole = np.where(y == 0, 1, y).astype(x.dtype)
    return np.where((x < 0) != (whole < 0), -(np.abs(x) // np.abs(whole)), np.abs(x) // np.abs(whole)).astype(x.dtype)


def _shifted(x: Lanes, count: Lanes, *, left: bool) -> Lanes:
    bits = x.dtype.itemsize * 8
    if left:
        return np.where(count < bits, x << (count & np.uint32(bits - 1)).astype(x.dtype), x.dtype.type(0))
    if x.dtype.kind == "i":
        return x >> np.minimum(count, bits - 1).astype(x.dtype)
    return np.where(count < bits, x >> (count & np.uint32(bits - 1)).astype(x.dtype), x.dtype.type(0))


def _fused(x: Lanes, y: Lanes, z: Lanes) -> Lanes:
    if x.dtype.kind == "f":
        return (x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)).astype(x.dtype)
    return x * y + z


def _smaller(x: Lanes, y: Lanes) -> Lanes:
    return np.fmin(x, y) if x.dtype.kind == "f" else np.minimum(x, y)


def _larger(x: Lanes, y: Lanes) -> Lanes:
    return np.fmax(x, y) if x.dtype.kind == "f" else np.maximum(x, y)


_OPERATIONS: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": _fused,
    "fma": _fused,
    "div": _quotient,
    "rem": lambda x, y: x - _quotient(x, y) * y,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "min": _smaller,
    "max": _larger,
    "shl": lambda x, count: _shifted(x, count, left=True),
    "shr": lambda x, count: _shifted(x, count, left=False),
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: x.dtype.type(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "tanh": np.tanh,
    "clz": lambda x: np.array([32 - int(one).bit_length() for one in x], np.uint32),
    "popc": lambda x: np.array([int(one).bit_count() for one in x], np.uint32),
}


def _operation(names: Names, head: str, parts: list[str], args: tuple[str, ...]) -> Step:
    kind, function = parts[-1], _OPERATIONS[head]
    kinds = [kind] * (len(args) - 1)
    if head in ("shl", "shr"):
        kinds[1] = "u32"
    if kind == "f32x2":
        return _elementwise(names, args, kinds, lambda *both: function(*[x.view(np.float32) for x in both]).view("u8"))
    if kind == "bf16":
        return _elementwise(names, args, kinds, lambda *all_: f32_to_bf16(function(*[bf16_to_f32(x) for x in all_])))
    if kind == "bf16x2":
        halves = lambda *all_: f32_to_bf16(function(*[bf16_to_f32(x.view(np.uint16)) for x in all_])).view("u4")  # noqa: E731
        return _elementwise(names, args, ["b32"] * len(kinds), halves)
    if kind == "f16x2":
        halves = lambda *all_: function(*[x.view(np.float16) for x in all_]).view("u4")  # noqa: E731
        return _elementwise(names, args, ["b32"] * len(kinds), halves)
    return _elementwise(names, args, kinds, function)


def _wide(names: Names, head: str, half: str, kind: str, args: tuple[str, ...]) -> Step:
    """Products of twice the bits: all of them, or the upper half."""
    dtype = dtype_of(kind)
    double = np.dtype(f"{dtype.kind}{dtype.itemsize * 2}")
    if half == "hi":
        shift = double.type(dtype.itemsize * 8)
        return _elementwise(
            names, args, (kind, kind), lambda x, y: ((x.astype(double) * y.astype(double)) >> shift).astype(dtype)
        )
    if head == "mul":
        return _elementwise(names, args, (kind, kind), lambda x, y: x.astype(double) * y.astype(double))
    kinds = (kind, kind, f"{kind[0]}{bits_of(kind) * 2}")
    return _elementwise(names, args, kinds, lambda x, y, z: x.astype(double) * y.astype(double) + z)


def _permute(low: Lanes, high: Lanes, selector: Lanes) -> Lanes:
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    out = np.zeros(32, np.uint32)
    for byte in range(4):
        place = (selector >> np.uint32(4 * byte)).astype(np.uint64) & np.uint64(15)
        value = (both >> ((place & np.uint64(7)) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        sign = np.where(value >> np.uint32(7), np.uint32(255), np.uint32(0))
        out |= np.where(place >> np.uint64(3), sign, value) << np.uint32(8 * byte)
    return out


def _extract(x: Lanes, place: Lanes, length: Lanes) -> Lanes:
    bits = (x.astype(np.int64) >> place.astype(np.int64)) & ((np.int64(1) << length.astype(np.int64)) - 1)
    if x.dtype.kind == "i":
        bits = bits - ((bits >> (length.astype(np.int64) - 1) & 1) << length.astype(np.int64))
    return bits.astype(x.dtype)


def _move(names: Names, kind: str, args: tuple[str, ...]) -> Step:
    """Also a register taken apart, and put together."""
    to, source = args
    if to.startswith("{"):
        parts, read = names.writers(to), names.reader(source, kind)
        dtype = UNSIGNED[bits_of(kind) // len(parts)]

        def take_apart(warp: Any, mask: Lanes | None) -> None:
            values = read(warp).view(dtype).reshape(32, -1)
            for index, write in enumerate(parts):
                write(warp, np.ascontiguousarray(values[:, index]), mask)

        return take_apart
    if source.startswith("{"):
        write, dtype = names.writer(to), UNSIGNED[bits_of(kind)]
        reads = names.readers(source, f"b{bits_of(kind) // len(listed(source))}")
        return lambda warp, mask: write(warp, np.stack([one(warp) for one in reads], 1).view(dtype)[:, 0], mask)
    write, read = names.writer(to), names.reader(source, kind)
    return lambda warp, mask: write(warp, read(warp), mask)


def _shuffle(names: Names, mode: str, args: tuple[str, ...]) -> Step:
    write, read, count = names.writer(args[0].split("|")[0]), names.reader(args[1], "b32"), names.reader(args[2], "u32")

    def shuffle(warp: Any, mask: Lanes | None) -> None:
        assert mask is None, "shuffled by some lanes only"
        lanes, by = warp.lanes.astype(np.int64), count(warp).astype(np.int64)
        source = {"bfly": lanes ^ by, "up": lanes - by, "down": lanes + by, "idx": by}[mode]
        write(warp, read(warp)[np.where((source < 0) | (source > 31), lanes, source)], mask)

    return shuffle


def _to_fp8(x: Lanes) -> Lanes:
    """e4m3, the largest where it would be larger."""
    values = torch.from_numpy(np.ascontiguousarray(x))
    bits = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(x), np.uint8(0x7F), bits)


def _from_fp8(bits: Lanes) -> Lanes:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.float8_e4m3fn).float().numpy()


def _convert(names: Names, instruction: Instruction) -> Step:
    parts, args = instruction.name.split(".")[1:], instruction.args
    to, source = parts[-2:]
    pairs = {  # of two fp32, the first becomes the upper half
        "bf16x2": lambda upper, lower: np.stack([f32_to_bf16(lower), f32_to_bf16(upper)], 1).view("u4")[:, 0],
        "f16x2": lambda upper, lower: np.stack([lower, upper], 1).astype(np.float16).view("u4")[:, 0],
        "e4m3x2": lambda upper, lower: np.stack([_to_fp8(lower), _to_fp8(upper)], 1).view("u2")[:, 0],
    }
    if source == "f32" and to in pairs:
        return _elementwise(names, args, ("f32", "f32"), pairs[to])
    if (to, source) == ("f16x2", "e4m3x2"):
        return _elementwise(names, args, ("b16",), lambda x: _from_fp8(x.view(np.uint8)).astype("f2").view("u4"))
    if source == "bf16":
        assert to == "f32", f"not known: {instruction}"
        return _elementwise(names, args, ("b16",), bf16_to_f32)
    if to == "bf16":
        return _elementwise(names, args, (source,), lambda x: f32_to_bf16(x.astype(np.float32)))
    dtype = dtype_of(to)
    rounding = next((part for part in parts[:-2] if part in ("rni", "rzi", "rmi", "rpi")), None)
    if rounding is not None:
        whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]
        return _elementwise(names, args, (source,), lambda x: whole(x).astype(dtype))
    return _elementwise(names, args, (source,), lambda x: x.astype(dtype))
