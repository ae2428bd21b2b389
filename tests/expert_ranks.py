"""Cases for dispatchers over several ranks, and what all ranks together must give for each.

`run_cases` is the body of one rank: it sends every case through a dispatcher and real experts. The test's own process
computes what was to come from the plain reference of a whole group and from the dispatcher of one rank.

A dtype is the one in which rows travel. Fp8 means a model in bf16 whose experts are in fp8, and wider rows: one full
group of columns with a scale, and one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from expert_parallel.dispatcher import Dispatcher, ExpertInput, LocalDispatcher
from expert_parallel.group import ExpertGroup
from expert_parallel.group_dispatcher import GroupDispatcher
from expert_parallel.placement import Placement
from expert_parallel.reference import RankBatch, ReferenceRanks
from expert_parallel.replicas import ReplicaTable
from expert_parallel.rounds import Combine, Traffic, rounds
from kernels.quantize import FP8, QuantizedBlocks, quantize_blocks
from kernels.rmsnorm import Norm
from moe.model.experts import Experts, Fp8Experts
from router.synthetic import skewed_routing
from tests.compare import assert_same_bits
from tests.ranks import world

WIDTH, FP8_WIDTH, EXPERT_WIDTH = 20, 148, 12  # no multiple of a record's alignment in any dtype


@dataclass(frozen=True)
class Case:
    """Routed tokens and placed experts. Both depend on the number of ranks."""

    name: str
    num_experts: int
    top_k: int
    num_tokens: Callable[[int, int], int]  # of a rank, by (rank, number of ranks)
    placement: Callable[[int, int], Placement] = Placement.contiguous
    ids: Callable[[Tensor], Tensor] | None = None  # makes other ids of the drawn ones
    row_cap: Callable[[int, int], int] | None = None  # by (number of ranks, top_k)


def uneven(rank: int, num_ranks: int) -> int:
    """3, 5, 7, ... tokens, and 19 on the last rank."""
    return 19 if rank == num_ranks - 1 else 3 + 2 * rank


def few(rank: int, num_ranks: int) -> int:
    return 2 + rank


def replicated(num_experts: int, num_ranks: int) -> Placement:
    """Experts backwards over the ranks with an empty slot behind each rank's, expert 0 on all, twice on rank 0."""
    held: list[list[int | None]] = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        held[(num_experts - 1 - expert) % num_ranks].append(expert)
    rows = [[*slots, None] + ([] if 0 in slots else [0]) for slots in held]
    return Placement.of_ranks(num_experts, [rows[0] + [0], *rows[1:]])


def first_two_experts(ids_TK: Tensor) -> Tensor:
    """0, 1 or 1, 0: both live on rank 0."""
    return (ids_TK[:, :1] + torch.arange(2, dtype=torch.int32)) % 2


def drop_some(ids_TK: Tensor) -> Tensor:
    """Padding (-1 in a whole row), a skipped k and ids of no expert."""
    ids_TK = ids_TK.clone()
    ids_TK[1::3] = -1
    ids_TK[2::3, 0] = -1
    ids_TK[3::5, 1] = 1000
    return ids_TK


CASES = (
    Case("uneven tokens", 8, 2, uneven),
    Case("no tokens on rank 0", 8, 2, lambda rank, n: 7 * rank),
    Case("no tokens anywhere", 8, 2, lambda rank, n: 0),
    Case("tokens on one rank alone", 8, 2, lambda rank, n: 40 if rank == n - 1 else 0),
    Case("k larger than the local experts", 8, 6, uneven),
    Case("k is all experts", 5, 5, few),  # 5 experts do not divide
    Case("k is 1", 7, 1, uneven),
    Case("more ranks than experts", 3, 2, uneven),
    Case("everything to one rank", 16, 2, uneven, ids=first_two_experts),
    Case("everything to one expert", 8, 1, uneven, ids=lambda ids_TK: torch.full_like(ids_TK, 7)),
    Case("replicas and empty slots", 8, 3, uneven, replicated),
    Case("padding and strangers", 8, 3, uneven, ids=drop_some),
    Case("one row a round", 8, 2, few, row_cap=lambda n, k: n * k),
    Case("several rounds, some ranks done early", 8, 2, uneven, row_cap=lambda n, k: n * k + 5),
    Case("several rounds to one expert", 8, 1, uneven, ids=torch.zeros_like, row_cap=lambda n, k: 3 * n),
    Case("several rounds with replicas", 8, 3, uneven, replicated, ids=drop_some, row_cap=lambda n, k: 2 * n * k),
    Case("several rounds, no tokens on rank 0", 8, 2, lambda rank, n: 5 * rank, row_cap=lambda n, k: 2 * n * k),
)
DTYPES = (torch.float32, torch.bfloat16, FP8)
# More ranks take more time, and differ in their numbers of ranks and not in their rows.
DTYPES_OF_RANKS = {1: DTYPES[:1], 2: DTYPES, 3: DTYPES, 4: DTYPES[1:], 8: DTYPES[1:2]}
COMBINES: tuple[Combine, ...] = ("exact", "fast")


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def width_of(dtype: torch.dtype) -> int:
    return FP8_WIDTH if dtype == FP8 else WIDTH


