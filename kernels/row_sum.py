"""Sums along a row in an order of its own: the same bits however Triton lays a tile out over threads. No launcher.

neighbours in pairs, three times; then halves: x[i] + x[i + n / 2], until one is left
"""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sum(x, ROWS: tl.constexpr):
    """Of x [ROWS, a power of two], the sum of each row. `tl.sum` adds in the order of the tile's layout, which depends
    on warps and on how loads were vectorised. On sm_90 this takes as many shuffles."""
    for step in tl.static_range(16):
        if x.shape[1] > 1:
            if step < 3:
                x = tl.sum(tl.reshape(x, (ROWS, x.shape[1] // 2, 2)), axis=2)
            else:
                x = tl.sum(tl.reshape(x, (ROWS, 2, x.shape[1] // 2)), axis=1)
    return tl.reshape(x, (ROWS,))
