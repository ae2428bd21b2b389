"""y = x w^T (+ bias) with the sum over K never split, so that a row's bits do not depend on how many rows there are.

Knows matrices; knows nothing of models. Serves where the vendor library may split K by the number of rows: router
logits, the head, narrow projections, and, as `head_linear`, the per-head products of absorbed MLA. On CPU the products
run in blocks of 32 rows, the last one filled up with zeros: torch's own rows change with the number of rows.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.checks import (
    assert_last_contiguous,
    assert_same_device,
    assert_shape,
    cdiv,
    next_power_of_2,
    uses_triton,
)
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.linear_few import few_rows_kernel, few_rows_sizes, is_deep, serves_few_rows
from kernels.linear_few_deep import few_rows_deep_kernel
from kernels.row_tiles import multiply, tile_of_program
from kernels.tiles import TileConfig, device_generation, linear_tile, num_multiprocessors

CPU_BLOCK = 32
"""Rows of one matrix product on CPU. Every product has exactly this many."""

_CPU_K_MULTIPLE = 4
"""Measured on CPU: with N <= 8 and a K that 4 does not divide, a row's bits depend on its place in the block."""


def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """y_MN = x w^T (+ bias), fp32 accumulation, one cast to `out_dtype` (None: the operands' dtype).

    Operands of different dtypes are both read as the wider one. fp32 operands are multiplied in fp32, never in tf32.
    The bias is added before the cast. `linear_reference` is the definition.
    """
    return (linear_triton if uses_triton(x_MK) else linear_reference)(x_MK, w_NK, bias_N, out_dtype=out_dtype)


def head_linear(x_BHK: Tensor, w_HNK: Tensor) -> Tensor:
    """y_BHN[b, h] = w_HNK[h] x_BHK[b, h], one product per head; x may be a strided view, w too in all but K.

    `head_linear_reference` is the definition.
    """
    return (head_linear_triton if uses_triton(x_BHK) else head_linear_reference)(x_BHK, w_HNK)


# y[h, m, n] = sum over k, ascending and unsplit, of x[h, m, k] * w[h, n, k], + bias[n]
#   x_ptr [M, K] and y_ptr [M, N] per head, w_ptr [N, K] per head, rows strided, the last dimension of each together;
#   bias_ptr [N] or None. grid (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N), heads): a program owns one tile of y.
#   fp32 accumulation. Rows from M on and columns from N on are read as zero and not written; K is filled up with zeros
#   (EVEN: the tile divides N and K, and weights are read without a mask).


@triton.jit
def prefetch_rows(row_ptrs, LINES: tl.constexpr):
    """Ask for the first LINES cache lines, of 128 bytes, of each row. Nothing waits for them."""
    line = tl.arange(0, LINES) * 128
    address = row_ptrs.to(tl.int64)[:, None] + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_columns,
    width,
    stride_xm,
    stride_xh,
    stride_wn,
    stride_wh,
    stride_ym,
    stride_yh,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    tile_m, tile_n = tile_of_program(tl.program_id(0), tiles_m, tiles_n, GROUP_M)  # pyright: ignore
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL and PREFETCH:
        # Weights are no work of this step: they may come into the L2 cache while the kernels before this one still run.
        rows = w_ptr + head * stride_wh + tl.minimum(n, num_columns - 1) * stride_wn
        prefetch_rows(rows, PREFETCH)
    wait_for_inputs(PDL)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + head * stride_xh + m[:, None] * stride_xm + k[None, :]
    w_ptrs = w_ptr + head * stride_wh + n[None, :] * stride_wn + k[:, None]
    # The tensor core takes 16 rows of one operand and 8 of the other: few rows of x are the other.
    SWAPPED: tl.constexpr = BLOCK_M < 16
    in_m, in_n = (m < num_rows)[:, None], (n < num_columns)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        in_k = start + k < width
        x = tl.load(x_ptrs, mask=in_m if EVEN else in_m & in_k[None, :], other=0.0)
        w = tl.load(w_ptrs) if EVEN else tl.load(w_ptrs, mask=in_n & in_k[:, None], other=0.0)
        if WIDE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = multiply(x, w, acc, SWAPPED)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if SWAPPED:
        acc = tl.trans(acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < num_columns, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + head * stride_yh + m[:, None] * stride_ym + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_m & in_n)


def linear_triton(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    tile: TileConfig | None = None,
) -> Tensor:
    """`linear` as one launch; unless it is given, `tile` is chosen by the rule of kernels/tiles.py, or few rows take
    the kernel of linear_few.py."""
    _check_linear(x_MK, w_NK, bias_N)
    operand_dtype = torch.promote_types(x_MK.dtype, w_NK.dtype)
    y_MN = torch.empty(x_MK.shape[0], w_NK.shape[0], dtype=out_dtype or operand_dtype, device=x_MK.device)
    if tile is None and serves_few_rows(x_MK, w_NK):
        _launch_few_rows(x_MK, w_NK, bias_N, y_MN)
        return y_MN
    _launch(x_MK.unsqueeze(1), w_NK.unsqueeze(0), bias_N, y_MN.unsqueeze(1), tile)
    return y_MN


def head_linear_triton(x_BHK: Tensor, w_HNK: Tensor, *, tile: TileConfig | None = None) -> Tensor:
    """`head_linear` as one launch."""
    _check_head_linear(x_BHK, w_HNK)
    y_BHN = torch.empty(*x_BHK.shape[:2], w_HNK.shape[1], dtype=x_BHK.dtype, device=x_BHK.device)
    _launch(x_BHK, w_HNK, None, y_BHN, tile)
    return y_BHN


