"""Arrays to the device: many small ones as one copy, or one by itself.

Knows bytes and alignment; knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Pieces begin at multiples of this, so that kernels see aligned pointers whatever the batch is.
ALIGNMENT = 16
DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def place(arrays: Sequence[np.ndarray], *, pinned: bool) -> Tensor:
    """The arrays behind one another in one host tensor of bytes (pinned: for a copy that nobody waits for)."""
    starts, end = _starts(arrays)
    host = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    host_bytes = host.numpy()
    for start, array in zip(starts, arrays):
        host_bytes[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return host


def views(there: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Tensors of the arrays' shapes and dtypes over the bytes that `place` laid out for them."""
    starts, _ = _starts(arrays)
    return [
        there[start : start + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays)
    ]


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The same arrays on the device, through one pinned buffer and one copy (on the CPU: views of it)."""
    there = place(arrays, pinned=device.type == "cuda").to(device, non_blocking=True)
    return views(there, arrays)


def upload_array(array: np.ndarray, device: torch.device) -> Tensor:
    """One array of any dtype, as a copy that nobody waits for. On the CPU a copy too: the array may change later."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


def _starts(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each array begins, and where the last ends."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, end
