"""Both collective dispatchers on GPUs over NCCL: one rank's bits, and the fixed-shape one inside a CUDA graph."""

from __future__ import annotations

import socket
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expert_parallel.all_gather import AllGatherDispatcher
from expert_parallel.all_to_all import AllToAllDispatcher
from expert_parallel.dispatcher import Dispatcher, LocalDispatcher
from expert_parallel.group import Ranks, RankValues, bring_up
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import rounds
from kernels.routing import Routing
from moe.model.experts import Experts
from router.synthetic import skewed_routing
from tests.compare import assert_same_bits, max_rel
from tests.ranks import run_ranks

WIDTH, EXPERT_WIDTH, NUM_EXPERTS, TOP_K = 256, 128, 9, 4  # 9 experts do not divide


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Weights(NamedTuple):
    """All experts of the model, on this rank's GPU."""

    w13: Tensor
    w2: Tensor

    def held(self, experts: tuple[int | None, ...]) -> Experts:
        index = torch.tensor(experts, device=self.w13.device)
        return Experts(self.w13[index], self.w2[index])


def make_weights(device: torch.device) -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_EXPERTS, 2 * EXPERT_WIDTH, WIDTH), (NUM_EXPERTS, WIDTH, EXPERT_WIDTH))
    return Weights(*(torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes))


class Batch(NamedTuple):
    """Rows of one rank and their routing."""

    x_TD: Tensor
    routing: Routing


def make_batch(num_tokens: int, seed: int, device: torch.device) -> Batch:
    x_TD = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)
    return Batch(x_TD, skewed_routing(num_tokens, NUM_EXPERTS, TOP_K, exponent=1.0, seed=seed, device=device))


def one_rank_sum(weights: Weights, batch: Batch) -> Tensor:
    local = LocalDispatcher(torch.arange(NUM_EXPERTS, dtype=torch.int32, device=batch.x_TD.device), NUM_EXPERTS)
    inputs = local.dispatch(batch.x_TD, *batch.routing)
    return local.combine(weights.held(tuple(range(NUM_EXPERTS)))(inputs), inputs.handle)


def all_rounds(dispatcher: Dispatcher, experts: Experts, batch: Batch) -> Tensor:
    out_TD = torch.full_like(batch.x_TD, torch.nan)
    for rows, inputs in rounds(dispatcher, batch.x_TD, *batch.routing):
        out_TD[rows] = dispatcher.combine(experts(inputs), inputs.handle)
    return out_TD


def on_gpus(rank: int, num_ranks: int, port: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    values = RankValues(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, agent_has_store=False)
    ranks = bring_up(values, device, 60.0)
    weights = make_weights(device)
    placement = Placement.contiguous(NUM_EXPERTS, num_ranks, redundant=num_ranks)
    experts = weights.held(placement.experts_of(rank))
    slots, replicas = tuple(map(len, placement.ranks)), ReplicaTable(placement, num_ranks + 1, device)

    uneven, even = make_batch(50 * rank, rank, device), make_batch(33, rank, device)
    for kind, batch in ((AllToAllDispatcher, uneven), (AllGatherDispatcher, even)):
        for cap in (None, 12 * num_ranks * TOP_K):
            exact = kind(ranks.everyone, replicas, slots, top_k=TOP_K, row_cap=cap, device=device)
            assert_same_bits(all_rounds(exact, experts, batch), one_rank_sum(weights, batch))
        fast = kind(ranks.everyone, replicas, slots, top_k=TOP_K, combine="fast", device=device)
        assert max_rel(all_rounds(fast, experts, batch), one_rank_sum(weights, batch)) < 0.02
    replay_a_graph(ranks, replicas, slots, weights, experts)
    dist.barrier()
    ranks.close()


def replay_a_graph(
    ranks: Ranks, replicas: ReplicaTable, slots: tuple[int, ...], weights: Weights, experts: Experts
) -> None:
    """Captured with one routing, replayed with others: nothing of it was read by the host."""
    dispatcher = AllGatherDispatcher(ranks.everyone, replicas, slots, top_k=TOP_K, device=ranks.device)
    static = make_batch(16, 100, ranks.device)
    all_rounds(dispatcher, experts, static)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD = all_rounds(dispatcher, experts, static)
    for seed in range(101, 105):
        batch = make_batch(16, seed + 10 * ranks.everyone.rank, ranks.device)
        static.x_TD.copy_(batch.x_TD)
        for target, source in zip(static.routing, batch.routing):
            target.copy_(source)
        graph.replay()
        assert_same_bits(out_TD, one_rank_sum(weights, batch))


@pytest.mark.gpu
def test_one_gpu() -> None:
    run_ranks(on_gpus, 1, free_port(), timeout_s=240.0, joined=False)


@pytest.mark.multi_gpu
def test_two_gpus() -> None:
    run_ranks(on_gpus, 2, free_port(), timeout_s=240.0, joined=False)
