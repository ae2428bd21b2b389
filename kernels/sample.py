"""One token a row: the largest logit, or a draw by the Gumbel trick from a counter-based generator.

Knows logits, temperatures, seeds and positions; knows nothing of requests, penalties or text. A row's token depends on
its own logits, temperature, seed and position, and on nothing else in the batch.

    # id_B[b] = argmax over v of  logits_BV[b, v]                                       (temperature 0)
    #                             logits_BV[b, v] / temperature_B[b] + g(seed, position, v)     (else)
    # the lowest v among equals; -1 where the row holds NaN or +inf, or nothing above -inf
    # g = -log(e), e = -log(1 - u), u = (word + 1/2) / 2^32: fine near 0, where the winners are

The word of vocabulary index v comes from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"):
key (seed low, seed high), counter (c, position low, position high, 0), where tiles of 2048 indices are cut into four
runs of 512: v = 2048 * tile + 512 * word + lane, c = 512 * tile + lane. Seeds and positions are 64-bit.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape, cdiv, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs

# Tiles of one program, and of one where rows are few: then 75 programs share a row of 151936 logits. On an H200,
# microseconds by 4 / 2 / 1 tiles: one row 6.7 / 5.2 / 4.1, eight 8.1 / 6.3 / 6.0, 64 23.6 / 23.5 / 24.8.
PART_TILES, FEW_ROWS = 4, 8
# Part of the random stream's definition, not a tuning knob: another value draws other tokens.
LANES = 512
TILE = 4 * LANES

# The kernels repeat these as literals: they cannot read plain globals.
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
MASK32 = 0xFFFFFFFF
LARGEST_BELOW_ONE = 1.0 - 2.0**-24
# Below this, 1 - u would lose u's low bits and the series of -log(1 - u) is exact in fp32.
SERIES_BELOW = 1e-3


class Drawn(NamedTuple):
    """Where a step's ids go. Rows that name one entry are padding: any of their ids may stay there.

    `ids` may be pinned host memory: kernels write there, too, and who waits for them reads it without a copy.
    """

    ids: Tensor  # int64, one-dimensional
    at_B: Tensor  # int64, each row's entry of `ids`
    newest_P: Tensor  # int64, by place
    place_B: Tensor  # int64, each row's entry of `newest_P`


def sample_argmax(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor) -> Tensor:
    """ids_B int64. logits fp32 (rows may be strided), temperature fp32 >= 0, seed and position int64.

    `sample_argmax_reference` is the definition.
    """
    if uses_triton(logits_BV):
        return sample_argmax_triton(logits_BV, temperature_B, seed_B, position_B)
    return sample_argmax_reference(logits_BV, temperature_B, seed_B, position_B)


def sample_argmax_into(
    drawn: Drawn, logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor
) -> None:
    """The ids of `sample_argmax`, written where `drawn` says."""
    if uses_triton(logits_BV):
        sample_argmax_triton(logits_BV, temperature_B, seed_B, position_B, drawn)
        return
    ids_B = sample_argmax_reference(logits_BV, temperature_B, seed_B, position_B)
    drawn.ids.scatter_(0, drawn.at_B, ids_B)
    drawn.newest_P.scatter_(0, drawn.place_B, ids_B)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 on uint32 values: four words."""
    for _ in tl.static_range(10):  # pyright: ignore[reportGeneralTypeIssues]
        product0 = c0.to(tl.uint64) * 0xD2511F53  # one wide multiplication gives both halves
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, product1.to(tl.uint32)
        c2, c3 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1, product0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _log(x, FAST: tl.constexpr):
    """ln x of normal numbers. FAST: by the GPU's own instruction, good to 3e-7 of the larger of 1 and the result."""
    if FAST:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.693147180559945309
    else:
        return tl.log(x)


