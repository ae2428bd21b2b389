"""Every layer's offsets of a step added to their running sums, in one launch.

Knows offsets and sums. Layers leave their offsets wherever the allocator put them: the launch is given all addresses,
and a program takes its own. Stacked by torch and then added, two launches without dependent launch stood between the
last norm and the logits' product. One H200, a step of qwen3's row, us: the second of them 3.4; the logits' product,
whose weights now come ahead, 144.5 behind them, 139.3 behind this one.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_shape, cdiv, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs


def add_offsets(sums_PS1: Tensor, offsets: Sequence[Tensor]) -> None:
    """sums_PS1[p] += offsets[p]. Sums int64 [P, S + 1], P at least len(offsets); each of these int32 [S + 1].

    `add_offsets_reference` is the definition."""
    if uses_triton(sums_PS1):
        add_offsets_triton(sums_PS1, offsets)
    else:
        add_offsets_reference(sums_PS1, offsets)


# sums_ptr int64 [P, S + 1], contiguous; offsets: of each of LAYERS layers a pointer, int32 [S + 1]. Grid (LAYERS,
# cdiv(S + 1, BLOCK)): a program adds BLOCK entries of one layer's.
@triton.jit(do_not_specialize=["num_entries"])
def _add_offsets_kernel(
    sums_ptr, offsets, num_entries, LAYERS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    layer = tl.program_id(0)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = offsets[0].to(tl.int64)
    for p in tl.static_range(1, LAYERS):
        address = tl.where(layer == p, offsets[p].to(tl.int64), address)
    offsets_ptr = address.to(tl.pointer_type(tl.int32))
    sum_ptrs = sums_ptr + layer.to(tl.int64) * num_entries + entry
    wait_for_inputs(PDL)
    total = tl.load(sum_ptrs, mask=entry < num_entries, other=0)
    total += tl.load(offsets_ptr + entry, mask=entry < num_entries, other=0)
    tl.store(sum_ptrs, total, mask=entry < num_entries)


def add_offsets_triton(sums_PS1: Tensor, offsets: Sequence[Tensor]) -> None:
    """The kernel's launcher; also what the interpreter's tests call on CPU tensors."""
    _check_operands(sums_PS1, offsets)
    num_entries = sums_PS1.shape[1]
    if not offsets:
        return
    block = min(1024, next_power_of_2(num_entries))
    _add_offsets_kernel[(len(offsets), cdiv(num_entries, block))](
        sums_PS1,
        tuple(offsets),
        num_entries,
        LAYERS=len(offsets),
        BLOCK=block,
        num_warps=4,
        **dependent_launch(sums_PS1, ahead=True),
    )


def _check_operands(sums_PS1: Tensor, offsets: Sequence[Tensor]) -> None:
    """One comparison a layer: this runs in every step that is launched kernel by kernel."""
    assert_shape("sums_PS1", sums_PS1, (None, None))
    assert_dtype("sums_PS1", sums_PS1, torch.int64)
    assert sums_PS1.is_contiguous(), "sums must lie together in memory"
    assert len(offsets) <= sums_PS1.shape[0], f"{len(offsets)} layers' offsets for {sums_PS1.shape[0]} sums"
    wanted = (sums_PS1.shape[1:], torch.int32, sums_PS1.device, True)
    for layer, offsets_S1 in enumerate(offsets):
        given = (offsets_S1.shape, offsets_S1.dtype, offsets_S1.device, offsets_S1.is_contiguous())
        assert given == wanted, f"offsets[{layer}]: shape, dtype, device, contiguous are {given}, wanted {wanted}"


def add_offsets_reference(sums_PS1: Tensor, offsets: Sequence[Tensor]) -> None:
    """The definition, in plain torch."""
    _check_operands(sums_PS1, offsets)
    if offsets:
        sums_PS1[: len(offsets)] += torch.stack(tuple(offsets))
