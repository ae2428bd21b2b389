"""Rows travel through DeepEP: its normal kernels for prompts, its low-latency kernels for decode, which CUDA graphs can
hold. Knows ranks, rows and slots; knows nothing of what an expert computes.

What DeepEP calls experts are our slots, equally many on each rank: slot s of rank r is its expert r * P + s, where P is
the most slots of any rank; those that a rank does not have get no row. All ranks bring equally many rows, agreed on
beforehand; who has fewer fills up with rows whose ids are -1, and those do not travel. So all have the same rounds.

    normal        there: a token's row once to each rank with any of its experts, in fp8 where they are held in fp8;
                  a rank waits on the host for how many come
                  back: a rank weighs and sums its rows of each token, DeepEP adds the ranks' sums
    low latency   there: a row to each of its experts, in bf16: DeepEP's own cast to fp8 has other bits than ours.
                  Every slot has room for all tokens of a round
                  back: DeepEP weighs and sums the rows of each token

DeepEP sums on the way: that is `parallel.combine=fast`, and exact is refused. One buffer serves all layers and both
kinds of steps. All ranks make it together, for the first dispatch: the largest steps run before memory is planned.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expert_parallel.deep_ep_buffer import SharedBuffer
from expert_parallel.group import ExpertGroup
from expert_parallel.group_dispatcher import GroupDispatcher
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import RoundInput
from kernels.checks import cdiv
from kernels.combine import combine
from kernels.pack import pack
from kernels.pack_fp8 import pack_rows
from kernels.quantize import Quantized, quantize_rows, quantized_bytes

LOW_LATENCY_TOKENS = 128
"""Of a rank in one round of them: what they are made for. Room is held for so many in every slot of every rank."""


class DeepEPHandle(NamedTuple):
    """What a round of the normal kernels needs to bring its sums home."""

    library_handle: Any
    packed_row_XK: Tensor  # the experts' row of each pair received
    weights_XK: Tensor


class DeepEPDispatcher(GroupDispatcher):
    """`GroupDispatcher` over DeepEP's normal kernels. `for_decode` is over the low-latency ones.

    row_cap: with N ranks, N * K for each row that a rank brings. Traffic counts rounds alone: rows are counted on the
    device.
    """

    equal_rows: bool = True

    def __init__(
        self,
        group: ExpertGroup,
        replicas: ReplicaTable,
        slots_per_rank: tuple[int, ...],
        *,
        shared: SharedBuffer | None = None,
        **common: Any,
    ) -> None:
        super().__init__(group, replicas, slots_per_rank, **common)
        if self.combine_mode == "exact":
            raise ValueError(
                "parallel.dispatcher=deep_ep sums rows on their way, so it cannot keep one rank's bits as "
                "parallel.combine=exact asks; give parallel.combine=fast, or another dispatcher."
            )
        self.shared = shared or SharedBuffer(group, max(1, *slots_per_rank))

    def _prepare(self) -> None:
        self._slots_S = torch.arange(max(self.num_slots, 1), dtype=torch.int32, device=self.device)

    def for_decode(self) -> DeepEPDecodeDispatcher:
        """The dispatcher of steps without prompts: with the same table, over the same buffer."""
        return DeepEPDecodeDispatcher(
            self.group,
            self.replicas,
            self.slots_per_rank,
            shared=self.shared,
            top_k=self.top_k,
            combine=self.combine_mode,
            row_cap=self.row_cap,
            fp8_rows=self.fp8_rows,
            device=self.device,
        )

    def close(self) -> None:
        """All ranks together, after the last combine. Where ranks just end, the memory goes with them."""
        self.shared.close()

    @property
    def held_bytes(self) -> int:
        """Of DeepEP's buffer, once it is made."""
        return self.shared.held_bytes

    def buffer_bytes(self, num_tokens: int, width: int, dtype: torch.dtype) -> int:
        """DeepEP's buffer, the most rows that come here, and their sums; each rank brings up to `num_tokens` rows."""
        taken = self._num_taken(num_tokens)
        records, pairs = self.group.size * taken, self.group.size * taken * min(self.top_k, max(self.num_slots, 1))
        rows = records * (self._row_bytes(width) + 2 * width) + self._fp8_bytes(taken + pairs, width)
        return self.shared.num_bytes(width) + rows

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> RoundInput:
        """Takes the leading rows that fit: the same number on every rank of the group."""
        buffer, num_taken = self._begin(x_TD, expert_ids_TK)
        x_XD = x_TD[:num_taken].contiguous()
        ids_TK = self._ids(expert_ids_TK[:num_taken])
        ranks_N, nodes_N, slots_P, is_in_rank_TN, _ = buffer.get_dispatch_layout(ids_TK, self.shared.num_experts)
        rows = quantize_rows(x_XD) if self.fp8_rows else None
        received, slots_XK, weights_XK, counts, handle, _ = buffer.dispatch(
            x_XD if rows is None else (rows.values, rows.scales.T),
            num_tokens_per_rank=ranks_N,
            num_tokens_per_rdma_rank=nodes_N,
            is_token_in_rank=is_in_rank_TN,
            num_tokens_per_expert=slots_P,
            topk_idx=ids_TK,
            topk_weights=weights_TK[:num_taken].contiguous(),
        )
        packed = pack(slots_XK.int(), self._slots_S, len(self._slots_S))
        index_R, offsets_S1 = packed.row_token_R[: sum(counts)], packed.offsets_S1[: self.num_slots + 1]
        scales_GX = None
        if self.fp8_rows:
            values_XD, scales_XG = received
            (received, scales_GX), index_R = pack_rows(Quantized(values_XD, scales_XG.T), index_R, offsets_S1), None
        return RoundInput(
            rows_XD=received,
            scales_GX=scales_GX,
            row_index_R=index_R,
            offsets_S1=offsets_S1,
            num_rows=sum(counts),
            handle=DeepEPHandle(handle, packed.packed_row_TK, weights_XK),
            out_dtype=x_TD.dtype,
            num_taken=num_taken,
            more=num_taken < x_TD.shape[0],
        )

    def _bring_home(self, y_RD: Tensor, handle: DeepEPHandle) -> Tensor:
        part_XD = combine(y_RD, handle.packed_row_XK, handle.weights_XK)
        out_TD, _, _ = self.shared.of(y_RD.shape[1]).combine(part_XD, handle.library_handle)
        self.shared.clean_after_normal()
        return out_TD

    def _begin(self, x_TD: Tensor, expert_ids_TK: Tensor) -> tuple[Any, int]:
        """The buffer, and how many rows this round takes."""
        self._check_top_k(expert_ids_TK)
        self.shared.check_rows(x_TD.shape[1], x_TD.dtype, fp8_rows=self.fp8_rows)
        self.traffic.rounds += 1
        return self.shared.of(x_TD.shape[1]), self._num_taken(x_TD.shape[0])

    def _ids(self, expert_ids_TK: Tensor) -> Tensor:
        """DeepEP's number of the slot that each (token, k) goes to; -1: none."""
        ranks_TK, slots_TK, _ = self.replicas.choose(expert_ids_TK, self.group.rank)
        ids_TK = torch.where(ranks_TK >= 0, ranks_TK * self.shared.slots + slots_TK, -1)
        return ids_TK.to(self.shared.package.topk_idx_t).contiguous()

    def _num_taken(self, num_tokens: int) -> int:
        if self.row_cap is None:
            return num_tokens
        return min(num_tokens, self.row_cap // (self.group.size * self.top_k))

    def _row_bytes(self, width: int) -> int:
        return quantized_bytes(1, width) if self.fp8_rows else 2 * width


class DecodeHandle(NamedTuple):
    """What a round of the low-latency kernels needs to bring its rows home."""

    library_handle: Any
    ids_TK: Tensor
    weights_TK: Tensor
    place_R: (
        Tensor  # where the experts' row r belongs among all places of all slots; behind them where it means nothing
    )


class DeepEPDecodeDispatcher(DeepEPDispatcher):
    """`DeepEPDispatcher` over the low-latency kernels, made by its `for_decode` before anyone dispatches."""

    graph_safe: bool = True

    def __init__(self, group: ExpertGroup, *args: Any, shared: SharedBuffer, **common: Any) -> None:
        super().__init__(group, *args, shared=shared, **common)
        # DeepEP wants ranks x room to be a multiple of 4.
        step = 4 // gcd(4, group.size)
        shared.use_low_latency(cdiv(self._num_taken(LOW_LATENCY_TOKENS), step) * step)

    @property
    def held_bytes(self) -> int:
        return 0  # of its own: the buffer counts with the dispatcher of prompts

    def buffer_bytes(self, num_tokens: int, width: int, dtype: torch.dtype) -> int:
        """DeepEP's buffer, and the places of all slots here, as they come and as they go."""
        places = self.shared.slots * self.group.size * self.shared.low_latency_tokens
        return self.shared.num_bytes(width) + 2 * places * 2 * width

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> RoundInput:
        """Takes the leading rows that fit: the same number on every rank of the group. No host sync."""
        self.shared.check_low_latency(x_TD.shape[1], self.top_k)
        buffer, num_taken = self._begin(x_TD, expert_ids_TK)
        ids_TK, room = self._ids(expert_ids_TK[:num_taken]), self.shared.low_latency_tokens
        received, count_P, handle, _, _ = buffer.low_latency_dispatch(
            x_TD[:num_taken].contiguous(), ids_TK, room, self.shared.num_experts, use_fp8=False
        )
        # Slot s has its rows at the front of its own ranks x room places.
        num_rows = self.group.size * num_taken * min(self.top_k, max(self.num_slots, 1))
        offsets_P1 = F.pad(count_P.cumsum(0, dtype=torch.int32), (1, 0))
        row_R = torch.arange(num_rows, dtype=torch.int32, device=x_TD.device)
        slot_R = torch.searchsorted(offsets_P1[1:], row_R, right=True).clamp_max(self.shared.slots - 1)
        place_R = slot_R * (self.group.size * room) + row_R - offsets_P1[slot_R]
        valid_R = row_R < offsets_P1[-1]
        return RoundInput(
            rows_XD=received.flatten(0, 1),
            row_index_R=torch.where(valid_R, place_R, 0).int(),
            offsets_S1=offsets_P1[: self.num_slots + 1],
            num_rows=num_rows,
            handle=DecodeHandle(
                handle,
                ids_TK,
                weights_TK[:num_taken].contiguous(),
                torch.where(valid_R, place_R, received.shape[0] * received.shape[1]),
            ),
            num_taken=num_taken,
            more=num_taken < x_TD.shape[0],
        )

    def _bring_home(self, y_RD: Tensor, handle: DecodeHandle) -> Tensor:
        num_places = self.shared.slots * self.group.size * self.shared.low_latency_tokens
        y_XD = y_RD.new_empty(num_places + 1, y_RD.shape[1])
        y_XD.index_copy_(0, handle.place_R, y_RD)
        buffer = self.shared.of(y_RD.shape[1])
        y_PXD = y_XD[:num_places].unflatten(0, (self.shared.slots, -1))
        out_TD, _, _ = buffer.low_latency_combine(y_PXD, handle.ids_TK, handle.weights_TK, handle.library_handle)
        return out_TD

    def _num_taken(self, num_tokens: int) -> int:
        return super()._num_taken(min(num_tokens, LOW_LATENCY_TOKENS))
