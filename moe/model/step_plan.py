"""What is worked out once per step and used by every layer: row offsets, and the rounds of MLA's prefill.

Knows lengths, pages and bounds; knows nothing of requests or weights. Everything of prefill comes from the host twins
of the step's lengths, so planning never waits for the device; one copy takes all rounds there. What decode needs the
device works out: the host knows no length of a replayed step.

Rounds cut a sequence's keys at fixed absolute positions: round r is [r * W, (r + 1) * W), W the same for all sequences
and steps. A round's keys are expanded into a workspace of bounded size; sequences that do not fit together take turns.
So which keys are summed together depends on their positions alone, not on the batch or the chunking.

    keys of a sequence   | 0 ........ W | W ....... 2W | 2W .. kv_len |
    workspace                 round 0        round 1        round 2        (pages of the cache's own size)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kernels.checks import cdiv
from kernels.mla_order import PieceList, list_pieces
from kernels.prefill_order import order_pieces
from kernels.split_kv import SplitRule
from moe.model.overlap import SideStream
from moe.model.step_input import PrefillBatch, StepInput

# Keys of one sequence in one round: long enough that merging costs little, a multiple of every attention tile.
ROUND_TOKENS = 4096


@dataclass(frozen=True)
class MLARound:
    """One expansion and one attention over it, for the sequences first..last whose keys fit the workspace together.

    Queries are prefill rows row_start:row_stop. A sequence without keys in this round has kv_len 0: an empty part.
    """

    index: int  # which round: results of later ones are merged into those of earlier ones
    row_start: int
    row_stop: int
    num_rows: int  # workspace rows in use, whole pages
    max_query_len: int
    max_kv_len: int
    block_tables_BM: Tensor  # of the latent cache
    workspace_tables_BM: Tensor  # of the workspace
    query_starts_B1: Tensor  # relative to row_start
    query_offsets_B: Tensor
    kv_starts_B: Tensor  # absolute position of the round's first key
    kv_lens_B: Tensor  # keys in this round
    row_starts_B1: Tensor  # workspace rows of each sequence
    pieces_I: Tensor | None  # the order of attention's work, as in StepPlan


class LayerLoads(Protocol):
    """Takes note of how many rows each slot of a layer got: int32 [S + 1], as `ExpertInput.offsets_S1`."""

    def add(self, layer_index: int, offsets_S1: Tensor) -> None: ...


class HalfLoads(LayerLoads):
    """What two halves of a step dispatched, until both are done: then it is one step's."""

    def __init__(self) -> None:
        self._offsets: dict[int, list[Tensor]] = {}

    def add(self, layer_index: int, offsets_S1: Tensor) -> None:
        self._offsets.setdefault(layer_index, []).append(offsets_S1)

    def tell(self, whole: LayerLoads) -> None:
        """Offsets are running sums of rows, and so is their sum."""
        for layer_index, (first_S1, second_S1) in self._offsets.items():
            whole.add(layer_index, first_S1 + second_S1)


@dataclass(frozen=True)
class StepPlan:
    """The step's tensors and what all layers share."""

    step: StepInput
    mla_rounds: tuple[MLARound, ...]
    load: LayerLoads | None
    pieces_I: Tensor | None = None  # of prefill without rounds, by kernels/prefill_order.py; None: as it comes
    beside: SideStream | None = None  # shared experts run there while rows travel; None: in their turn
    decode_pieces: PieceList | None = None  # taken by each layer in turn; None: decode reads no list

    @cached_property
    def all_rows_2(self) -> Tensor:
        """int32 (0, T), where a layer asks for it: a launch that few rows of most models need not wait for."""
        num_tokens, device = self.step.token_ids_T.shape[0], self.step.token_ids_T.device
        # On the device in one launch; a rank without rows has no step to count in.
        all_rows_2 = torch.arange(0, 2 * max(num_tokens, 1), max(num_tokens, 1), dtype=torch.int32, device=device)
        return all_rows_2 if num_tokens else all_rows_2.zero_()


def plan_step(
    step: StepInput,
    page_size: int,
    mla_workspace_tokens: int | None,
    load: LayerLoads | None,
    beside: SideStream | None = None,
    piece_queries: int | None = None,
    decode_rule: SplitRule | None = None,
) -> StepPlan:
    """`mla_workspace_tokens` is None for networks whose prefill reads the cache as it is; `piece_queries`: queries of a
    piece of prefill attention, `decode_rule`: how decode cuts sequences, None where the pieces of each are not listed.
    """
    rounds: tuple[MLARound, ...] = ()
    pieces_I: Tensor | None = None
    if step.prefill is not None:
        if mla_workspace_tokens is not None:
            rounds = plan_mla_rounds(step.prefill, page_size, mla_workspace_tokens, piece_queries)
        elif piece_queries is not None:
            upload, keys = Upload(), step.prefill.kv_lens_host
            listed = upload.add(_pieces(step.prefill, 0, [0] * len(keys), keys, piece_queries))
            pieces_I = upload.to(step.token_ids_T.device)[listed]
    decode_pieces: PieceList | None = None
    if step.decode is not None and decode_rule is not None:
        decode_pieces = list_pieces(step.decode.kv_lens_B, decode_rule, max_kv_len=step.decode.max_kv_len)
    return StepPlan(step, rounds, load, pieces_I, beside, decode_pieces)


def round_length(page_size: int, workspace_tokens: int) -> int:
    """W: the keys of one sequence that are expanded at a time, whole pages."""
    length = min(ROUND_TOKENS, workspace_tokens) // page_size * page_size
    if length < 1:
        raise ValueError(
            f"engine.mla_workspace_tokens={workspace_tokens} is smaller than one block of the cache "
            f"(cache.block_size={page_size}); raise it to at least one block."
        )
    return length


