"""From a schedule to the tensors of its step: a few numbers a row on the host, one copy, the rest on the device.

Knows sequences, tokens, positions and blocks; knows nothing of sampling or the network. What a kernel could only read
out of bounds is asserted here, on the host, before anything is launched.

Rows: one per decoding sequence, then the chunks. A decoding row's token may be in flight: then the device has it.
Logits come for the rows that need a token, then for prompt rows whose log-probabilities are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.decode_inputs import Places, decode_inputs
from moe.engine.scheduler import Chunk, Schedule
from moe.engine.sequence import Sequence
from moe.engine.upload import upload
from moe.model.step_input import DecodeBatch, PrefillBatch, StepInput

# Tables are padded to a multiple of this many entries: fewer distinct strides, fewer compilations.
TABLE_STEP = 16


@dataclass(frozen=True)
class Limits:
    """What ids, positions and slots must stay below."""

    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int

    def check(self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, sequences: Rows[Sequence]) -> None:
        """Each with the requests that break it. Token -1 is one that the device has."""
        assert token_ids.size, "an empty step was scheduled"
        longest = int(positions.max())
        assert longest < self.max_model_len, (
            f"position {longest} was scheduled, the position table ends at {self.max_model_len}; requests: "
            f"{[sequence.request.request_id for sequence in sequences]}"
        )
        limit = self.num_blocks * self.block_size
        assert slots.min() >= 0 and slots.max() < limit, f"a slot outside the {limit} rows of the pool"
        ordered = np.sort(slots)
        assert (ordered[1:] != ordered[:-1]).all(), "two rows of one step would write the same slot"
        assert token_ids.min() >= -1 and token_ids.max() < self.vocab_size, "a token id outside the vocabulary"


@dataclass(frozen=True)
class StepTensors:
    """A step's input, and of its sampled rows, in order, what the sampler asks."""

    step: StepInput
    sampled_places_S: Tensor
    draw_positions_S: Tensor


def decode_rows(decodes: Rows[Sequence], block_size: int) -> np.ndarray:
    """int64 [4, B]: token (-1: in flight), place, position and its block, as kernels/decode_inputs.py reads them."""
    rows = [
        [-1 if each.in_flight else each.token_at(each.num_computed) for each in decodes],
        [each.place for each in decodes],
        [each.num_computed for each in decodes],
        [each.table.ids[each.num_computed // block_size] for each in decodes],
    ]
    return np.array(rows, np.int64)


def check_decodes(rows_4B: np.ndarray, decodes: Rows[Sequence], limits: Limits) -> None:
    """The bounds of a step that a graph replays."""
    token_ids, _, positions, blocks = rows_4B
    limits.check(token_ids, positions, blocks * limits.block_size + positions % limits.block_size, decodes)


def step_tensors(schedule: Schedule, places: Places, limits: Limits) -> StepTensors:
    """Any step, launched kernel by kernel. Its new sequences' places are filled already."""
    decodes, chunks, size = schedule.decodes, schedule.chunks, limits.block_size
    rows_4B, (token_ids, positions, slots) = decode_rows(decodes, size), chunk_rows(chunks, size)
    limits.check(
        np.concatenate([rows_4B[0], token_ids]),
        np.concatenate([rows_4B[2], positions]),
        np.concatenate([rows_4B[3] * size + rows_4B[2] % size, slots]),
        schedule.sequences,
    )
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    ends = np.array([chunk.end for chunk in chunks], np.int64)
    host = [
        rows_4B,
        token_ids,
        positions,
        slots,
        np.array([sequence.place for sequence in schedule.sampled], np.int64),
        np.array(logits_rows(schedule), np.int64),
        np.array([chunk.sequence.place for chunk in chunks], np.int64),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        (ends - lengths).astype(np.int32),
        ends.astype(np.int32),
    ]
    rows, tokens_T, positions_T, slots_T, sampled, wanted, chunk_places, *prefill = upload(host, places.newest_P.device)
    decode = None
    if decodes:
        max_kv_len = int(rows_4B[2].max()) + 1
        inputs = decode_inputs(rows, places, block_size=size, width=_width(max_kv_len, places, size))
        decode = DecodeBatch(inputs.block_tables_BM, inputs.kv_lens_B, max_kv_len)
        tokens_T = torch.cat([inputs.token_ids_B, tokens_T])
        positions_T = torch.cat([inputs.positions_B, positions_T])
        slots_T = torch.cat([inputs.slot_mapping_B, slots_T])
    step = StepInput(
        tokens_T,
        positions_T,
        slots_T,
        len(decodes),
        decode,
        _prefill(chunks, chunk_places, prefill, places, size) if chunks else None,
        wanted,
    )
    return StepTensors(step, sampled, positions_T[wanted[: len(schedule.sampled)]] + 1)


def logits_rows(schedule: Schedule) -> list[int]:
    """Rows that need a token, in the order of the schedule, then rows whose prompt log-probabilities are wanted."""
    rows = list(schedule.sampled_decodes)
    prompt_rows: list[int] = []
    row = len(schedule.decodes)
    for chunk in schedule.chunks:
        if chunk.sequence.needs_token(chunk.end):
            rows.append(row + chunk.length - 1)
        if chunk.sequence.wants_prompt_rows:
            prompt_rows += range(row, row + num_prompt_rows(chunk))
        row += chunk.length
    return rows + prompt_rows


def num_prompt_rows(chunk: Chunk) -> int:
    """Rows of a chunk that score a prompt token: all, but for the prompt's last."""
    return min(chunk.end, chunk.sequence.num_prompt - 1) - chunk.start


def chunk_rows(chunks: Rows[Chunk], size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, positions and slots of all chunks, one after another."""
    total = sum(chunk.length for chunk in chunks)
    token_ids, positions, slots = (np.empty(total, np.int64) for _ in range(3))
    row = 0
    for chunk in chunks:
        rows = slice(row, row + chunk.length)
        token_ids[rows] = chunk.sequence.prompt_ids[chunk.start : chunk.end]
        positions[rows] = np.arange(chunk.start, chunk.end)
        table = np.frombuffer(chunk.sequence.table.ids, np.int32).astype(np.int64)
        slots[rows] = table[positions[rows] // size] * size + positions[rows] % size
        row += chunk.length
    return token_ids, positions, slots


def _prefill(chunks: Rows[Chunk], place_B: Tensor, rest: Rows[Tensor], places: Places, block_size: int) -> PrefillBatch:
    query_starts_B1, query_offsets_B, kv_lens_B = rest
    lengths, ends = tuple(chunk.length for chunk in chunks), tuple(chunk.end for chunk in chunks)
    width = _width(max(ends), places, block_size)
    return PrefillBatch(
        places.tables_PM[:, :width].index_select(0, place_B),
        query_starts_B1,
        query_offsets_B,
        kv_lens_B,
        max_query_len=max(lengths),
        max_kv_len=max(ends),
        query_lens_host=lengths,
        kv_lens_host=ends,
    )


def _width(num_positions: int, places: Places, block_size: int) -> int:
    """Entries of a table for so many positions."""
    step = block_size * TABLE_STEP
    return min(-(-num_positions // step) * TABLE_STEP, places.tables_PM.shape[1])