def _launch(x_MHK: Tensor, w_HNK: Tensor, bias_N: Tensor | None, y_MHN: Tensor, tile: TileConfig | None) -> None:
    num_rows, num_heads, width = x_MHK.shape
    num_columns = w_HNK.shape[1]
    if y_MHN.numel() == 0:
        return
    operand_dtype = torch.promote_types(x_MHK.dtype, w_HNK.dtype)
    tile = tile or linear_tile(
        num_rows,
        num_columns,
        operand_dtype,
        device_generation(x_MHK),
        num_multiprocessors(x_MHK.device),
        num_heads=num_heads,
    )
    # Lines of a row that are asked for early, where few rows leave the time to the weights. Measured on an H200 after a
    # kernel of 4 us, [5120, 2048]: 8 lines save 0.5 us of 8.5, 32 lines cost 1 us.
    prefetch = min(8, next_power_of_2(width * w_HNK.element_size() // 128 + 1) // 2) if num_rows <= 64 else 0
    _linear_kernel[(cdiv(num_rows, tile.block_m) * cdiv(num_columns, tile.block_n), num_heads)](
        x_MHK,
        w_HNK,
        bias_N,
        y_MHN,
        num_rows,
        num_columns,
        width,
        x_MHK.stride(0),
        x_MHK.stride(1),
        w_HNK.stride(1),
        w_HNK.stride(0),
        y_MHN.stride(0),
        y_MHN.stride(1),
        WIDE=x_MHK.dtype != w_HNK.dtype,
        EVEN=width % tile.block_k == 0 and num_columns % tile.block_n == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=8,
        PREFETCH=prefetch,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(x_MHK),
    )


def _launch_few_rows(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, y_MN: Tensor) -> None:
    sizes = few_rows_sizes(w_NK)
    deep = is_deep(w_NK.shape[1], sizes)
    box = [sizes["ROWS"], 256 if deep else 64]
    layout = gl.NVMMASharedLayout(128, 16, 2)  # as the tensor core reads it
    options = {} if deep else {"maxnreg": 96}  # room for programs of the launches before and after beside this one's
    (few_rows_deep_kernel if deep else few_rows_kernel)[(cdiv(w_NK.shape[0], sizes["ROWS"]),)](
        x_MK,
        TensorDescriptor(w_NK, list(w_NK.shape), list(w_NK.stride()), box, layout),
        bias_N,
        y_MN,
        x_MK.shape[0],
        *w_NK.shape,
        x_MK.stride(0) // 8,
        y_MN.stride(0),
        **sizes,
        num_warps=4,
        **options,
        **dependent_launch(x_MK),
    )


def _check_linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> None:
    assert_shape("x_MK", x_MK, (None, None))
    assert_shape("w_NK", w_NK, (None, x_MK.shape[1]))
    assert_last_contiguous("x_MK", x_MK)
    assert_last_contiguous("w_NK", w_NK)
    if bias_N is not None:
        assert_shape("bias_N", bias_N, (w_NK.shape[0],))
    assert_same_device(x_MK, w_NK=w_NK, bias_N=bias_N)


def linear_reference(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The definition, and the CPU's product path: fixed 32-row blocks in the widest of operand and output dtype."""
    _check_linear(x_MK, w_NK, bias_N)
    operand_dtype = torch.promote_types(x_MK.dtype, w_NK.dtype)
    out_dtype = out_dtype or operand_dtype
    product_dtype = torch.promote_types(operand_dtype, out_dtype)
    y_MN = multiply_blocks(x_MK.to(product_dtype), w_NK.to(product_dtype), bias_N)
    return y_MN.to(out_dtype)


def multiply_blocks(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x w^T (+ bias) in blocks of CPU_BLOCK rows, all of one shape: a row's bits depend on that row and w alone."""
    num_rows, width = x_MK.shape
    bias_N = None if bias_N is None else bias_N.to(x_MK.dtype)
    if width % _CPU_K_MULTIPLE:
        fill = _CPU_K_MULTIPLE - width % _CPU_K_MULTIPLE
        x_MK, w_NK = functional.pad(x_MK, (0, fill)), functional.pad(w_NK, (0, fill))
    y_MN = x_MK.new_empty(num_rows, w_NK.shape[0])
    for start in range(0, num_rows, CPU_BLOCK):
        block_MK = x_MK[start : start + CPU_BLOCK]
        rows = block_MK.shape[0]
        if rows < CPU_BLOCK:
            block_MK = functional.pad(block_MK, (0, 0, 0, CPU_BLOCK - rows))
        y_MN[start : start + rows] = functional.linear(block_MK.contiguous(), w_NK, bias_N)[:rows]
    return y_MN


def head_linear_reference(x_BHK: Tensor, w_HNK: Tensor) -> Tensor:
    """The definition of `head_linear`: per head, `linear_reference`'s fixed blocks of rows."""
    _check_head_linear(x_BHK, w_HNK)
    num_rows, num_heads, _ = x_BHK.shape
    y_BHN = x_BHK.new_empty(num_rows, num_heads, w_HNK.shape[1])
    for head in range(num_heads):
        y_BHN[:, head] = multiply_blocks(x_BHK[:, head], w_HNK[head])
    return y_BHN


def _check_head_linear(x_BHK: Tensor, w_HNK: Tensor) -> None:
    assert_shape("x_BHK", x_BHK, (None, None, None))
    assert_shape("w_HNK", w_HNK, (x_BHK.shape[1], None, x_BHK.shape[2]))
    assert x_BHK.dtype == w_HNK.dtype, (
        f"x_BHK is {x_BHK.dtype}, w_HNK {w_HNK.dtype}; a per-head product takes one dtype"
    )
    assert_last_contiguous("x_BHK", x_BHK)
    assert_same_device(x_BHK, w_HNK=w_HNK)
