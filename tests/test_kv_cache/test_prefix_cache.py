"""Blocks found again: what makes a key, which block is evicted first, and that look-up and binding are one step."""

from __future__ import annotations

import random

import pytest

from kv_cache.block_table import BlockTable
from kv_cache.prefix_cache import BlockKey, PrefixCache, block_key, root_key

SIZE = 4


def chain(cache: PrefixCache, tokens: list[int], num_prompt: int | None = None) -> list[BlockKey]:
    """Keys of the full blocks of `tokens`, the first `num_prompt` of them prompt tokens."""
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    keys: list[BlockKey] = []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        prompt_positions = min(max(num_prompt - start, 0), SIZE)
        keys.append(block_key(keys[-1] if keys else cache.root, tokens[start : start + SIZE], prompt_positions))
    return keys


def fill(cache: PrefixCache, tokens: list[int], num_prompt: int | None = None) -> tuple[BlockTable, int]:
    """Bind and commit all full blocks of a sequence; its table and how many were found."""
    table, keys = BlockTable(SIZE), chain(cache, tokens, num_prompt)
    found = cache.bind(table, keys, len(keys))
    assert found is not None
    for index in range(found, len(keys)):
        cache.commit(table, index, keys[index])
    return table, found


def test_a_prefix_is_found_and_shared() -> None:
    cache = PrefixCache(8, SIZE)
    first, found = fill(cache, list(range(12)))
    assert found == 0
    second, found = fill(cache, [*range(8), 99, 98, 97, 96])
    assert found == 2 and first.ids[:2] == second.ids[:2] and first.ids[2] != second.ids[2]
    assert cache.allocator.num_used == 4 and cache.allocator.references(first.ids[0]) == 2
    cache.release(first)
    cache.release(second)
    assert cache.allocator.num_used == 0 and cache.allocator.num_kept == 4
    cache.check()


def test_forgotten_blocks_are_free_or_stay_with_who_shares_them() -> None:
    cache = PrefixCache(8, SIZE)
    first, _ = fill(cache, list(range(12)))
    second, _ = fill(cache, [*range(8), 99, 98, 97, 96])
    cache.release(first, forget=True)
    cache.check()
    assert cache.count(chain(cache, list(range(12)))) == (0, 0)
    assert cache.allocator.num_used == 3 and cache.allocator.num_kept == 0 and cache.allocator.num_free == 5
    third, found = fill(cache, list(range(12)))  # written anew, beside the blocks that the second still reads
    assert found == 0 and not set(third.ids) & set(second.ids)
    cache.release(second)
    assert cache.allocator.num_kept == 1  # its own last block; the two it shared are nobody's
    cache.release(third)
    cache.check()
    assert cache.allocator.num_kept == 4 and cache.allocator.num_used == 0


def test_keys_depend_on_everything_before_them() -> None:
    """The same tokens behind another block, another salt, or written by decode: another key."""
    root = root_key(["model", "float32"])
    tokens = [1, 2, 3, 4]
    keys = {
        block_key(root, tokens, 4),
        block_key(root, tokens, 3),
        block_key(root, tokens, 0),
        block_key(root_key(["model", "float16"]), tokens, 4),
        block_key(root_key(["modelfloat32"]), tokens, 4),
        block_key(block_key(root, tokens, 4), tokens, 4),
        block_key(root, [1, 2, 4, 3], 4),
        block_key(root, [1, 2, 3, 4 + 2**32], 4),
    }
    assert len(keys) == 8
    assert block_key(root, tokens, 4) == block_key(root_key(["model", "float32"]), (1, 2, 3, 4), 4)


def test_decode_written_blocks_do_not_serve_a_prompt() -> None:
    """Prompt of 6 and 6 generated tokens; then the same 12 as a prompt: only the first block may be shared."""
    cache = PrefixCache(8, SIZE)
    tokens = list(range(12))
    cache.release(fill(cache, tokens, num_prompt=6)[0])
    assert cache.count(chain(cache, tokens)) == (1, 1)
    assert cache.count(chain(cache, tokens, num_prompt=6)) == (3, 3)  # generated again by the same prompt: all of it


