"""How tests compare numbers: relative to the largest value, and against fp64 next to torch in the same dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """What `torch.empty` and its like give holds the largest number, or NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def max_rel(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|, NaN if either holds one: the project's measure of agreement. `b` is the reference."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def rel_norm(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in fp64; `b` is the reference."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def assert_close_as_torch(
    ours: Tensor, torch_same_dtype: Tensor, exact_fp64: Tensor, factor: float = 1.5, *, chain: int = 0
) -> None:
    """Our error against fp64 is at most `factor` times torch's own in the same dtype (plus a floor of 1e-7).

    `chain`: terms that we add one after another in fp32, where torch may split the sum and so round less: our sums are
    never split. Such a chain errs by about 2^-24 * sqrt(chain), which only shows where operands are fp32 too.
    """
    ours_error, torch_error = rel_norm(ours, exact_fp64), rel_norm(torch_same_dtype, exact_fp64)
    bound = factor * torch_error + 1e-7 + (1.5 * 2**-24 * chain**0.5 if chain else 0.0)
    assert ours_error <= bound, f"error {ours_error:.3e}, torch's own {torch_error:.3e}, bound {bound:.3e}"


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """The two tensors are equal bit for bit (NaN equals NaN)."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.shape} {a.dtype} against {b.shape} {b.dtype}"
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) if a.dtype.is_floating_point else a == b
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} values differ"


def assert_same_as_separate(fused: Tensor, separate: Tensor) -> None:
    """A fused kernel's result is that of the kernels it stands for, bit for bit (NaN equals NaN).

    On a GPU fp32 is let off the last bits: both sum a row in tiles of one shape, but the compiler may lay those out in
    two ways. In 16 bits, where the sum is only seen after rounding, no difference was found.
    """
    if fused.is_cuda and fused.dtype == torch.float32:
        torch.testing.assert_close(fused, separate, rtol=1e-6, atol=2e-6, equal_nan=True)
    else:
        assert_same_bits(fused, separate)


@contextlib.contextmanager
def host_never_waits() -> Iterator[None]:
    """Whatever makes the host wait for the device in here raises. What was launched before has ended."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
