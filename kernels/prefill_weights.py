"""What the Hopper prefill kernel makes of scores: masks, weights with running sums, the rows at the end. No products.

Knows positions, rows and where they are written; knows nothing of pages.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def mask_scores(s, start, n, query, first, kv_end, first_query, last_query, WINDOW: gl.constexpr):
    """The scores s [64, N] of keys from position `start` on, -inf where a query [64] does not see the key.

    n [N] counts keys; `first_query` and `last_query` bound `query`; keys are in [first, kv_end). A tile that all see is
    not looked at.
    """
    BLOCK_N: gl.constexpr = n.shape[0]
    edge = (start < first) | (start + BLOCK_N > kv_end) | (start + BLOCK_N > first_query + 1)
    if WINDOW > 0:
        edge = edge | (start <= last_query - WINDOW)
    if edge:
        key = (start + n)[None, :]
        seen = (key >= first) & (key < kv_end) & (key <= query[:, None])
        if WINDOW > 0:
            seen = seen & (key > query[:, None] - WINDOW)
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def weigh(s, maximum, total, scale, scale_log2):
    """(maximum, total, decay, weights) after a tile of scores: weights are 2^(s * scale_log2 - maximum), total is their
    sum, and `decay` what sums so far are multiplied with. `scale` [64, N] is full of scale_log2."""
    new_maximum = gl.maximum(maximum, gl.max(s, axis=1) * scale_log2)
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(gl.fma(s, scale, gl.zeros_like(s) - base[:, None]))
    decay = gl.exp2(maximum - base)
    return new_maximum, gl.fma(total, decay, gl.sum(p, axis=1)), decay, p


@gluon.jit
def store_rows(
    out_ptr,
    lse_ptr,
    out,
    maximum,
    total,
    first_row,
    query_len,
    in_chunk,
    m,
    head0,
    num_heads,
    SUM: gl.constexpr,
    VALUE_WIDTH: gl.constexpr,
    HALF: gl.constexpr,
    PACK: gl.constexpr,
):
    """Rows m [64] of a piece, the sums `out` [64, VALUE_WIDTH] of layout SUM over their total, and the logarithm of the
    total. Rows past the chunk are not written."""
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    sum_m = HALF * 64 + gl.arange(0, 64, SUM_ROW)
    total = gl.where(total == 0.0, 1.0, total)
    out = out / gl.convert_layout(total, SUM_ROW)[:, None]
    row = ((first_row + in_chunk + sum_m // PACK).to(gl.int64) * num_heads + head0 + sum_m % PACK)[:, None]
    ptrs = out_ptr + row * VALUE_WIDTH + gl.arange(0, VALUE_WIDTH, gl.SliceLayout(0, SUM))[None, :]
    gl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=(in_chunk + sum_m // PACK < query_len)[:, None])
    lse_row = (first_row + in_chunk + m // PACK).to(gl.int64) * num_heads + head0 + m % PACK
    # A row without keys keeps -inf, its maximum. The factor, ln 2, turns log2 into ln.
    lse = (maximum + gl.log2(total)) * 0.6931471805599453
    gl.store(lse_ptr + lse_row, lse, mask=in_chunk + m // PACK < query_len)
