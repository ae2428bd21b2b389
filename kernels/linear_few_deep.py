"""A product of at most eight rows whose weights are more than a program's ring holds, for compute capability 9 (H100,
H200): kernels/linear_few.py, which says why, with less behind the wait.

Of x only the rows that there are come to shared memory: what lies beside them is multiplied in vain. No warp of its own
asks for weights: first stages are asked for before anything else, later ones by threads that have waited anyway. So a
program has four warps of 30 registers, where the other has eight of 96, and finds room sooner beside the launches
before it. Stages that are not filled again are not handed back. The same sums in the same order, so the same bits.

Where the ring holds all weights the other kernel serves: they come early enough, and sooner they are in the way of what
runs then. One H200, ms a step, this kernel for no map / for both maps of attention: qwen3 (the ring holds 5 of 8
and 12 of 16 stages) 1 row 2.166 / 2.126, 2 rows 2.905 / 2.914, 4 rows 4.440 / 4.399; mixtral (8 of 16) 1 row 6.293 /
6.273; dsv2-lite (all) 1 row 1.815 / 1.838. In another run, its attention ending sooner, qwen3 1 row 2.134 / 2.117.

A trap for who changes it: unrolled over stages, or with what the store wants reckoned ahead of the last wait, ptxas
waits for every step of the chain before the next one (every HGMMA with `gsb0`; here one in 4 or 16 has it).
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

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
from kernels.dependent_launch import wait_for_inputs
from kernels.linear_few import store_sums

_STEP = gl.constexpr(256)
"""Columns of a stage."""

# y[m, n] = sum over k, ascending and unsplit, of x[m, k] * w[n, k], + bias[n]
#   as in kernels/linear_few.py, but for w_desc: blocks of [ROWS, 256]. Rows of x from M on are not read, columns of y
#   that would be theirs not written


@gluon.jit
def _ask(w_desc, ws, full, stage, first, wanted, ROWS: gl.constexpr):
    """Columns `first` on into a stage, if wanted."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ready = full.index(stage)
    mbarrier.expect(ready, ROWS * _STEP * 2, pred=wanted)
    room = ws.index(stage * 4)._reinterpret(ws.dtype, [ROWS, _STEP], SWIZZLED)
    tma.async_copy_global_to_shared(w_desc, [gl.program_id(0) * ROWS, first], ready, room, pred=wanted)


@gluon.jit
def _copy_rows(x_ptr, num_rows, width, stride_x8, xs):
    """Rows of x to shared memory as the tensor core reads them, zero behind their end; other rows stay as they are."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [4, 1, 1], [2, 1, 0])
    CHUNKS: gl.constexpr = xs.shape[1] // 64
    # Eight rows of 64 columns lie together, 128 bytes each; of row m, group g of 16 bytes at place g ^ m.
    groups = xs._reinterpret(xs.dtype, [CHUNKS, 64, 8], PLAIN)
    chunk = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    group = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    value = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    for m in gl.static_range(8):
        if m < num_rows:
            k8 = chunk * 8 + (group ^ m)
            here, there = groups.slice(m * 8, 8, dim=1), (k8 < width // 8) & (value >= 0)
            async_copy.async_copy_global_to_shared(here, x_ptr + m * stride_x8 * 8 + k8 * 8 + value, mask=there)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def _multiply(acc, ws, x_parts, full, stage, phase, part, ROWS: gl.constexpr):
    """Adds a stage, when it is there; the products of the one before are done then, these under way. 64 rows of
    weights, or fewer and what lies behind them."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = 1 if ROWS == 64 else 4
    mbarrier.wait(full.index(stage), phase)
    for c in gl.static_range(PARTS):
        w = ws.index(stage * 4 + c)._reinterpret(ws.dtype, [64, _STEP // PARTS], SWIZZLED)
        x = x_parts.index(part * PARTS + c).permute((1, 0))
        acc = warpgroup_mma(w, x, acc, is_async=True)
    return warpgroup_mma_wait(PARTS, deps=[acc])


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@gluon.jit(do_not_specialize=["num_rows"])
def few_rows_deep_kernel(
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
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    PART: gl.constexpr = _STEP if ROWS == 64 else 64
    # Room behind the last stage, for the rows that the tensor core reads in vain.
    ws = gl.allocate_shared_memory(dtype, [STAGES * 4 + 64 // ROWS - 1, ROWS, 64], SWIZZLED)
    xs = gl.allocate_shared_memory(dtype, [8, BLOCK_K], SWIZZLED)
    (full,) = barriers(STAGES, (1,))
    fence_async_shared()
    for i in gl.static_range(STAGES):
        _ask(w_desc, ws, full, i, i * _STEP, i * _STEP < width, ROWS)
    wait_for_inputs(PDL)
    _copy_rows(x_ptr, num_rows, width, stride_x8, xs)
    x_parts = xs._reinterpret(dtype, [BLOCK_K // PART, 8, PART], SWIZZLED)
    acc = gl.zeros([64, 8], gl.float32, SUMS)
    num_steps = (width + _STEP - 1) // _STEP
    # In the first of these and behind the others the stage before is filled again.
    refilling = gl.where(num_steps > STAGES, num_steps - STAGES + 1, 0)
    stage, phase, before = 0, 0, 0
    for step in range(refilling):
        acc = _multiply(acc, ws, x_parts, full, stage, phase, step, ROWS)
        _ask(w_desc, ws, full, before, (step - 1 + STAGES) * _STEP, step > 0, ROWS)
        before = stage
        stage, phase = _next(stage, phase, STAGES)
    for step in range(refilling, num_steps):
        acc = _multiply(acc, ws, x_parts, full, stage, phase, step, ROWS)
        stage, phase = _next(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # Nothing of this may stand before the wait above: ptxas would take it for a reader of the sums, see the header.
    store_sums(acc, bias_ptr, y_ptr, num_rows, num_columns, stride_y, ROWS)
