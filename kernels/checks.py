"""What every launcher asks before it launches: where tensors live, how sizes divide, whether shapes and dtypes agree.

Knows tensors, devices and integers only. A failed check is a fault of the caller inside this project, so these are
assertions; mistakes of users are caught earlier, where the configuration is read.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uses_triton(x: Tensor) -> bool:
    """True where an op runs its Triton kernel: on CUDA tensors. The CPU's product path is the reference."""
    return x.is_cuda


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1): Triton's block shapes are powers of two."""
    return 1 << max(n - 1, 0).bit_length()


def assert_shape(name: str, x: Tensor, shape: tuple[int | None, ...]) -> None:
    """`x` has this shape; None stands for any size."""
    fits = x.dim() == len(shape) and all(want is None or want == size for size, want in zip(x.shape, shape))
    assert fits, f"{name} has shape {tuple(x.shape)}, wanted {shape} (None: any)"


def assert_dtype(name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """`x` has one of these dtypes."""
    assert x.dtype in dtypes, f"{name} is {x.dtype}, wanted {' or '.join(str(d) for d in dtypes)}"


def assert_last_contiguous(name: str, x: Tensor) -> None:
    """The last dimension lies together in memory: kernels step through it with stride one."""
    assert x.numel() == 0 or x.shape[-1] == 1 or x.stride(-1) == 1, (
        f"{name} has strides {x.stride()}; the last must be 1"
    )


def assert_same_device(first: Tensor, **others: Tensor | None) -> None:
    """All tensors lie where the first one does."""
    for name, x in others.items():
        assert x is None or x.device == first.device, f"{name} is on {x.device}, the first operand on {first.device}"
