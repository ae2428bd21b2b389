"""Rotations are long enough, every call is made, and variants take turns."""

from __future__ import annotations

import pytest
import torch

from launch.replay import L2_BYTES, Replay, rotation_length, time_variants

CPU = torch.device("cpu")


def test_rotations_read_past_the_cache() -> None:
    assert rotation_length(L2_BYTES / 6) == 6
    assert rotation_length(10 * L2_BYTES) == 4
    assert rotation_length(1.0) == 16
    assert rotation_length(0.0, most=256) == 256


def test_variants_take_turns_and_every_call_is_made() -> None:
    made: list[str] = []
    variants = {name: [lambda call=f"{name}{index}": made.append(call) for index in range(2)] for name in "ab"}
    timings = time_variants(variants, CPU, seconds=0.0)
    # One call each to warm up, two rounds to see how long one takes, three rounds measured.
    assert made[:2] == ["a0", "b0"]
    assert made[2:] == ["a0", "a1", "b0", "b1"] * 5
    assert {name: len(timing.samples) for name, timing in timings.items()} == {"a": 3, "b": 3}
    assert timings["a"].median > 0


@pytest.mark.gpu
def test_a_replay_repeats_the_work() -> None:
    device = torch.device("cuda")
    x = torch.zeros(1, device=device)
    replay = Replay([lambda: x.add_(1), lambda: x.add_(10)], device)
    before = x.item()
    replay.run()
    replay.run()
    torch.cuda.synchronize()
    assert x.item() == before + 22
    # A hundred additions of 64 MiB move 12.9 GB: at least two milliseconds on any card.
    big = torch.zeros(1 << 24, device=device)
    timing = time_variants({"add": [lambda: big.add_(1)] * 100}, device, seconds=0.05)["add"]
    assert timing.median > 2e-5
