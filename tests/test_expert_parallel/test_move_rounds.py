"""The order of moves, against a plain model of slots: whatever is read must still be there, in bounded memory."""

from __future__ import annotations

import random

import pytest

from expert_parallel.move_rounds import Round, move_rounds
from expert_parallel.moves import Move, moves
from expert_parallel.placement import Placement, Slot


def play(current: Placement, rounds: list[Round], most: int) -> list[list[int | None]]:
    """The slots after all rounds. Asserts what each rank may hold meanwhile, and that the right expert travels."""
    slots = [list(each) for each in current.ranks]
    aside: dict[int, int | None] = {}
    for each in rounds:
        travelling = []
        for move in each.moves:
            at = move.source
            found = aside.pop(at.rank) if move in each.from_aside else slots[at.rank][at.slot]
            assert found == move.expert, f"{move} finds expert {found}"
            travelling.append((move.target, found))
        for at in each.set_aside:
            assert at.rank not in aside, f"two experts are set aside on rank {at.rank}"
            aside[at.rank] = slots[at.rank][at.slot]
        for target, expert in travelling:
            slots[target.rank][target.slot] = expert
        for rank in range(current.num_ranks):
            assert sum(move.source.rank == rank for move in each.moves) <= most
            assert sum(move.target.rank == rank for move in each.moves) <= most
        order = [(move.source.rank, move.target.rank, move.target.slot) for move in each.moves]
        assert each.moves and order == sorted(order)
    assert not aside, "an expert was set aside for nobody"
    return slots


def check(current: Placement, wanted: Placement, most: int) -> list[Round]:
    rounds = move_rounds(moves(current, wanted), most)
    slots = play(current, rounds, most)
    for rank, held in enumerate(wanted.ranks):
        for slot, expert in enumerate(held):
            assert expert is None or slots[rank][slot] == expert, f"rank {rank} slot {slot} holds {slots[rank][slot]}"
    return rounds


def test_c25_a_swap_takes_one_round() -> None:
    now = Placement.contiguous(8, 2)
    then = Placement.of_ranks(8, [[7, 1, 2, 3], [4, 5, 6, 0]])
    (only,) = check(now, then, most=1)
    assert only.moves == [Move(0, Slot(0, 0), Slot(1, 3)), Move(7, Slot(1, 3), Slot(0, 0))]


def test_a_ring_that_fits_no_round_is_cut_open() -> None:
    """All four slots of one rank turn by one place: with one expert at a time the first is set aside."""
    now = Placement.of_ranks(4, [[0, 1, 2, 3]])
    then = Placement.of_ranks(4, [[3, 0, 1, 2]])
    rounds = check(now, then, most=1)
    assert len(rounds) == 4 and sum(len(each.set_aside) for each in rounds) == 1
    assert len(check(now, then, most=4)) == 1  # all at once: nothing is set aside
    assert not check(now, then, most=4)[0].set_aside


def test_a_slot_that_is_source_and_target_is_read_first() -> None:
    """Expert 0 goes to rank 1, where 1 was, which goes to rank 2's empty slot: a chain from its end."""
    now = Placement.of_ranks(3, [[0, 2], [1, 2], [2, None]])
    then = Placement.of_ranks(3, [[0, 2], [0, 2], [2, 1]])
    for most in (1, 2):
        check(now, then, most)


def test_rings_of_every_size_and_chains_by_chance() -> None:
    """Any placement to any other one: replicas, empty slots, ranks with no slots, one to three experts a round."""
    draw = random.Random(4)
    set_aside = 0
    for _ in range(400):
        num_experts, num_ranks = draw.randint(1, 9), draw.randint(1, 5)
        sizes = [0] * num_ranks
        for _ in range(num_experts + draw.randint(0, 4)):
            sizes[draw.randrange(num_ranks)] += 1

        def placement(num_experts: int = num_experts, sizes: tuple[int, ...] = tuple(sizes)) -> Placement:
            more = sum(sizes) - num_experts
            held: list[int | None] = [*range(num_experts), *draw.choices([None, *range(num_experts)], k=more)]
            draw.shuffle(held)
            starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
            return Placement.of_ranks(num_experts, [held[s : s + n] for s, n in zip(starts, sizes, strict=True)])

        rounds = check(placement(), placement(), draw.randint(1, 3))
        set_aside += sum(len(each.set_aside) for each in rounds)
    assert set_aside > 50, "rings that do not fit a round were hardly tried"


def test_rounds_are_few_where_ranks_are_many() -> None:
    """Every rank passes both its experts on: two rounds of one expert each, not one round a move."""
    now = Placement.contiguous(16, 8)
    then = Placement.of_ranks(16, [now.ranks[(rank + 1) % 8] for rank in range(8)])
    assert len(check(now, then, most=2)) == 1
    assert len(check(now, then, most=1)) == 2


def test_two_moves_into_one_slot_are_refused() -> None:
    twice = [Move(0, Slot(0, 0), Slot(1, 0)), Move(1, Slot(0, 1), Slot(1, 0))]
    with pytest.raises(AssertionError, match="two moves write one slot"):
        move_rounds(twice, 1)
