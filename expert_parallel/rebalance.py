"""Move whole experts from slots to slots, between ranks and within one, in place and in bounded memory.

Knows slots, bytes and ranks; knows nothing of what an expert computes or why it moves. All that is indexed by the slots
of a layer (weights, scales, biases) is one bundle and travels as one record of bytes, whatever its dtypes. Tensors keep
their addresses: captured graphs go on reading them.

    records out [B]  ->  all_to_all  ->  records in [B]  ->  slots      one round of a layer, the same on every rank
    aside [1]                            an expert whose slot is written before it can leave (move_rounds.py)

So a rank holds 2 B + 1 records, made once, whatever moves. Before anything moves, the ranks compare what they are about
to do. Each record carries a checksum, which is compared with one of the slot after it is written.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expert_parallel.group import ExpertGroup
from expert_parallel.move_rounds import Round, move_rounds
from expert_parallel.moves import moves
from expert_parallel.placement import Placement

_WORD = 8
"""Bytes of a checksum, and what a record's length is a multiple of."""


class Bundles:
    """Everything that the slots of one layer hold on this rank: contiguous tensors [S, ...], seen as bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.num_slots = tensors[0].shape[0]
        self._bytes: list[Tensor] = []
        for tensor in tensors:
            assert tensor.shape[0] == self.num_slots, f"{tensor.shape[0]} slots beside {self.num_slots} in one bundle"
            assert tensor.is_contiguous(), "a bundle's tensors are contiguous: they are written through a view of bytes"
            row = math.prod(tensor.shape[1:]) * tensor.element_size()
            self._bytes.append(tensor.reshape(-1).view(torch.uint8).view(self.num_slots, row))
        self.num_bytes = sum(each.shape[1] for each in self._bytes)  # of one slot

    def read(self, slot: int, out_X: Tensor) -> None:
        """All of a slot, one tensor after another, into the first bytes of `out`."""
        start = 0
        for each in self._bytes:
            out_X[start : start + each.shape[1]].copy_(each[slot])
            start += each.shape[1]

    def write(self, slot: int, x_X: Tensor) -> None:
        """What `read` gave."""
        start = 0
        for each in self._bytes:
            each[slot].copy_(x_X[start : start + each.shape[1]])
            start += each.shape[1]


def record_bytes(bundle_bytes: int) -> int:
    """A bundle, filled up to whole words, and its checksum."""
    return -(-bundle_bytes // _WORD) * _WORD + _WORD


def records_within(buffer_bytes: int, bundle_bytes: int, num_slots: int) -> int:
    """B: the most records a rank sends or receives at a time, so that 2 B + 1 fit the buffer; at least one, and no more
    than the slots of a rank: never more are on their way."""
    return min(max(1, (buffer_bytes // record_bytes(bundle_bytes) - 1) // 2), num_slots)


def mover_bytes(bundle_bytes: int, most: int) -> int:
    """Of the records of an `ExpertMover`, that is all the memory that moving takes."""
    return (2 * most + 1) * record_bytes(bundle_bytes)


@dataclass(frozen=True)
class MovedExperts:
    """What one layer's moves came to on this rank: experts received (from itself too), and rounds of all ranks."""

    received: int
    rounds: int


