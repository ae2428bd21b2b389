"""What the last program of gate_few.py does: it sums the parts of the logits, chooses and packs. No launcher.

Knows parts, the rule and where experts live; knows neither rows nor gate weights. Parts are summed as in gate.py,
experts chosen as in routing.py and places given as in pack.py. Pointers, shapes and padding are gate_few.py's.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.expert_choice import choose_experts, expert_places


@triton.jit
def _places(slots, BLOCK_R: tl.constexpr, BINS: tl.constexpr):
    """(row of each choice, by slot, then in their order; first row of each slot) of slots [BLOCK_R].

    Sums of tiles alone: Triton 3.6 adds up wrongly what a reshape left spread over lanes with gaps."""
    place = tl.arange(0, BLOCK_R)
    theirs, own = slots[None, :], slots[:, None]
    earlier = (theirs == own) & (place[None, :] < place[:, None])
    rows = tl.sum(((theirs < own) | earlier).to(tl.int32), axis=1)
    return rows, tl.sum((own < tl.arange(0, BINS)[None, :]).to(tl.int32), axis=0)


@triton.jit
def decide(
    parts_ptr, given, routing, packed, numbers, NUM_PARTS: tl.constexpr, BINS: tl.constexpr, CHOICE: tl.constexpr
):
    """given: (bias_ptr, real_ptr, slot_of_ptr); routing: (ids_ptr, weights_ptr); packed: (row_token_ptr,
    packed_row_ptr, offsets_ptr); numbers: (num_tokens, num_slots, epsilon, scale)."""
    BLOCK_T: tl.constexpr = CHOICE.block_t
    BLOCK_K: tl.constexpr = CHOICE.block_k
    TOP_K: tl.constexpr = CHOICE.top_k
    num_tokens, num_slots, epsilon, scale = numbers
    bias_ptr, real_ptr, slot_of_ptr = given
    ids_ptr, weights_ptr = routing
    row_token_ptr, packed_row_ptr, offsets_ptr = packed
    token, choice = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)[None, :]
    in_batch = (token < num_tokens)[:, None]
    _, expert, is_expert = expert_places(CHOICE)
    slot = tl.load(slot_of_ptr + expert, mask=is_expert, other=-1)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, num_slots)
    logits = tl.zeros((BLOCK_T, CHOICE.block_g * CHOICE.block_s), tl.float32)
    for p in tl.static_range(NUM_PARTS):
        part_ptr = parts_ptr + (p * num_tokens + token)[:, None] * CHOICE.num_experts + expert
        # Past the L1 cache, which knows nothing of other multiprocessors' stores.
        logits += tl.load(part_ptr, mask=in_batch & is_expert, other=0.0, cache_modifier=".cg")
    ids, weights, slots = choose_experts(logits, in_batch, bias_ptr, slot, epsilon, scale, CHOICE)
    if real_ptr is not None:
        real = tl.load(real_ptr + token, mask=token < num_tokens, other=0)[:, None] != 0
        ids, slots = tl.where(real, ids, -1), tl.where(real, slots, num_slots)
    wanted = in_batch & (choice < TOP_K)
    out = token[:, None] * TOP_K + choice
    tl.store(ids_ptr + out, ids, mask=wanted)
    tl.store(weights_ptr + out, weights, mask=wanted)
    # Behind the slots come choices without one, behind those the places that are no choice.
    slots = tl.reshape(tl.where(wanted, slots, num_slots + 1), (BLOCK_T * BLOCK_K,))
    rows, offsets = _places(slots, BLOCK_T * BLOCK_K, BINS)  # pyright: ignore
    bins, place = tl.arange(0, BINS), tl.arange(0, BLOCK_T * BLOCK_K)
    tl.store(offsets_ptr + bins, offsets, mask=bins <= num_slots)
    token_of_place, here = place // BLOCK_K, slots < num_slots
    packed_ptr = packed_row_ptr + token_of_place * TOP_K + place % BLOCK_K
    tl.store(packed_ptr, tl.where(here, rows, -1), mask=slots <= num_slots)
    tl.store(row_token_ptr + rows, token_of_place, mask=here)
