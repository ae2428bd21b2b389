"""The choice of one row's experts in the launch of experts_row.py: as kernels/experts_few_choose.py, which is the
definition, but for one row, which each of four warps has whole. No launcher.

So all that is reckoned of a row is a scalar, and one branch decides for all scores at once whether they are divided by
the short sequence (its own rounding is the division's, away from the least numbers) or one after another by the long.

A second group of warps guesses ahead: greatest logits are greatest scores but for ties, and so weights of the first
pieces are asked into the L2 cache before anyone has divided. A guess is a hint, and may be wrong.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.dependent_launch import wait_for_inputs
from kernels.experts_few_choose import LOWEST, _barrier, _key_of, _of_lane, _score_of
from kernels.experts_few_feed import AHEAD, COLUMNS

SHORT_FROM = gl.constexpr(2.0**-64)
"""Scores' numerators that are divided by the short sequence, or zero. Its remainder is exact above 2^-78."""


@gluon.jit
def _row_sum(x, LINE: gl.constexpr):
    """As there, of one row."""
    PER_LANE: gl.constexpr = x.shape[0] // 32
    for step in gl.static_range(3):
        if PER_LANE >> (step + 1) > 0:
            even, odd = gl.split(gl.reshape(x, [x.shape[0] // 2, 2]))
            x = even + odd
        else:
            x += _of_lane(x, (1 << step) // PER_LANE)
    for bit in gl.static_range(5):
        if (16 >> bit) * PER_LANE >= 8:
            x += _of_lane(x, 16 >> bit)
    for _ in gl.static_range(3):
        if x.shape[0] < PER_LANE * 32:
            x = gl.reshape(gl.join(x, x), [x.shape[0] * 2])
    return gl.convert_layout(x, LINE)


@gluon.jit
def _reciprocal(x):
    asm: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def divided(exps, total):
    """exps / total, rounded once; exps at most 1, total at least 1 and the same everywhere, or NaN."""
    long = (exps != 0.0) & ((exps >= SHORT_FROM) == 0)
    if gl.max(long.to(gl.int32), axis=0) > 0:
        out = gl.div_rn(exps, total)
    else:
        # What the division itself does where nothing is near the least numbers.
        guess = _reciprocal(total)
        guess = gl.fma(guess, gl.fma(-total, guess, 1.0 + total * 0.0), guess)
        short = exps * guess
        out = gl.fma(guess, gl.fma(-total, short, exps), short)
    return out


@gluon.jit
def _logits(parts_ptr, expert, is_expert, CHOICE: gl.constexpr, LINE: gl.constexpr):
    NUM_EXPERTS: gl.constexpr = CHOICE[0]
    NUM_PARTS: gl.constexpr = CHOICE[1]
    logits = gl.zeros(expert.shape, gl.float32, LINE)
    for part in gl.static_range(NUM_PARTS):
        # Past the L1 cache, which knows nothing of other multiprocessors' stores.
        part_ptr = parts_ptr + part * NUM_EXPERTS + expert
        if expert.shape[0] == NUM_EXPERTS:
            logits += gl.load(part_ptr, cache_modifier=".cg")
        else:
            logits += gl.load(part_ptr, mask=is_expert, other=0.0, cache_modifier=".cg")
    return gl.where(is_expert, logits, -float("inf"))


@gluon.jit
def _score(logits, bias, is_expert, CHOICE: gl.constexpr, LINE: gl.constexpr):
    """As there: (keys in the order that experts are chosen in, scores)."""
    if CHOICE[3]:
        scores = gl.div_rn(gl.full(logits.shape, 1.0, gl.float32, LINE), 1.0 + gl.exp(-logits))
        bad = is_expert & ((scores != scores) | (logits == float("inf")))
        scores = gl.where(gl.max(bad.to(gl.int32), axis=0) > 0, float("nan"), scores)
    else:
        exps = gl.exp(logits - _score_of(gl.max(_key_of(logits), axis=0)))
        scores = divided(exps, _row_sum(exps, LINE))
    selection = scores
    if bias is not None:
        selection += bias
    key = _key_of(gl.where(selection != selection, -float("inf"), selection))
    return gl.where(is_expert, key, LOWEST), scores


@gluon.jit
def _best(key, expert):
    """The first of the greatest: (its key, it)."""
    best = gl.max(key, axis=0)
    return best, gl.min(gl.where(key == best, expert, 0x7FFFFFFF), axis=0)


@gluon.jit
def choose(undecided, handed, num_slots, CHOICE: gl.constexpr, PDL: gl.constexpr):
    """Waits for the parts, sums, chooses and hands over; program 0 writes, too. CHOICE: see experts_few.py."""
    NUM_EXPERTS: gl.constexpr = CHOICE[0]
    BLOCK_E: gl.constexpr = CHOICE[5]
    LINE: gl.constexpr = gl.BlockedLayout([BLOCK_E // 32], [32], [4], [0])
    given, out, _, top_k, epsilon, scale = undecided
    parts_ptr, bias_ptr, real_ptr, slot_of_ptr = given
    ids_ptr, weights_ptr, packed_row_ptr = out
    keys, keys_there, choices, choices_there = handed
    expert = gl.arange(0, BLOCK_E, LINE)
    is_expert = expert < NUM_EXPERTS
    # Tables are older than the launch before this one.
    slot = gl.load(slot_of_ptr + expert, mask=is_expert, other=-1)
    bias, real = None, slot * 0 == 0
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    if real_ptr is not None:
        real = gl.load(real_ptr + expert * 0) != 0
    wait_for_inputs(PDL)
    key, scores = _score(_logits(parts_ptr, expert, is_expert, CHOICE, LINE), bias, is_expert, CHOICE, LINE)
    keys.index(0).store(key)
    _barrier()
    mbarrier.arrive(keys_there, count=1)
    choice, total = expert * 0 - 1, scale * 0.0
    # Not unrolled: the compiler would put the first rounds before what is handed over.
    for k in range(top_k):
        best, first = _best(key, expert)
        chosen = expert == first
        if bias_ptr is None:
            total += _score_of(best)
        else:
            bits = gl.where(chosen, scores.to(gl.int32, bitcast=True), LOWEST)
            total += gl.max(bits, axis=0).to(gl.float32, bitcast=True)
        key, choice = gl.where(chosen, LOWEST, key), gl.where(chosen, k, choice)
    here = (choice >= 0) & real & (slot >= 0) & (slot < num_slots)
    choices.index(0).store(gl.where(here, choice, -1))
    _barrier()
    mbarrier.arrive(choices_there, count=1)
    if gl.program_id(0) == 0:
        wanted = choice >= 0
        if CHOICE[4]:
            scores = gl.div_rn(scores, expert * 0.0 + (total + epsilon))
        gl.store(ids_ptr + choice, gl.where(real, expert, -1), mask=wanted)
        gl.store(weights_ptr + choice, scores * scale, mask=wanted)
        gl.store(packed_row_ptr + choice, gl.where(here, choice, -1), mask=wanted)


@gluon.jit
def guess(w13_ptr, undecided, sizes, CHOICE: gl.constexpr, PDL: gl.constexpr):
    """Behind the wait: the first columns of piece i into the L2 cache, i this program's number, which takes a piece
    near it. Pieces are those of the slots of the greatest logits in turn; of a rule with a bias nothing is guessed."""
    NUM_EXPERTS: gl.constexpr = CHOICE[0]
    TOP_K: gl.constexpr = CHOICE[2]
    BLOCK_E: gl.constexpr = CHOICE[5]
    LINE: gl.constexpr = gl.BlockedLayout([BLOCK_E // 32], [32], [4], [0])
    num_slots, num_hidden, num_columns = sizes[0], sizes[1], sizes[2]
    parts_ptr, bias_ptr, slot_of_ptr = undecided[0][0], undecided[0][1], undecided[0][3]
    expert = gl.arange(0, BLOCK_E, LINE)
    is_expert = expert < NUM_EXPERTS
    slot_of = gl.load(slot_of_ptr + expert, mask=is_expert, other=-1)
    wait_for_inputs(PDL)
    if bias_ptr is None:
        key = gl.where(is_expert, _key_of(_logits(parts_ptr, expert, is_expert, CHOICE, LINE)), LOWEST)
        per_first = (num_hidden + COLUMNS - 1) // COLUMNS
        number = gl.program_id(0) // per_first
        column = (gl.program_id(0) - number * per_first) * COLUMNS
        if number < TOP_K:
            first = number * 0
            for _ in range(number + 1):
                first = _best(key, expert)[1]
                key = gl.where(expert == first, LOWEST, key)
            slot = gl.max(gl.where(expert == first, slot_of, -1), axis=0)
            # Eight lanes of each warp ask for a row each, one after another; half of all rows are gate's, half up's.
            lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
            row = lane // 32 * (COLUMNS // 2) + lane % 32
            size = gl.where(lane % 32 < COLUMNS // 2, gl.minimum(AHEAD * 256, num_columns) * 2, 0)
            size = gl.where((slot >= 0) & (slot < num_slots), size, 0)
            row = gl.minimum(column + row % COLUMNS, num_hidden - 1) + row // COLUMNS * num_hidden
            row = row.to(gl.int64) + gl.maximum(slot, 0).to(gl.int64) * 2 * num_hidden
            address = (w13_ptr + row * num_columns).to(gl.int64, bitcast=True)
            asm: gl.constexpr = (
                "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
            )
            gl.inline_asm_elementwise(asm, "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1)
