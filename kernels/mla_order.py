"""The list of MLA decode's pieces with many heads, longest first, made on the device once a step.

Knows lengths; knows neither keys nor heads. A sequence is cut as split_kv.py says, by its own length alone, so the list
changes who computes what, and no bit. It lies where the step's graph has put it, is as long as the bound on the lengths
allows, and says itself how much of it is used: the host knows no length of a replayed step.

One H200, 128 heads, us with the merge, by the list / dealt out in turns (piece i, i + 132, ...): 64 of 512 to 7500 keys
108.3 / 198.6, 200 of 100 to 2000 117.9 / 147.2; 123 heads, pages of 16, 132 of 0 to 9000 152.4 / 556.6; of one length 1
x 4096 34.9 / 34.9, 8 x 4096 38.3 / 38.9, 64 x 4096 165.0 / 170.5, 128 x 4096 327 / 337, 256 x 1024 197.2 / 206.9. The
list's places in turns, every other one backwards, gave 116.5 where the counter gives 117.9.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_shape, cdiv, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.split_kv import MAX_SPLITS, SplitRule, split_bounds

TILE = tl.constexpr(64)
"""Keys that a program takes at a time: what a piece costs follows from the number of these."""

WORDS = 4
"""Of a piece: its sequence; its split, and how many there are << 16; its first key; the end of its keys."""

NUM_COUNTS = 4
"""Pieces listed, pieces taken beyond each program's first, and room: the list begins at a multiple of 16 bytes."""


class PieceList(NamedTuple):
    """Of one step. A program that takes a piece counts it in `counts`, and the last one to find none sets that back to
    zero: so one list serves all layers, which must follow one another."""

    pieces_I4: Tensor
    """int32: WORDS each, the longest first; as many as there could be."""
    counts: Tensor
    """int32 [NUM_COUNTS]"""


def list_bytes(num_sequences: int, splits: int) -> int:
    """For the plan of the working space: a step has one list, beside what its layers take.

    >>> list_bytes(256, 4)
    16400
    """
    return 4 * (NUM_COUNTS + WORDS * num_sequences * splits)


def list_pieces(kv_lens_B: Tensor, rule: SplitRule, *, max_kv_len: int) -> PieceList:
    """kv_lens_B int32, none above max_kv_len. Those of most tiles first, of as many by sequence and split; a sequence
    without keys has one piece, which writes its zeros. `list_pieces_reference` is the definition; what lies behind the
    last piece means nothing. Who attends by it reads it ahead of its wait: another launch must stand between."""
    return (list_pieces_triton if uses_triton(kv_lens_B) else list_pieces_reference)(
        kv_lens_B, rule, max_kv_len=max_kv_len
    )


# With n pieces of which a sequence has all but the last of F tiles and the last of L: a full one stands behind all that
#   have more tiles, and behind those with as many of the sequences before; the last one likewise.
#   kv_lens_ptr int32 [B]; pieces_ptr int32 [B * S, 4], counts_ptr int32 [4]
#   grid (cdiv(B, BLOCK_B),): a program places the pieces of BLOCK_B sequences, comparing them with BLOCK_J others at a
#   time, and the first one writes the counts. No program waits for another. Sequences from B on have no pieces.


@triton.jit
def _cut(kv_len, SPLIT_LEN: tl.constexpr, FEW_SPLITS: tl.constexpr):
    """(pieces, keys of all but the last, their tiles, the last one's tiles)."""
    split_len, _, splits = split_bounds(kv_len, 1, SPLIT_LEN, FEW_SPLITS, 0)
    pieces = tl.maximum(splits, 1)
    return pieces, split_len, split_len // TILE, tl.cdiv(kv_len - (pieces - 1) * split_len, TILE)


