"""The choice of experts in the launch of experts_few.py: every program makes it for itself, a row in each warp, or one
row in all of them. No launcher.

Knows parts of logits, rules and slots; asks for no weights. `choose_experts` in expert_choice.py is the definition: the
same parts in the same order, the same sums, ties and roundings. A row lies in the lanes of one warp, so that the best
of it is one instruction away.

Those who multiply choose, for they have nothing to multiply yet. They hand over two things in shared memory: the first
row's keys at once, from which the warp that asks for weights finds the slot of its first piece by itself; and, when it
has asked, which of its row's choices each expert is.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.dependent_launch import wait_for_inputs

WARPS = gl.constexpr(4)
"""That choose, and so the most rows. Two groups of them for eight, us a layer of qwen3: 155.6, where the router's own
launches take 146.8: as many logits as eight rows have are too much for every program to read."""

LOWEST = gl.constexpr(-(2**31))
"""Below the key of every score."""

SHORT_FROM = gl.constexpr(2.0**-64)
"""Scores' numerators that are divided by the short sequence, or zero. Its remainder is exact above 2^-78."""

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name until Triton 3.6


@gluon.jit
def _key_of(score):
    """int32 keys in the order of the scores; -0.0 ties with 0.0."""
    bits = gl.where(score == 0.0, 0.0, score).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _score_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def _of_lane(x, MASK: gl.constexpr):
    """x of the lane whose number differs in the bits of MASK."""
    asm: gl.constexpr = f"shfl.sync.bfly.b32 $0, $1, {MASK}, 31, -1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _row_sum(x, TILE: gl.constexpr):
    """The sum of each row in all its places, in the order of row_sum.py: neighbours three times, then halves. A lane
    has as many neighbouring places of a row as there are 32 of them."""
    PER_LANE: gl.constexpr = x.shape[1] // 32
    for step in gl.static_range(3):
        if PER_LANE >> (step + 1) > 0:
            even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
            x = even + odd
        else:
            x += _of_lane(x, (1 << step) // PER_LANE)
    for bit in gl.static_range(5):
        if (16 >> bit) * PER_LANE >= 8:
            x += _of_lane(x, 16 >> bit)
    for _ in gl.static_range(3):
        if x.shape[1] < PER_LANE * 32:
            x = gl.reshape(gl.join(x, x), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(x, TILE)


@gluon.jit
def _reciprocal(x):
    asm: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def divided(exps, total):
    """exps / total, rounded once; exps at most 1, total at least 1 and the same in a row, or NaN.

    A lane's divisions follow each other, a branch each: in machine code some 340 cycles for qwen3's four, of which 65
    are left where one branch decides for all of them, and for all rows. The short sequence rounds as the division."""
    long = ((exps != 0.0) & ((exps >= SHORT_FROM) == 0)).to(gl.int32)
    if gl.max(gl.max(long, axis=1), axis=0) > 0:
        out = gl.div_rn(exps, total)
    else:
        # What the division itself does where nothing is near the least numbers.
        guess = _reciprocal(total)
        guess = gl.fma(guess, gl.fma(-total, guess, 1.0 + total * 0.0), guess)
        short = exps * guess
        out = gl.fma(guess, gl.fma(-total, short, exps), short)
    return out


@gluon.jit
def _score(logits, bias, is_expert, SIGMOID: gl.constexpr, TILE: gl.constexpr):
    """(keys in the order that experts are chosen in, scores). In a row that holds NaN or inf all scores are NaN."""
    logits = gl.where(is_expert, logits, -float("inf"))
    if SIGMOID:
        scores = gl.div_rn(gl.full(logits.shape, 1.0, gl.float32, TILE), 1.0 + gl.exp(-logits))
        bad = is_expert & ((scores != scores) | (logits == float("inf")))
        scores = gl.where(gl.max(bad.to(gl.int32), axis=1)[:, None] > 0, float("nan"), scores)
    else:
        # Greatest by its key, an instruction for the whole warp. What is NaN or inf makes the sum NaN.
        exps = gl.exp(logits - _score_of(gl.max(_key_of(logits), axis=1))[:, None])
        scores = divided(exps, _row_sum(exps, TILE))
    selection = scores
    if bias is not None:
        selection += bias
    key = _key_of(gl.where(selection != selection, -float("inf"), selection))
    return gl.where(is_expert, key, LOWEST), scores


@gluon.jit
def choose(undecided, handed, num_slots, CHOICE: gl.constexpr, PDL: gl.constexpr):
    """Waits for the parts, sums, chooses and hands over; program 0 writes, too. CHOICE: see experts_few.py."""
    NUM_EXPERTS: gl.constexpr = CHOICE[0]
    NUM_PARTS: gl.constexpr = CHOICE[1]
    TOP_K: gl.constexpr = CHOICE[2]
    BLOCK_E: gl.constexpr = CHOICE[5]
    TILE: gl.constexpr = gl.BlockedLayout([1, BLOCK_E // 32], [1, 32], [WARPS, 1], [1, 0])
    # As many rows as were made room for: WARPS, or one, which each warp has whole.
    TOKENS: gl.constexpr = handed[0].shape[0]
    given, out, num_tokens, top_k, epsilon, scale = undecided
    parts_ptr, bias_ptr, real_ptr, slot_of_ptr = given
    ids_ptr, weights_ptr, packed_row_ptr = out
    keys, keys_there, choices, choices_there = handed
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, TILE))[:, None]
    expert = gl.arange(0, BLOCK_E, gl.SliceLayout(0, TILE))[None, :]
    in_batch, is_expert, place = token < num_tokens, expert < NUM_EXPERTS, expert + token * 0
    # Tables are older than the launch before this one. Beyond the last row the last is chosen for again, in vain.
    part_ptr = parts_ptr + gl.minimum(token, num_tokens - 1) * NUM_EXPERTS + expert
    slot = gl.load(slot_of_ptr + place, mask=in_batch & is_expert, other=-1)
    bias = None
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + place, mask=is_expert, other=0.0)
    real = in_batch
    if real_ptr is not None:
        real = gl.load(real_ptr + token + expert * 0, mask=in_batch, other=0) != 0
    wait_for_inputs(PDL)
    logits = gl.zeros([TOKENS, BLOCK_E], gl.float32, TILE)
    for _ in gl.static_range(NUM_PARTS):
        # Past the L1 cache, which knows nothing of other multiprocessors' stores.
        if NUM_EXPERTS == BLOCK_E:
            logits += gl.load(part_ptr, cache_modifier=".cg")
        else:
            logits += gl.load(part_ptr, mask=is_expert, other=0.0, cache_modifier=".cg")
        part_ptr += num_tokens * NUM_EXPERTS
    key, scores = _score(logits, bias, is_expert, CHOICE[3], TILE)
    keys.store(key)
    _barrier()
    mbarrier.arrive(keys_there, count=1)
    choice, total = place * 0 - 1, gl.zeros([TOKENS], gl.float32, gl.SliceLayout(1, TILE))
    # Not unrolled: the compiler would put the first rounds before what is handed over.
    for k in range(top_k):
        best = gl.max(key, axis=1)
        chosen = place == gl.min(gl.where(key == best[:, None], place, 0x7FFFFFFF), axis=1)[:, None]
        if bias_ptr is None:
            total += _score_of(best)
        else:
            bits = gl.where(chosen, scores.to(gl.int32, bitcast=True), LOWEST)
            total += gl.max(bits, axis=1).to(gl.float32, bitcast=True)
        key, choice = gl.where(chosen, LOWEST, key), gl.where(chosen, k, choice)
    here = (choice >= 0) & real & (slot >= 0) & (slot < num_slots)
    choices.store(gl.where(here, choice, -1))
    _barrier()
    mbarrier.arrive(choices_there, count=1)
    if gl.program_id(0) == 0:
        row, wanted = token * TOP_K + choice, in_batch & (choice >= 0)
        if CHOICE[4]:
            scores = gl.div_rn(scores, (total + epsilon)[:, None] + expert * 0.0)
        gl.store(ids_ptr + row, gl.where(real, place, -1), mask=wanted)
        gl.store(weights_ptr + row, scores * scale, mask=wanted)
        gl.store(packed_row_ptr + row, gl.where(here, row, -1), mask=wanted)


@gluon.jit
def row_of_table(table, row, LINE: gl.constexpr):
    """A row of what was handed over, for one warp: [BLOCK_E] in LINE."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    TILE: gl.constexpr = gl.BlockedLayout([1, table.shape[1] // 32], [1, 32], [1, 1], [1, 0])
    rows = table._reinterpret(table.dtype, [table.shape[0], 1, table.shape[1]], PLAIN)
    return gl.convert_layout(gl.max(rows.index(row).load(TILE), axis=0), LINE)
