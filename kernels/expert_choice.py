"""The choice of experts in the lanes of a program that holds whole rows of logits. No launcher.

Knows scores, groups and ties, and that a row lies in BLOCK_G groups of BLOCK_S places, each filled up beyond its
experts; knows neither where logits come from nor where ids go. `route_reference` in routing.py is the definition.
fp32 throughout. A place that is no expert holds logit -inf (no share in the softmax) and the lowest of all keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.row_sum import row_sum

_LOWEST = tl.constexpr(-(2**31))
"""Below every order key: no expert, or one already chosen."""


@triton.jit
def _order_key(score):
    """int32 keys in the order of the scores; -0.0 ties with 0.0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, place):
    """(greatest key of each row, first place that holds it). Reductions of int32 are single instructions in a warp."""
    best = tl.max(key, axis=1)
    return best, tl.min(tl.where(key == best[:, None], place, 0x7FFFFFFF), axis=1)


@triton.jit
def _losers_to_minus_inf(
    selection,
    key,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The selection scores, -inf in every group but each token's TOPK_GROUPS best."""
    key_of_group = tl.reshape(key, (BLOCK_T * BLOCK_G, BLOCK_S))
    place = tl.arange(0, BLOCK_S)[None, :]
    best, first = _best(key_of_group, place)  # pyright: ignore
    worth = _score_of_key(best)
    if TOP2_SUM:
        worth += _score_of_key(tl.max(tl.where(place == first[:, None], _LOWEST, key_of_group), axis=1))
    group = tl.arange(0, BLOCK_G)[None, :]
    group_key = tl.where(group < NUM_GROUPS, _order_key(tl.reshape(worth, (BLOCK_T, BLOCK_G))), _LOWEST)
    kept = tl.zeros((BLOCK_T, BLOCK_G), tl.int32)
    for _ in range(TOPK_GROUPS):
        _, winner = _best(group_key, group)
        kept = tl.where(group == winner[:, None], 1, kept)
        group_key = tl.where(group == winner[:, None], _LOWEST, group_key)
    kept = tl.broadcast_to(kept[:, :, None], (BLOCK_T, BLOCK_G, BLOCK_S))
    return tl.where(tl.reshape(kept, (BLOCK_T, BLOCK_G * BLOCK_S)) != 0, selection, -float("inf"))


@triton.jit
def expert_places(NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):
    """(places of a row, the expert of each, whether there is one), each [1, BLOCK_G * BLOCK_S]."""
    group_size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    place = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]
    is_expert = (place // BLOCK_S < NUM_GROUPS) & (place % BLOCK_S < group_size)
    return place, (place // BLOCK_S) * group_size + place % BLOCK_S, is_expert


@triton.jit
def choose_experts(
    logits,
    in_batch,
    bias_ptr,
    slot,
    epsilon,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(ids, weights, slots) [BLOCK_T, BLOCK_K] of the logits [BLOCK_T, BLOCK_G * BLOCK_S] of rows `in_batch`
    [BLOCK_T, 1]. `slot` [1, BLOCK_G * BLOCK_S]: what slots repeats of each chosen place; None: slots are zeros."""
    place, expert, is_expert = expert_places(NUM_EXPERTS, NUM_GROUPS, BLOCK_G, BLOCK_S)  # pyright: ignore
    used = in_batch & is_expert
    logits = tl.where(used, logits, -float("inf"))
    if SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        exps = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        total = row_sum(exps, BLOCK_T)
        scores = tl.div_rn(exps, tl.broadcast_to(total[:, None], (BLOCK_T, BLOCK_G * BLOCK_S)))
    # Also where every logit is -inf, of which softmax makes NaN.
    bad = tl.max((used & ((scores != scores) | (logits == float("inf")))).to(tl.int32), axis=1)
    scores = tl.where((bad > 0)[:, None], float("nan"), scores)

    selection = scores
    if bias_ptr is not None:
        selection += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    selection = tl.where(selection != selection, -float("inf"), selection)
    key = tl.where(is_expert, _order_key(selection), _LOWEST)
    if NUM_GROUPS > 1:
        selection = _losers_to_minus_inf(selection, key, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, BLOCK_T, BLOCK_G, BLOCK_S)
        key = tl.where(is_expert, _order_key(selection), _LOWEST)

    choice = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    slots = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    score_bits = scores.to(tl.int32, bitcast=True)
    group_size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    for k in range(TOP_K):
        best, first = _best(key, place)  # pyright: ignore
        chosen = place == first[:, None]
        if bias_ptr is None:
            # The score is what was selected by (but in rows of NaN, whose weights are NaN anyway).
            weight = _score_of_key(best)
        else:
            weight = tl.max(tl.where(chosen, score_bits, _LOWEST), axis=1).to(tl.float32, bitcast=True)
        id = (first // BLOCK_S) * group_size + first % BLOCK_S
        ids = tl.where(choice == k, id[:, None], ids)
        weights = tl.where(choice == k, weight[:, None], weights)
        if slot is not None:
            own = tl.max(tl.where(chosen, slot, _LOWEST), axis=1)
            slots = tl.where(choice == k, own[:, None], slots)
        total += weight
        key = tl.where(chosen, _LOWEST, key)
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.broadcast_to((total + epsilon)[:, None], (BLOCK_T, BLOCK_K)))
    weights = tl.where((bad > 0)[:, None], float("nan"), weights * scale)
    return ids, weights, slots
