"""Products of at most eight rows (kernels/linear_few.py) whose chain behind the wait is shorter. In the place of
`_launch_few_rows` in kernels/linear.py; the same bits. Predicted, one row: qwen3's qkv 4.5 -> 3.4 to 4.1 us, output map
5.7 -> 4.8 to 5.4, so -0.7 to -2.0 a layer; dsv2-lite's two -0.3 to -1.0, mixtral's two -0.3 to -0.8.

The reckoning. Readings of linear_few.py fit 2.1 us beside 0.244 us for every 256 columns: 480 cycles for 16 steps of
the chain, of which the tensor core needs 288 to 480 (18 cycles of reading shared memory for 64 rows of weights, or some
30 where a sum waits for the one before) and 265 are issued, with two barriers of the warps, behind each other.
- Rows of x: today all eight are copied, zeros where there are none, 32 copies a thread at 4096 columns of which four
  bring something. What stands in rows that are not there may be anything, for their sums are not written. -0.1 to -0.25
- Weights beyond the ring: qkv's programs hold 5 of 8 stages, so 8 MB of 21 are asked for behind the wait, when a stage
  has been multiplied, and come 0.8 us later. Here they come into the L2 cache ahead of the wait. qkv -0.4 to -0.9,
  output map (4 of 16 stages) -0.1 to -0.4; nothing where the ring holds all ([2048, 2048], [3648, 2048]).
- The chain: stages that are not filled again are not handed back (5 of 8 of qkv; one barrier of warps for two, those
  filled again have three, behind products that are under way); a stage of 64 rows is one product of 16 steps, not four
  of four (12 issue cycles a step for 13.5). 0 to -0.09 for 256 columns: nothing if sums wait for each other, which only
  a reading can tell.
- No warp of its own that asks: first stages are asked for before anything else, later ones by a thread that has waited
  anyway. A program has 4 warps of 30 registers, where it had 8 of 96, and ends without calling others. -0.05 to -0.1

Forms of the cases: in use; "rows" all of it but the L2 cache; "L2" with it (what `install` takes); "whole" with a ring
that holds all weights of a program where they fit (16 rows of 4096 columns: 128 KiB; "more is less" has been measured).
To land: this kernel takes the place of few_rows_kernel in kernels/linear_few.py, `launch` that of `_launch_few_rows`,
its descriptor's boxes have 256 columns; tests/test_kernels/test_linear_few.py as it is, the compile test with `w_ptr`,
`stride_w8` and `L2`; K of 8, 264 and 4096, one to eight rows, NaN around x. W2 at 1 and 8 rows of all three models.

A trap for who changes it: unrolled over stages, or with what the store wants reckoned ahead of the last wait, ptxas
waits for every step of the chain before the next one (every HGMMA with `gsb0`; here one in 4 or 16 has it).
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.drafts.case import Case
from kernels import linear as product
from kernels.checks import cdiv
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.linear_few import few_rows_sizes
from kernels.rmsnorm import rmsnorm
from launch.replay import Call, rotation_length

_STEP = gl.constexpr(256)
"""Columns of a stage."""

_WHOLE_BYTES = 130 << 10
"""Of a program's weights, at most, that a ring of the form "whole" holds."""


# y[m, n] = sum over k, ascending and unsplit, of x[m, k] * w[n, k], + bias[n]
#   as in kernels/linear_few.py, but for w_desc: blocks of [ROWS, 256]; w_ptr [N, K], the same weights, rows strided by
#   groups of 8 values. Rows of x from M on are not read, columns of y that would be theirs not written. L2: weights
#   behind the first STAGES stages are asked for ahead of the wait.


