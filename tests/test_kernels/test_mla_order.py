"""The list of MLA decode's pieces: every key once, longest first, the same from the kernel and from the definition."""

from __future__ import annotations

import pytest

from kernels.mla_decode_hopper import most_list_bytes, split_rule
from kernels.mla_order import TILE, PieceList, _list_kernel, list_bytes, list_pieces, list_pieces_triton
from kernels.split_kv import SplitRule
from tests.aot import aot, compile_ahead
from tests.paged_cache import index

RULE = split_rule(128)
LENGTHS = [
    pytest.param([], 4096, id="no-sequence"),
    pytest.param([0], 64, id="an-empty-one"),
    pytest.param([0, 1, 64, 65, 0, 1], 4096, id="around-a-tile"),
    pytest.param([512, 513, 2048, 2049, 4096, 4097], 8192, id="around-splits-and-their-lengths"),
    pytest.param([700] * 20, 700, id="equal-ones"),
    pytest.param([131072, 131073, 300000], 300000, id="more-keys-than-64-splits-of-2048"),
    pytest.param([(7919 * b) % 5000 for b in range(517)], 8192, id="more-than-a-block-of-others"),
]


def cuts(kv_len: int, rule: SplitRule) -> list[tuple[int, int]]:
    """(first key, end) of each split, spelt anew: so many keys as keep the sequence within `few` splits, or twice, or
    any multiple of four times within 64."""
    length = next((n * rule.length for n in (1, 2) if kv_len <= n * rule.few * rule.length), 0)
    length = length or -(-kv_len // (64 * 4 * rule.length)) * 4 * rule.length
    return [(first, min(first + length, kv_len)) for first in range(0, max(kv_len, 1), length)]


def by_hand(lens: list[int], rule: SplitRule) -> list[tuple[int, int, int, int, int]]:
    """(sequence, split, splits with a key, first key, end), sorted by tiles; as many keep their order."""
    pieces = [
        (sequence, split, len(cuts(kv_len, rule)) if kv_len else 0, first, end)
        for sequence, kv_len in enumerate(lens)
        for split, (first, end) in enumerate(cuts(kv_len, rule))
    ]
    return sorted(pieces, key=lambda piece: -(-(piece[4] - piece[3]) // TILE.value), reverse=True)


def told(listed: PieceList) -> list[tuple[int, int, int, int, int]]:
    number, taken, *_ = listed.counts.tolist()
    assert taken == 0
    words = listed.pieces_I4[:number].tolist()
    return [(sequence, cut & 0xFFFF, cut >> 16, first, end) for sequence, cut, first, end in words]


@pytest.mark.parametrize(("lens", "bound"), LENGTHS)
def test_definition(lens, bound):
    listed = list_pieces(index(lens, "cpu"), RULE, max_kv_len=bound)
    assert told(listed) == by_hand(lens, RULE)


@pytest.mark.parametrize(("lens", "bound"), LENGTHS)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_kernel(lens, bound, device):
    """Under this bound and a wider one, as a step in a graph has it: the list is longer, and says the same."""
    for max_kv_len in (bound, 4 * bound):
        listed = list_pieces_triton(index(lens, device), RULE, max_kv_len=max_kv_len)
        assert told(listed) == by_hand(lens, RULE)
        assert listed.pieces_I4.data_ptr() % 16 == 0
        assert len(lens) == 0 or listed.pieces_I4.shape[0] == len(lens) * RULE.most(max_kv_len)


def test_by_hand():
    """Two sequences of 700 and 3 keys: splits of 512 keys, of which the last has 188; then the short one, then none."""
    listed = list_pieces(index([3, 700, 0], "cpu"), RULE, max_kv_len=1024)
    assert told(listed) == [(1, 0, 2, 0, 512), (1, 1, 2, 512, 700), (0, 0, 1, 0, 3), (2, 0, 0, 0, 0)]


def test_bytes():
    """As in the docstrings; and those of the list that is made."""
    assert list_bytes(256, 4) == 16400
    listed = list_pieces(index([1] * 256, "cpu"), RULE, max_kv_len=8192)
    assert most_list_bytes(256, 128, 8192) == sum(x.nbytes for x in listed) == 16400
    assert most_list_bytes(256, 16, 8192) == 0 and most_list_bytes(1024, 128, 131072) == 1048592


@aot
@pytest.mark.parametrize("splits", [1, 4, 64])
def test_compiles_where_it_serves(splits):
    pointers = dict.fromkeys(("kv_lens_ptr", "pieces_ptr", "counts_ptr"), "*i32")
    sizes = {"SPLIT_LEN": 512, "FEW_SPLITS": 4, "BLOCK_B": 8, "BLOCK_J": 256, "BLOCK_S": splits, "PDL": True}
    assert compile_ahead(_list_kernel, 90, pointers | {"num_sequences": "i32"} | sizes)
