"""Time short pieces of device work by replaying CUDA graphs, several variants interleaved in one run.

Knows callables and clocks; knows nothing of what they compute. A variant is a rotation: calls with the same shapes and
different operands, captured one after another into one graph, so that no operand is still in the L2 cache when its turn
comes again. A sample is the time of one replay over the number of calls. On a CPU the calls are simply made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

L2_BYTES = 240 << 20  # a rotation must read this much before it comes round: four times the L2 of an H200


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: a sample for each replay."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def rotation_length(bytes_per_call: float, *, least: int = 4, most: int = 16) -> int:
    """Calls in a rotation: as many as read L2_BYTES together, within bounds."""
    return max(least, min(most, -(-L2_BYTES // max(int(bytes_per_call), 1))))


class Replay:
    """A rotation, compiled, captured and ready. On a GPU it owns the graph and the memory of its results."""

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        assert calls, "an empty rotation"
        self.calls = tuple(calls)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            self.calls[0]()
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for call in self.calls:  # compiles: nothing may be loaded while a graph is captured
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in self.calls:
                call()

    def run(self) -> None:
        """All calls once."""
        if self.graph is not None:
            self.graph.replay()
            return
        for call in self.calls:
            call()


def time_variants(
    variants: Mapping[str, Sequence[Call]], device: torch.device, *, seconds: float = 0.2, most: int = 40
) -> dict[str, Timing]:
    """A timing for each variant. `seconds` of device time are shared by all; each gets 3 to `most` samples.

    The variants take turns, so that a change of clocks meets all of them.
    """
    with torch.inference_mode():
        replays = {name: Replay(calls, device) for name, calls in variants.items()}
        first = _rounds(replays, device, 2)
        per_round = sum(times[-1] for times in first.values())
        rounds = max(3, min(most, int(seconds / max(per_round, 1e-9))))
        samples = _rounds(replays, device, rounds)
    return {
        name: Timing(tuple(seconds / len(replay.calls) for seconds in samples[name]))
        for name, replay in replays.items()
    }


def _rounds(replays: Mapping[str, Replay], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of each replay. On a GPU nothing waits in between: the next replay is queued while this one runs."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    if device.type != "cuda":
        for _ in range(rounds):
            for name, replay in replays.items():
                started = time.perf_counter()
                replay.run()
                times[name].append(time.perf_counter() - started)
        return times
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(rounds):
        for name, replay in replays.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay.run()
            end.record()
            marks.append((name, begin, end))
    torch.cuda.synchronize(device)
    for name, begin, end in marks:
        times[name].append(begin.elapsed_time(end) / 1e3)
    return times
