"""Decode steps as CUDA graphs: one replay in place of a thousand launches, which would keep the device waiting.

Knows the network's interface, batch sizes and lengths; knows nothing of requests. A graph makes its inputs from a few
numbers a row (kernels/decode_inputs.py), which one small copy brings to a fixed place, runs the network, draws a token
for every row and leaves it where the next step finds it, and on the host, by its own hand: a copy would lie between two
replays. Kernels give a row the same bits in any batch and under any bound on the lengths, so a replayed step equals an
eager one, bit for bit.

A step of B rows runs in the smallest graph that holds it. The rows above B are padding: nothing is written or read for
them, and they go to no expert.

Graphs share one pool of memory. `prepare` captures all sizes that a number of sequences can need, the largest first so
that the others find its memory free again, until its time is spent; what is missing then, and what is needed rarely
(lengths above the first bound, steps that want logits), is captured when it is first wanted.
"""

from __future__ import annotations

import logging
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.decode_inputs import Places, decode_inputs
from kernels.sample import Drawn, sample_argmax_into
from kv_cache.layout import LayerCache
from moe.engine.network import Network
from moe.model.offloaded_experts import Offload
from moe.model.step_input import DecodeBatch, StepInput

logger = logging.getLogger(__name__)

# Bounds on the lengths of a step's sequences: a graph's attention has programs for every split below its bound. Each
# bound costs one more graph a size; programs without keys end at once.
LENGTH_BOUNDS = (2048, 8192, 32768, 131072)
HOST_STEPS = 4
"""So many steps' ids may wait on the host to be read; the engine has two on their way."""
PROGRESS_S = 2.0


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The ladder: steps of about an eighth, so that little of a step is padding; of 32 where a row costs little."""
    sizes = [*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 257, 16)]
    sizes += range(288, max_num_seqs, 32)
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class DecodeGraphs:
    """All graphs of one network over one KV pool."""

    def __init__(
        self,
        network: Network,
        kv_caches: Sequence[LayerCache],
        places: Places,
        *,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        offload: Offload | None = None,
        top_k: int = 1,
    ) -> None:
        """`offload`: experts that come from host memory, of which a row asks for `top_k`; None: all are here."""
        self.network = network
        self._offload, self._top_k = offload, top_k
        self.kv_caches = kv_caches
        self.places = places
        self.device = places.newest_P.device
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_num_seqs = places.newest_P.shape[0] - 1
        self.sizes = [size for size in graph_sizes(self.max_num_seqs) if self._captures(size)]
        self.bounds = [bound for bound in LENGTH_BOUNDS if bound < max_model_len] + [max_model_len]
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)
        # Kept for good: a graph goes on reading what it was captured with.
        self._rows: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._all_rows_B = torch.arange(self.max_num_seqs, device=self.device)
        self._ids = torch.empty(HOST_STEPS * self.max_num_seqs, dtype=torch.int64, pin_memory=True)
        self._free_parts = list(range(HOST_STEPS))  # of `_ids`, which nobody has to read any more
        self._logits_BV: Tensor | None = None  # made when a step first wants logits
        self.num_prepared = 0  # `prepare` has done what it could for so many sequences

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        """Free all graphs, when the last step is done: NCCL ends no group of which a graph still holds a collective.
        Steps that come after all are captured anew."""
        if self._graphs:
            torch.cuda.synchronize(self.device)
            self._graphs.clear()
            self._memory = torch.cuda.graph_pool_handle()  # a pool that nobody holds any more is not taken again

    def serves(self, num_rows: int) -> bool:
        """Whether a step of so many rows is replayed: where experts come from host memory, of a few rows alone."""
        return num_rows <= self.sizes[-1] and self._captures(num_rows)

    def _captures(self, num_rows: int) -> bool:
        return self._offload is None or self._offload.captures(num_rows * self._top_k)

    def draw(self, rows_4B: np.ndarray, most_rows: int = 0, max_kv_len: int = 0) -> Tensor:
        """Drawn ids int64 [B] of the rows, in their order, on the host: they are there when the step has ended, and are
        the caller's for as long as the tensor lives (a view does not count).

        The graph has room for `most_rows` rows and lengths of `max_kv_len`, where others need it: all ranks replay the
        same one. B may be 0.
        """
        assert self._free_parts, f"the ids of {HOST_STEPS} steps wait to be read"
        first = self._free_parts[-1] * self.max_num_seqs
        self._replay(rows_4B, most_rows, max_kv_len, wants_logits=False)
        ids_B = self._ids[first : first + rows_4B.shape[1]]
        # Given back by whoever lets go of it: only a later replay writes there, behind this one on the device.
        weakref.finalize(ids_B, self._free_parts.append, self._free_parts.pop()).atexit = False
        return ids_B

    def logits(self, rows_4B: np.ndarray, most_rows: int = 0, max_kv_len: int = 0) -> Tensor:
        """fp32 logits [B, V] of the rows, in their order, and nothing drawn. Else as `draw`."""
        if self._logits_BV is None:
            shape = (self.max_num_seqs, self.vocab_size)
            self._logits_BV = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._replay(rows_4B, most_rows, max_kv_len, wants_logits=True)
        return self._logits_BV[: rows_4B.shape[1]]

    @torch.inference_mode()
    def prepare(self, num_seqs: int, seconds: float, anyone: Callable[[bool], bool] = bool) -> None:
        """Capture what steps of up to `num_seqs` rows need, in about so many seconds at most.

        `anyone`: whether any rank says yes. All stop where one is out of time: a capture runs the ranks' collectives.
        """
        self.num_prepared = max(num_seqs, self.num_prepared)
        if seconds <= 0.0:
            return
        num_seqs = min(num_seqs, self.sizes[-1])
        largest = bisect_left(self.sizes, num_seqs)
        missing = [size for size in self.sizes[: largest + 1] if (size, self.bounds[0], False) not in self._graphs]
        begin = told = time.perf_counter()
        free_before, done = torch.cuda.mem_get_info(self.device)[0], 0
        for size in reversed(missing):
            now = time.perf_counter()
            if anyone(now - begin > seconds):
                break
            if now - told > PROGRESS_S:
                told = now
                logger.info("captured %d of %d decode graphs", done, len(missing))
            self._capture(size, self.bounds[0], wants_logits=False)
            done += 1
        took, used = time.perf_counter() - begin, free_before - torch.cuda.mem_get_info(self.device)[0]
        if done > 1:
            logger.info(
                "captured %d of %d decode graphs, up to %d rows, in %.1f s and %.2f GiB; the others when first wanted",
                *(done, len(missing), num_seqs, took, used / 2**30),
            )

    def _replay(self, rows_4B: np.ndarray, most_rows: int, max_kv_len: int, *, wants_logits: bool) -> None:
        size = self.sizes[bisect_left(self.sizes, max(rows_4B.shape[1], most_rows))]
        bound = self.bounds[bisect_left(self.bounds, max(int(rows_4B[2].max(initial=-1)) + 1, max_kv_len))]
        graph = self._graphs.get((size, bound, wants_logits))
        if graph is None:
            graph = self._capture(size, bound, wants_logits=wants_logits)
        # One copy, in stream order after the last replay that read this place.
        self._rows[size].copy_(self._padded(rows_4B, size), non_blocking=True)
        graph.replay()
        if self._offload is not None:
            self._offload.replayed()

    def _padded(self, rows_4B: np.ndarray, size: int) -> Tensor:
        """The rows, padding, and where in `_ids` what they draw goes. Pinned: a copy from there waits for nobody, and
        torch keeps the memory until it is done."""
        host = torch.empty((5, size), dtype=torch.int64, pin_memory=True)
        array, used = host.numpy(), rows_4B.shape[1]
        array[:4, :used] = rows_4B
        array[:4, used:] = [[0], [self.max_num_seqs], [-1], [0]]
        # Steps of which logits are wanted draw nothing, and need no part.
        array[4] = (self._free_parts or [0])[-1] * self.max_num_seqs + np.arange(size)
        return host

    def _run(self, size: int, bound: int, *, wants_logits: bool) -> None:
        """One step over the rows that lie at the fixed place."""
        rows_4B, at_B = self._rows[size][:4], self._rows[size][4]
        inputs = decode_inputs(rows_4B, self.places, block_size=self.block_size, width=-(-bound // self.block_size))
        step = StepInput(
            token_ids_T=inputs.token_ids_B,
            positions_T=inputs.positions_B,
            slot_mapping_T=inputs.slot_mapping_B,
            num_decode=size,
            decode=DecodeBatch(inputs.block_tables_BM, inputs.kv_lens_B, bound),
            prefill=None,
            logits_rows_B=self._all_rows_B[:size],
            real_T=inputs.real_B,
        )
        logits_BV = self.network.forward(step, self.kv_caches)
        if wants_logits:
            assert self._logits_BV is not None, "logits without a place for them"
            self._logits_BV[:size].copy_(logits_BV)
            return
        drawn = Drawn(self._ids, at_B, self.places.newest_P, rows_4B[1])
        sample_argmax_into(drawn, logits_BV, inputs.temperature_B, inputs.seed_B, inputs.draw_position_B)

    def _capture(self, size: int, bound: int, *, wants_logits: bool) -> torch.cuda.CUDAGraph:
        """A step of padding alone."""
        started = time.perf_counter()
        if size not in self._rows:
            self._rows[size] = torch.empty((5, size), dtype=torch.int64, device=self.device)
        nothing = np.zeros((4, 0), np.int64)
        self._rows[size].copy_(self._padded(nothing, size))
        graph = self.record(lambda: self._run(size, bound, wants_logits=wants_logits))
        self._graphs[size, bound, wants_logits] = graph
        seconds = time.perf_counter() - started
        logger.debug("captured decode of %d rows up to %d positions in %.2f s", size, bound, seconds)
        return graph

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What `run` launches, after it ran once, so that everything is compiled. In the memory of all graphs here."""
        run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        # Not torch.cuda.graph: it empties the allocator's cache, which is seconds over a whole ladder.
        with torch.cuda.stream(self._stream):
            # Other threads may ask the device meanwhile, as NCCL's watchdog does about collectives launched before.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return graph
