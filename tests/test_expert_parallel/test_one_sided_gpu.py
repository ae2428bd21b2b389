"""`OneSidedDispatcher` on GPUs: two processes that share one card, and two cards; bits, graphs, reuse, faults.

On one card the processes take turns, so this is slow and says nothing of speed; symmetric memory has to be told that
devices overlap, and NCCL refuses them: the group is gloo's.
"""

# torch.distributed lists its stores nowhere.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expert_parallel.choice import Choice, planned_bytes
from expert_parallel.dispatcher import Dispatcher, LocalDispatcher
from expert_parallel.group import ExpertGroup
from expert_parallel.one_sided import OneSidedDispatcher
from expert_parallel.peer_memory import peer_problem
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable, most_replicas
from expert_parallel.rounds import Combine, rounds
from kernels.peer_flags import TOKEN_BITS
from kernels.quantize import QuantizedBlocks, quantize_blocks, supports_fp8
from kernels.rmsnorm import Norm
from kernels.routing import Routing
from moe.model.experts import Experts, Fp8Experts
from router.synthetic import skewed_routing
from tests.compare import assert_same_bits, max_rel
from tests.ranks import run_ranks, world

WIDTH, EXPERT_WIDTH, NUM_EXPERTS, TOP_K = 256, 128, 9, 4  # 9 experts do not divide
TOKENS = 33
PLACEMENT = Placement.contiguous(NUM_EXPERTS, 2, redundant=2)
AnyExperts = Experts | Fp8Experts


class Weights(NamedTuple):
    """All experts of the model, on this rank's GPU."""

    w13: Tensor
    w2: Tensor

    def held(self, experts: tuple[int | None, ...], *, fp8: bool) -> AnyExperts:
        index = torch.tensor(experts, device=self.w13.device)
        w13, w2 = self.w13[index], self.w2[index]
        if not fp8:
            return Experts(w13, w2)
        first, second = quantize_blocks(w13.unflatten(1, (2, -1))), quantize_blocks(w2[:, None])
        return Fp8Experts(
            QuantizedBlocks(first.values.flatten(1, 2), first.scales),
            QuantizedBlocks(second.values.flatten(1, 2), second.scales),
        )


def make_weights(device: torch.device) -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_EXPERTS, 2 * EXPERT_WIDTH, WIDTH), (NUM_EXPERTS, WIDTH, EXPERT_WIDTH))
    return Weights(*((torch.randn(shape, generator=generator) * 0.1).bfloat16().to(device) for shape in shapes))


class Batch(NamedTuple):
    """Rows of one rank and their routing. In odd seeds three quarters of rank 0's are NaN and go nowhere."""

    x_TD: Tensor
    routing: Routing