def test_the_least_recently_released_tail_is_evicted_first() -> None:
    cache = PrefixCache(4, SIZE)
    old, _ = fill(cache, [1] * 8)
    young, _ = fill(cache, [2] * 8)
    old_ids, young_ids = old.ids.tolist(), young.ids.tolist()
    cache.release(old)
    cache.release(young)
    table = BlockTable(SIZE)
    for expected in (old_ids[1], old_ids[0], young_ids[1], young_ids[0]):
        assert cache.extend(table)
        assert table.ids[-1] == expected
    assert not cache.extend(table) and cache.num_evicted == 4
    assert cache.count(chain(cache, [2] * 8)) == (0, 0)
    cache.release(table)
    assert cache.allocator.num_free == 4 and cache.allocator.num_kept == 0  # nothing was committed under the new owner
    cache.check()


def test_a_block_found_again_is_young_again() -> None:
    cache = PrefixCache(2, SIZE)
    for token in (1, 2):
        cache.release(fill(cache, [token] * SIZE)[0])
    cache.release(fill(cache, [1] * SIZE)[0])  # used once more: now 2 is the oldest
    table = BlockTable(SIZE)
    cache.extend(table)
    assert cache.count(chain(cache, [1] * SIZE))[0] == 1 and cache.count(chain(cache, [2] * SIZE))[0] == 0


def test_bind_counts_found_blocks_that_must_not_be_evicted_for_it() -> None:
    """3 blocks, 2 kept and wanted, 1 free: a sequence of 4 cannot be bound, and nothing has changed after trying."""
    cache = PrefixCache(3, SIZE)
    cache.release(fill(cache, [1] * 8)[0])
    table, keys = BlockTable(SIZE), chain(cache, [1] * 8)
    assert cache.bind(table, keys, 4) is None
    assert len(table) == 0 and cache.allocator.num_kept == 2
    assert cache.bind(table, keys, 3) == 2
    assert len(set(table.ids)) == 3
    cache.check()


def test_c17_found_blocks_are_those_at_the_moment_of_binding() -> None:
    """A first look finds two blocks; the pool fills up in between; binding sees what is there then."""
    cache = PrefixCache(4, SIZE)
    cache.release(fill(cache, [1] * 8)[0])
    keys = chain(cache, [1] * 8)
    assert cache.count(keys) == (2, 2)
    squatter = BlockTable(SIZE)
    assert cache.bind(squatter, [], 4) == 0  # evicts both
    cache.release(squatter)
    table = BlockTable(SIZE)
    assert cache.bind(table, keys, 2) == 0
    assert cache.allocator.num_used == 2


def test_the_same_content_twice_keeps_one_findable_block() -> None:
    cache = PrefixCache(4, SIZE)
    keys = chain(cache, [5] * SIZE)
    one, two = BlockTable(SIZE), BlockTable(SIZE)
    for table in (one, two):  # both are computed in the same step: neither finds the other
        assert cache.bind(table, keys, 1) == 0
    for table in (one, two):
        cache.commit(table, 0, keys[0])
    cache.release(two)
    cache.release(one)
    assert (cache.allocator.num_free, cache.allocator.num_kept) == (3, 1)
    cache.check()


def test_disabled_keeps_nothing() -> None:
    cache = PrefixCache(4, SIZE, enabled=False)
    cache.release(fill(cache, [1] * 8)[0])
    assert cache.allocator.num_free == 4
    assert fill(cache, [1] * 8)[1] == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_c52_a_random_walk_loses_no_block(enabled: bool) -> None:
    rng, cache = random.Random(2), PrefixCache(24, SIZE, enabled=enabled)
    live: list[BlockTable] = []
    for _ in range(1500):
        if live and rng.random() < 0.5:
            cache.release(live.pop(rng.randrange(len(live))))
        else:
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 5))]
            table, keys = BlockTable(SIZE), chain(cache, tokens)
            found = cache.bind(table, keys if enabled else [], len(keys))
            if found is not None:
                for index in range(found, len(keys)):
                    cache.commit(table, index, keys[index])
                live.append(table)
        cache.check()
    for table in live:
        cache.release(table)
    assert cache.allocator.num_used == 0
    assert cache.num_available == 24
