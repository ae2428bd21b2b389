"""The local dispatcher against the plain reference, with worked examples where expert e computes (e + 1) * x."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expert_parallel.dispatcher import Dispatcher, ExpertInput, LocalDispatcher
from expert_parallel.placement import Placement
from expert_parallel.reference import ReferenceDispatcher
from router.synthetic import one_expert_routing, skewed_routing
from tests.compare import assert_same_bits

IDS_C28 = torch.tensor([[7, 0, 3, 5]], dtype=torch.int32)
WEIGHTS_C28 = torch.tensor([[0.4, 0.3, 0.2, 0.1]])


def scale_rows(inputs: ExpertInput, factors: list[float]) -> Tensor:
    """Slot s multiplies its rows by factors[s]; rows behind the last slot are NaN and must never come back."""
    y_RD = torch.full((inputs.num_rows, inputs.rows_XD.shape[1]), torch.nan, dtype=inputs.rows_XD.dtype)
    offsets = inputs.offsets_S1.tolist()
    for factor, start, stop in zip(factors, offsets, offsets[1:]):
        index = torch.arange(start, stop) if inputs.row_index_R is None else inputs.row_index_R[start:stop].long()
        y_RD[start:stop] = inputs.rows_XD[index] * factor
    return y_RD


def run_rank(
    dispatcher: Dispatcher, held: tuple[int | None, ...], x_TD: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    inputs = dispatcher.dispatch(x_TD, ids, weights)
    factors = [torch.nan if expert is None else expert + 1.0 for expert in held]
    return dispatcher.combine(scale_rows(inputs, factors), inputs.handle)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])  # 8: one expert per rank, fewer than top_k
@pytest.mark.parametrize("kind", [LocalDispatcher, ReferenceDispatcher])
def test_C28_every_layout_gives_the_same_sum(kind: type, num_ranks: int) -> None:
    """x * (.4*8 + .3*1 + .2*4 + .1*6) = 4.9 x: each rank adds the experts it holds, none twice, none lost."""
    placement = Placement.contiguous(8, num_ranks)
    x_TD = torch.tensor([[1.0, -2.0, 0.5]])
    total_TD = torch.zeros_like(x_TD)
    for rank in range(num_ranks):
        dispatcher = kind(placement.slot_table(rank, "cpu"), placement.num_slots(rank))
        total_TD += run_rank(dispatcher, placement.experts_of(rank), x_TD, IDS_C28, WEIGHTS_C28)
    torch.testing.assert_close(total_TD, 4.9 * x_TD)


def test_C28_an_id_outside_the_experts() -> None:
    """-1 takes no part; a stranger is an error in the reference, and takes no part where the host may not look."""
    placement = Placement.contiguous(8, 1)
    x_TD = torch.tensor([[1.0, -2.0, 0.5]])
    slots = placement.slot_table(0, "cpu")
    skipped = torch.tensor([[7, -1, 3, -1]], dtype=torch.int32)
    for kind in (LocalDispatcher, ReferenceDispatcher):
        out_TD = run_rank(kind(slots, 8), placement.experts_of(0), x_TD, skipped, WEIGHTS_C28)
        torch.testing.assert_close(out_TD, (0.4 * 8 + 0.2 * 4) * x_TD)
    for stranger in (8, -2, 1000):
        ids = torch.tensor([[7, stranger, 3, 5]], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"expert id {stranger} of token 0"):
            ReferenceDispatcher(slots, 8).dispatch(x_TD, ids, WEIGHTS_C28)
        out_TD = run_rank(LocalDispatcher(slots, 8), placement.experts_of(0), x_TD, ids, WEIGHTS_C28)
        torch.testing.assert_close(out_TD, (0.4 * 8 + 0.2 * 4 + 0.1 * 6) * x_TD)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [
        (0, 8, 2),  # nothing to do
        (1, 8, 2),  # one row
        (127, 3, 3),  # k = E, E no power of two
        (128, 60, 1),  # k = 1
        (129, 257, 6),  # most experts get no row
    ],
)
def test_local_equals_the_reference(num_tokens: int, num_experts: int, top_k: int) -> None:
    torch.manual_seed(num_tokens)
    x_TD = torch.randn(num_tokens, 16)
    routing = skewed_routing(num_tokens, num_experts, top_k, exponent=1.0, seed=num_tokens)
    placement = Placement.contiguous(num_experts, 2)
    for rank in range(2):
        table, held = placement.slot_table(rank, "cpu"), placement.experts_of(rank)
        local = run_rank(LocalDispatcher(table, len(held)), held, x_TD, *routing)
        reference = run_rank(ReferenceDispatcher(table, len(held)), held, x_TD, *routing)
        assert_same_bits(local, reference)


@pytest.mark.parametrize("kind", [LocalDispatcher, ReferenceDispatcher])
def test_all_tokens_to_one_expert_in_a_moved_slot(kind: type) -> None:
    """Experts in reverse slots with an empty one between: the table, not the id, finds the weights."""
    held = (3, None, 2, 1, 0)
    placement = Placement.of_ranks(4, [held])
    x_TD = torch.randn(130, 8)
    routing = one_expert_routing(130, 2)
    out_TD = run_rank(kind(placement.slot_table(0, "cpu"), 5), held, x_TD, *routing)
    assert_same_bits(out_TD, x_TD * 3.0)


def test_reference_rows_by_hand() -> None:
    """Rows grouped by slot, then token, then k: tokens 0, 1 to slot 0; token 0 to slot 1; expert 2 lives elsewhere."""
    x_TD = torch.tensor([[10.0], [20.0]])
    ids = torch.tensor([[1, 0], [2, 0]], dtype=torch.int32)
    slots = torch.tensor([0, 1, -1], dtype=torch.int32)
    inputs = ReferenceDispatcher(slots, 2).dispatch(x_TD, ids, torch.ones(2, 2))
    assert inputs.rows_XD[:, 0].tolist() == [10.0, 20.0, 10.0]
    assert inputs.offsets_S1.tolist() == [0, 2, 3]
    assert inputs.handle.rows == [[2, 0], [None, 1]]


def test_bf16_rows_are_rounded_before_they_are_weighted_and_summed_in_routing_order() -> None:
    """Same bits for any placement: the sum goes k = 0..K-1 in fp32 with one cast, wherever the rows lie."""
    torch.manual_seed(0)
    x_TD = torch.randn(40, 16, dtype=torch.bfloat16)
    routing = skewed_routing(40, 8, 4, seed=1)
    plain, moved = tuple(range(8)), (5, 1, 7, 0, 2, 6, 3, 4)
    results = []
    for held in (plain, moved):
        table = Placement.of_ranks(8, [held]).slot_table(0, "cpu")
        results.append(run_rank(LocalDispatcher(table, 8), held, x_TD, *routing))
    assert_same_bits(*results)
    assert_same_bits(
        results[0],
        run_rank(ReferenceDispatcher(Placement.contiguous(8, 1).slot_table(0, "cpu"), 8), plain, x_TD, *routing),
    )


def test_what_the_local_dispatcher_declares() -> None:
    """Static rows: the bound is T * K whatever the routing, and the rows themselves are not copied."""
    dispatcher: Dispatcher = LocalDispatcher(Placement.contiguous(8, 1).slot_table(0, "cpu"), 8)
    assert dispatcher.graph_safe and dispatcher.row_cap is None
    x_TD = torch.randn(5, 4)
    for routing in (skewed_routing(5, 8, 2), skewed_routing(5, 8, 2, exponent=9.0)):
        inputs = dispatcher.dispatch(x_TD, *routing)
        assert inputs.num_rows == 10
        assert inputs.rows_XD.data_ptr() == x_TD.data_ptr()