@triton.jit
def _perturbed(x, word, temperature, reciprocal, FAST: tl.constexpr):
    """x / temperature + g(word); the quotient by one step of Newton's method from a product with the reciprocal."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * (0.2 + u * 0.16666666666666666)))))
    e = tl.where(u < 0.0625, series, -_log(1.0 - u, FAST))
    quotient = x * reciprocal
    refined = tl.fma(tl.fma(-quotient, temperature, x), reciprocal, quotient)
    return tl.where(tl.abs(quotient) < 1e37, refined, quotient) - _log(e, FAST)


@triton.jit
def _better(x, score, ids, best_score, best_id, good):
    """Later ids win only if strictly larger, so a lane keeps its lowest id."""
    wins = score > best_score
    return tl.where(wins, score, best_score), tl.where(wins, ids, best_id), good & (x < float("inf"))


# logits_ptr fp32 [B, V], stride_b between rows; temperature_ptr fp32 [B]; seed_ptr, position_ptr int64 [B];
# score_ptr fp32, id_ptr int32 [B, S]: the best of each part, id -1 where the part holds NaN or +inf.
# Grid (S, B): program (s, b) walks part s of row b, PART_TILES tiles of 4 * LANES. Comparisons only, so nothing
# accumulates and neither the order nor the cut into parts matters. Ids past V load -inf and never win.
@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    score_ptr,
    id_ptr,
    vocab_size,
    stride_b,
    LANES: tl.constexpr,
    PART_TILES: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits_ptr += row * stride_b
    temperature = tl.load(temperature_ptr + row)
    reciprocal = tl.minimum(tl.div_rn(1.0, temperature), 3e38)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    lane = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.uint32)
    key0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    counter1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    counter2 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    best_score = tl.full([LANES], float("-inf"), tl.float32)
    best_id = tl.zeros([LANES], tl.int32)
    good = lane >= 0
    first = part * PART_TILES * 4 * LANES
    for start in range(first, tl.minimum(first + PART_TILES * 4 * LANES, vocab_size), 4 * LANES):
        ids0 = start + lane
        ids1, ids2, ids3 = ids0 + LANES, ids0 + 2 * LANES, ids0 + 3 * LANES
        x0 = tl.load(logits_ptr + ids0, mask=ids0 < vocab_size, other=float("-inf"))
        x1 = tl.load(logits_ptr + ids1, mask=ids1 < vocab_size, other=float("-inf"))
        x2 = tl.load(logits_ptr + ids2, mask=ids2 < vocab_size, other=float("-inf"))
        x3 = tl.load(logits_ptr + ids3, mask=ids3 < vocab_size, other=float("-inf"))
        score0, score1, score2, score3 = x0, x1, x2, x3
        if temperature > 0.0:
            w0, w1, w2, w3 = _philox((start // 4 + lane).to(tl.uint32), counter1, counter2, zero, key0, key1)
            score0 = _perturbed(x0, w0, temperature, reciprocal, FAST)
            score1 = _perturbed(x1, w1, temperature, reciprocal, FAST)
            score2 = _perturbed(x2, w2, temperature, reciprocal, FAST)
            score3 = _perturbed(x3, w3, temperature, reciprocal, FAST)
        best_score, best_id, good = _better(x0, score0, ids0, best_score, best_id, good)
        best_score, best_id, good = _better(x1, score1, ids1, best_score, best_id, good)
        best_score, best_id, good = _better(x2, score2, ids2, best_score, best_id, good)
        best_score, best_id, good = _better(x3, score3, ids3, best_score, best_id, good)
    best = tl.max(best_score, axis=0)
    winner = tl.min(tl.where(best_score == best, best_id, 2147483647), axis=0)
    at = row * tl.num_programs(0) + part
    tl.store(score_ptr + at, best)
    tl.store(id_ptr + at, tl.where(tl.min(good.to(tl.int32), axis=0) > 0, winner, -1))


# ids_ptr int64 [B]; with at_ptr, all four pointers as in `Drawn`.
# Grid (B,): program b takes the best of row b's parts, of which PARTS (a power of two) hold all.
@triton.jit
def _best_part_kernel(
    score_ptr, id_ptr, ids_ptr, at_ptr, newest_ptr, place_ptr, num_parts, PARTS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    score = tl.load(score_ptr + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_parts + part, mask=part < num_parts, other=2147483647)
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, ids, 2147483647), axis=0)
    fails = (tl.min(ids, axis=0) < 0) | (best == float("-inf"))
    id = tl.where(fails, -1, winner).to(tl.int64)
    if at_ptr is None:
        tl.store(ids_ptr + row, id)
    else:
        tl.store(ids_ptr + tl.load(at_ptr + row), id)
        tl.store(newest_ptr + tl.load(place_ptr + row), id)


def sample_argmax_triton(
    logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor, drawn: Drawn | None = None
) -> Tensor:
    """The kernels' launcher, which returns what it writes; also what the interpreter's tests call on CPU tensors."""
    _check_operands(logits_BV, temperature_B, seed_B, position_B)
    batch, vocab_size = logits_BV.shape
    where: tuple[Tensor | None, ...] = (None, None, None)
    if drawn is None:
        ids_B = torch.empty(batch, dtype=torch.int64, device=logits_BV.device)
    else:
        ids_B, where = drawn.ids, drawn[1:]
        for name, x, size in zip(Drawn._fields, drawn, (None, batch, None, batch), strict=True):
            assert_shape(f"drawn.{name}", x, (size,))
            assert_dtype(f"drawn.{name}", x, torch.int64)
            assert x.is_contiguous(), f"drawn.{name} must lie together in memory"
    if batch > 0:
        part_tiles = 1 if batch <= FEW_ROWS else PART_TILES
        num_parts = cdiv(vocab_size, part_tiles * TILE)
        score_BS = torch.empty((batch, num_parts), dtype=torch.float32, device=logits_BV.device)
        id_BS = torch.empty((batch, num_parts), dtype=torch.int32, device=logits_BV.device)
        _sample_kernel[(num_parts, batch)](
            logits_BV,
            temperature_B,
            seed_B,
            position_B,
            score_BS,
            id_BS,
            vocab_size,
            logits_BV.stride(0),
            LANES=LANES,
            PART_TILES=part_tiles,
            FAST=logits_BV.is_cuda,
            num_warps=4,
            **dependent_launch(logits_BV),
        )
        _best_part_kernel[(batch,)](
            score_BS,
            id_BS,
            ids_B,
            *where,
            num_parts,
            PARTS=triton.next_power_of_2(num_parts),
            num_warps=1,
            **dependent_launch(logits_BV),
        )
    return ids_B


def _check_operands(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor) -> None:
    assert_shape("logits_BV", logits_BV, (None, None))
    assert_dtype("logits_BV", logits_BV, torch.float32)
    assert_last_contiguous("logits_BV", logits_BV)
    assert 0 < logits_BV.shape[1] < 2**31 - TILE, f"a vocabulary of {logits_BV.shape[1]} ids"
    for name, x, dtype in (
        ("temperature_B", temperature_B, torch.float32),
        ("seed_B", seed_B, torch.int64),
        ("position_B", position_B, torch.int64),
    ):
        assert_shape(name, x, (logits_BV.shape[0],))
        assert_dtype(name, x, dtype)
        assert x.is_contiguous(), f"{name} must lie together in memory"
    assert_same_device(logits_BV, temperature_B=temperature_B, seed_B=seed_B, position_B=position_B)


def sample_argmax_reference(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor) -> Tensor:
    """The definition, in plain torch. Greedy rows draw nothing."""
    _check_operands(logits_BV, temperature_B, seed_B, position_B)
    batch, vocab_size = logits_BV.shape
    if batch == 0:
        return seed_B.new_empty(0)
    scores_BV = logits_BV
    draws = temperature_B > 0
    if bool(draws.any()):
        noise_SV = gumbel_reference(seed_B[draws], position_B[draws], vocab_size)
        scores_BV = logits_BV.clone()
        scores_BV[draws] = logits_BV[draws] / temperature_B[draws].unsqueeze(1) + noise_SV
    largest_B = logits_BV.amax(dim=1)  # NaN if any is
    # Not argmax: which of several equal entries it gives is unspecified.
    equals_BV = scores_BV == scores_BV.amax(dim=1, keepdim=True)
    ids_V = torch.arange(vocab_size, device=logits_BV.device)
    first_B = torch.where(equals_BV, ids_V, vocab_size).amin(dim=1)
    return torch.where(largest_B.isfinite(), first_B, -1)


class Words(NamedTuple):
    """Four 32-bit words, or a counter, held in int64 tensors of values 0 .. 2^32 - 1."""

    w0: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor


def philox_reference(counter: Words, key0: Tensor, key1: Tensor) -> Words:
    """Philox4x32-10 in 64-bit integers: bit for bit what the kernel computes."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product0, product1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1  # may wrap past 2^63; the masks below undo the sign
        c0, c1 = ((product1 >> 32) & MASK32) ^ c1 ^ key0, product1 & MASK32
        c2, c3 = ((product0 >> 32) & MASK32) ^ c3 ^ key1, product0 & MASK32
        key0, key1 = (key0 + WEYL_0) & MASK32, (key1 + WEYL_1) & MASK32
    return Words(c0, c1, c2, c3)


