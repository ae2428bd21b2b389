"""Kernels write rows straight into the buffers of the ranks that hold their experts, and results back: no collective.

Knows ranks, rounds and buffers; knows nothing of what an expert computes. Fixed shapes, no host sync, fit for CUDA
graphs; for ranks whose GPUs reach each other's memory (expert_parallel/peer_memory.py).

    dispatch   replicas are chosen, each row goes once to each rank with any of its experts    1 launch
               all ranks' rows are here; their (record, k) pairs are packed into slots         1 launch, then pack's
    combine    exact: the row of every pair goes home     fast: a record's sum goes home
               while they come in, they are weighted and summed, with the norm                 1 launch, for both

What replaces a collective's size exchange: a place for every token of every rank (kernels/peer_layout.py). What
replaces its barriers: both ways signal in turns (kernels/peer_flags.py says why that is safe). All ranks bring equally
many rows, agreed on beforehand; who has fewer fills up with rows whose ids are -1, and those do not travel.

The row cap allows capacity = row_cap / (ranks x K) tokens of each rank in a round, of which all K pairs may meet on one
rank; more tokens take more rounds, the same number everywhere. Buffers are made for the first dispatch: the largest
step is run before memory is planned. A second set is made when a dispatch first comes before the combine of another
(half-steps that overlap, each on its own stream; each stays with its set in all its rounds, since only the order of one
stream says that what a set held was read). A wait ends after `timeout_s`, and `check` then says for whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expert_parallel.group import ExpertGroup
from expert_parallel.group_dispatcher import GroupDispatcher
from expert_parallel.peer_memory import symmetric_memory
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import RoundInput
from kernels.pack import pack
from kernels.pack_fp8 import pack_rows
from kernels.peer_combine import NormAfter, Results, Tokens, combine_home
from kernels.peer_dispatch import send_rows
from kernels.peer_flags import RoundState, new_state, wait_for_peers
from kernels.peer_layout import PeerLayout, Peers
from kernels.quantize import FP8, Quantized, quantize_rows
from kernels.rmsnorm import Norm

MakePeers = Callable[[ExpertGroup, PeerLayout, torch.device], Peers]

_MOST_SETS = 2
"""Rounds under way at a time: two half-steps."""


@dataclass
class _Buffers:
    """One set of buffers, and how far its rounds are."""

    layout: PeerLayout
    peers: Peers
    state: RoundState
    in_use: bool = False
    stream: Any = None  # of the last round

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes


class OneSidedHandle(NamedTuple):
    """What a round needs to bring its rows home."""

    buffers: _Buffers
    packed_row_XK: Tensor  # the experts' row of each pair that arrived
    tokens: Tokens  # this rank's own


class OneSidedDispatcher(GroupDispatcher):
    """`GroupDispatcher` over memory that all ranks can write to. Each handle is combined before a third dispatch.

    `timeout_s` bounds each wait for the others; `make_peers` makes the buffers, by a call that all ranks make together.
    """

    graph_safe: bool = True
    equal_rows: bool = True
    two_open: bool = True

    def __init__(
        self,
        group: ExpertGroup,
        replicas: ReplicaTable,
        slots_per_rank: tuple[int, ...],
        *,
        timeout_s: float = 600.0,
        make_peers: MakePeers = symmetric_memory,
        **common: Any,
    ) -> None:
        super().__init__(group, replicas, slots_per_rank, **common)
        self.timeout_s = timeout_s
        self.make_peers = make_peers

    def _prepare(self) -> None:
        self._sets: list[_Buffers] = []  # also those of the copies with which other layers dispatch
        self._slots_S = torch.arange(max(self.num_slots, 1), dtype=torch.int32, device=self.device)

    @property
    def held_bytes(self) -> int:
        """Of the buffers that exist."""
        return sum(buffers.num_bytes for buffers in self._sets)

    def buffer_bytes(self, num_tokens: int, width: int, dtype: torch.dtype) -> int:
        """Of one set, the one that exists or one for `num_tokens`, with what a round takes beside it."""
        made = self._sets[0].layout if self._sets else None
        layout = made or self._peer_layout(self._capacity(num_tokens), width, dtype)
        return layout.num_bytes + self._fp8_bytes(layout.capacity * (1 + self.group.size * self._pairs_here), width)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> RoundInput:
        """Takes the leading rows that fit: the same number on every rank of the group."""
        self._check_top_k(expert_ids_TK)
        self.check()
        buffers = self._free_buffers(x_TD)
        layout, own = buffers.layout, buffers.peers.own
        num_taken = min(x_TD.shape[0], layout.capacity)
        x_BD, weights_BK = x_TD[:num_taken], weights_TK[:num_taken].contiguous()
        home_row_BK = send_rows(
            buffers.peers,
            layout,
            buffers.state,
            quantize_rows(x_BD) if self.fp8_rows else x_BD,
            expert_ids_TK[:num_taken],
            weights_BK,
            self.replicas.columns,
        )
        self.traffic.rounds += 1
        wait_for_peers(buffers.peers, layout, buffers.state, num_taken, self.timeout_s)

        packed = pack(layout.slots_XK(own, num_taken), self._slots_S, len(self._slots_S))
        # The experts of a token are distinct, so no more of its pairs can be here.
        num_rows = self.group.size * num_taken * self._pairs_here
        index_R, offsets_S1 = packed.row_token_R[:num_rows], packed.offsets_S1[: self.num_slots + 1]
        rows_XD, scales_GX = layout.rows_XD(own, num_taken), None
        if self.fp8_rows:
            arrived = Quantized(rows_XD, layout.scales_XG(own, num_taken).T)
            (rows_XD, scales_GX), index_R = pack_rows(arrived, index_R, offsets_S1), None
        return RoundInput(
            rows_XD=rows_XD,
            scales_GX=scales_GX,
            row_index_R=index_R,
            offsets_S1=offsets_S1,
            num_rows=num_rows,
            handle=OneSidedHandle(buffers, packed.packed_row_TK, Tokens(home_row_BK, weights_BK)),
            out_dtype=x_TD.dtype,
            num_taken=num_taken,
            more=num_taken < x_TD.shape[0],
        )

    def combine_norm(
        self, y_RD: Tensor, handle: OneSidedHandle, residual_TD: Tensor, norm: Norm, shared_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y_TD, new_residual_TD = self._finish(y_RD, handle, NormAfter(residual_TD, *norm, shared_TD))
        assert new_residual_TD is not None, "a norm after the sum gives a residual"
        return y_TD, new_residual_TD

    def _bring_home(self, y_RD: Tensor, handle: OneSidedHandle) -> Tensor:
        return self._finish(y_RD, handle, None)[0]

    def _finish(self, y_RD: Tensor, handle: OneSidedHandle, after: NormAfter | None) -> tuple[Tensor, Tensor | None]:
        """The complete sums, and what follows them."""
        buffers, tokens = handle.buffers, handle.tokens
        assert buffers.in_use, "a handle is combined once"
        layout, own = buffers.layout, buffers.peers.own
        weights_XK = layout.weights_XK(own, tokens.home_row_BK.shape[0]) if layout.sums else None
        results = Results(y_RD, handle.packed_row_XK, weights_XK)
        beside = len(self._sets) > 1  # two rounds are, or may be, on their way
        place = (buffers.peers, layout, buffers.state)
        done = combine_home(*place, results, tokens, self.timeout_s, after, beside=beside)
        buffers.in_use = False
        return done

    def check(self) -> None:
        """RuntimeError where a wait for another rank was given up, or a rank brought other rows. Waits for nobody: what
        the device has done so far is seen."""
        for buffers in self._sets:
            faults_3N = buffers.state.faults_3N
            if not faults_3N.any():
                continue
            (no_rows, other, no_results), own = faults_3N.tolist(), self.group.rank
            brought = {rank: count - 1 for rank, count in enumerate(other) if count}
            # What follows a fault on this rank is another: the first stage's come first.
            for what, late in (("rows", no_rows), ("results", [] if brought else no_results)):
                for rank, epoch in enumerate(late):
                    if epoch:
                        raise RuntimeError(
                            f"one_sided: rank {own} waited {self.timeout_s:g} s (parallel.timeout_s) for the {what} "
                            f"of rank {rank} in round {epoch}; it has ended, or hangs."
                        )
            raise RuntimeError(
                f"one_sided: ranks {brought} (rank: rows) bring other numbers of rows than rank {own}; all must "
                "bring the same number, with padding."
            )

    @property
    def _pairs_here(self) -> int:
        return min(self.top_k, self.num_slots)

    def _capacity(self, num_tokens: int) -> int:
        """Tokens of each rank in a round, where the first round brings so many."""
        if self.row_cap is not None:
            num_tokens = min(num_tokens, self.row_cap // (self.group.size * self.top_k))
        return max(num_tokens, 1)

    def _peer_layout(self, capacity: int, width: int, dtype: torch.dtype) -> PeerLayout:
        row_dtype, sums = (FP8 if self.fp8_rows else dtype), self.combine_mode == "fast"
        return PeerLayout(self.group.size, capacity, width, self.top_k, row_dtype, dtype, sums)

    def _free_buffers(self, x_TD: Tensor) -> _Buffers:
        """A set that no handle holds, made if need be: that of this stream's last round, else the first. Ranks make the
        same calls, on streams of the same parts, so all take the same one."""
        stream = _current_stream(self.device)
        unheld = [buffers for buffers in self._sets if not buffers.in_use]
        free = next((buffers for buffers in unheld if buffers.stream == stream), unheld[0] if unheld else None)
        if free is None:
            assert len(self._sets) < _MOST_SETS, f"{_MOST_SETS} rounds are under way; combine one of them first"
            first = self._sets[0].layout if self._sets else None
            layout = first or self._peer_layout(self._capacity(x_TD.shape[0]), x_TD.shape[1], x_TD.dtype)
            self._check_same_layout(layout)
            peers = self.make_peers(self.group, layout, self.device)
            free = _Buffers(layout, peers, new_state(layout.num_ranks, self.device))
            self._sets.append(free)
        free.in_use, free.stream = True, stream
        return free

    def _check_same_layout(self, layout: PeerLayout) -> None:
        """A place is a number of bytes in every rank's buffer, so all must count alike before anyone writes."""
        layouts: list[PeerLayout] = self.group.gather_objects(layout)
        if len(set(layouts)) > 1:
            each = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(layouts))
            raise RuntimeError(f"one_sided: ranks would make different buffers: {each}")


def _current_stream(device: torch.device) -> Any:
    """On which kernels are launched; the CPU has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
