"""Buffers of slots, who stays in them, chunks that pass through, and guesses: with copies that are late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from expert_parallel.chunk_stream import ChunkStream
from expert_parallel.disk_source import DiskSource
from expert_parallel.held_slots import HeldSlots
from expert_parallel.offload_figures import OffloadFigures
from expert_parallel.prefetch import ExpectedUse
from expert_parallel.slot_buffer import HostSource, SlotBuffer, runs
from tests.simulated_copies import SimulatedEngine

S, LAYERS = 6, (1, 3, 4)


def bundle(layer: int) -> list[Tensor]:
    """Slot s of a layer holds layer * 100 + s in every number."""
    numbers = torch.arange(S) + layer * 100.0
    return [numbers[:, None, None].expand(S, 2, 3).contiguous(), numbers[:, None].expand(S, 4).contiguous()]


def make(num_places: int, engine: SimulatedEngine, source: HostSource | None = None) -> SlotBuffer:
    source = source or HostSource({layer: bundle(layer) for layer in LAYERS})
    return SlotBuffer([torch.zeros(num_places, 2, 3), torch.zeros(num_places, 4)], source, engine)


def contents(buffer: SlotBuffer) -> list[list[float]]:
    """The number in each place, of each tensor."""
    return [[float(each.flatten()[0]) for each in tensor] for tensor in buffer.tensors]


def test_neighbours_make_one_copy() -> None:
    assert runs([2, 3, 4, 7, 0], [0, 1, 2, 3, 4]) == [(2, 0, 3), (7, 3, 1), (0, 4, 1)]
    assert runs([2, 3], [1, 0]) == [(2, 1, 1), (3, 0, 1)]
    assert runs([], []) == []


def test_a_place_can_be_read_once_its_copy_has_landed() -> None:
    engine = SimulatedEngine(most_late=10_000, seed=1)
    buffer = make(4, engine)
    buffer.fill(3, [5, 0], [2, 0])
    assert all(torch.isnan(torch.tensor(each))[[0, 2]].all() for each in contents(buffer)) and buffer.on_its_way(2)
    buffer.ready(3, [5, 0], [2, 0])
    assert contents(buffer) == [[300.0, 0.0, 305.0, 0.0]] * 2 and not buffer.on_its_way(2)
    assert engine.figures().num_bytes == 2 * (6 + 4) * 4


def test_another_slot_than_the_tag_says_is_never_read() -> None:
    buffer = make(4, SimulatedEngine())
    buffer.fill(3, [5], [2])
    for layer, slot, place in ((3, 4, 2), (1, 5, 2), (3, 5, 1)):
        with pytest.raises(AssertionError, match=f"a product wants slot {slot} of layer {layer}"):
            buffer.ready(layer, [slot], [place])
    buffer.forget([2])
    with pytest.raises(AssertionError, match="place 2 holds None"):
        buffer.ready(3, [5], [2])


def test_a_product_that_did_not_wait_is_noticed() -> None:
    buffer = make(2, SimulatedEngine())
    buffer.fill(1, [0], [0])
    with pytest.raises(AssertionError, match="read before its copy was waited for"):
        buffer.read([0])


def test_weights_that_are_read_are_not_overwritten() -> None:
    """The engine notices a copy that does not wait, and the buffer's copies do."""
    engine = SimulatedEngine(most_late=10_000, seed=1)
    buffer = make(2, engine)
    buffer.fill(1, [0, 1], [0, 1])
    buffer.ready(1, [0, 1], [0, 1])
    buffer.read([0, 1])
    with pytest.raises(AssertionError, match="overwrites weights that products still read"):
        engine.copy([buffer.tensors[1][1:2]], [torch.zeros(1, 4)])
    buffer.fill(1, [4], [1])
    assert engine.num_held_up == 1


def test_slots_give_way_by_how_likely_they_are_asked_for() -> None:
    held = HeldSlots(1, make(3, SimulatedEngine()), S)
    held.fetch([0, 1, 2], [0, 1, 2])
    assert held.passing() == [3, 4, 5]
    for needed in ([0, 2], [2], [2, 5]):
        hits, misses = held.ask(needed)
        assert (hits, misses) == ([slot for slot in needed if slot < 3], [slot for slot in needed if slot >= 3])
    assert held.places_for(9, keep=[2]) == [1, 0]  # 0 was used once, 1 never
    held.fetch([5], [1])
    assert held.passing() == [1, 3, 4] and held.slots == [0, 5, 2]
    held.forget([2, 4])
    assert held.slots == [0, 5, None] and held.places_for(2, keep=[]) == [2, 0]
    assert (held.figures.hits, held.figures.misses) == (4, 1)


