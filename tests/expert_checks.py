"""What every dispatcher over several ranks must do with the cases of `expert_ranks`, whatever its transport."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from expert_parallel.dispatcher import ExpertInput
from expert_parallel.group import split
from kernels.quantize import FP8, quantize_rows
from tests.compare import assert_same_bits, max_rel
from tests.expert_ranks import (
    Case,
    Key,
    MakeDispatcher,
    Outcome,
    case_named,
    expected_bits,
    expected_of_reference,
    run_case,
    width_of,
)
from tests.ranks import run_ranks, world


def check_one_ranks_bits(outcomes: list[dict[Key, Outcome]], case: Case, *, padded: bool) -> None:
    """`exact`, in every dtype that was run."""
    for key in outcomes[0]:
        if (key.case, key.combine) == (case.name, "exact"):
            for rank, of_rank in enumerate(outcomes):
                expected = expected_bits(case, rank, len(outcomes), key.dtype, padded=padded)
                assert_same_bits(of_rank[key].out_TD, expected)


def check_against_reference(
    outcomes: list[dict[Key, Outcome]], case: Case, *, padded: bool, same_order: bool = True, arrived: bool = True
) -> None:
    """Rows arrive in the reference's order, quantised as it would be after they came, and come home with its bits.
    `same_order`: `fast` adds ranks in the reference's order too. Without `arrived` only sums are compared."""
    for key in (key for key in outcomes[0] if key.case == case.name):
        expected = expected_of_reference(case, len(outcomes), key.combine, key.dtype, padded=padded)
        for rank, of_rank in enumerate(outcomes):
            got = of_rank[key]
            # In a later round a token's index, and with it its replica and so its rank, is another one.
            one_sum = same_order and (case.row_cap is None or "replicas" not in case.name)
            if key.combine == "exact" or one_sum:
                assert_same_bits(got.out_TD, expected.outs[rank])
            else:
                assert max_rel(got.out_TD, expected.outs[rank]) <= (1e-6 if key.dtype == torch.float32 else 0.02)
            if arrived and case.row_cap is None:
                check_arrived(got, expected.inputs[rank], key.dtype)


def check_arrived(got: Outcome, expected: ExpertInput, dtype: torch.dtype) -> None:
    assert_same_bits(got.offsets_S1, expected.offsets_S1)
    assert (got.scales_GR is not None) == (dtype == FP8)
    if got.scales_GR is None:
        assert_same_bits(got.rows_RD, expected.rows_XD)
        return
    rows = quantize_rows(expected.rows_XD)
    assert_same_bits(got.rows_RD, rows.values.view(torch.uint8))
    assert_same_bits(got.scales_GR, rows.scales)


def record_bytes(case: Case, key: Key) -> int:
    """Of one record: its row, scales of 128 columns, slots, weights; a multiple of 64."""
    width = width_of(key.dtype)
    row = width + 4 * 2 if key.dtype == FP8 else width * key.dtype.itemsize
    return -(-(row + 4 * case.top_k * (2 if key.combine == "fast" else 1)) // 64) * 64


class TwoGroups(NamedTuple):
    """What one rank of two groups of half the ranks got, and then of one group of all of them."""

    group_rank: int
    apart_TD: Tensor
    joint_TD: Tensor


def run_two_groups(rank: int, num_ranks: int, make: MakeDispatcher, key: Key, padded: bool) -> TwoGroups:
    """Two expert groups at once, with other weights and other tokens; k may be larger than the local experts."""
    everyone = world(rank, num_ranks)
    group = split(everyone, num_ranks // 2, timedelta(seconds=30))
    apart = run_case(group, key, make, padded=padded, seed=1 + rank // group.size)
    joint = run_case(everyone, key, make, padded=padded)
    return TwoGroups(group.rank, apart.out_TD, joint.out_TD)


def check_two_groups(make: MakeDispatcher, *, padded: bool) -> None:
    """Four ranks; `exact` has the bits of one rank, for every dtype."""
    for dtype, name in ((torch.bfloat16, "replicas and empty slots"), (FP8, "k larger than the local experts")):
        key = Key(name, "exact", dtype)
        results = run_ranks(run_two_groups, 4, make, key, padded)
        assert [result.group_rank for result in results] == [0, 1, 0, 1]
        for rank, result in enumerate(results):
            seed = 1 + rank // 2
            apart = expected_bits(case_named(name), result.group_rank, 2, dtype, padded=padded, seed=seed)
            assert_same_bits(result.apart_TD, apart)
            assert_same_bits(result.joint_TD, expected_bits(case_named(name), rank, 4, dtype, padded=padded))
