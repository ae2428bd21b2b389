"""The list of pieces: each there is, once, the ones that see most keys first; and what that is worth."""

from __future__ import annotations

import random

import numpy as np

from kernels.prefill_order import order_pieces


def pieces_of(lens, offsets, starts, keys, *, num_queries):
    listed = order_pieces(lens, offsets, starts, keys, num_queries)
    return [(piece & 0xFFFF, piece >> 16) for piece in listed]


def test_every_piece_of_ragged_chunks_once():
    """A chunk without rows has none; one row more than a whole piece makes another."""
    listed = pieces_of([0, 1, 32, 33], [0, 5, 0, 64], [0] * 4, [0, 6, 32, 97], num_queries=16)
    assert sorted(listed) == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    # Keys seen: 97, 96, 80 by the last chunk's pieces, then 32 and 16, then 6.
    assert listed == [(3, 2), (3, 1), (3, 0), (2, 1), (2, 0), (1, 0)]


def test_keys_of_a_later_round():
    """Keys from position 128 on: pieces before it see none and come last, and none sees more than there are."""
    assert pieces_of([64], [96], [128], [20], num_queries=16) == [(0, 3), (0, 2), (0, 0), (0, 1)]


def test_programs_get_equal_shares():
    """Dealt out to and fro, as the kernel does: the busiest of 132 programs has little more than the mean."""
    r = random.Random(0)
    lens = [r.randint(64, 1024) for _ in range(30)]
    listed = pieces_of(lens, [0] * 30, [0] * 30, lens, num_queries=16)
    seen = np.array([place + 1 for _, place in listed])
    costs = np.repeat(0.6 + -(-seen * 16 // 128), 4)  # four head tiles, each piece with some work of its own
    shares = np.zeros(132)
    for turn in range(-(-len(costs) // 132)):
        part = costs[turn * 132 : (turn + 1) * 132]
        shares[: len(part)] += part[::-1] if turn % 2 and len(part) == 132 else part
    assert shares.max() / shares.mean() < 1.05