def model_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == FP8 else dtype


def make_batch(case: Case, rank: int, num_ranks: int, dtype: torch.dtype, *, padded: bool, seed: int = 0) -> RankBatch:
    """A rank's tokens. padded: up to the number that the fullest rank has, with NaN rows whose ids are -1."""
    num_tokens = case.num_tokens(rank, num_ranks)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x_TD = torch.randn(num_tokens, width_of(dtype), generator=generator).to(model_dtype(dtype))
    ids_TK, weights_TK = skewed_routing(num_tokens, case.num_experts, case.top_k, exponent=0.5, seed=rank + 77 * seed)
    if case.ids is not None:
        ids_TK = case.ids(ids_TK)
    if padded:
        missing = max(case.num_tokens(other, num_ranks) for other in range(num_ranks)) - num_tokens
        x_TD = torch.cat([x_TD, x_TD.new_full((missing, x_TD.shape[1]), torch.nan)])
        ids_TK = torch.cat([ids_TK, ids_TK.new_full((missing, case.top_k), -1)])
        weights_TK = torch.cat([weights_TK, torch.full((missing, case.top_k), torch.nan)])
    return RankBatch(x_TD, ids_TK, weights_TK)


def make_experts(held: Sequence[int | None], dtype: torch.dtype, *, seed: int = 0) -> Callable[[ExpertInput], Tensor]:
    """The real experts in a rank's slots; an expert's weights follow from its number, an empty slot's are NaN. Rows
    behind those of the slots are NaN."""

    def weights(expert: int | None, salt: int, rows: int, columns: int) -> Tensor:
        if expert is None:
            return torch.full((rows, columns), torch.nan, dtype=model_dtype(dtype))
        generator = torch.Generator().manual_seed(100_000 * seed + 10 * expert + salt)
        return torch.randn(rows, columns, generator=generator).to(model_dtype(dtype))

    # Without slots there is nothing to stack: the first of one too many gives the shape.
    width = width_of(dtype)
    w13 = torch.stack([weights(expert, 1, 2 * EXPERT_WIDTH, width) for expert in (*held, None)])[: len(held)]
    w2 = torch.stack([weights(expert, 2, width, EXPERT_WIDTH) for expert in (*held, None)])[: len(held)]
    experts = Experts(w13, w2)
    if dtype == FP8:
        values, scales = quantize_blocks(w13.unflatten(1, (2, -1)))
        of_w2 = quantize_blocks(w2[:, None])
        experts = Fp8Experts(
            QuantizedBlocks(values.flatten(1, 2), scales), QuantizedBlocks(of_w2.values.flatten(1, 2), of_w2.scales)
        )

    def run(inputs: ExpertInput) -> Tensor:
        y_RD = experts(inputs)
        y_RD[int(inputs.offsets_S1[-1]) :] = torch.nan
        return y_RD

    return run


class Outcome(NamedTuple):
    """What one rank saw of one case."""

    out_TD: Tensor
    rows_RD: Tensor  # the rows of its experts in the first round, in order; bytes in fp8, which pickle does not know
    scales_GR: Tensor | None  # in fp8
    offsets_S1: Tensor
    num_rounds: int
    most_rows: int  # of a round's experts
    traffic: Traffic


class Key(NamedTuple):
    case: str
    combine: Combine
    dtype: torch.dtype


MakeDispatcher = Callable[[ExpertGroup, ReplicaTable, tuple[int, ...], Case, Key], GroupDispatcher]


def make_dispatcher(
    kind: type[GroupDispatcher],
    group: ExpertGroup,
    replicas: ReplicaTable,
    slots_per_rank: tuple[int, ...],
    case: Case,
    key: Key,
) -> GroupDispatcher:
    """`partial` of it with a kind is a `MakeDispatcher`."""
    return kind(
        group,
        replicas,
        slots_per_rank,
        top_k=case.top_k,
        combine=key.combine,
        row_cap=case.row_cap(group.size, case.top_k) if case.row_cap else None,
        fp8_rows=key.dtype == FP8,
        device="cpu",
    )


def run_cases(
    rank: int,
    num_ranks: int,
    make: MakeDispatcher,
    padded: bool,
    dtypes: Sequence[torch.dtype],
    combines: Sequence[Combine] = COMBINES,
) -> dict[Key, Outcome]:
    """All cases, both ways to combine, some dtypes: in one run of the ranks."""
    group = world(rank, num_ranks)
    outcomes = {}
    for case in CASES:
        for combine in combines:
            for dtype in dtypes:
                key = Key(case.name, combine, dtype)
                try:
                    outcomes[key] = run_case(group, key, make, padded=padded)
                except Exception as error:
                    error.add_note(f"in case {key}")
                    raise
    return outcomes


