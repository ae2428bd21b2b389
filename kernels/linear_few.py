"""A plain product of at most eight rows, for compute capability 9 (H100, H200): the sum over K as short as it can be.

Knows matrices as kernels/linear.py does, which holds the definition and the launch. With few rows a product waits for
nothing but its own chain of sums: 16 entries of K after the 16 before. wgmma adds them faster than the tensor core's
older instruction, but wants 64 rows of weights; here a program has 16, 32 or 64 of them, so that every multiprocessor
has one program, and what lies behind its own in shared memory stands in for the rest: sums of rows that are not there
are not written.

Weights are nothing of this step: they are on their way, by the copy engine, while the launch before this one still
runs. A program's ring holds all of them; where it does not, linear_few_deep.py has less behind the wait. The sum over K
ascends, unsplit, in one fp32 accumulator, as in every other kernel here: the bits are the same.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.barriers import barriers
from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import wait_for_inputs
from kernels.tiles import device_generation, num_multiprocessors

FEW_ROWS = 8
"""Rows of x: as many as the tensor core has columns at least."""

_WIDEST = 4096
"""Columns of x at most: eight rows of them lie in shared memory."""

_STAGES = {16: 12, 32: 8, 64: 5}
"""Stages of 256 columns, by rows of weights. Measured on an H200, one row behind a norm of 1.4 us, microseconds, in
brackets the tiles of linear.py: [2048, 2048] 16 rows, 5 stages 5.3, 8 5.4 (6.5); [2048, 2816] 16 rows, 6 stages 6.0,
11 6.3 (7.8); [3648, 2048] 32 rows, 5 stages 6.2, 9 6.6, 16 rows 6.6 (6.9); [2048, 4096] 32 rows 7.3, 16 rows, 8 stages
7.4, 12 7.8 (9.9); [4096, 4096] 32 rows, 5 stages 10.7, 8 10.9, 16 rows 12.4 (11.6); [5120, 2048] 64 rows 7.5, 32 rows,
160 programs, 9.9 (8.0); [6144, 4096] 64 rows 15.0, 32 rows, 192 programs, 20.8 (15.5).
In place, behind kernels that tell ahead of their wait (dependent_launch.py), weights have longer to come; us a layer,
these stages / 6, 5 and 4: qwen3 1 row 51.25 / 51.87, 8 rows 150.0 / 150.9, mixtral 1 row 202.6 / 203.4, 8 rows 556.3 /
556.5. More is less, for what is to run beside finds no room: with 160 KiB of weights a program, of as many rows as
leave no multiprocessor without one (40 of 5120), qwen3's row takes 54.1 where it takes 50.9."""

_CHUNKS = gl.constexpr(4)
"""Of 64 columns in a stage."""


# y[m, n] = sum over k, ascending and unsplit, of x[m, k] * w[n, k], + bias[n]
#   x_ptr [M, K], M at most 8, K at most STAGES * 256, rows strided by groups of 8 values; w_desc [N, K] in blocks of
#   [ROWS, 64]; bias_ptr [N] or None; y_ptr [M, N], rows strided
#   grid (cdiv(N, ROWS),): a program owns ROWS columns of y
#   fp32 accumulation. Rows from M on and columns from N on are read as zero and not written; K is filled up with zeros


@gluon.jit
def _feed(w_desc, ws, full, width, ROWS: gl.constexpr):
    """Weights of this program, in stages of 256 columns, each of which is filled once."""
    n = gl.program_id(0) * ROWS
    for first in range(0, width, _CHUNKS * 64):
        stage = first // (_CHUNKS * 64)
        mbarrier.expect(full.index(stage), ROWS * _CHUNKS * 64 * 2)
        for c in gl.static_range(_CHUNKS):
            chunk = ws.index(stage * _CHUNKS + c)
            tma.async_copy_global_to_shared(w_desc, [n, first + c * 64], full.index(stage), chunk)


