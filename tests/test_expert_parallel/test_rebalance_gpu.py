"""Experts that move on GPUs, over NCCL: a captured graph goes on giving one rank's bits."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from expert_parallel.all_gather import AllGatherDispatcher
from expert_parallel.layout import ExpertLayout
from expert_parallel.placement import Placement
from expert_parallel.rebalance import Bundles, ExpertMover
from expert_parallel.replicas import ReplicaTable, most_replicas
from moe.model.experts import Experts
from tests.compare import assert_same_bits
from tests.ranks import run_ranks
from tests.test_expert_parallel.test_collectives_gpu import (
    NUM_EXPERTS,
    WIDTH,
    all_rounds,
    free_port,
    join,
    make_batch,
    one_rank_sum,
    set_up,
)


def on_gpus(rank: int, num_ranks: int, port: int) -> None:
    ranks = join(rank, num_ranks, port)
    for fp8 in (False, True):
        setup = set_up(ranks, WIDTH, fp8=fp8)
        experts = setup.experts
        tensors = (
            [experts.w13_S2FD, experts.w2_SDF] if isinstance(experts, Experts) else [*experts.w13[:2], *experts.w2[:2]]
        )
        bundles, device = Bundles(tensors), ranks.device
        placement = Placement.contiguous(NUM_EXPERTS, num_ranks, redundant=num_ranks)
        table = ReplicaTable(placement, most_replicas(placement), device)
        dispatcher = setup._replace(replicas=table).make(AllGatherDispatcher)
        layout = ExpertLayout(rank, {0: placement}, {}, {0: table})
        mover = ExpertMover(ranks.everyone, bundles.num_bytes, 2, device)
        assert mover.seconds_per_byte() > 0
        batch = make_batch(16, 100 + rank, setup.weights)
        expected = one_rank_sum(setup.weights, batch)
        all_rounds(dispatcher, experts, batch)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TD = all_rounds(dispatcher, experts, batch)
        draw, flat = random.Random(0), [expert for slots in placement.ranks for expert in slots]
        for _ in range(20):
            draw.shuffle(flat)
            rest = iter(flat)
            wanted = Placement.of_ranks(NUM_EXPERTS, [[next(rest) for _ in slots] for slots in placement.ranks])
            mover.move(bundles, layout.placements[0], wanted)
            layout.set(0, wanted)
            out_TD.fill_(torch.nan)
            graph.replay()
            assert_same_bits(out_TD, expected)
        del graph  # NCCL ends no group of which a graph still holds a collective
    dist.barrier()
    ranks.close()


@pytest.mark.gpu
def test_C25_one_gpu() -> None:
    run_ranks(on_gpus, 1, free_port(), timeout_s=240.0, joined=False)


@pytest.mark.multi_gpu
def test_C25_two_gpus() -> None:
    run_ranks(on_gpus, 2, free_port(), timeout_s=240.0, joined=False)
