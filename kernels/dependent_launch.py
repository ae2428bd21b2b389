"""Programmatic dependent launch: a kernel is set up while the one before it ends. Knows launches; computes nothing.

Between two small kernels a GPU idles for a microsecond or more, and a decode step has hundreds. With this attribute the
next kernel's programs are placed as soon as every program of the last one runs, and wait on the device for its end.

A kernel that takes part calls `wait_for_inputs(PDL)` in every program, also those that have nothing to do: a kernel
that ended without waiting would let its successor run before its predecessor has ended. It does so before it writes
anything, and before it reads what the kernel right before it may have written. What older kernels wrote may be read
earlier: the one before has told only after its own wait, when they had ended. So weights, lengths, tables and the
router's choices are on their way while the kernel before still works. One H200, whole layers of qwen3 in graphs, with
positions and the offsets of second products read so too / all behind the wait, microseconds: 1 row 54.5 / 55.8, 8 rows
152.2 / 153.8, 256 rows 410.6 / 411.9.

One H200: 0.4 us less for each kernel of 1 to 2 us in a chain of them.

A short kernel of few rows may tell ahead of its own wait: then the product behind it asks for its weights while the
kernel before both still runs. What follows such kernels, one or several behind each other, may read early what is older
than the launch before the first of them, no younger: that one has told after its own wait. One H200, us a layer with
merges of splits and the sums behind experts doing so / none: qwen3 1 row 51.9 / 52.4, 8 rows 150.9 / 151.8, mixtral 1
row 203.4 / 204.1, 8 rows 556.5 / 557.9; routers too: 52.6. Attention of few rows, too: a step of qwen3's row 2.119 ms,
without 2.130.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

AHEAD_ROWS = 8
"""Up to so many rows short kernels tell ahead: what follows waits for its weights, and has room on the GPU."""


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended and their writes are seen; let the next one be placed, before
    the wait where PDL is "ahead"."""
    if PDL == "ahead":
        gdc_launch_dependents()
        gdc_wait()
    elif PDL:
        gdc_wait()
        gdc_launch_dependents()


def dependent_launch(x: Tensor, *, ahead: bool = False) -> dict[str, Any]:
    """The launch options of a kernel that calls `wait_for_inputs`: on from compute capability 9 (H100), else off.

    `ahead`: the next kernel may be placed while this one still waits, see above."""
    return _options(x.device, ahead)


@cache
def _options(device: torch.device, ahead: bool) -> dict[str, Any]:
    # Asked at every launch, and the driver's answer costs about as much as the launch.
    on = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": "ahead" if ahead else True, "launch_pdl": True} if on else {"PDL": False}
