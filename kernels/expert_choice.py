"""The choice of experts in the lanes of a program that holds whole rows of logits. No launcher.

Knows scores, groups and ties, and that a row lies in `block_g` groups of `block_s` places, each filled up beyond
its experts; knows neither where logits come from nor where ids go. `route_reference` in routing.py is the definition.
fp32 throughout. A place that is no expert holds logit -inf (no share in the softmax) and the lowest of all keys.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.row_sum import row_sum

_LOWEST = tl.constexpr(-(2**31))
"""Below every order key: no expert, or one already chosen."""


class Choice(NamedTuple):
    """What a kernel that chooses is compiled for: a rule among so many experts, and a program's blocks: tokens, groups,
    places of a group, and choices of a token."""

    num_experts: int
    top_k: int
    sigmoid: bool
    num_groups: int
    topk_groups: int
    top2_sum: bool
    renormalize: bool
    block_t: int
    block_g: int
    block_s: int
    block_k: int


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
def _losers_to_minus_inf(selection, key, CHOICE: tl.constexpr):
    """The selection scores, -inf in every group but each token's `topk_groups` best."""
    BLOCK_T: tl.constexpr = CHOICE.block_t
    BLOCK_G: tl.constexpr = CHOICE.block_g
    BLOCK_S: tl.constexpr = CHOICE.block_s
    key_of_group = tl.reshape(key, (BLOCK_T * BLOCK_G, BLOCK_S))
    place = tl.arange(0, BLOCK_S)[None, :]
    best, first = _best(key_of_group, place)  # pyright: ignore
    worth = _score_of_key(best)
    if CHOICE.top2_sum:
        worth += _score_of_key(tl.max(tl.where(place == first[:, None], _LOWEST, key_of_group), axis=1))
    group = tl.arange(0, BLOCK_G)[None, :]
    group_key = tl.where(group < CHOICE.num_groups, _order_key(tl.reshape(worth, (BLOCK_T, BLOCK_G))), _LOWEST)
    kept = tl.zeros((BLOCK_T, BLOCK_G), tl.int32)
    for _ in range(CHOICE.topk_groups):
        _, winner = _best(group_key, group)
        kept = tl.where(group == winner[:, None], 1, kept)
        group_key = tl.where(group == winner[:, None], _LOWEST, group_key)
    kept = tl.broadcast_to(kept[:, :, None], (BLOCK_T, BLOCK_G, BLOCK_S))
    return tl.where(tl.reshape(kept, (BLOCK_T, BLOCK_G * BLOCK_S)) != 0, selection, -float("inf"))


@triton.jit
def expert_places(CHOICE: tl.constexpr):
    """(places of a row, the expert of each, whether there is one), each [1, block_g * block_s]."""
    BLOCK_S: tl.constexpr = CHOICE.block_s
    group_size: tl.constexpr = CHOICE.num_experts // CHOICE.num_groups
    place = tl.arange(0, CHOICE.block_g * BLOCK_S)[None, :]
    is_expert = (place // BLOCK_S < CHOICE.num_groups) & (place % BLOCK_S < group_size)
    return place, (place // BLOCK_S) * group_size + place % BLOCK_S, is_expert


@triton.jit
def choose_experts(logits, in_batch, bias_ptr, slot, epsilon, scale, CHOICE: tl.constexpr):
    """(ids, weights, slots) [block_t, block_k] of the logits [block_t, block_g * block_s] of rows `in_batch`
    [block_t, 1]. `slot` [1, block_g * block_s]: what slots repeats of each chosen place; None: slots are zeros."""
    BLOCK_T: tl.constexpr = CHOICE.block_t
    BLOCK_K: tl.constexpr = CHOICE.block_k
    BLOCK_S: tl.constexpr = CHOICE.block_s
    place, expert, is_expert = expert_places(CHOICE)  # pyright: ignore
    used = in_batch & is_expert
    logits = tl.where(used, logits, -float("inf"))
    if CHOICE.sigmoid:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        exps = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        total = row_sum(exps, BLOCK_T)
        scores = tl.div_rn(exps, tl.broadcast_to(total[:, None], logits.shape))
    # Also where every logit is -inf, of which softmax makes NaN.
    bad = tl.max((used & ((scores != scores) | (logits == float("inf")))).to(tl.int32), axis=1)
    scores = tl.where((bad > 0)[:, None], float("nan"), scores)

    selection = scores
    if bias_ptr is not None:
        selection += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    selection = tl.where(selection != selection, -float("inf"), selection)
    key = tl.where(is_expert, _order_key(selection), _LOWEST)
    if CHOICE.num_groups > 1:
        selection = _losers_to_minus_inf(selection, key, CHOICE)
        key = tl.where(is_expert, _order_key(selection), _LOWEST)

    choice = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    slots = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    score_bits = scores.to(tl.int32, bitcast=True)
    group_size: tl.constexpr = CHOICE.num_experts // CHOICE.num_groups
    for k in range(CHOICE.top_k):
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
    if CHOICE.renormalize:
        weights = tl.div_rn(weights, tl.broadcast_to((total + epsilon)[:, None], (BLOCK_T, BLOCK_K)))
    weights = tl.where((bad > 0)[:, None], float("nan"), weights * scale)
    return ids, weights, slots
