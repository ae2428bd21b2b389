"""y = x w^T (+ bias) for up to 8 rows on Hopper: weights are on their way before there is a row to multiply.

Knows matrices; knows nothing of models. Its idea: a program is one warp with 16 columns of y, and asks, while the
kernels before this one still run, for as many of its weights as shared memory holds beside those of the other programs
of its multiprocessor: mostly for all. Behind the rows' arrival lies then the sum alone, whose products wait for each
other: 16 entries of K in 33 cycles, 2.2 us for a K of 2048.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.checks import cdiv
from kernels.dependent_launch import dependent_launch
from kernels.tiles import device_generation, num_multiprocessors

_ROWS, _COLUMNS, _STEP = 8, 16, 256
"""A program's tile of y, and the part of K that it multiplies at once."""

_ROW_STAGES = 3
_STAGE_BYTES, _ROW_STAGE_BYTES = _COLUMNS * _STEP * 2, _ROWS * _STEP * 2
_SHARED_BYTES, _SYSTEM_BYTES = 227 * 1024, 1024
"""Of a multiprocessor's shared memory, and what the system keeps of it for each program."""

_MOST_A_MULTIPROCESSOR = 3
"""Programs above these would begin only when others have ended, so with nothing asked for early."""

# y[m, n] = sum over k, ascending and unsplit, of x[m, k] * w[n, k], + bias[n]
#   x_ptr [M, K], y_ptr [M, N], w_ptr [N, K], rows strided, the last dimension of each together; bias_ptr [N] or None
#   grid (N / 16,): a program owns 16 columns of y. mma.sync with operands swapped, fp32 accumulation: the bits of
#   kernels/linear.py. Rows from M on are neither read nor written; what lies in their place reaches no other row.


@gluon.jit
def _copy_weights(weights, w_ptrs, step, num_steps):
    STAGES: gl.constexpr = weights.shape[0]
    if step < num_steps:
        async_copy.async_copy_global_to_shared(weights.index(step % STAGES), w_ptrs + step * weights.shape[2])


@gluon.jit
def _copy_rows(rows, x_ptrs, in_m, step, num_steps):
    STAGES: gl.constexpr = rows.shape[0]
    if step < num_steps:
        async_copy.async_copy_global_to_shared(rows.index(step % STAGES), x_ptrs + step * rows.shape[2], mask=in_m)


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@gluon.jit(do_not_specialize=["num_rows"])
def _resident_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    width,
    stride_xm,
    stride_wn,
    stride_ym,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = w_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    weights = gl.allocate_shared_memory(dtype, [STAGES, 16, BLOCK_K], SHARED)
    rows = gl.allocate_shared_memory(dtype, [ROW_STAGES, 8, BLOCK_K], SHARED)
    num_steps = width // BLOCK_K
    first = gl.program_id(0) * 16
    n = first + gl.arange(0, 16, gl.SliceLayout(1, LOAD))
    m = gl.arange(0, 8, gl.SliceLayout(1, LOAD))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LOAD))
    w_ptrs = w_ptr + n.to(gl.int64)[:, None] * stride_wn + k[None, :]
    x_ptrs = x_ptr + m.to(gl.int64)[:, None] * stride_xm + k[None, :]
    in_m = (m < num_rows)[:, None] & (k < BLOCK_K)[None, :]
    for step in gl.static_range(STAGES):
        _copy_weights(weights, w_ptrs, step, num_steps)
        async_copy.commit_group()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for step in gl.static_range(ROW_STAGES):
        _copy_rows(rows, x_ptrs, in_m, step, num_steps)
        async_copy.commit_group()
    acc = gl.zeros([16, 8], gl.float32, MMA)
    for step in range(num_steps):
        # Groups end in order: this step's rows were asked for behind all weights up to this step.
        async_copy.wait_group(ROW_STAGES - 1)
        w = weights.index(step % STAGES).load(gl.DotOperandLayout(0, MMA, 2))
        x = rows.index(step % ROW_STAGES).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
        acc = mma_v2(w, x, acc)
        _copy_weights(weights, w_ptrs, step + STAGES, num_steps)
        _copy_rows(rows, x_ptrs, in_m, step + ROW_STAGES, num_steps)
        async_copy.commit_group()
    async_copy.wait_group(0)
    column = first + gl.arange(0, 16, gl.SliceLayout(1, MMA))
    row = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + column).to(gl.float32)[:, None]
    y_ptrs = y_ptr + row.to(gl.int64)[None, :] * stride_ym + column[:, None]
    gl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(row < num_rows)[None, :] & (column >= 0)[:, None])


def resident_stages(num_columns: int, width: int, multiprocessors: int) -> int:
    """How many steps' weights a program holds; 0 where the shape is another kernel's.

    Measured on an H200 in whole layers of one and of 8 rows, us a layer, without and with this kernel (wait, then
    tell): qwen3 69.9 / 66.8 and 160.7 / 158.2, dsv2-lite 91.9 / 87.3 and 190.0 / 186.3, mixtral 219.3 / 216.6.

    >>> resident_stages(5120, 2048, 132), resident_stages(2048, 4096, 132), resident_stages(151936, 2048, 132)
    (7, 16, 0)
    """
    programs = num_columns // _COLUMNS
    each = cdiv(programs, multiprocessors)
    if num_columns % _COLUMNS or width % _STEP or not 1 <= each <= _MOST_A_MULTIPROCESSOR:
        return 0
    room = _SHARED_BYTES // each - _SYSTEM_BYTES - _ROW_STAGES * _ROW_STAGE_BYTES
    return min(width // _STEP, room // _STAGE_BYTES)


def resident_serves(x_MK: Tensor, w_NK: Tensor) -> bool:
    """Whether `launch_resident` can multiply these and should: few rows, 16 bits, 16 bytes at a time."""
    if x_MK.shape[0] > _ROWS or device_generation(x_MK) != 9 or x_MK.dtype != w_NK.dtype:
        return False
    aligned = not any((x.data_ptr() % 16 or x.stride(0) % 16) for x in (x_MK, w_NK))
    fits = x_MK.element_size() == 2 and aligned
    return fits and resident_stages(*w_NK.shape, num_multiprocessors(x_MK.device)) > 0


def launch_resident(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, y_MN: Tensor) -> None:
    """y_MN = x w^T (+ bias), where `resident_serves`. `kernels.linear.linear_reference` is the definition."""
    num_columns, width = w_NK.shape
    _resident_kernel[(num_columns // _COLUMNS,)](
        x_MK,
        w_NK,
        bias_N,
        y_MN,
        x_MK.shape[0],
        width,
        x_MK.stride(0),
        w_NK.stride(0),
        y_MN.stride(0),
        STAGES=resident_stages(num_columns, width, num_multiprocessors(x_MK.device)),
        ROW_STAGES=_ROW_STAGES,
        BLOCK_K=_STEP,
        num_warps=1,
        **dependent_launch(x_MK),
    )
