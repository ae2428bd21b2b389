"""How many experts are held: by hand, and by properties over many sizes."""

from __future__ import annotations

import random

import pytest

from expert_parallel.offload_plan import (
    STAGING_BYTES,
    OffloadPlan,
    Room,
    choose_held,
    held_bytes,
    held_within,
    staging_slots,
)

MIB, GIB = 1 << 20, 1 << 30


def plan(**changed: object) -> OffloadPlan:
    values = {"regime": "auto", "num_slots": 128, "num_held": 48 * 32, "staging_slots": 7, "num_layers": 48}
    return OffloadPlan(**(values | {"bundle_bytes": 9 * MIB, "tier": "host", "host_bytes": 54 * GIB} | changed))  # pyright: ignore


def test_bytes_by_hand() -> None:
    """48 layers of 32 held experts of 9 MiB are 13.5 GiB, two buffers of 7 are 126 MiB; 96 a layer pass: 40.5 GiB."""
    one = plan()
    assert one.gpu_bytes == 13.5 * GIB + 126 * MIB and one.streamed_bytes == 40.5 * GIB
    assert held_bytes(128, 48 * 32, 48, 9 * MIB) == one.gpu_bytes and one.held_share == 0.25
    assert held_bytes(128, 48 * 128, 48, 9 * MIB) == 54 * GIB  # nothing passes, so there are no buffers
    words = one.words()
    assert (
        "in host memory (auto): the GPU holds 32 of 128 in each of 48 layers" in words and "13.623 GiB there" in words
    )
    assert plan(tier="disk").words().startswith("experts on disk, behind host memory (auto)")
    with pytest.raises(AssertionError, match="6144 of 6144 slots are held"):
        plan(num_held=48 * 128)


def test_layers_hold_equal_numbers_and_those_with_one_more_lie_evenly() -> None:
    """45 bundles of 336 MiB in 32 layers: 13 of them hold two, of which at most two lie beside each other."""
    mixtral = plan(num_slots=8, num_held=45, staging_slots=1, num_layers=32, bundle_bytes=336 * MIB)
    assert mixtral.held_words() == "1 or 2 of 8 in each of 32 layers, 45 in all"
    assert mixtral.gpu_bytes == 47 * 336 * MIB and mixtral.streamed_bytes == (256 - 45) * 336 * MIB
    for held, layers in ((45, 32), (33, 32), (63, 32), (31, 32), (1060, 48), (7, 2), (0, 3)):
        one = plan(num_held=held, num_layers=layers)
        counts = [one.held_in(at) for at in range(layers)]
        assert sum(counts) == held and set(counts) <= {held // layers, -(-held // layers)}
        for first in range(layers):  # any layers in a row hold their share, to a slot
            for number in range(1, layers - first + 1):
                assert abs(sum(counts[first : first + number]) - number * held / layers) < 1


def test_which_calls_stream() -> None:
    """From six rows for each of 128 slots on, wherever those are."""
    assert [plan().streams(rows) for rows in (1, 767, 768)] == [False, False, True]
    for by_host in (plan(tier="disk"), plan(num_held=0), plan(num_held=47)):  # 47: a layer without a place
        assert [by_host.streams(rows) for rows in (127, 128)] == [False, True]
    assert [plan(num_slots=8, num_held=48, staging_slots=1).streams(rows) for rows in (47, 48)] == [False, True]
    assert plan(regime="stream").streams(1) and not plan(regime="cache").streams(10_000)


@pytest.mark.parametrize(
    ("passing", "bundle", "slots"),
    [
        (96, 9 * MIB, 7),  # 7.1 go into 64 MiB: 13 chunks of 7 and one of 5
        (7, 336 * MIB, 1),  # a bundle that is larger than a buffer should be
        (3, 1024, 3),  # everything in one chunk
        (8, 9 * MIB, 4),  # two chunks of 4, not 7 and 1
    ],
)
def test_buffers_are_cut_evenly(passing: int, bundle: int, slots: int) -> None:
    assert staging_slots(passing, bundle) == slots


def test_all_experts_stay_where_the_cache_still_has_a_share() -> None:
    """54 GiB of experts, sequences of 60 MiB: an eightieth of 56 GiB and one sequence are 0.77 GiB; below, the cache
    gets what 512 sequences want, and experts what is left."""
    wanted = 512 * 60 * MIB

    def held(gib: float) -> int | None:
        return choose_held(128, 48, 9 * MIB, Room(int(gib * GIB), int(gib * GIB), wanted, 60 * MIB))

    assert held(54.8) == held(200) == 48 * 128
    assert held(54.7) == (54.7 * GIB - wanted - 126 * MIB) // (9 * MIB) == 2796
    assert held(30) == 0  # the cache gets less than it wants
    assert held(0.1) is None  # not even the buffers
    small = Room(54 * GIB + 60 * MIB, 54 * GIB + 60 * MIB, 60 * MIB, 60 * MIB)
    assert choose_held(128, 48, 9 * MIB, small) == 48 * 128  # one sequence wants no more
    captured = Room(small.shared, 54 * GIB, 60 * MIB, 60 * MIB)
    assert choose_held(128, 48, 9 * MIB, captured) != 48 * 128  # graphs take what its cache needs


def test_what_is_chosen_fits_and_leaves_nothing_over() -> None:
    draw = random.Random(5)
    for _ in range(300):
        slots, layers, bundle = draw.randint(1, 256), draw.randint(1, 61), draw.randint(1, 400) * MIB
        everything = slots * layers * bundle
        shared = int(everything * draw.uniform(0.05, 1.3)) + draw.randint(0, GIB)
        least = draw.randint(1, 200) * MIB
        room = Room(shared, shared, least * draw.randint(1, 1024), least)
        held = choose_held(slots, layers, bundle, room)
        if held is None:
            assert held_bytes(slots, 0, layers, bundle) + least > shared
        elif held == slots * layers:
            assert everything < shared
        else:
            taken = held_bytes(slots, held, layers, bundle)
            assert taken + (room.wanted if held else least) <= shared, "what was chosen does not fit"
            assert held + 1 == slots * layers or held_bytes(slots, held + 1, layers, bundle) + room.wanted > shared
            if 0 < held < slots * layers - 1:  # buffers of a layer that passes one less may be larger
                assert shared - room.wanted - taken < bundle + 2 * STAGING_BYTES
        more = Room(shared + GIB, shared + GIB, room.wanted, least)
        assert (choose_held(slots, layers, bundle, more) or 0) >= (held or 0), "more memory holds fewer"


def test_a_budget_of_bytes_is_filled() -> None:
    draw = random.Random(6)
    for _ in range(200):
        slots, layers, bundle = draw.randint(1, 256), draw.randint(1, 61), draw.randint(1, 400) * MIB
        budget = draw.randint(0, slots * layers * bundle * 5 // 4)
        held = held_within(slots, layers, bundle, budget)
        if held is None:
            assert held_bytes(slots, 0, layers, bundle) > budget
            continue
        assert held_bytes(slots, held, layers, bundle) <= budget
        every_slot = slots * layers
        assert held in (every_slot, every_slot - 1) or held_bytes(slots, held + 1, layers, bundle) > budget
    assert 2 * staging_slots(128, 9 * MIB) * 9 * MIB <= 2 * STAGING_BYTES
