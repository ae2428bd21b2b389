"""Steps that decode beside a few prompt tokens as CUDA graphs: prompts that are spread over many steps (spread.py) cost
the host a replay each, not a thousand launches.

Knows the network's interface, rows and chunks; knows nothing of queues or texts. A graph has room for a number of
decode rows, for PROMPT_ROWS rows of up to CHUNKS prompts behind them, and draws a token for every decode row and every
chunk. What is not used is padding, as in cuda_graphs.py: nothing is written or read for it, and it goes to no expert.
Kernels give a row the same bits in any batch and under any bound, so a replayed step equals a launched one bit for bit.

A graph is captured when its size has been wanted some times: it costs about three launched steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.decode_inputs import Places, decode_inputs
from kernels.sample import sample_argmax
from kv_cache.layout import LayerCache
from moe.engine.network import Network
from moe.engine.scheduler import Chunk, Schedule
from moe.engine.spread import LEAST_TOKENS
from moe.engine.step_tensors import Limits, checked_rows
from moe.engine.upload import place, views
from moe.model.step_input import DecodeBatch, ExpandedRows, PrefillBatch, StepInput

PROMPT_ROWS = LEAST_TOKENS
CHUNKS = 16
PROMPT_BOUND = 2048  # positions of a prompt, the chunk's last one included
SIZE_STEP = 64  # decode rows from graph to graph: one costs little beside the prompts
WANTED_TIMES = 4


class Replay(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Run it again, on what its inputs hold now."""
        ...


