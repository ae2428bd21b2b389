"""Which slot is in which place, which come ahead: kernels against the definition, and what always must hold of it."""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.slot_guesses import _guess_ahead_kernel, guess_ahead, guess_ahead_reference, guess_ahead_triton
from kernels.slot_places import _place_slots_kernel, place_slots, place_slots_reference, place_slots_triton
from kernels.slot_tables import COUNTS, HEADER, STAMPS, TIMES, Places, numbers_length
from tests.aot import ARCHS, aot, compile_ahead

RUNS = [
    pytest.param((place_slots_triton, guess_ahead_triton), "cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param((place_slots, guess_ahead), "cuda", marks=pytest.mark.gpu, id="gpu"),
]
PIECES = 3


def make(num_slots: int, num_places: int, device: str = "cpu", held: int = 0) -> Places:
    """The first slots in the first places; slot s is of expert s + 1, in row 2 s; memory after the tables is wild."""
    size = numbers_length(num_slots, num_places)
    numbers = torch.full((size + 64,), 123_456, dtype=torch.int32, device=device)[:size]
    numbers.zero_()
    shares_S1 = torch.zeros(num_slots + 1, device=device)
    shares_S1[-1] = 1.0
    counts = torch.zeros(len(COUNTS) + len(TIMES) + len(STAMPS), dtype=torch.int64, device=device)
    places = Places(numbers, shares_S1, counts, num_slots, num_places)
    for name in ("slot_at", "place_of"):
        places.part(name).fill_(-1)
        places.part(name)[:held] = torch.arange(held)
    places.part("row_of").copy_(torch.arange(num_slots) * 2)
    places.part("expert_of").copy_(torch.arange(num_slots) + 1)
    return places


def offsets_of(rows: list[int], num_slots: int, device: str = "cpu") -> torch.Tensor:
    """One row for each of these slots."""
    counts = torch.bincount(torch.tensor(rows, dtype=torch.int64), minlength=num_slots)
    return torch.cat([torch.zeros(1), counts.cumsum(0)]).to(device, torch.int32)


def copy_to(places: Places, device: str) -> Places:
    return replace(
        places,
        numbers=places.numbers.to(device).clone(),
        shares_S1=places.shares_S1.to(device).clone(),
        counts=places.counts.to(device).clone(),
    )


def counted(places: Places) -> dict[str, int]:
    return dict(zip(COUNTS, places.counts.tolist()))


def come(places: Places, generator: torch.Generator) -> None:
    """Some guesses are copied: a part of each that has begun, of others all."""
    num = int(places.numbers[1])
    pieces = torch.randint(0, PIECES + 1, (num,), generator=generator).to(places.numbers)
    state = places.part("ahead_state")[:num]
    state.copy_(torch.maximum(state, (pieces > 0).to(state)))
    places.part("ahead_pieces")[:num] = pieces


@pytest.mark.parametrize(
    ("num_slots", "num_places", "most"),
    [(8, 3, 3), (8, 1, 4), (60, 17, 24), (5, 4, 5)],
)
@pytest.mark.parametrize(("run", "device"), RUNS)
def test_kernels_decide_as_the_definition(run, device, num_slots, num_places, most):
    """Steps of a skewed choice, guesses half of which are right, more slots than places now and then."""
    generator = torch.Generator().manual_seed(num_slots)
    theirs = make(num_slots, num_places, held=min(2, num_places))
    weights = 1.0 / torch.arange(1, num_slots + 1)
    for step in range(40 if device == "cuda" else 6):
        rows = torch.multinomial(weights, min(most, num_slots), generator=generator).tolist()
        ours = copy_to(theirs, device)
        if step % 3:
            other = torch.randint(-1, num_slots + 1, (2, 3), generator=generator)
            ids = torch.tensor(rows[:3] + other.flatten().tolist()[:3], dtype=torch.int32).view(2, 3) + 1
            last = None if step % 2 else torch.tensor([1 + step % 4 // 2], dtype=torch.int32)
            run[1](ours, ids.to(device), None if last is None else last.to(device))
            guess_ahead_reference(theirs, ids, last)
            assert_same(ours, theirs)
            come(theirs, generator)
            ours = copy_to(theirs, device)
        offsets_S1 = offsets_of(rows, num_slots)
        for number in range(-(-len(rows) // num_places)):
            run[0](ours, offsets_S1.to(device), pieces=PIECES, first=number == 0)
            place_slots_reference(theirs, offsets_S1, pieces=PIECES, first=number == 0)
            assert_same(ours, theirs)
            ours = copy_to(theirs, device)


def assert_same(ours: Places, theirs: Places) -> None:
    """Lists count up to their length; a sum may be contracted on a GPU."""
    num_fetched, num_ahead = theirs.numbers[:2].tolist()
    assert ours.numbers[:3].tolist() == theirs.numbers[:3].tolist()
    lengths = {"fetch_row": num_fetched, "fetch_place": num_fetched}
    lengths |= {f"ahead_{name}": num_ahead for name in ("slot", "place", "former", "row", "state", "pieces")}
    for name in ("slot_at", "place_of", "waiting", "guessed", "ranges", *lengths):
        mine, wanted = (each.part(name)[: lengths.get(name)].cpu() for each in (ours, theirs))
        assert torch.equal(mine, wanted), f"{name} is {mine.tolist()}, wanted {wanted.tolist()}"
    torch.testing.assert_close(ours.shares_S1.cpu(), theirs.shares_S1, rtol=1e-6, atol=1e-7)
    assert counted(ours) == counted(theirs)


def test_every_slot_with_rows_has_its_turn_once():
    """More slots than places come in rounds, each with the rows of slots that are in its places by then."""
    generator = torch.Generator().manual_seed(26)
    for _ in range(200):
        num_slots = int(torch.randint(2, 12, (1,), generator=generator))
        num_places = int(torch.randint(1, num_slots, (1,), generator=generator))
        places = make(num_slots, num_places, held=int(torch.randint(0, num_places + 1, (1,), generator=generator)))
        at = places.part("slot_at")
        for step in range(6):
            rows = torch.randint(0, num_slots, (1 + step,), generator=generator).tolist()
            if step % 2:
                guess_ahead_reference(places, torch.tensor([[*rows[:2], num_slots + 5]], dtype=torch.int32), None)
                come(places, generator)
            offsets_S1 = offsets_of(rows, num_slots)
            ends, seen = offsets_S1.tolist(), []
            for number in range(-(-min(num_slots, len(rows)) // num_places)):
                place_slots_reference(places, offsets_S1, pieces=PIECES, first=number == 0)
                for place, (start, end) in enumerate(places.part("ranges").tolist()):
                    if start < end:
                        assert (start, end) == (ends[at[place]], ends[at[place] + 1])
                        seen.append(int(at[place]))
            assert sorted(seen) == sorted(set(rows)) and not places.part("waiting").any()
            for slot, place in enumerate(places.part("place_of").tolist()):
                assert place < 0 or int(at[place]) == slot
            assert sum(place >= 0 for place in places.part("place_of").tolist()) == int((at >= 0).sum())


def test_misses_take_empty_places_then_those_least_asked_for():
    """Slots 0 to 2 held; 0 and 2 are asked for, then 2 alone: 5 comes for 1, which never was, and 4 for 0."""
    places = make(6, 3, held=3)
    for rows in ([0, 2], [2], [2, 5], [2, 4]):
        place_slots_reference(places, offsets_of(rows, 6), pieces=PIECES, first=True)
    assert places.part("slot_at").tolist() == [4, 5, 2] or places.part("slot_at").tolist() == [0, 4, 2]
    assert counted(places) | {"hits": 5, "misses": 2, "fetched": 2} == counted(places)
    assert places.part("fetch_row")[0] == 8  # row 2 s
    f = 0.98**3 * 0.02 + 0.0
    torch.testing.assert_close(places.shares_S1[0], torch.tensor(f))


def test_guesses_are_judged():
    """Four guesses: one is asked for, one came whole, one half, one never began. The last gives its place back."""
    places = make(12, 5, held=5)
    ids = torch.tensor([[8, 9, 10, 11]], dtype=torch.int32)  # slots 7 to 10
    guess_ahead_reference(places, ids, None)
    assert places.part("slot_at").tolist() == [7, 8, 9, 10, 4]
    assert places.part("ahead_former")[:4].tolist() == [0, 1, 2, 3]
    places.part("ahead_state")[:3], places.part("ahead_pieces")[:3] = 1, torch.tensor([1, PIECES, 1])
    place_slots_reference(places, offsets_of([7, 4], 12), pieces=PIECES, first=True)
    assert places.part("slot_at").tolist() == [7, 8, -1, 3, 4]
    assert places.part("place_of").tolist() == [-1, -1, -1, 3, 4, -1, -1, 0, 1, -1, -1, -1]
    assert places.part("ahead_state")[:4].tolist() == [1, 2, 2, 2]
    expected = {"hits": 2, "misses": 0, "fetched_and_used": 1, "fetched_in_vain": 2, "ahead": 2, "guessed": 4}
    assert counted(places) | expected == counted(places)
    assert places.shares_S1[-1] == pytest.approx(0.98 + 0.02 / 4)


def test_a_guess_that_is_always_wrong_is_soon_not_followed():
    places, followed = make(4, 2), 0
    for _ in range(60):
        guess_ahead_reference(places, torch.tensor([[4]], dtype=torch.int32), None)
        followed += int(places.part("place_of")[3]) >= 0
        place_slots_reference(places, offsets_of([1], 4), pieces=PIECES, first=True)
    assert 20 < followed < 50


@pytest.mark.gpu
def test_times_add_up():
    """Of stamps by hand: 30 on the way before the call, 50 in it after a gap of 3; 20 computed since the guess."""
    places = make(8, 3, "cuda", held=3)
    stamps = torch.tensor([1000, 1013, 1063, 980, 981, 1010])
    places.counts[-6:] = stamps.to("cuda")
    place_slots(places, offsets_of([1], 8, "cuda"), pieces=PIECES, first=True)
    times = dict(zip(TIMES, places.counts[len(COUNTS) :].tolist()))
    ahead, own = 1010 - 981, 50
    assert times["busy"] == ahead + own
    assert times["stall"] == (1010 - 1000) + (1063 - 1010)
    assert times["due"] == (ahead - 20) + own
    assert (times["first"], times["last"]) == (981, 1063)
    left = places.counts[-6:].tolist()
    assert left[0] > 10**6 and left[1:] == [0] * 5  # the clock, of this call


@aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sizes", [(128, 32, 128, 32), (8, 1, 16, 16)])
def test_compiles(arch, sizes):
    S, G, block_s, block_g = sizes
    tables: dict[str, object] = {"numbers_ptr": "*i32", "shares_ptr": "*fp32", "counts_ptr": "*i64"}
    tables |= {"S": S, "G": G, "BLOCK_S": block_s, "BLOCK_G": block_g, "TIMED": True}
    for first in (True, False):
        args = tables | {"offsets_ptr": "*i32", "pieces": "i32", "FIRST": first}
        assert compile_ahead(_place_slots_kernel, arch, args, aligned=False)
    for last in ("*i32", None):
        args = tables | {"ids_ptr": "*i32", "last_ptr": last, "num_ids": "i32", "TOP_K": 8}
        assert compile_ahead(_guess_ahead_kernel, arch, args, aligned=False)


def test_parts_lie_side_by_side():
    """Every number of the tables belongs to one part."""
    places = make(5, 3)
    places.numbers.zero_()
    names = ("slot_at", "ahead_slot", "ahead_place", "ahead_former", "ahead_row", "ahead_state", "ahead_pieces")
    names += ("fetch_row", "fetch_place", "ranges", "place_of", "waiting", "guessed", "row_of", "expert_of")
    for name in names:
        places.part(name).add_(1)
    assert places.numbers.tolist() == [0] * HEADER + [1] * (len(places.numbers) - HEADER)
    assert all(begin < end for begin, end in pairwise(places.part(name).data_ptr() for name in names))