@triton.jit(do_not_specialize=["num_sequences"])
def _list_kernel(
    kv_lens_ptr,
    pieces_ptr,
    counts_ptr,
    num_sequences,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    kv_len = tl.load(kv_lens_ptr + b, mask=b < num_sequences, other=0)
    pieces, split_len, full, last = _cut(kv_len, SPLIT_LEN, FEW_SPLITS)
    before_full = tl.zeros((BLOCK_B,), tl.int32)
    before_last = tl.zeros((BLOCK_B,), tl.int32)
    total = tl.zeros((), tl.int32)
    for base in range(0, num_sequences, BLOCK_J):
        j = base + tl.arange(0, BLOCK_J)
        there = j < num_sequences
        other_len = tl.load(kv_lens_ptr + j, mask=there, other=0)
        other_pieces, _, other_full, other_last = _cut(other_len, SPLIT_LEN, FEW_SPLITS)
        many, one = tl.where(there, other_pieces - 1, 0)[None, :], there.to(tl.int32)[None, :]
        other_full, other_last = other_full[None, :], other_last[None, :]
        earlier, own = j[None, :] < b[:, None], j[None, :] == b[:, None]
        ahead = (other_full > full[:, None]) | ((other_full == full[:, None]) & earlier)
        before_full += tl.sum(tl.where(ahead, many, 0), axis=1)
        ahead = (other_last > full[:, None]) | ((other_last == full[:, None]) & earlier)
        before_full += tl.sum(tl.where(ahead, one, 0), axis=1)
        ahead = (other_full > last[:, None]) | ((other_full == last[:, None]) & (earlier | own))
        before_last += tl.sum(tl.where(ahead, many, 0), axis=1)
        ahead = (other_last > last[:, None]) | ((other_last == last[:, None]) & earlier)
        before_last += tl.sum(tl.where(ahead, one, 0), axis=1)
        total += tl.sum(tl.where(there, other_pieces, 0), axis=0)
    split = tl.arange(0, BLOCK_S)[None, :]
    place = tl.where(split + 1 < pieces[:, None], before_full[:, None] + split, before_last[:, None])
    first = split * split_len[:, None]
    end = tl.minimum(first + split_len[:, None], kv_len[:, None])
    splits = tl.where(kv_len > 0, pieces, 0)[:, None]
    wanted = (split < pieces[:, None]) & (b < num_sequences)[:, None]
    words_ptr = pieces_ptr + place * 4
    tl.store(words_ptr, tl.broadcast_to(b[:, None], place.shape), mask=wanted)
    tl.store(words_ptr + 1, split | splits << 16, mask=wanted)
    tl.store(words_ptr + 2, first, mask=wanted)
    tl.store(words_ptr + 3, end, mask=wanted)
    if tl.program_id(0) == 0:
        at = tl.arange(0, 4)
        tl.store(counts_ptr + at, tl.where(at == 0, total, 0))


def _room(kv_lens_B: Tensor, rule: SplitRule, max_kv_len: int) -> tuple[PieceList, int]:
    """(the list, to be filled; splits of a sequence at most)."""
    assert_shape("kv_lens_B", kv_lens_B, (None,))
    assert_dtype("kv_lens_B", kv_lens_B, torch.int32)
    assert rule.length % TILE.value == 0, f"splits of {rule.length} keys are no whole tiles"
    splits = max(rule.most(max_kv_len), 1)
    room = kv_lens_B.new_empty(NUM_COUNTS + WORDS * kv_lens_B.shape[0] * splits)
    return PieceList(room[NUM_COUNTS:].view(-1, WORDS), room[:NUM_COUNTS]), splits


def list_pieces_triton(kv_lens_B: Tensor, rule: SplitRule, *, max_kv_len: int) -> PieceList:
    """`list_pieces` as one launch."""
    listed, splits = _room(kv_lens_B, rule, max_kv_len)
    num_sequences, block_b = kv_lens_B.shape[0], 8
    # Of no sequence there is still a count to be written.
    _list_kernel[(max(cdiv(num_sequences, block_b), 1),)](
        kv_lens_B,
        *listed,
        num_sequences,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        BLOCK_B=block_b,
        BLOCK_J=256,
        BLOCK_S=next_power_of_2(splits),
        num_warps=4,
        **dependent_launch(kv_lens_B),
    )
    return listed


def split_lengths_reference(kv_lens_B: Tensor, rule: SplitRule) -> Tensor:
    """Keys of each sequence's splits but the last, as `split_bounds` has it."""
    most, long = MAX_SPLITS.value, 4 * rule.length
    split_len_B = (kv_lens_B + most * long - 1) // (most * long) * long
    split_len_B = split_len_B.where(kv_lens_B > 2 * rule.few * rule.length, 2 * rule.length)
    return split_len_B.where(kv_lens_B > rule.few * rule.length, rule.length)


def list_pieces_reference(kv_lens_B: Tensor, rule: SplitRule, *, max_kv_len: int) -> PieceList:
    """The definition. Zeros behind the last piece."""
    listed, splits = _room(kv_lens_B, rule, max_kv_len)
    kv_len_B1, split_len_B1 = kv_lens_B[:, None], split_lengths_reference(kv_lens_B, rule)[:, None]
    split_S = torch.arange(splits, dtype=torch.int32, device=kv_lens_B.device)
    first_BS = split_S * split_len_B1
    end_BS = torch.minimum(first_BS + split_len_B1, kv_len_B1)
    there_BS = (first_BS < end_BS) | (split_S == 0)
    tiles_BS = torch.where(there_BS, (end_BS - first_BS + TILE.value - 1) // TILE.value, -1)
    order_I = tiles_BS.flatten().argsort(descending=True, stable=True)
    sequence_BS = torch.arange(kv_lens_B.shape[0], dtype=torch.int32, device=kv_lens_B.device)[:, None]
    splits_BS = (first_BS < end_BS).sum(dim=1, keepdim=True, dtype=torch.int32) << 16 | split_S
    words = [each.expand_as(tiles_BS).flatten() for each in (sequence_BS, splits_BS, first_BS, end_BS)]
    pieces_I4 = torch.stack(words, dim=1) * there_BS.flatten()[:, None]
    listed.pieces_I4.copy_(pieces_I4[order_I])
    listed.counts.zero_()
    listed.counts[0] = there_BS.sum()
    return listed