def test_what_a_router_guesses_is_fetched_ahead_and_judged() -> None:
    held = HeldSlots(1, make(3, SimulatedEngine()), S)
    held.fetch([0, 1, 2], [0, 1, 2])
    held.look_ahead([1, 4, 5])
    assert sorted(slot for slot in held.slots if slot is not None) == [1, 4, 5]
    assert held.ask([1, 4]) == ([1, 4], [])
    figures = held.figures
    assert (figures.fetched_and_used, figures.fetched_in_vain) == (1, 1)
    assert (figures.guessed, figures.guessed_right) == (3, 2)
    held.look_ahead([0])
    held.fetch([3], [held.place_of[0]])  # gives it up before it was asked for
    assert figures.fetched_in_vain == 2


def test_expected_use_blends_guesses_and_shares() -> None:
    """A guess that is always wrong is soon not followed any more; a slot that is always used is wanted without one."""
    use = ExpectedUse(4)
    use.expect([3])
    assert use.wanted() == [3] and use.expected(3) == 1.0 and use.expected(0) == 0.0
    followed = 0
    for _ in range(60):
        use.expect([3])
        followed += 3 in use.wanted()
        use.see([1])
    assert 20 < followed < 50
    use.expect([2, 3])
    a, f = use.trust, use.share[1]
    assert use.expected(1) == pytest.approx((1 - a) * f) and use.expected(2) == pytest.approx(a)
    use.see([2])
    assert use.wanted() == [1]


def test_chunks_pass_in_a_cycle_copied_ahead() -> None:
    """Layer 3 holds all but one slot, layer 4 all: so the cycle is 1, 1, 3, 1, 1, 3, ... with one copy a chunk."""
    engine = SimulatedEngine()
    source = HostSource({layer: bundle(layer) for layer in LAYERS})
    passing = {1: [0, 2, 3], 3: [5], 4: []}
    stream = ChunkStream(LAYERS, (make(2, engine, source), make(2, engine, source)), lambda layer: passing[layer])
    for _ in range(4):
        for layer in LAYERS:
            seen = []
            for buffer, slots in stream.chunks(layer):
                seen += slots
                expected = [100.0 * layer + slot for slot in slots]
                assert [each[: len(slots)] for each in contents(buffer)] == [expected] * 2
            assert seen == passing[layer]
    assert engine.figures().num_copies == 4 * 3 + 2  # two are ahead
    del passing[1][1]  # what was copied ahead of it is given up
    for layer in (1, 3, 3, 1):
        assert [slot for _, slots in stream.chunks(layer) for slot in slots] == passing[layer]


def test_a_row_of_the_bounded_part_stays_until_its_copy_has_landed() -> None:
    """Seven bundles of eighteen have room; copies are so late that every row is waited for before it is read anew."""
    engine = SimulatedEngine(most_late=10_000, seed=3)
    asked: list[tuple[int, int]] = []

    def read(layer: int, expert: int, rows: Sequence[Tensor]) -> None:
        asked.append((layer, expert))
        for row in rows:
            row.fill_(layer * 100.0 + expert)

    experts = {layer: tuple(reversed(range(S))) for layer in LAYERS}
    source = DiskSource([torch.zeros(7, 2, 3), torch.zeros(7, 4)], experts, read, engine)
    buffer = SlotBuffer([torch.zeros(18, 2, 3), torch.zeros(18, 4)], source, engine)
    for number, layer in enumerate(LAYERS):
        for half in (0, 3):
            buffer.fill(layer, range(half, half + 3), range(number * 6 + half, number * 6 + half + 3))
    engine.drain()
    expected = [layer * 100.0 + expert for layer in LAYERS for expert in experts[layer]]
    assert contents(buffer) == [expected] * 2
    assert len(asked) == source.reads == 18 and source.found == 0
    rows = source.find(4, [5])[1]  # the newest are there still
    source.place(4, tuple(range(S)))  # expert 0 comes from slot 5 to slot 0
    assert source.find(4, [0])[1] == rows and source.reads == 18 and source.found == 2


def test_figures_of_ranks_add_up_and_are_told() -> None:
    one = OffloadFigures()
    one.slots.hits, one.slots.misses, one.slots.fetched_in_vain = 6, 2, 1
    one.copies.num_bytes, one.copies.busy_seconds, one.copies.span_seconds = 10**10, 0.25, 0.5
    whole = OffloadFigures.together([one, one])
    found = whole.as_dict()
    assert (found["hits"], found["hit_rate"], found["num_bytes"], found["gb_per_second"]) == (12, 0.75, 2 * 10**10, 40)
    rows = dict(whole.rows())
    assert rows["experts copied to the GPU"] == "20.0 GB at 40.0 GB/s, 50% of the time"
    assert rows["experts found on the GPU"] == "75.0% (0 fetched ahead, 2 in vain)"
    assert "experts found on the GPU" not in dict(OffloadFigures().rows())
