"""Decode steps as CUDA graphs: one replay in place of a thousand launches, which would keep the device waiting.

Knows the network's interface, batch sizes and lengths; knows nothing of requests. A graph is captured the first time
its size is wanted, in a pool of memory that all graphs share, and reads its inputs from fixed places: one copy brings
a step's inputs there. Kernels give a row the same bits in any batch and under any bound on the lengths, so a replayed
step equals an eager one, bit for bit.

A step of B rows runs in the smallest graph that holds it. The rows above B are padding: their slot is -1 (nothing is
written), their length 0 (nothing is read), and they go to no expert.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe.engine.network import Network
from moe.engine.upload import place, views
from moe.model.step_input import DecodeBatch, StepInput

logger = logging.getLogger(__name__)

# Bounds on the lengths of a step's sequences: a graph's attention has programs for every split below its bound. Each
# bound costs one more graph a size; programs without keys end at once.
LENGTH_BOUNDS = (2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class DecodeRows:
    """One step's decode rows on the host: int64 [B] ids, positions and slots, int32 [B, M] tables."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray

    @property
    def max_kv_len(self) -> int:
        return int(self.positions.max()) + 1


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The ladder: steps of about an eighth, so that little of a step is padding."""
    sizes = [*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, max_num_seqs, 16)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class _Inputs:
    """The fixed places of one batch size, in one stretch of memory."""

    def __init__(self, size: int, table_width: int, device: torch.device) -> None:
        self.arrays = [
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.full(size, -1, np.int64),
            np.zeros((size, table_width), np.int32),
            np.zeros(size, np.int32),
            np.zeros(size, np.bool_),
        ]
        self.there = place(self.arrays, pinned=True).to(device)
        self.tensors = views(self.there, self.arrays)
        # Made once and kept: a graph goes on reading what it was captured with.
        self.rows_B = torch.arange(size, device=device)

    def step(self, max_kv_len: int) -> StepInput:
        token_ids_T, positions_T, slots_T, tables_BM, kv_lens_B, real_T = self.tensors
        size = token_ids_T.shape[0]
        return StepInput(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slot_mapping_T=slots_T,
            num_decode=size,
            decode=DecodeBatch(tables_BM, kv_lens_B, max_kv_len),
            prefill=None,
            logits_rows_B=self.rows_B,
            real_T=real_T,
        )

    def fill(self, rows: DecodeRows) -> None:
        """The rows, then padding; one copy, in stream order after the last replay that read these places."""
        used, width = rows.token_ids.shape[0], min(rows.tables.shape[1], self.arrays[3].shape[1])
        token_ids, positions, slots, tables, kv_lens, real = (array.copy() for array in self.arrays)
        token_ids[:used], positions[:used], slots[:used] = rows.token_ids, rows.positions, rows.slots
        tables[:used, :width] = rows.tables[:, :width]
        kv_lens[:used], real[:used] = rows.positions + 1, True
        self.there.copy_(place([token_ids, positions, slots, tables, kv_lens, real], pinned=True), non_blocking=True)


class DecodeGraphs:
    """All graphs of one network over one KV pool."""

    def __init__(
        self,
        network: Network,
        kv_caches: Sequence[Tensor],
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self.network = network
        self.kv_caches = kv_caches
        self.device = device
        self.sizes = graph_sizes(max_num_seqs)
        self.bounds = [bound for bound in LENGTH_BOUNDS if bound < max_model_len] + [max_model_len]
        self.table_width = -(-max_model_len // block_size)
        self._memory = torch.cuda.graph_pool_handle()
        self._inputs: dict[int, _Inputs] = {}
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def forward(self, rows: DecodeRows) -> Tensor:
        """fp32 logits [B, V] of the rows, in their order. Overwritten by the next call."""
        used = rows.token_ids.shape[0]
        size = self.sizes[bisect_left(self.sizes, used)]
        bound = self.bounds[bisect_left(self.bounds, rows.max_kv_len)]
        if (size, bound) not in self._graphs:
            self._capture(size, bound)
        graph, logits_BV = self._graphs[size, bound]
        self._inputs[size].fill(rows)
        graph.replay()
        return logits_BV[:used]

    def _capture(self, size: int, bound: int) -> None:
        """Run the step once on padding alone, so that everything is compiled, then record it."""
        started = time.perf_counter()
        if size not in self._inputs:
            self._inputs[size] = _Inputs(size, self.table_width, self.device)
        inputs = self._inputs[size]
        inputs.there.copy_(place(inputs.arrays, pinned=True))
        step = inputs.step(bound)
        self.network.forward(step, self.kv_caches)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits_BV = self.network.forward(step, self.kv_caches)
        self._graphs[size, bound] = graph, logits_BV
        seconds = time.perf_counter() - started
        logger.debug("captured decode of %d rows up to %d positions in %.1f s", size, bound, seconds)
