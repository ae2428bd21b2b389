"""Experts that move between real ranks: the bits of what they compute, addresses, memory, and what is refused."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expert_parallel.choice import Choice, Dispatchers, make_dispatchers
from expert_parallel.dispatcher import ExpertInput
from expert_parallel.group import ExpertGroup
from expert_parallel.layout import ExpertLayout
from expert_parallel.placement import Placement
from expert_parallel.rebalance import Bundles, ExpertMover, record_bytes, records_within
from expert_parallel.rounds import rounds
from kernels.quantize import FP8, QuantizedBlocks
from moe.model.experts import Experts, Fp8Experts
from router.load import LoadCounter
from router.synthetic import skewed_routing
from tests.compare import assert_same_bits
from tests.ranks import run_ranks, world

NUM_EXPERTS, TOP_K, WIDTH, EXPERT_WIDTH = 8, 3, 8, 132  # two blocks of 128, the second one short
FORMATS = (torch.float32, torch.bfloat16, FP8)


class Layer:
    """The experts in the slots of one rank: expert e has weights of ones, in bf16 and fp32 times (e + 1) / 64, in fp8
    with that as every block's scale, and the bias e, which nothing here computes with."""

    def __init__(self, dtype: torch.dtype, experts: Sequence[int | None]) -> None:
        self.dtype = dtype
        num_slots = len(experts)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "w13": ((num_slots, 2 * EXPERT_WIDTH, WIDTH), dtype),
            "w2": ((num_slots, WIDTH, EXPERT_WIDTH), dtype),
            "bias": ((num_slots, 3), torch.bfloat16),  # a slot has 6 bytes: no whole word
        }
        if dtype == FP8:
            shapes |= {"s13": ((num_slots, 2, 2, 1), torch.float32), "s2": ((num_slots, 1, 1, 2), torch.float32)}
        self.tensors = {name: torch.full(shape, 7.0).to(kind) for name, (shape, kind) in shapes.items()}
        for slot, expert in enumerate(experts):
            if expert is None:
                continue
            for name, tensor in self.tensors.items():
                scale = 1.0 if dtype == FP8 and name.startswith("w") else (expert + 1) / 64
                tensor[slot] = float(expert) if name == "bias" else scale
        if dtype == FP8:
            self.experts = Fp8Experts(
                QuantizedBlocks(self.tensors["w13"], self.tensors["s13"]),
                QuantizedBlocks(self.tensors["w2"], self.tensors["s2"]),
            )
        else:
            self.experts = Experts(self.tensors["w13"], self.tensors["w2"])
        self.bundles = Bundles([*self.tensors.values()])

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors.values()]