@gluon.jit
def store_sums(acc, bias_ptr, y_ptr, num_rows, num_columns, stride_y, ROWS: gl.constexpr):
    """acc [64, 8], of which the first ROWS rows are this program's columns of y."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, SUMS))[:, None]
    n = gl.program_id(0) * ROWS + row
    out_m = gl.arange(0, 8, gl.SliceLayout(0, SUMS))[None, :]
    own = (row < ROWS) & (n < num_columns)
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + n, mask=own, other=0.0).to(gl.float32)
    gl.store(y_ptr + out_m * stride_y + n, acc.to(y_ptr.dtype.element_ty), mask=own & (out_m < num_rows))


@gluon.jit
def _sum(
    x_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_columns,
    width,
    stride_x8,
    stride_y,
    xs,
    x_chunks,
    ws,
    full,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    wait_for_inputs(PDL)
    m = gl.arange(0, 8, gl.SliceLayout(1, COPY))[:, None]
    k = gl.arange(0, xs.shape[1], gl.SliceLayout(0, COPY))[None, :]
    # Groups of 8 values, 16 bytes, are what one copy moves: spelt out, for the compiler to see it of any width.
    there = (m < num_rows) & (k // 8 < width // 8)
    async_copy.async_copy_global_to_shared(xs, x_ptr + m * stride_x8 * 8 + k, mask=there)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    acc = gl.zeros([64, 8], gl.float32, SUMS)
    for first in range(0, width, _CHUNKS * 64):
        stage = first // (_CHUNKS * 64)
        mbarrier.wait(full.index(stage), 0)
        for c in gl.static_range(_CHUNKS):
            w = ws.index(stage * _CHUNKS + c)._reinterpret(ws.dtype, [64, 64], SWIZZLED)
            x = x_chunks.index(stage * _CHUNKS + c).permute((1, 0))
            acc = warpgroup_mma(w, x, acc, is_async=True)
        # This stage's products are under way, those before them done.
        acc = warpgroup_mma_wait(_CHUNKS, deps=[acc])
    acc = warpgroup_mma_wait(0, deps=[acc])
    store_sums(acc, bias_ptr, y_ptr, num_rows, num_columns, stride_y, ROWS)


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@gluon.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_ptr,
    w_desc,
    bias_ptr,
    y_ptr,
    num_rows,
    num_columns,
    width,
    stride_x8,
    stride_y,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = w_desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Room behind the last chunk, for the rows that the tensor core reads in vain.
    ws = gl.allocate_shared_memory(dtype, [STAGES * _CHUNKS + 64 // ROWS - 1, ROWS, 64], SWIZZLED)
    xs = gl.allocate_shared_memory(dtype, [8, BLOCK_K], SWIZZLED)
    x_chunks = xs._reinterpret(dtype, [BLOCK_K // 64, 8, 64], SWIZZLED)
    (full,) = barriers(STAGES, (1,))
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_sum, (
                x_ptr, bias_ptr, y_ptr, num_rows, num_columns, width, stride_x8, stride_y, xs, x_chunks, ws, full,
                ROWS, PDL,
            )),
            (_feed, (w_desc, ws, full, width, ROWS)),
        ],
        [1],
        [24],
    )
    # fmt: on


def serves_few_rows(x_MK: Tensor, w_NK: Tensor) -> bool:
    """Whether this kernel takes these operands: of 16 bits, few rows, and weights that a program each takes 64 of."""
    return (
        device_generation(x_MK) == 9
        and 0 < x_MK.shape[0] <= FEW_ROWS
        and x_MK.dtype == w_NK.dtype
        and x_MK.dtype in (torch.bfloat16, torch.float16)
        and 0 < x_MK.shape[1] <= _WIDEST
        and 0 < w_NK.shape[0] <= 64 * num_multiprocessors(x_MK.device)
        and x_MK.shape[1] % 8 == x_MK.stride(0) % 8 == w_NK.stride(0) % 8 == 0
        and x_MK.data_ptr() % 16 == w_NK.data_ptr() % 16 == 0
    )


def few_rows_sizes(w_NK: Tensor) -> dict[str, int]:
    """The kernel's constants for these weights."""
    rows = rows_of_weights(w_NK.shape[0], num_multiprocessors(w_NK.device))
    block_k = max(_CHUNKS.value * 64, next_power_of_2(w_NK.shape[1]))
    return {"ROWS": rows, "STAGES": _STAGES[rows], "BLOCK_K": block_k}


def is_deep(width: int, sizes: dict[str, int]) -> bool:
    """Whether a program's ring, by these sizes, does not hold all its weights at once: then linear_few_deep.py has less
    behind the wait."""
    return width > sizes["STAGES"] * _CHUNKS.value * 64


def rows_of_weights(num_columns: int, multiprocessors: int) -> int:
    """Of a program: as few as leave no multiprocessor a second program.

    >>> [rows_of_weights(columns, 132) for columns in (2048, 2112, 3648, 5120)]
    [16, 16, 32, 64]
    """
    return next((rows for rows in (16, 32) if cdiv(num_columns, rows) <= multiprocessors), 64)
