"""Which block is free, used or kept: reference counts and a free list, in plain Python.

Knows block ids; knows nothing of tokens, hashes or tensors. Every block is in exactly one of three states:

    free   --allocate-->  used (references > 0)  --last release-->  free, or kept
    kept (no reference, content still findable)  --share-->  used   |   --evict-->  free

so free + used + kept = total, always; `check` recounts it.
"""

from __future__ import annotations

from collections import deque


class BlockAllocator:
    """Ids 0..num_blocks-1. Deterministic: free blocks are handed out in the order they came back."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "an allocator needs at least one block"
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._kept: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._kept)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """A free block, now with one reference."""
        assert self._free, "no free block: the caller must evict or wait first"
        block = self._free.popleft()
        assert self._references[block] == 0, f"block {block} was in the free list with references"
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is used or kept."""
        assert self._references[block] > 0 or block in self._kept, f"block {block} is free and cannot be shared"
        self._kept.discard(block)
        self._references[block] += 1

    def release(self, block: int, *, keep: bool) -> bool:
        """Drop one reference; with the last one the block is free, or kept if `keep`. True where it was the last."""
        assert self._references[block] > 0, f"block {block} was released twice"
        self._references[block] -= 1
        if self._references[block]:
            return False
        if keep:
            self._kept.add(block)
        else:
            self._free.append(block)
        return True

    def evict(self, block: int) -> None:
        """A kept block becomes free."""
        assert block in self._kept, f"block {block} is not kept and cannot be evicted"
        self._kept.remove(block)
        self._free.append(block)

    def check(self) -> None:
        """Recount everything; an AssertionError says what is wrong."""
        free = set(self._free)
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        assert not free & used and not free & self._kept and not used & self._kept, "a block is in two states at once"
        total = len(free) + len(used) + len(self._kept)
        assert total == self.num_blocks, f"free + used + kept = {total}, but there are {self.num_blocks} blocks"