@gluon.jit
def _ask(w_desc, ws, full, stage, first, wanted, ROWS: gl.constexpr):
    """Columns `first` on into a stage, if wanted."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ready = full.index(stage)
    mbarrier.expect(ready, ROWS * _STEP * 2, pred=wanted)
    room = ws.index(stage * 4)._reinterpret(ws.dtype, [ROWS, _STEP], SWIZZLED)
    tma.async_copy_global_to_shared(w_desc, [gl.program_id(0) * ROWS, first], ready, room, pred=wanted)


@gluon.jit
def _into_l2(w_ptr, num_columns, begin, width, stride_w8, ROWS: gl.constexpr):
    """Columns `begin` on of this program's rows: nobody waits for them. Lanes ask for a row each, one after another."""
    PER_WARP: gl.constexpr = ROWS // 4
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    row = gl.minimum(gl.program_id(0) * ROWS + lane // 32 * PER_WARP + lane % 32, num_columns - 1)
    size = gl.where(lane % 32 < PER_WARP, (width - begin) * 2, 0)
    address = (w_ptr + row.to(gl.int64) * stride_w8 * 8 + begin).to(gl.int64, bitcast=True)
    asm: gl.constexpr = (
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_rows(x_ptr, num_rows, width, stride_x8, xs):
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
def few_rows_kernel(
    x_ptr,
    w_desc,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_columns,
    width,
    stride_x8,
    stride_w8,
    stride_y,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    L2: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = w_desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    PART: gl.constexpr = _STEP if ROWS == 64 else 64
    # Room behind the last stage, for the rows that the tensor core reads in vain.
    ws = gl.allocate_shared_memory(dtype, [STAGES * 4 + 64 // ROWS - 1, ROWS, 64], SWIZZLED)
    xs = gl.allocate_shared_memory(dtype, [8, BLOCK_K], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        _ask(w_desc, ws, full, i, i * _STEP, i * _STEP < width, ROWS)
    if L2:  # noqa: SIM102 (one is known when it is compiled, one is not)
        if width > STAGES * _STEP:
            _into_l2(w_ptr, num_columns, STAGES * _STEP, width, stride_w8, ROWS)
    wait_for_inputs(PDL)
    copy_rows(x_ptr, num_rows, width, stride_x8, xs)
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
    row = gl.arange(0, 64, gl.SliceLayout(1, SUMS))[:, None]
    n = gl.program_id(0) * ROWS + row
    out_m = gl.arange(0, 8, gl.SliceLayout(0, SUMS))[None, :]
    own = (row < ROWS) & (n < num_columns)
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + n, mask=own, other=0.0).to(gl.float32)
    gl.store(y_ptr + out_m * stride_y + n, acc.to(y_ptr.dtype.element_ty), mask=own & (out_m < num_rows))


def launch(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, y_MN: Tensor, *, into_l2: bool = True, whole: bool = False
) -> None:
    """As `_launch_few_rows` of kernels/linear.py."""
    sizes, width = few_rows_sizes(w_NK), w_NK.shape[1]
    rows, steps = sizes["ROWS"], cdiv(width, _STEP.value)
    fits = whole and rows * steps * _STEP.value * 2 <= _WHOLE_BYTES
    sizes["STAGES"] = steps if fits else min(sizes["STAGES"], steps)
    layout = gl.NVMMASharedLayout(128, 16, 2)  # as the tensor core reads it
    few_rows_kernel[(cdiv(w_NK.shape[0], rows),)](
        x_MK,
        TensorDescriptor(w_NK, list(w_NK.shape), list(w_NK.stride()), [rows, _STEP.value], layout),
        w_NK,
        bias_N,
        y_MN,
        x_MK.shape[0],
        *w_NK.shape,
        x_MK.stride(0) // 8,
        w_NK.stride(0) // 8,
        y_MN.stride(0),
        **sizes,
        L2=into_l2,
        num_warps=4,
        **dependent_launch(x_MK),
    )


def install() -> None:
    product._launch_few_rows = launch


FORMS = {
    "rows": partial(launch, into_l2=False),
    "L2": launch,
    "whole": partial(launch, whole=True),
}

SHAPES = {
    "qwen3 qkv": (1, 5120, 2048, False),
    "qwen3 output map": (1, 2048, 4096, False),
    "qwen3 qkv, 8 rows": (8, 5120, 2048, False),
    "dsv2-lite q and latent": (1, 3648, 2048, False),
    "dsv2-lite output map": (1, 2048, 2048, False),
    "mixtral qkv": (1, 6144, 4096, False),
    "mixtral output map": (1, 4096, 4096, False),
    "nothing divides": (5, 2056, 1032, True),
}
"""rows, columns, width, with a bias"""


def cases(device: torch.device) -> Iterator[Case]:
    """A product behind three norms of its rows, some 4 us in which its weights come, as they do in a layer. How much of
    a time is the norms' is the same in all forms."""
    on_gpu, dtype = device.type == "cuda", torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    for name, (num_rows, num_columns, width, with_bias) in SHAPES.items():
        if not on_gpu:
            num_columns, width = num_columns // 8, width // 8
        draw = partial(torch.randn, device=device, generator=generator)
        operands = []
        for _ in range(rotation_length(num_columns * width * 2) if on_gpu else 2):
            wide_MK = torch.full((num_rows, width + 8), torch.nan, device=device, dtype=dtype)
            wide_MK[:, :width] = draw(num_rows, width)
            w_NK = draw(num_columns, width).mul_(width**-0.5).to(dtype)
            bias_N = draw(num_columns).to(dtype) if with_bias else None
            operands.append((wide_MK[:, :width], w_NK, bias_N))
        norm_K = torch.ones(width, device=device, dtype=dtype)
        forms = {"in use": [_behind_norms(None, norm_K, *each) for each in operands]}
        forms |= {form: [_behind_norms(run, norm_K, *each) for each in operands] for form, run in FORMS.items()}
        yield Case(name, forms)


def _behind_norms(
    drafted: Callable[..., None] | None, norm_K: Tensor, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None
) -> Call:
    y_MN = torch.full((x_MK.shape[0], w_NK.shape[0]), torch.nan, dtype=x_MK.dtype, device=x_MK.device)

    def call() -> Tensor:
        rows_MK = x_MK
        for _ in range(3):
            rows_MK = rmsnorm(rows_MK, norm_K, 1e-6)
        if drafted is None or not product.serves_few_rows(rows_MK, w_NK):
            return product.linear(rows_MK, w_NK, bias_N)
        drafted(rows_MK, w_NK, bias_N, y_MN)
        return y_MN

    return call
