"""Dispatchers on GPUs over NCCL, and over the package deep_ep: one rank's bits or near them, rows in bf16 and fp8, CUDA
graphs."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expert_parallel.all_gather import AllGatherDispatcher
from expert_parallel.all_to_all import AllToAllDispatcher
from expert_parallel.deep_ep import DeepEPDispatcher
from expert_parallel.deep_ep_buffer import SharedBuffer, deep_ep_problem
from expert_parallel.dispatcher import Dispatcher, LocalDispatcher
from expert_parallel.group import Ranks, RankValues, bring_up
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import rounds
from kernels.quantize import QuantizedBlocks, quantize_blocks
from kernels.routing import Routing
from moe.model.experts import Experts, Fp8Experts
from router.synthetic import skewed_routing
from tests.compare import assert_same_bits, max_rel
from tests.ranks import run_ranks

EXPERT_WIDTH, NUM_EXPERTS, TOP_K = 128, 9, 4  # 9 experts do not divide
WIDTH, LOW_LATENCY_WIDTH = 288, 2048  # no whole number of scales; the least that DeepEP's kernels for decode take


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Weights(NamedTuple):
    """All experts of the model, on this rank's GPU. Fp8: rows of them are held in fp8."""

    w13: Tensor
    w2: Tensor
    fp8: bool

    @property
    def width(self) -> int:
        return self.w2.shape[1]

    def held(self, experts: tuple[int | None, ...]) -> Experts | Fp8Experts:
        index = torch.tensor(experts, device=self.w13.device)
        w13, w2 = self.w13[index], self.w2[index]
        if not self.fp8:
            return Experts(w13, w2)
        of_w13, of_w2 = quantize_blocks(w13.unflatten(1, (2, -1))), quantize_blocks(w2[:, None])
        return Fp8Experts(*(QuantizedBlocks(values.flatten(1, 2), scales) for values, scales in (of_w13, of_w2)))


def make_weights(device: torch.device, width: int, *, fp8: bool) -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_EXPERTS, 2 * EXPERT_WIDTH, width), (NUM_EXPERTS, width, EXPERT_WIDTH))
    w13, w2 = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    return Weights(w13, w2, fp8)


class Batch(NamedTuple):
    """Rows of one rank and their routing."""

    x_TD: Tensor
    routing: Routing


def make_batch(num_tokens: int, seed: int, weights: Weights, *, rows: int | None = None) -> Batch:
    """`rows`: filled up to so many, with ids of -1."""
    device = weights.w13.device
    x_TD = (
        torch.randn(rows or num_tokens, weights.width, generator=torch.Generator().manual_seed(seed))
        .bfloat16()
        .to(device)
    )
    routing = skewed_routing(len(x_TD), NUM_EXPERTS, TOP_K, exponent=1.0, seed=seed, device=device)
    routing.expert_ids_TK[num_tokens:] = -1
    return Batch(x_TD, routing)


def one_rank_sum(weights: Weights, batch: Batch) -> Tensor:
    local = LocalDispatcher(torch.arange(NUM_EXPERTS, dtype=torch.int32, device=batch.x_TD.device), NUM_EXPERTS)
    inputs = local.dispatch(batch.x_TD, *batch.routing)
    return local.combine(weights.held(tuple(range(NUM_EXPERTS)))(inputs), inputs.handle)


def all_rounds(dispatcher: Dispatcher, experts: Experts | Fp8Experts, batch: Batch) -> Tensor:
    out_TD = torch.full_like(batch.x_TD, torch.nan)
    for rows, inputs in rounds(dispatcher, batch.x_TD, *batch.routing):
        out_TD[rows] = dispatcher.combine(experts(inputs), inputs.handle)
    return out_TD


class Setup(NamedTuple):
    """What a rank's dispatchers are made of."""

    ranks: Ranks
    weights: Weights
    experts: Experts | Fp8Experts
    replicas: ReplicaTable
    slots: tuple[int, ...]

    def make(self, kind: Any, **settings: Any) -> Any:
        settings = {"top_k": TOP_K, "fp8_rows": self.weights.fp8, "device": self.ranks.device} | settings
        return kind(self.ranks.everyone, self.replicas, self.slots, **settings)


def join(rank: int, num_ranks: int, port: int) -> Ranks:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    values = RankValues(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, agent_has_store=False)
    return bring_up(values, device, 60.0)


