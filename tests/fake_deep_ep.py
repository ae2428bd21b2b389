"""A stand-in for the package `deep_ep` on the CPU: the documented meaning of its `Buffer`, over gloo, in plain loops.

It tests our arithmetic of slots, rows and handles, and nothing of DeepEP itself. What the package leaves open differs
here from call to call: the order of a slot's rows in low-latency mode. What it does not write is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64


@dataclass(frozen=True)
class Config:
    """Bytes for each byte of a row, on each of the ranks."""

    nvlink: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.nvlink * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else hidden_bytes * num_ranks


class Sent(NamedTuple):
    """What one rank sends to all others in a dispatch."""

    rows: list[Tensor]  # bytes, and scales
    ids: list[list[int]]
    weights: Tensor | None


class Handle(NamedTuple):
    """(source rank, token) of every row received, and how many rows this rank sent."""

    sources: list[Any]
    num_tokens: int


class Buffer:
    """As `deep_ep.Buffer`; ranks call its methods together."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int,
        num_rdma_bytes: int,
        *,
        low_latency_mode: bool,
        num_qps_per_rank: int,
        explicitly_destroy: bool,
    ) -> None:
        self.group = group
        self.bytes = (num_nvl_bytes, num_rdma_bytes)
        self.low_latency_mode = low_latency_mode
        self.num_qps_per_rank = num_qps_per_rank
        self.explicitly_destroy = explicitly_destroy
        self.calls = 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(3)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(5)

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        return 4 * tokens * hidden * num_experts

    def destroy(self) -> None:
        assert self.explicitly_destroy

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        self._check_ids(topk_idx, num_experts)
        in_expert_TE = torch.stack([(topk_idx == expert).any(1) for expert in range(num_experts)], 1)
        in_rank_TN = in_expert_TE.unflatten(1, (self.group.size(), -1)).any(2)
        return in_rank_TN.sum(0).int(), None, in_expert_TE.sum(0).int(), in_rank_TN, None

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
    ) -> tuple[Any, Tensor, Tensor, list[int], Handle, None]:
        """Rows by source rank, then token, each once; ids of this rank's experts, -1 for others."""
        values, scales = x if isinstance(x, tuple) else (x, None)
        assert values.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn) and values.is_contiguous()
        assert scales is None or (scales.dtype == torch.float32 and scales.shape[0] == values.shape[0])
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert topk_weights.shape == topk_idx.shape and topk_idx.shape[0] == values.shape[0]
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0).int()) and num_tokens_per_rdma_rank is None
        num_here, rank = len(num_tokens_per_expert) // self.group.size(), self.group.rank()
        parts = [values.view(torch.uint8)] + ([] if scales is None else [scales.contiguous()])
        everyone = self._gather(Sent(parts, topk_idx.tolist(), topk_weights))
        sources, ids, weights = [], [], []
        for source, sent in enumerate(everyone):
            for token, of_token in enumerate(sent.ids):
                local = [e - rank * num_here if e // num_here == rank and e >= 0 else -1 for e in of_token]
                if max(local) >= 0:
                    sources.append((source, token))
                    ids.append(local)
                    weights.append(sent.weights[token].where(torch.tensor(local) >= 0, 0.0))
        received = [
            torch.stack([everyone[source].rows[part][token] for source, token in sources])
            if sources
            else parts[part][:0]
            for part in range(len(parts))
        ]
        counts = [sum(of_token.count(expert) for of_token in ids) for expert in range(num_here)]
        top_k = topk_idx.shape[1]
        out = received[0].view(values.dtype)
        return (
            out if scales is None else (out, received[1]),
            torch.tensor(ids, dtype=topk_idx_t).reshape(-1, top_k),
            torch.stack(weights) if weights else topk_weights[:0],
            counts,
            Handle(sources, values.shape[0]),
            None,
        )

    def combine(self, x: Tensor, handle: Handle) -> tuple[Tensor, None, None]:
        """Unweighted sums over ranks, in fp32, one cast; a token that went nowhere is zero."""
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[0] == len(handle.sources)
        out = torch.zeros(handle.num_tokens, x.shape[1])
        for rows, sources in self._gather((x, handle.sources)):
            for row, (source, token) in zip(rows, sources, strict=True):
                if source == self.group.rank():
                    out[token] += row.float()
        return out.to(x.dtype), None, None

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int, *, use_fp8: bool
    ) -> tuple[Tensor, Tensor, Handle, None, None]:
        """For each local expert its rows, packed to the front, in an order of their own."""
        self._check_ids(topk_idx, num_experts)
        size, rank = self.group.size(), self.group.rank()
        assert self.low_latency_mode and not use_fp8 and x.dtype == torch.bfloat16 and x.is_contiguous()
        assert x.shape[0] <= num_max_dispatch_tokens_per_rank and size * num_max_dispatch_tokens_per_rank % 4 == 0
        num_here, room = num_experts // size, size * num_max_dispatch_tokens_per_rank
        assert self.num_qps_per_rank == num_here
        everyone = self._gather(Sent([x], topk_idx.tolist(), None))
        received = x.new_full((num_here, room, x.shape[1]), torch.nan)
        sources: list[list[tuple[int, int, int]]] = []
        self.calls += 1
        order = torch.Generator().manual_seed(self.calls)
        for expert in range(num_here):
            found = [
                (source, token, of_token.index(rank * num_here + expert))
                for source, sent in enumerate(everyone)
                for token, of_token in enumerate(sent.ids)
                if rank * num_here + expert in of_token
            ]
            found = [found[i] for i in torch.randperm(len(found), generator=order).tolist()]
            for place, (source, token, _) in enumerate(found):
                received[expert, place] = everyone[source].rows[0][token]
            sources.append(found)
        counts = torch.tensor([len(found) for found in sources], dtype=torch.int32)
        return received, counts, Handle(sources, x.shape[0]), None, None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Handle
    ) -> tuple[Tensor, None, None]:
        """Weighted sums over k, in fp32, one cast."""
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[0] == len(handle.sources)
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape
        terms: dict[tuple[int, int], Tensor] = {}
        for rows, of_experts in self._gather((x, handle.sources)):
            for of_expert, found in zip(rows, of_experts, strict=True):
                for row, (source, token, k) in zip(of_expert, found):
                    if source == self.group.rank():
                        terms[token, k] = row.float()
        out = torch.zeros(handle.num_tokens, x.shape[2])
        for token, k in sorted(terms):
            out[token] += topk_weights[token, k] * terms[token, k]
        return out.to(x.dtype), None, None

    def _check_ids(self, topk_idx: Tensor, num_experts: int) -> None:
        assert topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous() and topk_idx.dim() == 2
        assert num_experts % self.group.size() == 0 and bool(((topk_idx >= -1) & (topk_idx < num_experts)).all())

    def _gather(self, own: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyone, own, group=self.group)
        return everyone
