"""Blocks found again by what they hold: chained hashes over a ref-counted allocator.

Knows token ids, hashes and block tables; knows nothing of requests, models or tensors. With `enabled=False` nothing is
ever kept or found, and the same code only counts references.

A block's key is H(key of the block before, its token ids, how many of its positions are prompt positions). The last
part keeps apart what prefill wrote and what decode wrote: their kernels differ in bits, so a block of generated tokens
must not serve a prompt of the same tokens (it may serve the same prompt, generating the same tokens again). The first
key comes from the salt: whatever else the content depends on (model, dtypes).

Blocks without a reference whose key is known are kept, and evicted least recently released first; a sequence's blocks
are released last first, so that a chain loses its tail before its head.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kv_cache.allocator import BlockAllocator
from kv_cache.block_table import BlockTable

BlockKey = bytes


def root_key(salt: Sequence[str]) -> BlockKey:
    """The key before a sequence's first block."""
    return hashlib.blake2b("\0".join(salt).encode(), digest_size=16).digest()


def block_key(parent: BlockKey, token_ids: Sequence[int], num_prompt: int) -> BlockKey:
    """Key of a full block. `num_prompt`: how many of its positions belong to the prompt."""
    content = hashlib.blake2b(parent, digest_size=16)
    content.update(num_prompt.to_bytes(4, "little"))
    content.update(array("q", token_ids).tobytes())
    return content.digest()


class PrefixCache:
    """All blocks of the pool: free, used, or kept for their content. The scheduler's only way to blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, salt: Sequence[str] = (), enabled: bool = True) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.block_size = block_size
        self.enabled = enabled
        self.root = root_key(salt)
        self.num_evicted = 0
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept blocks, the next to be evicted first

    @property
    def num_available(self) -> int:
        """Blocks that could be bound now: free ones and kept ones."""
        return self.allocator.num_free + self.allocator.num_kept

    def new_table(self) -> BlockTable:
        """An empty table of this pool's block size."""
        return BlockTable(self.block_size)

    def count(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """How many leading keys are found, and how many of those blocks are kept now, so count as available."""
        found = kept = 0
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found += 1
            kept += block in self._idle
        return found, kept

    def bind(self, table: BlockTable, keys: Sequence[BlockKey], num_blocks: int) -> int | None:
        """Fill an empty table with `num_blocks` blocks: those found for the leading keys, then new ones.

        Look-up and references are one step: the returned number of found blocks is true by construction, nothing can
        evict them in between. None, and nothing bound, where the new ones are not available.
        """
        assert len(table) == 0, "a table is bound once"
        assert len(keys) <= num_blocks, f"{len(keys)} keys for {num_blocks} blocks"
        found, kept = self.count(keys)
        if num_blocks - found > self.num_available - kept:
            return None
        for key in keys[:found]:
            block = self._block_of[key]
            self._idle.pop(block, None)
            self.allocator.share(block)
            table.append(block)
        for _ in range(num_blocks - found):
            table.append(self._take())
        return found

    def extend(self, table: BlockTable) -> bool:
        """Append one new block; False where none is available."""
        if self.num_available == 0:
            return False
        table.append(self._take())
        return True

    def commit(self, table: BlockTable, index: int, key: BlockKey) -> None:
        """Block `index` of the table is full and written: it can be found from now on.

        Where another block already has the content, that one stays the findable one.
        """
        block = table.ids[index]
        if not self.enabled or key in self._block_of:
            return
        assert block not in self._key_of, f"block {block} would get a second key: its content changed in place"
        self._block_of[key] = block
        self._key_of[block] = key

    def release(self, table: BlockTable, *, forget: bool = False) -> None:
        """Give back every block of the table and empty it; an empty table is fine.

        `forget`: what the blocks hold must not serve anybody again. Others that share one keep it until they end.
        """
        for block in reversed(table.clear()):
            if forget:
                self._forget(block)
            keep = block in self._key_of
            if self.allocator.release(block, keep=keep) and keep:
                self._idle[block] = None

    def check(self) -> None:
        """Recount; an AssertionError says what is wrong."""
        self.allocator.check()
        assert len(self._idle) == self.allocator.num_kept, "kept blocks and the eviction order differ"
        assert all(self.allocator.references(block) == 0 for block in self._idle), "a used block is up for eviction"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "keys and blocks differ"

    def _take(self) -> int:
        """A block to write: a free one, else the least recently released kept one, which is forgotten."""
        if self.allocator.num_free == 0:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self.allocator.evict(block)
            self.num_evicted += 1
        return self.allocator.allocate()

    def _forget(self, block: int) -> None:
        """The block, if it could be found by its content, cannot be any more."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
