"""In which order experts are copied so that nothing is overwritten before it has left, in bounded memory. Pure.

Knows slots and ranks; knows no weights and no transport. In a round every rank first reads what it sends, then all
exchange, then each writes what it received. So a move that reads a slot comes no later than the one that writes it, and
in one round experts may change places. Moves that wait for each other in a ring (0 -> 1 -> 2 -> 0) and do not fit one
round are cut open: the first expert of the ring is set aside on its own rank until its turn has come.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from expert_parallel.moves import Move
from expert_parallel.placement import Slot


@dataclass
class Round:
    """What happens together: `moves` in the order of the exchange, by source rank, target rank, then target slot.

    `from_aside`: those whose expert was set aside earlier. `set_aside`: slots whose expert is kept, once all of this
    round is read and before any of it is written; one on each rank at a time.
    """

    moves: list[Move] = field(default_factory=list)
    from_aside: set[Move] = field(default_factory=set)
    set_aside: list[Slot] = field(default_factory=list)

    def fits(self, more: Sequence[Move], most: int) -> bool:
        """Whether no rank would send, and none receive, more than `most` experts."""
        together = [*self.moves, *more]
        ends = ([move.source.rank for move in together], [move.target.rank for move in together])
        return all(max(Counter(ranks).values()) <= most for ranks in ends)


def move_rounds(moves: Sequence[Move], most: int) -> list[Round]:
    """The moves of one layer in rounds of at most `most` experts sent and received by each rank, each move in the first
    round that its slots and ranks leave free. Equal input, equal output."""
    assert most >= 1, f"{most} experts a round"
    writer = {move.target: move for move in moves}
    assert len(writer) == len(moves), "two moves write one slot"
    units = _units(moves, writer)
    unit_of = {move: index for index, unit in enumerate(units) for move in unit}
    waits_for = [
        {unit_of[reader] for reader in moves if writer.get(reader.source) in unit and reader not in unit}
        for unit in units
    ]
    return _schedule(units, waits_for, most)


def _units(moves: Sequence[Move], writer: dict[Slot, Move]) -> list[list[Move]]:
    """Rings of moves, each of which reads the slot that the next one writes; all others one by one."""
    units: list[list[Move]] = []
    seen: set[Move] = set()
    in_ring: set[Move] = set()
    for start in moves:
        path: list[Move] = []
        move: Move | None = start
        while move is not None and move not in seen:
            seen.add(move)
            path.append(move)
            move = writer.get(move.source)
        if move is not None and move in path:
            ring = path[path.index(move) :]
            in_ring.update(ring)
            units.append(ring)
    return units + [[move] for move in moves if move not in in_ring]


def _schedule(units: list[list[Move]], waits_for: list[set[int]], most: int) -> list[Round]:
    """Every unit after those it waits for; of those that wait for nobody, the first in the list."""
    rounds: list[Round] = []
    first_round, aside_free = [0] * len(units), Counter[int]()
    left = [len(each) for each in waits_for]
    ready = [index for index, number in enumerate(left) if number == 0]
    heapq.heapify(ready)
    num_done = 0
    while ready:
        index = heapq.heappop(ready)
        num_done += 1
        last = _place(rounds, units[index], first_round[index], most, aside_free)
        for other, waits in enumerate(waits_for):
            if index in waits:
                first_round[other] = max(first_round[other], last)
                left[other] -= 1
                if left[other] == 0:
                    heapq.heappush(ready, other)
    assert num_done == len(units), "moves wait for each other outside of a ring"
    for each in rounds:
        each.moves.sort(key=lambda move: (move.source.rank, move.target.rank, move.target.slot))
    return rounds


def _place(rounds: list[Round], unit: list[Move], earliest: int, most: int, aside_free: Counter[int]) -> int:
    """Puts a unit into rounds from `earliest` on; the last round it takes part in."""
    if Round().fits(unit, most):
        return _add(rounds, unit, earliest, most)
    kept = unit[0]
    number = max(earliest, aside_free[kept.source.rank])
    for place, move in enumerate([*unit[1:], kept]):
        number = _add(rounds, [move], number, most)
        if place == 0:
            rounds[number].set_aside.append(kept.source)
    rounds[number].from_aside.add(kept)
    aside_free[kept.source.rank] = number
    return number


def _add(rounds: list[Round], moves: list[Move], earliest: int, most: int) -> int:
    number = earliest
    while number < len(rounds) and not rounds[number].fits(moves, most):
        number += 1
    rounds.extend(Round() for _ in range(number + 1 - len(rounds)))
    rounds[number].moves += moves
    return number
