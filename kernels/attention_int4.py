"""One tile of keys and values in int4, as decode and prefill attention take it. No launcher.

Knows codes, steps, middles and an online softmax; knows neither pages nor tables. Its idea: within half a head all
columns of a key share step and middle (kv_int4.py), so the products run on codes alone, and

    q . k[p] = step[p] * (q . code[p]) + middle[p] * (sum of q)              half by half
    sum of w[p] v[p] = sum of (w[p] * step[p]) code[p] + (sum of w[p] * middle[p])
"""
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.kv_int4 import INT4_UNIT, both_codes, step_and_middle


@triton.jit
def empty_state(ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of ROWS queries before the first tile: (lower sum, upper sum, their middles' sums, total, maximum)."""
    zeros = tl.zeros((ROWS, BLOCK_C), tl.float32)
    none = tl.zeros((ROWS,), tl.float32)
    return zeros, zeros, none, none, none, tl.full((ROWS,), float("-inf"), tl.float32)


@triton.jit
def attend_int4_tile(
    state,
    q_lower,
    q_upper,
    k_ptrs,
    v_ptrs,
    k_word_ptrs,
    v_word_ptrs,
    seen,
    scale_log2,
    HALF_WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The state with a tile more. q [M, BLOCK_C]; k_ptrs, v_ptrs [N, 1] to rows of bytes, k_word_ptrs, v_word_ptrs [N]
    to their two words; seen [M or 1, N]. Every pointer may be read."""
    lower_sum, upper_sum, lower_middles, upper_middles, total, maximum = state
    c = tl.arange(0, BLOCK_C)[None, :]
    if HALF_WIDTH == BLOCK_C:
        k = tl.load(k_ptrs + c)
        v = tl.load(v_ptrs + c)
    else:
        k = tl.load(k_ptrs + c, mask=c < HALF_WIDTH, other=0)
        v = tl.load(v_ptrs + c, mask=c < HALF_WIDTH, other=0)
    k_lower, k_upper = both_codes(k, q_lower.dtype)
    lower_step, lower_middle = step_and_middle(tl.load(k_word_ptrs))
    upper_step, upper_middle = step_and_middle(tl.load(k_word_ptrs + 1))
    scores = tl.dot(q_lower, tl.trans(k_lower), input_precision="ieee") * lower_step[None, :]
    scores += tl.dot(q_upper, tl.trans(k_upper), input_precision="ieee") * upper_step[None, :]
    scores += tl.sum(q_lower.to(tl.float32), axis=1)[:, None] * lower_middle[None, :]
    scores += tl.sum(q_upper.to(tl.float32), axis=1)[:, None] * upper_middle[None, :]
    scores = tl.where(seen, scores * scale_log2, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(maximum - base)
    total = total * decay + tl.sum(weights, axis=1)
    v_lower, v_upper = both_codes(v, q_lower.dtype)
    lower_step, lower_middle = step_and_middle(tl.load(v_word_ptrs))
    upper_step, upper_middle = step_and_middle(tl.load(v_word_ptrs + 1))
    lower_weights = (weights * (lower_step * INT4_UNIT)[None, :]).to(q_lower.dtype)
    upper_weights = (weights * (upper_step * INT4_UNIT)[None, :]).to(q_lower.dtype)
    lower_sum = tl.dot(lower_weights, v_lower, lower_sum * decay[:, None], input_precision="ieee")
    upper_sum = tl.dot(upper_weights, v_upper, upper_sum * decay[:, None], input_precision="ieee")
    lower_middles = lower_middles * decay + tl.sum(weights * lower_middle[None, :], axis=1)
    upper_middles = upper_middles * decay + tl.sum(weights * upper_middle[None, :], axis=1)
    return lower_sum, upper_sum, lower_middles, upper_middles, total, new_maximum


@triton.jit
def int4_result(state):
    """(lower half, upper half, log2 of the sum of 2^score); a row without keys gives 0 and -inf."""
    lower_sum, upper_sum, lower_middles, upper_middles, total, maximum = state
    total = tl.where(total == 0.0, 1.0, total)
    lower = (lower_sum / INT4_UNIT + lower_middles[:, None]) / total[:, None]
    upper = (upper_sum / INT4_UNIT + upper_middles[:, None]) / total[:, None]
    return lower, upper, maximum + tl.log2(total)