def tokens(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(3 + 2 * rank, WIDTH, generator=generator).to(torch.bfloat16 if dtype == FP8 else dtype)
    routing = skewed_routing(len(x_TD), NUM_EXPERTS, TOP_K, exponent=1.0, seed=rank)
    return x_TD, routing.expert_ids_TK, routing.weights_TK


def computed(
    dispatchers: Dispatchers, experts: Callable[[ExpertInput], Tensor], rank: int, dtype: torch.dtype
) -> Tensor:
    x_TD, ids_TK, weights_TK = tokens(rank, dtype)
    parts = [
        dispatchers.prefill.combine(experts(inputs), inputs.handle)
        for _, inputs in rounds(dispatchers.prefill, x_TD, ids_TK, weights_TK)
    ]
    return torch.cat(parts)


def without_balancing(rank: int, dtype: torch.dtype) -> Tensor:
    placement = Placement.contiguous(NUM_EXPERTS, 1)
    experts = Layer(dtype, placement.experts_of(0)).experts
    return computed(Dispatchers.local(placement, 0, "cpu"), experts, rank, dtype)


def tables(layout: ExpertLayout) -> list[int]:
    return [tensor.data_ptr() for table in layout.replicas.values() for tensor in table.columns]


def play(rank: int, num_ranks: int, start: Placement, plans: Sequence[Placement], repeats: int, most: int) -> None:
    """Layer 0 goes through the plans, again and again; layer 1 stays. After each move both give the bits they must."""
    group = world(rank, num_ranks)
    for dtype in FORMATS:
        layers = [Layer(dtype, start.experts_of(rank)) for _ in range(2)]
        made = make_dispatchers(
            Choice("all_to_all", "all_to_all", "a test"),
            *(group, start),
            top_k=TOP_K,
            combine="exact",
            row_cap=None,
            device=torch.device("cpu"),
        )
        layout = ExpertLayout.spread(rank, {0: start, 1: start}, made, "cpu")
        mover = ExpertMover(group, layers[0].bundles.num_bytes, most, "cpu")
        expected = without_balancing(rank, dtype)
        before = [layers[0].addresses(), layers[1].addresses(), tables(layout)]
        held = mover.num_bytes
        for step in range(repeats * len(plans)):
            wanted = plans[step % len(plans)]
            mover.move(layers[0].bundles, layout.placements[0], wanted)
            layout.set(0, wanted)
            for index, layer in enumerate(layers[: 2 if step % 10 == 0 else 1]):
                out_TD = computed(layout.dispatchers[index], layer.experts, rank, dtype)
                assert_same_bits(out_TD, expected)
        fresh = Layer(dtype, layout.placements[0].experts_of(rank))
        for name, tensor in layers[0].tensors.items():
            filled = [slot for slot, expert in enumerate(layout.experts[0]) if expert is not None]
            assert_same_bits(tensor[filled], fresh.tensors[name][filled])
        assert [layers[0].addresses(), layers[1].addresses(), tables(layout)] == before
        assert mover.num_bytes == held


SWAPPED = Placement.of_ranks(8, [[7, 1, 2, 3], [4, 5, 6, 0]])


def test_C25_a_swap_and_back_every_step_for_50_steps() -> None:
    run_ranks(play, 2, Placement.contiguous(8, 2), [SWAPPED, Placement.contiguous(8, 2)], 25, 1, timeout_s=180)


def test_C25_redundant_slots_on_both_ranks_or_twice_on_one() -> None:
    start = Placement.contiguous(8, 2, redundant=2)
    both = Placement.of_ranks(8, [[3, 1, 2, 0, 4], [3, 5, 6, 7, 1]])
    twice = Placement.of_ranks(8, [[3, 1, 3, 0, 4], [2, 5, 6, 7, None]])
    thrice = Placement.of_ranks(8, [[3, 3, 3, 0, 4], [2, 5, 6, 7, 1]])
    run_ranks(play, 2, start, [both, twice, thrice, start], 3, 1, timeout_s=180)


def test_C25_slots_that_do_not_divide_evenly_and_a_rank_without_any() -> None:
    start = Placement.contiguous(8, 4, redundant=2)  # 3, 3, 2 and 2 slots
    other = Placement.of_ranks(8, [[7, 0, 6], [5, 4, 0], [3, 2], [1, 0]])
    run_ranks(play, 4, start, [other, start], 3, 2, timeout_s=180)
    start = Placement.of_ranks(8, [[0, 1, 2, 3, 4], [], [5, 6, 7]])
    other = Placement.of_ranks(8, [[7, 0, 1, 2, 3], [], [4, 5, 6]])
    run_ranks(play, 3, start, [other, start], 2, 2, timeout_s=180)


def refusals(rank: int, num_ranks: int) -> None:
    group, start = world(rank, num_ranks), Placement.contiguous(8, 2)
    layer = Layer(torch.float32, start.experts_of(rank))
    before = {name: tensor.clone() for name, tensor in layer.tensors.items()}
    mover = ExpertMover(group, layer.bundles.num_bytes, 1, "cpu")
    with pytest.raises(AssertionError, match=r"slots of the ranks differ: \[4, 4\] now, \[5, 4\] wanted"):
        mover.move(layer.bundles, start, Placement.of_ranks(8, [[7, 1, 2, 3, 0], [4, 5, 6, 0]]))
    with pytest.raises(AssertionError, match=r"4 slots on rank \d, the placement has 5"):
        mover.move(layer.bundles, Placement.contiguous(8, 2, 2), Placement.contiguous(8, 2, 2))
    with pytest.raises(RuntimeError, match=r"ranks \[1\] would move other experts than rank 0; nothing was moved"):
        mover.move(layer.bundles, start, start if rank else SWAPPED)
    for name, tensor in layer.tensors.items():
        assert_same_bits(tensor, before[name])
    mover.move(layer.bundles, start, SWAPPED)  # and all goes well afterwards


def test_C25_plans_that_cannot_be_are_refused_before_anything_moves() -> None:
    with pytest.raises(ValueError, match=r"experts \[0\] have no slot"):
        Placement.of_ranks(8, [[7, 1, 2, 3], [4, 5, 6, 7]])
    with pytest.raises(ValueError, match=r"names expert 8, outside 0\.\.7"):
        Placement.of_ranks(8, [[8, 1, 2, 3], [4, 5, 6, 0]])
    run_ranks(refusals, 2, timeout_s=180)


class Flipping(ExpertGroup):
    """Loses a bit on the way."""

    def all_to_all(self, out_XD: Tensor, x_XD: Tensor, out_rows: Sequence[int], rows: Sequence[int]) -> None:
        super().all_to_all(out_XD, x_XD, out_rows, rows)
        if self.rank == 1:
            out_XD[0, 100] ^= 1


def damaged(rank: int, num_ranks: int) -> None:
    whole, start = world(rank, num_ranks), Placement.contiguous(8, 2)
    layer = Layer(torch.bfloat16, start.experts_of(rank))
    mover = ExpertMover(Flipping(rank, num_ranks, whole.process_group), layer.bundles.num_bytes, 1, "cpu")
    if rank:
        with pytest.raises(RuntimeError, match="1 experts arrived on rank 1 with other bytes than were sent"):
            mover.move(layer.bundles, start, SWAPPED)
    else:
        mover.move(layer.bundles, start, SWAPPED)


def test_a_bit_that_is_lost_on_the_way_is_noticed() -> None:
    run_ranks(damaged, 2, timeout_s=180)


def placements(seed: int, start: Placement) -> Iterator[Placement]:
    """Any placements with the slots of `start`."""
    draw = random.Random(seed)
    flat = [expert for slots in start.ranks for expert in slots]
    while True:
        draw.shuffle(flat)
        rest = iter(flat)
        yield Placement.of_ranks(start.num_experts, [[next(rest) for _ in slots] for slots in start.ranks])


def soak(rank: int, num_ranks: int, times: int) -> tuple[int, int]:
    """(bytes, objects) by which this process grew in the last four fifths of so many rebalances."""
    group, start = world(rank, num_ranks), Placement.contiguous(4, 2, redundant=1)
    weights = torch.zeros(start.num_slots(rank), 16384)  # 64 KiB each
    for slot, expert in enumerate(start.experts_of(rank)):
        weights[slot] = -1.0 if expert is None else float(expert)
    bundles, load = Bundles([weights]), LoadCounter(1, 4, "cpu", {0: start.experts_of(rank)})
    made = make_dispatchers(
        Choice("all_to_all", "all_to_all", "a test"),
        *(group, start),
        top_k=2,
        combine="exact",
        row_cap=None,
        device=torch.device("cpu"),
    )
    layout = ExpertLayout.spread(rank, {0: start}, made, "cpu")
    mover = ExpertMover(group, bundles.num_bytes, 1, "cpu")
    rows = torch.arange(len(weights) + 1, dtype=torch.int32)  # one row to each slot
    before, counted = (0, 0), torch.zeros(4, dtype=torch.int64)
    for step, wanted in zip(range(times), placements(1, start)):
        load.add(0, rows)
        load.end_step()
        for expert in layout.experts[0]:
            counted[expert or 0] += 1
        mover.move(bundles, layout.placements[0], wanted)
        layout.set(0, wanted)
        load.place(0, wanted.experts_of(rank))
        assert weights[:, ::4096].tolist() == [[float(expert or 0)] * 4 for expert in layout.experts[0]]
        if step == times // 5:
            before = measure()
    assert load.snapshot()[0].tolist() == counted.tolist()
    after = measure()
    return after[0] - before[0], after[1] - before[1]


def measure() -> tuple[int, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects())


def test_500_rebalances_leave_memory_as_it_was() -> None:
    """A record that stayed each time would be 26 MB."""
    for num_bytes, num_objects in run_ranks(soak, 2, 500, timeout_s=240):
        assert num_bytes < 8e6 and num_objects < 50


def test_memory_by_hand() -> None:
    assert record_bytes(16) == 24 and record_bytes(17) == 32
    assert records_within(24 * 9, 16, 8) == 4 and records_within(24 * 8, 16, 8) == 3  # 2 B + 1 records
    assert records_within(1, 16, 8) == 1 and records_within(24 * 9, 16, 2) == 2
