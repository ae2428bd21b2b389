"""The blocks of one sequence, in order: position p lives in block p // block_size at offset p % block_size.

Knows block ids and positions; knows nothing of reference counts. Plain Python; the ids lie in one int32 buffer, so that
a step's tables are copied without touching each id.
"""

from __future__ import annotations

from array import array


class BlockTable:
    """Logical block i of a sequence -> physical block `ids[i]`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ids = array("i")
        assert self.ids.itemsize == 4, "the kernels read int32 tables"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def capacity(self) -> int:
        """Positions that the bound blocks hold."""
        return len(self.ids) * self.block_size

    def append(self, block: int) -> None:
        self.ids.append(block)

    def clear(self) -> list[int]:
        """Forget all blocks and return them in order; whoever calls it owes their release."""
        blocks = self.ids.tolist()
        self.ids = array("i")
        return blocks

    def slot(self, position: int) -> int:
        """Index of a position's row in the pool, seen as one run of block_size rows per block."""
        assert 0 <= position < self.capacity, f"position {position} is outside the {self.capacity} bound positions"
        return self.ids[position // self.block_size] * self.block_size + position % self.block_size
