"""Routing with groups: no token leaves its best groups, popularity stays, and what cannot be is refused."""

from __future__ import annotations

import pytest
import torch

from router.synthetic import _in_best_groups, skewed_routing


def groups_of(ids_TK: torch.Tensor, group_size: int) -> list[int]:
    return [len(set(ids)) for ids in (ids_TK // group_size).tolist()]


def test_a_token_uses_few_groups() -> None:
    limited = skewed_routing(500, 32, 6, exponent=0.5, num_groups=8, topk_groups=2, seed=3).expert_ids_TK
    free = skewed_routing(500, 32, 6, exponent=0.5, seed=3).expert_ids_TK
    assert max(groups_of(limited, 4)) <= 2 < min(groups_of(free, 4))
    assert all(len(set(ids)) == 6 for ids in limited.tolist())
    assert limited.min() >= 0 and limited.max() < 32


def test_the_best_groups_by_hand() -> None:
    """Groups of three: 5 + 1, 3 + 3.5 and 4 + 1.5: the sum of the two best decides, not the best, not all three."""
    kept_TE = _in_best_groups(torch.tensor([[5, 1, 0, 3, 3.5, -9, 4, 1.5, 1]]), num_groups=3, topk_groups=1)
    assert kept_TE.isinf().tolist() == [[True] * 3 + [False] * 3 + [True] * 3]


def test_all_groups_are_no_limit() -> None:
    plain, grouped = (
        skewed_routing(100, 12, 3, exponent=1.0, num_groups=groups, topk_groups=groups, seed=5) for groups in (1, 4)
    )
    assert torch.equal(plain.expert_ids_TK, grouped.expert_ids_TK)


def test_popular_experts_stay_popular() -> None:
    """The same seed draws the same popularity: the busiest expert without groups is among the busiest with them."""
    counts = [
        torch.bincount(
            skewed_routing(4096, 32, 4, exponent=1.0, num_groups=8, topk_groups=few, seed=7).expert_ids_TK.flatten(),
            minlength=32,
        )
        for few in (8, 4)
    ]
    assert counts[0].argmax() in counts[1].topk(3).indices


def test_groups_of_one_expert() -> None:
    """Two best of a group is then the one it has."""
    ids_TK = skewed_routing(50, 6, 2, num_groups=6, topk_groups=2, seed=1).expert_ids_TK
    assert groups_of(ids_TK, 1) == [2] * 50


@pytest.mark.parametrize(
    ("groups", "few", "text"),
    [(5, 1, "num_groups=5 must divide num_experts=12"), (4, 5, "topk_groups=5"), (4, 1, "top_k=4 exceeds")],
)
def test_what_is_refused(groups: int, few: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        skewed_routing(3, 12, 4, num_groups=groups, topk_groups=few)