class ExpertMover:
    """Moves experts of layers whose bundles have the same size. Every rank of the group makes the same calls."""

    def __init__(
        self, group: ExpertGroup, bundle_bytes: int, most: int, device: torch.device | str, *, num_nodes: int = 1
    ) -> None:
        """`most`: B above."""
        self.group = group
        self.bundle_bytes = bundle_bytes
        self.most = most
        self.num_nodes = num_nodes
        shape = (2 * most + 1, record_bytes(bundle_bytes))
        # Zeros: the bytes that fill a record up are part of its checksum.
        self._records = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._out_BX, self._in_BX = self._records[:most], self._records[most : 2 * most]
        self._aside_X = self._records[2 * most]

    @property
    def num_bytes(self) -> int:
        """All the memory that moving takes."""
        return self._records.nbytes

    def move(self, bundles: Bundles, current: Placement, wanted: Placement) -> MovedExperts:
        """Fill the slots as `wanted` says, from where experts are in `current`. The caller changes its tables after it.

        Nothing has moved where this raises for a plan that cannot be: slots that differ from the current ones
        (AssertionError), or ranks that do not agree on it (RuntimeError).
        """
        rank = self.group.rank
        assert bundles.num_bytes == self.bundle_bytes, f"bundles of {bundles.num_bytes} bytes, not {self.bundle_bytes}"
        assert bundles.num_slots == current.num_slots(rank), (
            f"{bundles.num_slots} slots on rank {rank}, the placement has {current.num_slots(rank)}"
        )
        plan = moves(current, wanted, num_nodes=self.num_nodes)
        self.agree(current, wanted)
        rounds = move_rounds(plan, self.most)
        wrong = torch.zeros((), dtype=torch.int64, device=self._records.device)
        for each in rounds:
            wrong += self._exchange(bundles, each)
        if num_wrong := int(wrong):
            raise RuntimeError(f"{num_wrong} experts arrived on rank {rank} with other bytes than were sent.")
        return MovedExperts(sum(move.target.rank == rank for move in plan), len(rounds))

    def seconds_per_byte(self) -> float:
        """Of sending to one rank while receiving from another, tried with one record. Every rank calls it."""
        size = self.group.size
        to_next = [int(rank == (self.group.rank + 1) % size) for rank in range(size)]
        from_last = [int(rank == (self.group.rank - 1) % size) for rank in range(size)]
        seconds = 0.0
        for _ in range(2):  # the first one builds connections
            self._wait()
            begin = time.perf_counter()
            self.group.all_to_all(self._in_BX[:1], self._out_BX[:1], from_last, to_next)
            self._wait()
            seconds = time.perf_counter() - begin
        return seconds / self._records.shape[1]

    def _wait(self) -> None:
        if self._records.is_cuda:
            torch.cuda.synchronize(self._records.device)

    def agree(self, current: Placement, wanted: Placement) -> None:
        """Ranks whose libraries round differently may come to different plans: better no move than two."""
        text = repr((current.ranks, wanted.ranks, self.most)).encode()
        own = torch.tensor([int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")])
        everyone = own.new_empty(self.group.size)
        self.group.all_gather(everyone, own)
        different = [rank for rank, digest in enumerate(everyone.tolist()) if digest != everyone[0]]
        if different:
            raise RuntimeError(
                f"ranks {different} would move other experts than rank 0; nothing was moved. Are their processors and "
                "libraries the same? balance.move=never keeps experts where they are."
            )

    def _exchange(self, bundles: Bundles, plan: Round) -> Tensor:
        """One round; on the device, how many experts that arrived differ from what was sent."""
        rank = self.group.rank
        out = [move for move in plan.moves if move.source.rank == rank]
        arriving = [move for move in plan.moves if move.target.rank == rank]
        for record_X, move in zip(self._out_BX, out, strict=False):
            if move in plan.from_aside:
                record_X.copy_(self._aside_X)
            else:
                bundles.read(move.source.slot, record_X)
                self._sum(record_X, out_1=_checksum(record_X))
        for slot in plan.set_aside:
            if slot.rank == rank:
                bundles.read(slot.slot, self._aside_X)
                self._sum(self._aside_X, out_1=_checksum(self._aside_X))
        self.group.all_to_all(
            self._in_BX[: len(arriving)],
            self._out_BX[: len(out)],
            self._counts([move.source.rank for move in arriving]),
            self._counts([move.target.rank for move in out]),
        )
        wrong = torch.zeros((), dtype=torch.int64, device=self._records.device)
        check_X = self._out_BX[0]  # free again
        for record_X, move in zip(self._in_BX, arriving, strict=False):
            bundles.write(move.target.slot, record_X)
            bundles.read(move.target.slot, check_X)
            self._sum(check_X, out_1=_checksum(check_X))
            wrong += (_checksum(check_X) != _checksum(record_X)).sum()
        return wrong

    @staticmethod
    def _sum(record_X: Tensor, out_1: Tensor) -> None:
        """Of a bundle's words, modulo 2^64."""
        out_1.copy_(record_X[:-_WORD].view(torch.int64).sum(dim=0, keepdim=True))

    def _counts(self, ranks: list[int]) -> list[int]:
        return [ranks.count(rank) for rank in range(self.group.size)]


def _checksum(record_X: Tensor) -> Tensor:
    """Where it stands in a record."""
    return record_X[-_WORD:].view(torch.int64)
