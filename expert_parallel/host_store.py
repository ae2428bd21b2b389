"""Host memory for what the GPU does not hold: few arenas of just the size they need, pinned, perhaps shared by ranks.

Knows names, shapes and bytes; knows nothing of experts. A pinning allocator rounds each block up to a power of two; an
arena is mapped from the system in whole pages instead, and then registered with the driver. Tensors are views of it,
each at a multiple of ALIGNMENT bytes, and keep it alive: the last one unpins and unmaps it.

    arena   | w13 [S, 2F, D] ........ | w2 [S, D, F] .... | scales |-| end of the page
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from expert_parallel.host_memory import locked_limit, mem_available

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor by name."""

ALIGNMENT = 256
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process
_MADV_POPULATE_WRITE = 23
_MAX_THREADS = 16  # pages are zeroed and pinned arena by arena, side by side


def arena_bytes(shapes: Shapes) -> int:
    """What an arena with these tensors takes."""
    return -(-_layout(shapes)[1] // mmap.PAGESIZE) * mmap.PAGESIZE


def _layout(shapes: Shapes) -> tuple[dict[str, int], int]:
    """The offset of each tensor, and the end of the last one."""
    offsets: dict[str, int] = {}
    end = 0
    for name, (shape, dtype) in shapes.items():
        offsets[name] = -(-end // ALIGNMENT) * ALIGNMENT
        end = offsets[name] + math.prod(shape) * dtype.itemsize
    return offsets, end


class Arena:
    """Tensors in one mapping. `file` None: this process's own; else a file in memory, which others may map too.
    `pin_for`: the GPU that copies from it; None: not pinned."""

    def __init__(self, shapes: Shapes, file: int | None = None, *, pin_for: torch.device | None = None) -> None:
        offsets, _ = _layout(shapes)
        self.num_bytes = arena_bytes(shapes)
        mapped = mmap.mmap(-1 if file is None else file, max(self.num_bytes, mmap.PAGESIZE))
        if file is None and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # kernels without them
                mapped.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
        # Holds the mapping; what is finalized with it comes before the unmapping.
        anchor = (ctypes.c_ubyte * len(mapped)).from_buffer(mapped)
        if pin_for is not None and self.num_bytes:
            address = ctypes.addressof(anchor)
            _populate(address, self.num_bytes)
            with torch.cuda.device(pin_for):  # threads begin with the first one
                pin(address, self.num_bytes)
            weakref.finalize(anchor, _unpin, address).atexit = False
        whole_X = torch.frombuffer(anchor, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            part_X = whole_X[offsets[name] : offsets[name] + math.prod(shape) * dtype.itemsize]
            self.tensors[name] = part_X.view(dtype).view(shape)


def pin(address: int, num_bytes: int) -> None:
    """Register memory with the driver, so that the GPU copies from it at full speed and beside the host's work."""
    code = int(_cuda().cudaHostRegister(address, num_bytes, _PORTABLE))
    if code:
        raise ValueError(_not_pinned(num_bytes, code))


def _populate(address: int, num_bytes: int) -> None:
    """Let the system give and zero all pages now, arenas side by side: the driver, which pins, does it page by page and
    for one arena at a time. Where the system cannot (Linux before 5.14), the driver does."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE)


def _unpin(address: int) -> None:
    _cuda().cudaHostUnregister(address)


def _cuda() -> Any:
    """The runtime's own calls; torch has no others that pin what it did not allocate."""
    return torch.cuda.cudart()


def _not_pinned(num_bytes: int, code: int) -> str:
    limit = locked_limit()
    limit_text = "none" if limit is None else f"{limit} bytes"
    return (
        f"{num_bytes} bytes of host memory for experts could not be pinned (CUDA error {code}); {mem_available()} "
        f"bytes are available, the limit of locked memory (ulimit -l) is {limit_text}. Free host memory, raise the "
        "limit, or keep less there: offload.tier=disk with a smaller offload.host_gb, or ranks on more hosts."
    )


def make_arenas(
    shapes: Sequence[Shapes], files: Sequence[int | None], *, pin_for: torch.device | None = None
) -> list[Arena]:
    """One for each of `shapes`, in `files[i]` where that is none of this process's own. Made side by side: pinning
    zeroes every page."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda each: Arena(*each, pin_for=pin_for), zip(shapes, files, strict=True)))


class SharedFiles:
    """Files in memory, one for each arena: the first rank of a node makes them, the others open them.

    `names` tells the others where: a path that leads through the first one's process. All hold the same pages.
    """

    def __init__(self, files: list[int]) -> None:
        self.files = files

    @classmethod
    def make(cls, sizes: Sequence[int]) -> SharedFiles:
        files: list[int] = []
        for index, size in enumerate(sizes):
            file = os.memfd_create(f"experts-{index}")
            os.ftruncate(file, max(size, mmap.PAGESIZE))
            files.append(file)
        return cls(files)

    @classmethod
    def open(cls, names: Sequence[str]) -> SharedFiles:
        return cls([os.open(name, os.O_RDWR | os.O_CLOEXEC) for name in names])

    @property
    def names(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{file}" for file in self.files]

    def close(self) -> None:
        """Once everyone has mapped them; what is mapped stays."""
        for file in self.files:
            os.close(file)


def node_key() -> str:
    """The same in processes that can open each other's files in memory, another elsewhere."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
        return f"{boot_id.read().strip()} {os.readlink('/proc/self/ns/pid')}"