def make_batch(num_tokens: int, seed: int, rank: int, device: torch.device) -> Batch:
    x_TD = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank)).bfloat16()
    ids_TK, weights_TK = skewed_routing(num_tokens, NUM_EXPERTS, TOP_K, exponent=1.0, seed=10 * seed + rank)
    if rank == 0 and seed % 2:
        x_TD[num_tokens // 4 :], ids_TK[num_tokens // 4 :] = torch.nan, -1
    return Batch(x_TD.to(device), Routing(ids_TK.to(device), weights_TK.to(device)))


def one_rank_sum(weights: Weights, batch: Batch, *, fp8: bool = False) -> Tensor:
    local = LocalDispatcher(torch.arange(NUM_EXPERTS, dtype=torch.int32, device=batch.x_TD.device), NUM_EXPERTS)
    inputs = local.dispatch(batch.x_TD, *batch.routing)
    return local.combine(weights.held(tuple(range(NUM_EXPERTS)), fp8=fp8)(inputs), inputs.handle)


def make_dispatcher(
    group: ExpertGroup, device: torch.device, combine: Combine = "exact", row_cap: int | None = None, fp8: bool = False
) -> OneSidedDispatcher:
    return OneSidedDispatcher(
        group,
        ReplicaTable(PLACEMENT, most_replicas(PLACEMENT), device),
        tuple(map(len, PLACEMENT.ranks)),
        top_k=TOP_K,
        combine=combine,
        row_cap=row_cap,
        fp8_rows=fp8,
        timeout_s=60.0,
        device=device,
    )


def all_rounds(dispatcher: OneSidedDispatcher, experts: AnyExperts, batch: Batch) -> Tensor:
    out_TD = torch.full_like(batch.x_TD, torch.nan)
    for rows, inputs in rounds(dispatcher, batch.x_TD, *batch.routing):
        out_TD[rows] = dispatcher.combine(experts(inputs), inputs.handle)
    return out_TD


def on_gpus(rank: int, num_ranks: int, shared: bool) -> None:
    """Everything in one start of the processes. `shared`: both on one card."""
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    group, weights = world(rank, num_ranks), make_weights(device)
    assert peer_problem(group, device) is None
    experts = weights.held(PLACEMENT.experts_of(rank), fp8=False)
    rows_come_from_the_peer(group, device)
    for cap in (None, 5 * num_ranks * TOP_K):
        dispatcher = make_dispatcher(group, device, row_cap=cap)
        for seed in range(6):  # the same buffers for other routings
            batch = make_batch(TOKENS, seed, rank, device)
            assert_same_bits(all_rounds(dispatcher, experts, batch), one_rank_sum(weights, batch))
        assert dispatcher.traffic.rounds == 6 * (1 if cap is None else 7)
    fast, batch = make_dispatcher(group, device, "fast"), make_batch(TOKENS, 1, rank, device)
    assert max_rel(all_rounds(fast, experts, batch), one_rank_sum(weights, batch)) < 0.02
    if supports_fp8(device):
        in_fp8, of_rank = make_dispatcher(group, device, fp8=True), weights.held(PLACEMENT.experts_of(rank), fp8=True)
        assert_same_bits(all_rounds(in_fp8, of_rank, batch), one_rank_sum(weights, batch, fp8=True))
    the_norm_comes_along(group, device, experts)
    two_streams(group, device, weights, experts)
    for combine in ("exact", "fast"):
        replay_a_graph(make_dispatcher(group, device, combine), weights, experts)
    dispatcher.check()
    dist.barrier()
    a_peer_that_does_not_come(make_dispatcher(group, device), experts)
    dist.barrier()


def rows_come_from_the_peer(group: ExpertGroup, device: torch.device) -> None:
    """Rows lie in this rank's symmetric buffer where only the peer can have written them: this rank sends itself none.
    The peer's buffer holds what this rank sent, read through its mapping."""
    dispatcher, peer = make_dispatcher(group, device), 1 - group.rank
    batch, of_peer = (make_batch(TOKENS, 0, rank, device) for rank in (group.rank, peer))
    single = [expert for expert in range(NUM_EXPERTS) if len(PLACEMENT.slots_of(expert)) == 1]
    of_peer_alone = next(expert for expert in single if PLACEMENT.slots_of(expert)[0].rank == peer)
    ids_TK = torch.full_like(batch.routing.expert_ids_TK, -1)
    ids_TK[:, 0] = of_peer_alone
    inputs = dispatcher.dispatch(batch.x_TD, ids_TK, batch.routing.weights_TK)
    (buffers,) = dispatcher._sets
    own, layout = buffers.peers.own, buffers.layout
    assert inputs.rows_XD.data_ptr() == own.data_ptr() + layout.rows_at
    choice, common = Choice("one_sided", "one_sided", "a test"), {"top_k": TOP_K, "row_cap": None}
    planned = planned_bytes(choice, group.rank, PLACEMENT, TOKENS, WIDTH, torch.bfloat16, combine="exact", **common)
    assert dispatcher.held_bytes == planned == own.numel()
    records = slice(peer * TOKENS, (peer + 1) * TOKENS)
    assert_same_bits(inputs.rows_XD[records], of_peer.x_TD)
    assert int(inputs.offsets_S1[-1]) == TOKENS
    in_peer = layout.rows_XD(buffers.peers.buffers[peer], TOKENS)
    assert_same_bits(in_peer[group.rank * TOKENS : (group.rank + 1) * TOKENS], batch.x_TD)
    assert int(layout.flags_N(own)[peer]) == 1 << TOKEN_BITS | TOKENS
    dispatcher.combine(inputs.rows_XD.new_zeros(inputs.num_rows, WIDTH), inputs.handle)
    torch.cuda.synchronize()
    dispatcher.check()


def the_norm_comes_along(group: ExpertGroup, device: torch.device, experts: AnyExperts) -> None:
    """The bits of combine and norm one after the other."""
    dispatcher, batch = make_dispatcher(group, device), make_batch(TOKENS, 2, group.rank, device)
    norm = Norm(torch.linspace(0.5, 2.0, WIDTH, device=device).bfloat16(), 1e-6)
    residual_TD, both = batch.x_TD.flip(0).contiguous(), []
    for combine_norm in (dispatcher.combine_norm, partial(Dispatcher.combine_norm, dispatcher)):
        inputs = dispatcher.dispatch(batch.x_TD, *batch.routing)
        both.append(combine_norm(experts(inputs), inputs.handle, residual_TD, norm))
    for got, meant in zip(*both):
        assert_same_bits(got, meant)


def two_streams(group: ExpertGroup, device: torch.device, weights: Weights, experts: AnyExperts) -> None:
    """Two rounds open at a time, each on its own stream, as half-steps go."""
    dispatcher = make_dispatcher(group, device)
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for seed in range(3):
        batches = [make_batch(TOKENS, 2 * seed + half, group.rank, device) for half in range(2)]
        side.wait_stream(here)
        first = dispatcher.dispatch(batches[0].x_TD, *batches[0].routing)
        with torch.cuda.stream(side):
            second = dispatcher.dispatch(batches[1].x_TD, *batches[1].routing)
        outs = [dispatcher.combine(experts(first), first.handle)]
        with torch.cuda.stream(side):
            outs.append(dispatcher.combine(experts(second), second.handle))
        here.wait_stream(side)
        for out_TD, batch in zip(outs, batches):
            assert_same_bits(out_TD, one_rank_sum(weights, batch))


def replay_a_graph(dispatcher: OneSidedDispatcher, weights: Weights, experts: AnyExperts) -> None:
    """Captured with one routing, replayed with others, with eager rounds in between: three rounds a graph, so that
    nothing rests on an even number of them."""
    device, rank = dispatcher.device, dispatcher.group.rank
    static = make_batch(16, 100, rank, device)
    all_rounds(dispatcher, experts, static)  # compiles, and makes the buffers
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [all_rounds(dispatcher, experts, static) for _ in range(3)]
    for seed in range(101, 107):
        batch = make_batch(16, seed, rank, device)
        static.x_TD.copy_(batch.x_TD)
        for target, source in zip(static.routing, batch.routing):
            target.copy_(source)
        graph.replay()
        expected_TD = one_rank_sum(weights, batch)
        for out_TD in (*outs, all_rounds(dispatcher, experts, batch)):
            if dispatcher.combine_mode == "exact":
                assert_same_bits(out_TD, expected_TD)
            else:
                assert max_rel(out_TD, expected_TD) < 0.02
    torch.cuda.synchronize()
    dispatcher.check()


def a_peer_that_does_not_come(dispatcher: OneSidedDispatcher, experts: AnyExperts) -> None:
    """The device ends its wait by itself, and the next call on the host says for whom it was."""
    rank = dispatcher.group.rank
    batch = make_batch(TOKENS, 0, rank, dispatcher.device)
    all_rounds(dispatcher, experts, batch)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        return
    dispatcher.timeout_s = 1.0
    inputs = dispatcher.dispatch(batch.x_TD, *batch.routing)
    dispatcher.combine(experts(inputs), inputs.handle)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"rank 0 waited 1 s .* for the rows of rank 1 in round 2"):
        dispatcher.check()


def on_one_card(rank: int, num_ranks: int, folder: str) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    join(rank, num_ranks, folder)
    on_gpus(rank, num_ranks, shared=True)
    dist.destroy_process_group()


def on_two_cards(rank: int, num_ranks: int, folder: str) -> None:
    join(rank, num_ranks, folder)
    on_gpus(rank, num_ranks, shared=False)
    dist.destroy_process_group()


def join(rank: int, num_ranks: int, folder: str) -> None:
    """By gloo alone: rows take no collective, and one card has room for one NCCL rank."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=200))


@pytest.mark.gpu
def test_two_processes_on_one_card(tmp_path: Path) -> None:
    run_ranks(on_one_card, 2, str(tmp_path), timeout_s=300.0, joined=False)


@pytest.mark.multi_gpu
def test_two_cards(tmp_path: Path) -> None:
    run_ranks(on_two_cards, 2, str(tmp_path), timeout_s=300.0, joined=False)
