"""From a schedule to tensors, through the network, to token ids on the host.

Knows the pool, the network's interface and the sampler; knows nothing of queues, text or endings. The network's inputs
go to the device in one copy, the sampler's parameters in a few more, and only where they changed; only ids (and
log-probabilities, where asked) come back. What a kernel could only read out of bounds is asserted here, on the host,
before anything is launched.

Rows: one per decoding sequence, then the chunks. Logits come for the rows that need a token, then for prompt rows whose
log-probabilities are wanted. A row that replays a known token needs neither (a CUDA graph computes the logits of every
row; those are dropped).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kv_cache.pool import KVPool
from moe.engine.cuda_graphs import DecodeGraphs, DecodeRows
from moe.engine.network import Network
from moe.engine.request import TokenLogprobs
from moe.engine.sampler import Sampler, SampleRow, SamplingBatch
from moe.engine.scheduler import Chunk, Schedule
from moe.engine.sequence import Sequence
from moe.engine.upload import upload
from moe.model.step_input import DecodeBatch, PrefillBatch, StepInput

# Tables are padded to a multiple of this many entries: fewer distinct strides, fewer compilations.
TABLE_STEP = 16


@dataclass(frozen=True)
class Sampled:
    """The next token of one sequence; id -1 where its logits held NaN."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None


