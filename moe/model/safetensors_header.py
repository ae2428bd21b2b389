"""The header of one safetensors file: names, dtypes, shapes and places of its tensors, checked against the file's size.

Reads the first bytes only, so a hundred shards are checked in a moment. Knows one file; knows nothing of models.
Layout: 8 bytes, little-endian length N of the header | N bytes of JSON | the tensors, one after another.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.model.checkpoint_file import readable, refuse_lfs_pointer

_MAX_HEADER_BYTES = 100_000_000  # what the format itself allows
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: bytes [begin, end) behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of `file` by name. ValueError names the file, its size, the size expected and the likely cause."""
    with readable(file), file.open("rb") as stream:
        actual = os.fstat(stream.fileno()).st_size
        start = stream.read(200)
        refuse_lfs_pointer(file, start)
        if actual < 8:
            raise ValueError(
                f"{file}: the file has {actual} bytes, expected at least 8 for the length of the header; "
                "incomplete download: fetch this file again."
            )
        header_bytes = int.from_bytes(start[:8], "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(
                f"{file}: the first 8 bytes announce a header of {header_bytes} bytes in a file of {actual}; "
                "this is not a safetensors file."
            )
        if 8 + header_bytes > actual:
            raise ValueError(
                f"{file}: the file has {actual} bytes, expected at least {8 + header_bytes}: it ends inside its "
                "header; incomplete download: fetch this file again."
            )
        stream.seek(8)
        header = _parse(file, stream.read(header_bytes))
    entries = {name: _entry(file, name, value) for name, value in header.items() if name != "__metadata__"}
    _check_places(file, entries, 8 + header_bytes, actual)
    return entries


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError:  # both bad JSON and bad UTF-8
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: its header of {len(raw)} bytes is not JSON; damaged file: fetch it again.")
    return header


def _entry(file: Path, name: str, value: Any) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{file}: tensor {name}: its header entry {value!r} is malformed; fetch this file again.")
    dtype, (begin, end) = fields.get("dtype"), offsets
    if dtype not in _BITS:
        raise ValueError(
            f"{file}: tensor {name} has dtype {dtype!r}, which is unknown; known: {', '.join(sorted(_BITS))}."
        )
    expected = math.ceil(math.prod(shape) * _BITS[dtype] / 8)
    if end - begin != expected:
        raise ValueError(
            f"{file}: tensor {name}: offsets {begin} to {end} hold {end - begin} bytes, but dtype {dtype} and shape "
            f"{list(shape)} need {expected}; damaged header: fetch this file again."
        )
    return TensorEntry(dtype, shape, begin, end)


def _counts(values: Any) -> tuple[int, ...] | None:
    """The list as a tuple, if it holds nothing but integers of 0 or more."""
    if not isinstance(values, list) or any(not isinstance(n, int) or n < 0 for n in values):
        return None
    return tuple(values)


def _check_places(file: Path, entries: dict[str, TensorEntry], data_start: int, actual: int) -> None:
    """The tensors follow each other without gap or overlap, and the last one ends where the file ends."""
    position, last = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if data_start + entry.end > actual:
            raise ValueError(
                f"{file}: the file has {actual} bytes, expected at least {data_start + entry.end}: tensor {name} ends "
                "past the end of the file; incomplete download or damaged header: fetch this file again."
            )
        if entry.begin != position:
            raise ValueError(
                f"{file}: tensor {name} begins at offset {entry.begin}, but the one before it ({last or 'none'}) ends "
                f"at {position}; damaged header: fetch this file again."
            )
        position, last = entry.end, name
    if data_start + position != actual:
        raise ValueError(
            f"{file}: the file has {actual} bytes, expected {data_start + position}: {actual - data_start - position} "
            "bytes follow the last tensor; damaged file: fetch it again."
        )