def run_case(group: ExpertGroup, key: Key, make: MakeDispatcher, *, padded: bool, seed: int = 0) -> Outcome:
    """One case in this rank's process."""
    case, dtype = case_named(key.case), key.dtype
    placement = case.placement(case.num_experts, group.size)
    slots_per_rank = tuple(len(slots) for slots in placement.ranks)
    width = max(len(placement.slots_of(expert)) for expert in range(case.num_experts))
    dispatcher = make(group, ReplicaTable(placement, width, "cpu"), slots_per_rank, case, key)
    experts = make_experts(placement.experts_of(group.rank), dtype, seed=seed)
    seen: list[ExpertInput] = []
    batch = make_batch(case, group.rank, group.size, dtype, padded=padded, seed=seed)
    out_TD = torch.full_like(batch.x_TD, torch.nan)
    for rows, inputs in rounds(dispatcher, *batch):
        out_TD[rows] = dispatcher.combine(experts(inputs), inputs.handle)
        seen.append(inputs)
    first = seen[0]
    index_R = torch.arange(first.num_rows) if first.row_index_R is None else first.row_index_R
    index_R = index_R[: int(first.offsets_S1[-1])].long()
    rows_RD = (first.rows_XD.view(torch.uint8) if dtype == FP8 else first.rows_XD)[index_R]
    scales_GR = None if first.scales_GX is None else first.scales_GX[:, index_R]
    most_rows = max(int(inputs.offsets_S1[-1]) for inputs in seen)
    return Outcome(out_TD, rows_RD, scales_GR, first.offsets_S1, len(seen), most_rows, dispatcher.traffic)


def run_norms(
    rank: int, num_ranks: int, make: MakeDispatcher, padded: bool, combines: Sequence[Combine] = COMBINES
) -> None:
    """`combine_norm` in one launch against what it means, in several rounds, with and without shared rows."""
    group = world(rank, num_ranks)
    case = case_named("several rounds with replicas")
    placement = case.placement(case.num_experts, num_ranks)
    norm = Norm(torch.linspace(0.5, 2.0, WIDTH).bfloat16(), 1e-6)
    experts = make_experts(placement.experts_of(rank), torch.bfloat16)
    batch = make_batch(case, rank, num_ranks, torch.bfloat16, padded=padded)
    residual_TD, shared_TD = torch.randn(2, *batch.x_TD.shape).bfloat16()
    for combine in combines:
        dispatcher = make(
            group,
            ReplicaTable(placement, num_ranks + 1, "cpu"),
            tuple(map(len, placement.ranks)),
            case,
            Key(case.name, combine, torch.bfloat16),
        )
        for shared in (None, shared_TD):
            both = []
            for combine_norm in (dispatcher.combine_norm, partial(Dispatcher.combine_norm, dispatcher)):
                both.append(
                    [
                        torch.cat(
                            combine_norm(experts(inputs), inputs.handle, residual_TD[rows], norm, of_rows(shared, rows))
                        )
                        for rows, inputs in rounds(dispatcher, *batch)
                    ]
                )
            assert len(both[0]) == len(both[1]) > 1
            for got, meant in zip(*both):
                assert_same_bits(got, meant)


def of_rows(x_TD: Tensor | None, rows: slice) -> Tensor | None:
    return None if x_TD is None else x_TD[rows]


def expected_bits(case: Case, rank: int, num_ranks: int, dtype: torch.dtype, *, padded: bool, seed: int = 0) -> Tensor:
    """One rank that holds all experts: what `exact` must equal bit for bit."""
    held = tuple(range(case.num_experts))
    local = LocalDispatcher(torch.arange(case.num_experts, dtype=torch.int32), case.num_experts)
    inputs = local.dispatch(*make_batch(case, rank, num_ranks, dtype, padded=padded, seed=seed))
    return local.combine(make_experts(held, dtype, seed=seed)(inputs), inputs.handle)


class Expected(NamedTuple):
    """What the plain reference of the whole group gives: by rank."""

    inputs: list[ExpertInput]
    outs: list[Tensor]


def reference_batches(case: Case, num_ranks: int, dtype: torch.dtype, *, padded: bool) -> list[RankBatch]:
    """Ids of no expert count as -1: the reference would refuse them."""
    batches = []
    for rank in range(num_ranks):
        x_TD, ids_TK, weights_TK = make_batch(case, rank, num_ranks, dtype, padded=padded)
        batches.append(RankBatch(x_TD, ids_TK.where(ids_TK < case.num_experts, -1), weights_TK))
    return batches


def expected_of_reference(
    case: Case, num_ranks: int, combine: Combine, dtype: torch.dtype, *, padded: bool
) -> Expected:
    placement = case.placement(case.num_experts, num_ranks)
    batches = reference_batches(case, num_ranks, dtype, padded=padded)
    reference = ReferenceRanks(placement, combine)
    inputs = reference.dispatch(batches)
    ys = [make_experts(placement.experts_of(rank), dtype)(of_rank) for rank, of_rank in enumerate(inputs)]
    return Expected(inputs, reference.combine(ys, [of_rank.handle for of_rank in inputs], batches))
