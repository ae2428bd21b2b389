"""The reference of a whole group, by hand: who gets which row in which order, and what both sums mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expert_parallel.dispatcher import ExpertInput
from expert_parallel.placement import Placement
from expert_parallel.reference import RankBatch, ReferenceRanks, Row
from expert_parallel.rounds import Combine

COMBINES: tuple[Combine, ...] = ("exact", "fast")


def scaled(inputs: ExpertInput, held: tuple[int | None, ...]) -> Tensor:
    """Expert e computes (e + 1) x."""
    y_RD = inputs.rows_XD.clone()
    offsets = inputs.offsets_S1.tolist()
    for expert, start, stop in zip(held, offsets, offsets[1:]):
        y_RD[start:stop] *= torch.nan if expert is None else expert + 1.0
    return y_RD


def run(placement: Placement, batches: list[RankBatch], combine: Combine) -> list[Tensor]:
    reference = ReferenceRanks(placement, combine)
    inputs = reference.dispatch(batches)
    ys = [scaled(of_rank, placement.experts_of(rank)) for rank, of_rank in enumerate(inputs)]
    return reference.combine(ys, [of_rank.handle for of_rank in inputs], batches)


def test_rows_by_hand() -> None:
    """Expert 0 has replicas on both ranks. Rank 0 brings tokens 10, 20 and rank 1 token 30, each to experts 1 and 0;
    tokens (rank 0, 0) and (rank 1, 1) would take replica 0, (rank 0, 1) and (rank 1, 0) take replica 1."""
    placement = Placement.of_ranks(2, [[0, 1], [None, 0]])
    ids_TK = torch.tensor([[1, 0], [1, 0]], dtype=torch.int32)
    batches = [
        RankBatch(torch.tensor([[10.0], [20.0]]), ids_TK, torch.ones(2, 2)),
        RankBatch(torch.tensor([[30.0]]), ids_TK[:1], torch.ones(1, 2)),
    ]
    first, second = ReferenceRanks(placement, "exact").dispatch(batches)
    assert first.handle == [Row(0, 0, 0, 1), Row(1, 0, 0, 0), Row(1, 0, 1, 0), Row(1, 1, 0, 0)]
    assert first.rows_XD[:, 0].tolist() == [10, 10, 20, 30] and first.offsets_S1.tolist() == [0, 1, 4]
    assert second.handle == [Row(1, 0, 1, 1), Row(1, 1, 0, 1)]
    assert second.rows_XD[:, 0].tolist() == [20, 30] and second.offsets_S1.tolist() == [0, 0, 2]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])  # 8: one expert a rank, fewer than K
@pytest.mark.parametrize("combine", COMBINES)
def test_C28_every_layout_gives_the_same_sum(num_ranks: int, combine: Combine) -> None:
    """x * (.4*8 + .3*1 + .2*4 + .1*6) = 4.9 x on every rank; -1 takes no part, another number is an error."""
    ids, weights = torch.tensor([[7, 0, 3, 5]], dtype=torch.int32), torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    x_TD = torch.tensor([[1.0, -2.0, 0.5]])
    placement = Placement.contiguous(8, num_ranks)
    for out_TD in run(placement, [RankBatch(x_TD, ids, weights)] * num_ranks, combine):
        torch.testing.assert_close(out_TD, 4.9 * x_TD)
    skipped = torch.tensor([[7, -1, 3, -1]], dtype=torch.int32)
    for out_TD in run(placement, [RankBatch(x_TD, skipped, weights)] * num_ranks, combine):
        torch.testing.assert_close(out_TD, (0.4 * 8 + 0.2 * 4) * x_TD)
    with pytest.raises(ValueError, match="expert id 8 of token 0 of rank 0"):
        run(placement, [RankBatch(x_TD, ids + 1, weights)] * num_ranks, combine)


def test_fast_rounds_once_more_for_each_rank() -> None:
    """bf16 steps by 2 between 256 and 512. Rank 0 computes 256 and 1 of a token, rank 1 another 1. exact: 258. fast:
    256 + 1 rounds to 256 on rank 0, and 256 + 1 rounds to 256 at home."""
    placement = Placement.of_ranks(3, [[0, 2], [1]])
    ids_TK, weights_TK = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.ones(1, 3)
    batches = [RankBatch(torch.ones(1, 1, dtype=torch.bfloat16), ids_TK, weights_TK)] * 2
    ys = [torch.tensor([[256.0], [256.0], [1.0], [1.0]]).bfloat16(), torch.tensor([[1.0], [1.0]]).bfloat16()]
    sums: dict[Combine, list[float]] = {}
    for combine in COMBINES:
        reference = ReferenceRanks(placement, combine)
        handles = [of_rank.handle for of_rank in reference.dispatch(batches)]
        sums[combine] = [float(out_TD) for out_TD in reference.combine(ys, handles, batches)]
    assert sums == {"exact": [258.0, 258.0], "fast": [256.0, 256.0]}
