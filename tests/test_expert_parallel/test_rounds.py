"""The loop over rounds, with a dispatcher of one rank and with one that takes few rows at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expert_parallel.dispatcher import Dispatcher, ExpertInput, LocalDispatcher
from expert_parallel.rounds import RoundInput, check_row_cap, rounds

X_TD = torch.arange(14.0).reshape(7, 2)
IDS_TK = torch.tensor([[0], [1], [0], [1], [0], [1], [0]], dtype=torch.int32)
WEIGHTS_TK = torch.linspace(1.0, 2.0, 7)[:, None]
SLOTS = torch.tensor([0, 1], dtype=torch.int32)


class FewAtATime(LocalDispatcher):
    """Takes `most` rows; another rank has rows for `rounds_elsewhere` rounds."""

    def __init__(self, most: int, rounds_elsewhere: int) -> None:
        super().__init__(SLOTS, 2)
        self.most = most
        self.rounds_left = rounds_elsewhere
        self.asked: list[int] = []

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> RoundInput:
        self.asked.append(x_TD.shape[0])
        self.rounds_left -= 1
        taken = slice(0, self.most)
        plain = super().dispatch(x_TD[taken], expert_ids_TK[taken], weights_TK[taken])
        num_left = x_TD.shape[0] - plain.rows_XD.shape[0]
        return RoundInput(**vars(plain), num_taken=plain.rows_XD.shape[0], more=num_left > 0 or self.rounds_left > 0)


def doubled(inputs: ExpertInput) -> Tensor:
    assert inputs.row_index_R is not None
    return 2 * inputs.rows_XD[inputs.row_index_R.long()]


def run(dispatcher: Dispatcher) -> Tensor:
    out_TD = torch.full_like(X_TD, torch.nan)
    for rows, inputs in rounds(dispatcher, X_TD, IDS_TK, WEIGHTS_TK):
        out_TD[rows] = dispatcher.combine(doubled(inputs), inputs.handle)
    return out_TD


def test_one_rank_takes_everything_at_once() -> None:
    seen = [rows for rows, _ in rounds(LocalDispatcher(SLOTS, 2), X_TD, IDS_TK, WEIGHTS_TK)]
    assert seen == [slice(0, 7)]
    assert torch.equal(run(LocalDispatcher(SLOTS, 2)), 2 * WEIGHTS_TK * X_TD)


@pytest.mark.parametrize(
    ("most", "rounds_elsewhere", "asked"),
    [
        (3, 0, [7, 4, 1]),
        (7, 1, [7]),
        (7, 3, [7, 0, 0]),  # done early: joins with zero rows until nobody has any left
        (1, 8, [7, 6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_every_row_is_dispatched_once(most: int, rounds_elsewhere: int, asked: list[int]) -> None:
    dispatcher = FewAtATime(most, rounds_elsewhere)
    assert torch.equal(run(dispatcher), 2 * WEIGHTS_TK * X_TD)
    assert dispatcher.asked == asked


def test_a_last_round_that_leaves_rows_is_a_fault() -> None:
    class Forgetful(FewAtATime):
        def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> RoundInput:
            return RoundInput(**{**vars(super().dispatch(x_TD, expert_ids_TK, weights_TK)), "more": False})

    with pytest.raises(AssertionError, match="the last round ended at row 3 of 7"):
        run(Forgetful(3, 0))


def test_the_least_cap() -> None:
    check_row_cap(None, 512, 8)
    check_row_cap(16, 4, 4)
    with pytest.raises(ValueError, match=r"parallel.row_cap=15 is less than 4 ranks x 4 experts per token = 16 rows"):
        check_row_cap(15, 4, 4)