def _pieces(
    prefill: PrefillBatch, first: int, kv_starts: Sequence[int], keys: Sequence[int], piece_queries: int
) -> list[int]:
    """In order, of the sequences first .. first + len(keys), each with so many keys from `kv_starts` on."""
    sequences = slice(first, first + len(keys))
    query_lens = prefill.query_lens_host[sequences]
    offsets = [kv_len - query_len for query_len, kv_len in zip(query_lens, prefill.kv_lens_host[sequences])]
    return order_pieces(query_lens, offsets, kv_starts, keys, piece_queries)


def plan_mla_rounds(
    prefill: PrefillBatch, page_size: int, workspace_tokens: int, piece_queries: int | None = None
) -> tuple[MLARound, ...]:
    """All rounds of one step, in the order in which their results are merged."""
    length = round_length(page_size, workspace_tokens)
    capacity = workspace_tokens // page_size * page_size
    upload = Upload()
    drafts = [
        _draft(prefill, upload, index, first, keys, page_size, length, piece_queries)
        for index in range(cdiv(max(prefill.kv_lens_host), length))
        for first, keys in _groups(_keys_of_round(prefill, index, length), page_size, capacity)
    ]
    flat_X = upload.to(prefill.kv_lens_B.device)
    return tuple(draft.on_device(prefill, flat_X) for draft in drafts)


def _keys_of_round(prefill: PrefillBatch, index: int, length: int) -> list[int]:
    return [min(max(kv_len - index * length, 0), length) for kv_len in prefill.kv_lens_host]


def _groups(keys: list[int], page_size: int, capacity: int) -> list[tuple[int, list[int]]]:
    """Runs of neighbouring sequences whose whole pages fit the workspace: (first sequence, keys of each).

    Each run begins and ends with a sequence that has keys; those without keys between them ride along for nothing.
    """
    groups: list[tuple[int, list[int]]] = []
    rows = 0
    for sequence, count in enumerate(keys):
        if count == 0:
            continue
        pages = cdiv(count, page_size) * page_size
        if groups and rows + pages <= capacity:
            first, members = groups[-1]
            members.extend(keys[first + len(members) : sequence + 1])
            rows += pages
        else:
            groups.append((sequence, [count]))
            rows = pages
    return groups


class Upload:
    """Many small int32 lists, copied to the device as one."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def add(self, values: list[int]) -> slice:
        """Begins at a multiple of 16 bytes, so that kernels are not compiled anew for another alignment."""
        self.values += [0] * (-len(self.values) % 4)
        start = len(self.values)
        self.values += values
        return slice(start, len(self.values))

    def to(self, device: torch.device) -> Tensor:
        flat_X = torch.tensor(self.values, dtype=torch.int32)
        if device.type == "cuda":
            return flat_X.pin_memory().to(device, non_blocking=True)
        return flat_X


@dataclass(frozen=True)
class _Draft:
    """A round before its lists are on the device."""

    index: int
    first: int
    last: int
    row_start: int
    row_stop: int
    num_rows: int
    max_query_len: int
    max_kv_len: int
    max_pages: int
    tables: slice
    query_starts: slice
    kv_starts: slice
    kv_lens: slice
    row_starts: slice
    pieces: slice | None

    def on_device(self, prefill: PrefillBatch, flat_X: Tensor) -> MLARound:
        sequences = slice(self.first, self.last)
        return MLARound(
            index=self.index,
            row_start=self.row_start,
            row_stop=self.row_stop,
            num_rows=self.num_rows,
            max_query_len=self.max_query_len,
            max_kv_len=self.max_kv_len,
            block_tables_BM=prefill.block_tables_BM[sequences],
            workspace_tables_BM=flat_X[self.tables].view(-1, self.max_pages),
            query_starts_B1=flat_X[self.query_starts],
            query_offsets_B=prefill.query_offsets_B[sequences],
            kv_starts_B=flat_X[self.kv_starts],
            kv_lens_B=flat_X[self.kv_lens],
            row_starts_B1=flat_X[self.row_starts],
            pieces_I=None if self.pieces is None else flat_X[self.pieces],
        )


def _draft(
    prefill: PrefillBatch,
    upload: Upload,
    index: int,
    first: int,
    keys: list[int],
    page_size: int,
    length: int,
    piece_queries: int | None,
) -> _Draft:
    """One round of the sequences first .. first + len(keys), its lists noted in `upload`."""
    last = first + len(keys)
    query_lens = prefill.query_lens_host[first:last]
    row_start = sum(prefill.query_lens_host[:first])
    pages = [cdiv(count, page_size) for count in keys]
    row_starts = starts_of([count * page_size for count in pages])
    tables = [
        row // page_size + page if page < count else 0
        for row, count in zip(row_starts, pages)
        for page in range(max(pages))
    ]
    # A sequence without keys keeps its place with position 0, so that no table is read beyond its width.
    kv_starts = [index * length if count else 0 for count in keys]
    pieces = None
    if piece_queries is not None:
        pieces = upload.add(_pieces(prefill, first, kv_starts, keys, piece_queries))
    return _Draft(
        index=index,
        first=first,
        last=last,
        row_start=row_start,
        row_stop=row_start + sum(query_lens),
        num_rows=row_starts[-1],
        max_query_len=max(query_lens),
        max_kv_len=max(keys),
        max_pages=max(pages),
        tables=upload.add(tables),
        query_starts=upload.add(starts_of(list(query_lens))),
        kv_starts=upload.add(kv_starts),
        kv_lens=upload.add(keys),
        row_starts=upload.add(row_starts),
        pieces=pieces,
    )


def starts_of(lengths: list[int]) -> list[int]:
    """[0, l0, l0 + l1, ...]"""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