def set_up(ranks: Ranks, width: int, *, fp8: bool) -> Setup:
    group, weights = ranks.everyone, make_weights(ranks.device, width, fp8=fp8)
    placement = Placement.contiguous(NUM_EXPERTS, group.size, redundant=group.size)
    replicas = ReplicaTable(placement, group.size + 1, ranks.device)
    experts = weights.held(placement.experts_of(group.rank))
    return Setup(ranks, weights, experts, replicas, tuple(map(len, placement.ranks)))


def on_gpus(rank: int, num_ranks: int, port: int) -> None:
    ranks = join(rank, num_ranks, port)
    for fp8 in (False, True):
        setup = set_up(ranks, WIDTH, fp8=fp8)
        weights, experts = setup.weights, setup.experts
        uneven, even = make_batch(50 * rank, rank, weights), make_batch(33, rank, weights)
        for kind, batch in ((AllToAllDispatcher, uneven), (AllGatherDispatcher, even)):
            for cap in (None, 12 * num_ranks * TOP_K):
                exact = setup.make(kind, row_cap=cap)
                assert_same_bits(all_rounds(exact, experts, batch), one_rank_sum(weights, batch))
            fast = setup.make(kind, combine="fast")
            assert max_rel(all_rounds(fast, experts, batch), one_rank_sum(weights, batch)) < 0.02
        replay_a_graph(setup, setup.make(AllGatherDispatcher), exact=True)
    dist.barrier()
    ranks.close()


def over_deep_ep(rank: int, num_ranks: int, port: int, cap: int | None) -> None:
    """Uneven ranks, a rank without tokens, rounds, both kinds of kernels in turns over one buffer, graphs."""
    ranks = join(rank, num_ranks, port)
    shared: SharedBuffer | None = None
    for fp8 in (False, True):
        setup = set_up(ranks, LOW_LATENCY_WIDTH, fp8=fp8)
        weights, experts = setup.weights, setup.experts
        normal = setup.make(DeepEPDispatcher, combine="fast", row_cap=cap, shared=shared)
        shared, decode = normal.shared, normal.for_decode()
        for turn, num_tokens in enumerate((50 * rank, 33, 0, 200 - rank)):
            batch = make_batch(num_tokens, 10 * turn + rank, weights, rows=200)
            for dispatcher in (normal, decode, normal):
                out_TD = all_rounds(dispatcher, experts, batch)
                assert max_rel(out_TD, one_rank_sum(weights, batch)) < 0.02
                assert not out_TD[num_tokens:].any()
        replay_a_graph(setup, decode, exact=False)
    assert shared is not None
    shared.close()
    dist.barrier()
    ranks.close()


def replay_a_graph(setup: Setup, dispatcher: Dispatcher, *, exact: bool) -> None:
    """Captured with one routing, replayed with others: nothing of it was read by the host."""
    weights, rank = setup.weights, setup.ranks.everyone.rank
    static = make_batch(16, 100, weights)
    all_rounds(dispatcher, setup.experts, static)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD = all_rounds(dispatcher, setup.experts, static)
    for seed in range(101, 105):
        batch = make_batch(16, seed + 10 * rank, weights)
        static.x_TD.copy_(batch.x_TD)
        for target, source in zip(static.routing, batch.routing):
            target.copy_(source)
        graph.replay()
        if exact:
            assert_same_bits(out_TD, one_rank_sum(weights, batch))
        else:
            assert max_rel(out_TD, one_rank_sum(weights, batch)) < 0.02


@pytest.mark.gpu
def test_one_gpu() -> None:
    run_ranks(on_gpus, 1, free_port(), timeout_s=240.0, joined=False)


@pytest.mark.multi_gpu
def test_two_gpus() -> None:
    run_ranks(on_gpus, 2, free_port(), timeout_s=240.0, joined=False)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("cap", [None, 12 * 2 * TOP_K])
def test_two_gpus_over_deep_ep(cap: int | None) -> None:
    """The package itself, no stand-in."""
    problem = deep_ep_problem(torch.device("cuda", 0), num_ranks=2, width=LOW_LATENCY_WIDTH)
    if problem is not None:
        pytest.skip(problem)
    run_ranks(over_deep_ep, 2, free_port(), cap, timeout_s=240.0, joined=False)