def words_reference(seed_B: Tensor, position_B: Tensor, vocab_size: int) -> Tensor:
    """words_BV int64, the random 32 bits of each vocabulary index."""
    num_tiles = cdiv(vocab_size, TILE)
    counter_C = torch.arange(num_tiles * LANES, device=seed_B.device)
    seed_B1, position_B1 = seed_B.unsqueeze(1), position_B.unsqueeze(1)
    counter = Words(counter_C, position_B1 & MASK32, (position_B1 >> 32) & MASK32, torch.zeros_like(counter_C))
    words = philox_reference(counter, seed_B1 & MASK32, (seed_B1 >> 32) & MASK32)
    tiles_B4 = [word_BC.view(-1, num_tiles, LANES) for word_BC in words]
    return torch.stack(tiles_B4, dim=2).view(-1, num_tiles * TILE)[:, :vocab_size]


def gumbel_reference(seed_B: Tensor, position_B: Tensor, vocab_size: int) -> Tensor:
    """noise_BV fp32, standard Gumbel: -log of an exponential variable."""
    words_BV = words_reference(seed_B, position_B, vocab_size)
    u_BV = ((words_BV.float() + 0.5) * 2.0**-32).clamp_max(LARGEST_BELOW_ONE)
    series_BV = u_BV * (1.0 + u_BV * (0.5 + u_BV * (1.0 / 3.0)))
    return -torch.where(u_BV < SERIES_BELOW, series_BV, -torch.log(1.0 - u_BV)).log()
