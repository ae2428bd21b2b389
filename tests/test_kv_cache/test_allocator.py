"""Reference counts and the three states of a block; wrong use is caught where it happens."""

from __future__ import annotations

import random

import pytest

from kv_cache.allocator import BlockAllocator
from kv_cache.block_table import BlockTable


def test_blocks_go_round() -> None:
    allocator = BlockAllocator(3)
    first, second = allocator.allocate(), allocator.allocate()
    allocator.share(first)
    assert (allocator.num_free, allocator.num_used, allocator.num_kept) == (1, 2, 0)
    assert allocator.release(first, keep=True) is False  # one reference is left
    assert allocator.release(first, keep=True) is True
    assert allocator.release(second, keep=False) is True
    assert (allocator.num_free, allocator.num_used, allocator.num_kept) == (2, 0, 1)
    allocator.share(first)  # kept, found again
    assert allocator.references(first) == 1 and allocator.num_kept == 0
    allocator.release(first, keep=True)
    allocator.evict(first)
    assert allocator.num_free == 3
    allocator.check()


def test_c52_double_free_asserts() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.release(block, keep=False)
    with pytest.raises(AssertionError, match=f"block {block} was released twice"):
        allocator.release(block, keep=False)


def test_wrong_use_asserts() -> None:
    allocator = BlockAllocator(1)
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        allocator.share(0)
    with pytest.raises(AssertionError, match="is not kept"):
        allocator.evict(0)
    allocator.allocate()
    with pytest.raises(AssertionError, match="no free block"):
        allocator.allocate()


def test_check_finds_a_lost_and_a_doubled_block() -> None:
    allocator = BlockAllocator(4)
    allocator._free.popleft()
    with pytest.raises(AssertionError, match="free \\+ used \\+ kept = 3, but there are 4"):
        allocator.check()
    allocator._free.append(3)
    with pytest.raises(AssertionError, match="in the free list twice"):
        allocator.check()


def test_a_random_walk_keeps_every_block() -> None:
    rng, allocator = random.Random(1), BlockAllocator(16)
    held: list[int] = []
    for _ in range(3000):
        action = rng.randrange(4)
        if action == 0 and allocator.num_free:
            held.append(allocator.allocate())
        elif action == 1 and held:
            allocator.share(held[0])
            held.append(held[0])
        elif action == 2 and held:
            allocator.release(held.pop(rng.randrange(len(held))), keep=rng.random() < 0.5)
        elif action == 3 and allocator.num_kept:
            allocator.evict(min(allocator._kept))
        assert allocator.num_used == len(set(held))
        allocator.check()


def test_slots_follow_the_table() -> None:
    table = BlockTable(4)
    for block in (9, 2):
        table.append(block)
    assert table.capacity == 8 and len(table) == 2
    assert [table.slot(position) for position in (0, 3, 4, 7)] == [36, 39, 8, 11]
    with pytest.raises(AssertionError, match="position 8 is outside the 8 bound positions"):
        table.slot(8)
    assert table.clear() == [9, 2] and len(table) == 0