class MixedGraphs:
    """`record` captures what a function launches, after the function ran once."""

    def __init__(
        self,
        network: Network,
        kv_caches: Sequence[LayerCache],
        places: Places,
        *,
        bounds: Sequence[int],
        limits: Limits,
        record: Callable[[Callable[[], None]], Replay],
    ) -> None:
        self.network, self.kv_caches, self.places = network, kv_caches, places
        self.bounds, self.limits, self.record = bounds, limits, record
        self.block_size = block_size = limits.block_size
        self.device = places.newest_P.device
        self.max_num_seqs = places.newest_P.shape[0] - 1
        self.prompt_bound = min(PROMPT_BOUND, bounds[-1]) // block_size * block_size
        self._times: Counter[tuple[int, int]] = Counter()
        # Kept for good: a graph goes on reading what it was captured with.
        self._graphs: dict[tuple[int, int], Replay] = {}
        self._inputs: dict[int, Tensor] = {}
        self._all_rows_B = torch.arange(self.max_num_seqs, device=self.device)
        self._ids_B = torch.empty(self.max_num_seqs + CHUNKS, dtype=torch.int64, device=self.device)

    def draw(self, schedule: Schedule) -> tuple[Tensor, list[int]] | None:
        """(drawn ids int64, where in them those of `schedule.sampled` lie, in order); None where no graph serves the
        step, or none yet."""
        if not self._fits(schedule):
            return None
        rows_4B, prompt = checked_rows(schedule, self.limits)
        size = min(-(-rows_4B.shape[1] // SIZE_STEP) * SIZE_STEP, self.max_num_seqs)
        bound = next(bound for bound in self.bounds if rows_4B[2].max() < bound)
        key = size, bound
        self._times[key] += 1
        if key not in self._graphs:
            if self._times[key] < WANTED_TIMES:
                return None
            self._capture(size, bound)
        self._load(size, self._arrays(size, rows_4B, prompt, schedule.chunks))
        self._graphs[key].replay()
        drawn = [size + at for at, chunk in enumerate(schedule.chunks) if chunk.sequence.needs_token(chunk.end)]
        return self._ids_B[: size + len(schedule.chunks)].clone(), [*schedule.sampled_decodes, *drawn]

    def close(self) -> None:
        """Free all graphs, when the last step is done."""
        self._graphs.clear()

    def _fits(self, schedule: Schedule) -> bool:
        chunks = schedule.chunks
        return (
            bool(schedule.decodes)
            and 0 < len(chunks) <= CHUNKS
            and sum(chunk.length for chunk in chunks) <= PROMPT_ROWS
            and all(chunk.end <= self.prompt_bound for chunk in chunks)
            and sum(self._pages(chunk) for chunk in chunks) <= self._all_pages
        )

    def _pages(self, chunk: Chunk) -> int:
        return -(-chunk.end // self.block_size)

    @property
    def _all_pages(self) -> int:
        """Of expanded keys: twice the chunks' own, for what was computed of the prompts before."""
        return 2 * PROMPT_ROWS // self.block_size + CHUNKS

    def _arrays(
        self, size: int, rows_4B: np.ndarray, prompt: Sequence[np.ndarray], chunks: Sequence[Chunk]
    ) -> list[np.ndarray]:
        """The step on the host, filled up: in the order in which `_run` takes it apart."""
        decodes = np.empty((4, size), np.int64)
        decodes[:, : rows_4B.shape[1]] = rows_4B
        decodes[:, rows_4B.shape[1] :] = [[0], [self.max_num_seqs], [-1], [0]]
        rows = np.zeros((3, PROMPT_ROWS), np.int64)  # token ids, positions, slots
        rows[2] = -1
        used = sum(chunk.length for chunk in chunks)
        for to, row in zip(rows, prompt):
            to[:used] = row
        # Of each chunk: its place, where its token goes, the position of that, its last row.
        drawn = np.zeros((4, CHUNKS), np.int64)
        drawn[:2], drawn[3] = self.max_num_seqs, size
        starts, row_starts = np.full(CHUNKS + 1, used, np.int32), np.zeros(CHUNKS + 1, np.int32)
        offsets, lens = np.zeros(CHUNKS, np.int32), np.zeros(CHUNKS, np.int32)
        tables = np.zeros((CHUNKS, self.prompt_bound // self.block_size), np.int32)
        row = pages = 0
        for at, chunk in enumerate(chunks):
            sequence, count = chunk.sequence, self._pages(chunk)
            goes_to = sequence.place if sequence.needs_token(chunk.end) else self.max_num_seqs
            drawn[:, at] = sequence.place, goes_to, chunk.end, size + row + chunk.length - 1
            starts[at], offsets[at], lens[at] = row, chunk.start, chunk.end
            row_starts[at], tables[at, :count] = pages * self.block_size, np.arange(pages, pages + count)
            row, pages = row + chunk.length, pages + count
        row_starts[len(chunks) :] = pages * self.block_size
        return [decodes, rows, drawn, starts, offsets, lens, tables, row_starts]

    def _load(self, size: int, arrays: list[np.ndarray]) -> list[Tensor]:
        """To the graphs' fixed place, in one copy, in stream order after the last replay that read it."""
        host = place(arrays, pinned=self.device.type == "cuda")
        if size not in self._inputs:
            self._inputs[size] = torch.empty_like(host, device=self.device)
        self._inputs[size].copy_(host, non_blocking=True)
        return views(self._inputs[size], arrays)

    def _run(self, size: int, bound: int, inputs: list[Tensor]) -> None:
        """One step over what lies at the fixed place."""
        rows_4B, prompt_3P, drawn_4S, starts_S1, offsets_S, lens_S, tables_SM, row_starts_S1 = inputs
        block_size, places = self.block_size, self.places
        decode = decode_inputs(rows_4B, places, block_size=block_size, width=-(-bound // block_size))
        tokens_P, positions_P, slots_P = prompt_3P
        place_S, to_S, draw_position_S, last_row_S = drawn_4S
        prefill = PrefillBatch(
            places.tables_PM[:, : tables_SM.shape[1]].index_select(0, place_S),
            starts_S1,
            offsets_S,
            lens_S,
            max_query_len=PROMPT_ROWS,
            max_kv_len=self.prompt_bound,
            query_lens_host=(PROMPT_ROWS,),
            kv_lens_host=(self.prompt_bound,),
            expanded=ExpandedRows(self._all_pages * block_size, tables_SM, row_starts_S1),
        )
        step = StepInput(
            torch.cat([decode.token_ids_B, tokens_P]),
            torch.cat([decode.positions_B, positions_P]),
            torch.cat([decode.slot_mapping_B, slots_P]),
            size,
            DecodeBatch(decode.block_tables_BM, decode.kv_lens_B, bound),
            prefill,
            torch.cat([self._all_rows_B[:size], last_row_S]),
            torch.cat([decode.real_B, slots_P >= 0]),
        )
        logits_BV = self.network.forward(step, self.kv_caches)
        ids_B = sample_argmax(
            logits_BV,
            torch.cat([decode.temperature_B, places.temperature_P[place_S]]),
            torch.cat([decode.seed_B, places.seed_P[place_S]]),
            torch.cat([decode.draw_position_B, draw_position_S]),
        )
        self._ids_B[: size + CHUNKS].copy_(ids_B)
        places.newest_P.scatter_(0, torch.cat([rows_4B[1], to_S]), ids_B)

    def _capture(self, size: int, bound: int) -> None:
        inputs = self._load(size, self._arrays(size, np.zeros((4, 0), np.int64), (), ()))
        self._graphs[size, bound] = self.record(lambda: self._run(size, bound, inputs))
