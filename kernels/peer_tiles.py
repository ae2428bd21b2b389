"""What one program of peer_combine.py does with a few tokens: send what is here of another rank's, sum up its own.

Knows rows, records and buffers; knows neither flags nor who takes which tokens. The maths and the operands are those of
peer_combine.py. A token's columns go a part at a time, so that several programs fit a multiprocessor; all its rows are
asked for before the first arrives.

Of the tuples below: `results` is (y_ptr, row_ptr, weights_ptr, y's stride), `tokens` (home_row_ptr, home_weights_ptr),
`after` (shared_ptr, residual_ptr, norm_ptr, the strides of the first two, eps), `out` (out_ptr, sum_ptr), `sizes`
(num_tokens, num_columns).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.combine import add_rows
from kernels.rmsnorm import rms_apply, rms_scale


@triton.jit
def _rows_here(row_ptr, weights_ptr, first, in_batch, stride_y, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr):
    """Of the choices from `first` on: the places in y of their rows, whether these are here, and their weights."""
    places, here, weights = (), (), ()
    for k in tl.static_range(TOP_K):
        row = tl.load(row_ptr + first + k, mask=in_batch, other=-1)
        # One instruction multiplies numbers without a sign; nobody looks where no row is.
        places += (row.to(tl.uint32).to(tl.uint64) * tl.cast(stride_y, tl.uint32),)
        here += (row >= 0,)
        if WEIGHTED:
            weights += (tl.load(weights_ptr + first + k, mask=row >= 0, other=0.0),)
    return places, here, weights


@triton.jit
def _rows_home(
    home_ptr,
    results,
    tokens,
    first,
    first_own,
    in_batch,
    num_columns,
    TOP_K: tl.constexpr,
):
    """The same of own choices, whose rows have stayed here or come home: the home lies so many elements from y."""
    y_ptr, row_ptr, _, stride_y = results
    home_row_ptr, home_weights_ptr = tokens
    home_at = (home_ptr.to(tl.int64) - y_ptr.to(tl.int64)) // (y_ptr.dtype.element_ty.primitive_bitwidth // 8)
    home_at = tl.multiple_of(home_at, 8)
    places, here, weights = (), (), ()
    for k in tl.static_range(TOP_K):
        home_row = tl.load(home_row_ptr + first + k, mask=in_batch, other=-1).to(tl.int64)
        row = tl.load(row_ptr + first_own + k, mask=in_batch, other=-1).to(tl.int64)
        places += (tl.where(row >= 0, row * stride_y, home_at + home_row * num_columns),)
        here += (home_row >= 0,)
        weights += (tl.load(home_weights_ptr + first + k, mask=home_row >= 0, other=0.0),)
    return places, here, weights


@triton.jit
def _columns(ptr, places, here, d, in_row, NUMBER: tl.constexpr):
    """Columns d of all these rows. Each is read once, so that L2 may keep others, that have come home: 1 % gained."""
    columns = ()
    for k in tl.static_range(NUMBER):
        columns += (tl.load(ptr + places[k] + d, mask=here[k] & in_row, other=0.0, eviction_policy="evict_first"),)
    return columns


@triton.jit
def _weighted_sum(y_ptr, rows, d, in_row, TOP_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of each token the sum of columns d of its rows, k ascending."""
    places, here, weights = rows
    y = _columns(y_ptr, places, here, d, in_row, TOP_K)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for k in tl.static_range(TOP_K):
        total += weights[k] * y[k].to(tl.float32)
    return total


@triton.jit
def send_tile(
    home_ptr,
    results,
    tile,
    first_record,
    first_place,
    sizes,
    TOP_K: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What is here of a home's tokens, into its buffer."""
    y_ptr, row_ptr, weights_ptr, stride_y = results
    num_tokens, num_columns = sizes
    token = (tile * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64))[:, None]
    in_batch = token < num_tokens
    rows = _rows_here(row_ptr, weights_ptr, (first_record + token) * TOP_K, in_batch, stride_y, TOP_K, SUMS)
    places, here, _ = rows
    any_here = here[0]
    for k in tl.static_range(1, TOP_K):
        any_here |= here[k]
    for start in range(0, num_columns, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        in_row = d < num_columns
        if SUMS:
            total = _weighted_sum(y_ptr, rows, d, in_row, TOP_K, BLOCK_R, BLOCK_D)
            place = (first_place + token) * num_columns
            tl.store(home_ptr + place + d, total.to(y_ptr.dtype.element_ty), mask=any_here & in_row)
        else:
            y = _columns(y_ptr, places, here, d, in_row, TOP_K)
            for k in tl.static_range(TOP_K):
                tl.store(home_ptr + (token * TOP_K + k) * num_columns + d, y[k], mask=here[k] & in_row)


@triton.jit
def _sums_home(home_row_ptr, first, own, num_tokens, in_batch, num_columns, HOMES: tl.constexpr):
    """Of each rank's sum of a token: where it lies at home, whether it has come there, and whether it is this rank's
    own, which stays where it is made."""
    places, come, stayed = (), (), ()
    for j in tl.static_range(HOMES):
        home_row = tl.load(home_row_ptr + first + j, mask=in_batch, other=-1)
        mine = (home_row >= own) & (home_row < own + num_tokens)
        places += (home_row.to(tl.int64) * num_columns,)
        come += ((home_row >= 0) & ~mine,)
        stayed += (mine,)
    return places, come, stayed


@triton.jit
def sum_tile(
    home_ptr,
    results,
    tokens,
    after,
    out,
    tile,
    own,
    sizes,
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW_D: tl.constexpr,
):
    """Own tokens, all of whose results are here; the first of all is record `own`."""
    y_ptr, row_ptr, weights_ptr, stride_y = results
    shared_ptr, residual_ptr, norm_ptr, stride_shared, stride_residual, eps = after
    out_ptr, sum_ptr = out
    num_tokens, num_columns = sizes
    HOMES: tl.constexpr = NUM_RANKS if NUM_RANKS < TOP_K else TOP_K
    dtype = y_ptr.dtype.element_ty
    token = (tile * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64))[:, None]
    in_batch = token < num_tokens
    first, first_own = token * TOP_K, (own + token) * TOP_K
    if SUMS:
        rows = _rows_here(row_ptr, weights_ptr, first_own, in_batch, stride_y, TOP_K, True)
        homes, come, stayed = _sums_home(tokens[0], first, own, num_tokens, in_batch, num_columns, HOMES)
    else:
        rows = _rows_home(home_ptr, results, tokens, first, first_own, in_batch, num_columns, TOP_K)
    for start in range(0, num_columns, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        in_row = d < num_columns
        if SUMS:
            far = _columns(home_ptr, homes, come, d, in_row, HOMES)
            local = _weighted_sum(y_ptr, rows, d, in_row, TOP_K, BLOCK_R, BLOCK_D).to(dtype).to(tl.float32)
            total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
            for j in tl.static_range(HOMES):
                total += tl.where(stayed[j], local, far[j].to(tl.float32))
        else:
            total = _weighted_sum(y_ptr, rows, d, in_row, TOP_K, BLOCK_R, BLOCK_D)
        place = token * num_columns + d
        used = in_batch & in_row
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