class Runner:
    """Runs schedules on one device. `decode` gives the text of one token, for log-probabilities; None: no texts.

    With `graphs`, steps of decode rows alone are replayed; all others are launched one kernel after another.
    """

    def __init__(
        self,
        network: Network,
        sampler: Sampler,
        pool: KVPool,
        *,
        device: torch.device,
        max_model_len: int,
        vocab_size: int,
        eos_ids: frozenset[int] = frozenset(),
        decode: Callable[[int], str] | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.network = network
        self.graphs = graphs
        self.sampler = sampler
        self.pool = pool
        self.device = device
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.decode = decode
        self._last_sampled: list[Sequence] = []
        self._last_batch: SamplingBatch | None = None

    @torch.inference_mode()
    def run(self, schedule: Schedule, enter: Callable[[str], None]) -> list[Sampled]:
        """One step; `enter` is told each stage that begins. Prompt log-probabilities go to their sequences."""
        enter("prepare")
        sampled = [sequence for sequence in schedule.decodes if sequence.needs_token(sequence.num_computed + 1)]
        sampled += [chunk.sequence for chunk in schedule.chunks if chunk.sequence.needs_token(chunk.end)]
        logits_BV = (
            self._replay(schedule, enter) if self.graphs and not schedule.chunks else self._launch(schedule, enter)
        )
        enter("sample")
        self._prompt_logprobs(schedule, logits_BV[len(sampled) :])
        batch = self._sampling_batch(sampled)
        if batch is None:
            return []
        result = self.sampler.sample(logits_BV[: len(sampled)], batch)
        ids = result.ids_B.tolist()
        logprobs = result.logprobs or [None] * len(ids)
        return [
            Sampled(sequence, token_id, self._with_texts(each))
            for sequence, token_id, each in zip(sampled, ids, logprobs, strict=True)
        ]

    def _launch(self, schedule: Schedule, enter: Callable[[str], None]) -> Tensor:
        """Logits of the rows that need a token, then of the prompt rows whose log-probabilities are wanted."""
        step = self.step_input(schedule)
        enter("forward")
        return self.network.forward(step, self.pool.layers)

    def _replay(self, schedule: Schedule, enter: Callable[[str], None]) -> Tensor:
        """The same of a step without chunks, through a captured graph, which gives the logits of every row."""
        assert self.graphs is not None, "a replay was asked of a runner without graphs"
        rows = self._decode_rows(schedule.decodes)
        self._check(rows.token_ids, rows.positions, rows.slots, schedule.decodes)
        enter("forward")
        logits_BV = self.graphs.forward(rows)
        wanted = _logits_rows(schedule)
        if len(wanted) == len(schedule.decodes):
            return logits_BV
        return logits_BV[upload([np.array(wanted, np.int64)], self.device)[0]]

    def _decode_rows(self, decodes: Rows[Sequence]) -> DecodeRows:
        token_ids = np.array([sequence.token_at(sequence.num_computed) for sequence in decodes], np.int64)
        positions = np.array([sequence.num_computed for sequence in decodes], np.int64)
        tables = self._tables(decodes)
        size = self.pool.layout.block_size
        blocks = tables[np.arange(len(decodes)), positions // size].astype(np.int64)
        return DecodeRows(token_ids, positions, blocks * size + positions % size, tables)

    def step_input(self, schedule: Schedule) -> StepInput:
        """The schedule's tensors, checked against the pool and the position table."""
        decodes, chunks = schedule.decodes, schedule.chunks
        token_ids = np.empty(schedule.num_tokens, np.int64)
        positions = np.empty(schedule.num_tokens, np.int64)
        slots = np.empty(schedule.num_tokens, np.int64)
        decoded = self._decode_rows(decodes)
        prefill_tables = self._tables([chunk.sequence for chunk in chunks])
        size = self.pool.layout.block_size
        row = len(decodes)
        token_ids[:row], positions[:row], slots[:row] = decoded.token_ids, decoded.positions, decoded.slots
        for index, chunk in enumerate(chunks):
            rows = slice(row, row + chunk.length)
            token_ids[rows] = chunk.sequence.prompt_ids[chunk.start : chunk.end]
            positions[rows] = np.arange(chunk.start, chunk.end)
            blocks = prefill_tables[index, positions[rows] // size].astype(np.int64)
            slots[rows] = blocks * size + positions[rows] % size
            row += chunk.length
        lengths = np.array([chunk.length for chunk in chunks], np.int64)
        decode_lens = positions[: len(decodes)] + 1
        prefill_lens = np.array([chunk.end for chunk in chunks], np.int64)
        self._check(token_ids, positions, slots, [*decodes, *(chunk.sequence for chunk in chunks)])
        host = [
            token_ids,
            positions,
            slots,
            np.array(_logits_rows(schedule), np.int64),
            decoded.tables,
            decode_lens.astype(np.int32),
            prefill_tables,
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            (prefill_lens - lengths).astype(np.int32),
            prefill_lens.astype(np.int32),
        ]
        return _assemble(upload(host, self.device), len(decodes), decode_lens, lengths, prefill_lens)

    def _tables(self, sequences: Rows[Sequence]) -> np.ndarray:
        """int32 [B, M], unused entries 0. An empty table is as wide as one step, so it can be indexed."""
        longest = max((len(sequence.table) for sequence in sequences), default=1)
        tables = np.zeros((len(sequences), -(-longest // TABLE_STEP) * TABLE_STEP), np.int32)
        for row, sequence in enumerate(sequences):
            tables[row, : len(sequence.table)] = np.frombuffer(sequence.table.ids, np.int32)
        assert not tables.size or 0 <= tables.min() <= tables.max() < self.pool.num_blocks, (
            "a block id outside the pool"
        )
        return tables

    def _check(
        self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, sequences: Rows[Sequence]
    ) -> None:
        """Host-side bounds, each with the request that breaks it."""
        assert token_ids.size, "an empty step was scheduled"
        longest = int(positions.max())
        assert longest < self.max_model_len, (
            f"position {longest} was scheduled, the position table ends at {self.max_model_len}; requests: "
            f"{[sequence.request.request_id for sequence in sequences]}"
        )
        limit = self.pool.num_blocks * self.pool.layout.block_size
        assert slots.min() >= 0 and slots.max() < limit, f"a slot outside the {limit} rows of the pool"
        assert len(np.unique(slots)) == slots.size, "two rows of one step would write the same slot"
        assert token_ids.min() >= 0 and token_ids.max() < self.vocab_size, "a token id outside the vocabulary"

    def _prompt_logprobs(self, schedule: Schedule, logits_XV: Tensor) -> None:
        """Row p of the prompt scores token p + 1; the first token has no score."""
        row = 0
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            if not sequence.wants_prompt_rows:
                continue
            if chunk.start == 0:
                sequence.prompt_logprobs.append(None)
            num_rows = _num_prompt_rows(chunk)
            top = sequence.request.params.prompt_logprobs
            assert top is not None, "prompt rows without a request for them"
            targets = sequence.prompt_ids[chunk.start + 1 : chunk.start + 1 + num_rows]
            records = self.sampler.prompt_logprobs(logits_XV[row : row + num_rows], targets, top)
            sequence.prompt_logprobs += [self._with_texts(each) for each in records]
            row += num_rows
        assert row == logits_XV.shape[0], "logits of prompt rows were computed that nobody wanted"

    def _with_texts(self, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
        if logprobs is None or self.decode is None:
            return logprobs
        decode = self.decode
        return {token_id: replace(each, decoded_token=decode(token_id)) for token_id, each in logprobs.items()}

    def _sampling_batch(self, sampled: list[Sequence]) -> SamplingBatch | None:
        """The parameters of these rows. Where the last step sampled the same sequences, all but their positions stand
        (edits of logits follow the output and are made anew)."""
        last, self._last_batch = self._last_batch, None
        if sampled and last is not None and sampled == self._last_sampled and last.edits is None:
            self._last_batch = last._replace(position_B=last.position_B + 1)
        elif sampled:
            rows = [self._sample_row(sequence) for sequence in sampled]
            self._last_batch = SamplingBatch.build(rows, self.device)
        self._last_sampled = sampled
        return self._last_batch

    def _sample_row(self, sequence: Sequence) -> SampleRow:
        return SampleRow(
            params=sequence.request.params,
            seed=sequence.seed,
            position=sequence.num_tokens,
            prompt_ids=sequence.prompt_ids,
            output_ids=sequence.output_ids,
            eos_ids=self.eos_ids,
            counts=sequence.token_counts(),
        )


def _assemble(
    tensors: Rows[Tensor], num_decode: int, decode_lens: np.ndarray, lengths: np.ndarray, prefill_lens: np.ndarray
) -> StepInput:
    token_ids, positions, slots, logits_rows, decode_tables, decode_kv, tables, starts, offsets, kv_lens = tensors
    decode = prefill = None
    if num_decode:
        decode = DecodeBatch(decode_tables, decode_kv, max_kv_len=int(decode_lens.max()))
    if lengths.size:
        prefill = PrefillBatch(
            tables,
            starts,
            offsets,
            kv_lens,
            max_query_len=int(lengths.max()),
            max_kv_len=int(prefill_lens.max()),
            query_lens_host=tuple(lengths.tolist()),
            kv_lens_host=tuple(prefill_lens.tolist()),
        )
    return StepInput(token_ids, positions, slots, num_decode, decode, prefill, logits_rows)


def _logits_rows(schedule: Schedule) -> list[int]:
    """Rows that need a token, in the order of the schedule, then rows whose prompt log-probabilities are wanted."""
    rows = [row for row, sequence in enumerate(schedule.decodes) if sequence.needs_token(sequence.num_computed + 1)]
    prompt_rows: list[int] = []
    row = len(schedule.decodes)
    for chunk in schedule.chunks:
        if chunk.sequence.needs_token(chunk.end):
            rows.append(row + chunk.length - 1)
        if chunk.sequence.wants_prompt_rows:
            prompt_rows += range(row, row + _num_prompt_rows(chunk))
        row += chunk.length
    return rows + prompt_rows


def _num_prompt_rows(chunk: Chunk) -> int:
    """Rows of a chunk that score a prompt token: all, but for the prompt's last."""
    return min(chunk.end, chunk.sequence.num_prompt - 1) - chunk.start
