"""What one program of peer_combine.py does with a few tokens: send what is here of another rank's, sum up its own.

Knows rows, records and buffers; knows neither flags nor who takes which tokens. The maths and the operands are those of
peer_combine.py. A token's columns go a part at a time, so that several programs fit a multiprocessor.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.combine import UNROLLED, add_experts, add_rows
from kernels.rmsnorm import rms_apply, rms_scale


@triton.jit
def send_tile(
    home_ptr,
    y_ptr,
    row_ptr,
    weights_ptr,
    tile,
    first_record,
    first_place,
    num_tokens,
    num_columns,
    stride_y,
    TOP_K: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What is here of a home's tokens, into its buffer."""
    token = (tile * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64))[:, None]
    in_batch = token < num_tokens
    record = first_record + token
    for start in range(0, num_columns, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        if SUMS:
            here = tl.zeros((BLOCK_R, 1), tl.int32)
            for k in range(TOP_K):
                here |= (tl.load(row_ptr + record * TOP_K + k, mask=in_batch, other=-1) >= 0).to(tl.int32)
            total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
            total = add_experts(total, y_ptr, row_ptr, weights_ptr, record, in_batch, d, num_columns, stride_y, TOP_K)
            place = (first_place + token) * num_columns
            tl.store(home_ptr + place + d, total.to(y_ptr.dtype.element_ty), mask=(here > 0) & (d < num_columns))
        else:
            for k in range(TOP_K):
                row = tl.load(row_ptr + record * TOP_K + k, mask=in_batch, other=-1)
                here = (row >= 0) & (d < num_columns)
                y = tl.load(y_ptr + row.to(tl.int64) * stride_y + d, mask=here)
                tl.store(home_ptr + (token * TOP_K + k) * num_columns + d, y, mask=here)


@triton.jit
def _add_choice(
    total,
    local,
    home_ptr,
    y_ptr,
    row_ptr,
    home_row_ptr,
    home_weights_ptr,
    choice,
    first,
    num_tokens,
    in_batch,
    d,
    num_columns,
    stride_y,
    TOP_K: tl.constexpr,
    SUMS: tl.constexpr,
):
    """total + the term of one choice of each token: what stayed here, or what has come home."""
    in_row = d < num_columns
    home_row = tl.load(home_row_ptr + choice, mask=in_batch, other=-1).to(tl.int64)
    if SUMS:
        mine = (home_row >= first) & (home_row < first + num_tokens)
        far = tl.load(home_ptr + home_row * num_columns + d, mask=(home_row >= 0) & ~mine & in_row, other=0.0)
        return total + tl.where(mine, local, far.to(tl.float32))
    row = tl.load(row_ptr + first * TOP_K + choice, mask=in_batch, other=-1).to(tl.int64)
    mine = row >= 0
    weight = tl.load(home_weights_ptr + choice, mask=home_row >= 0, other=0.0)
    near = tl.load(y_ptr + row * stride_y + d, mask=mine & in_row, other=0.0)
    far = tl.load(home_ptr + home_row * num_columns + d, mask=(home_row >= 0) & ~mine & in_row, other=0.0)
    return total + weight * tl.where(mine, near, far).to(tl.float32)


@triton.jit
def sum_tile(
    home_ptr,
    y_ptr,
    row_ptr,
    weights_ptr,
    home_row_ptr,
    home_weights_ptr,
    shared_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    sum_ptr,
    tile,
    first,
    num_tokens,
    num_columns,
    stride_y,
    stride_shared,
    stride_residual,
    eps,
    TOP_K: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW_D: tl.constexpr,
):
    """Own tokens, all of whose results are here. Up to UNROLLED choices of a token are asked for at once."""
    AT_ONCE: tl.constexpr = TOP_K if TOP_K <= UNROLLED else UNROLLED
    dtype = y_ptr.dtype.element_ty
    token = (tile * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64))[:, None]
    in_batch = token < num_tokens
    for start in range(0, num_columns, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        used = in_batch & (d < num_columns)
        local = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        if SUMS:
            record = first + token
            local = add_experts(local, y_ptr, row_ptr, weights_ptr, record, in_batch, d, num_columns, stride_y, TOP_K)
            local = local.to(dtype).to(tl.float32)
        total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        for first_k in range(0, TOP_K, AT_ONCE):
            for j in tl.static_range(AT_ONCE):  # pyright: ignore
                total = _add_choice(
                    total,
                    local,
                    home_ptr,
                    y_ptr,
                    row_ptr,
                    home_row_ptr,
                    home_weights_ptr,
                    token * TOP_K + first_k + j,
                    first,
                    num_tokens,
                    in_batch & (first_k + j < TOP_K),
                    d,
                    num_columns,
                    stride_y,
                    TOP_K,
                    SUMS,
                )
        place = token * num_columns + d
        if norm_ptr is None:
            tl.store(out_ptr + place, total.to(dtype), mask=used)
        else:
            residual = tl.load(residual_ptr + token * stride_residual + d, mask=used, other=0.0)
            x = add_rows(total, shared_ptr, token * stride_shared + d, residual, used)
            tl.store(sum_ptr + place, x, mask=used)
    if norm_ptr is not None:
        # Whole rows again, in the tile of rmsnorm.py: what this program has just written.
        tl.debug_barrier()
        c = tl.arange(0, ROW_D)[None, :]
        used = in_batch & (c < num_columns)
        x = tl.load(sum_ptr + token * num_columns + c, mask=used, other=0.0)
        norm = tl.load(norm_ptr + c, mask=c < num_columns, other=0.0)
        tl.store(out_ptr + token * num_columns + c, rms_apply(x, rms_scale(x, num_columns, eps), norm), mask=used)
