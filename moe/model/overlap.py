"""What runs beside what in a step of several ranks: shared experts beside rows that travel, one half beside the other.

Knows streams, stages and when it pays; knows nothing of what a stage computes. Nothing here changes a bit of a result:
the same kernels run on the same rows, in another order. On the CPU there are no streams: the order is all that changes.

A layer has four stages: attention and router, dispatch, experts, combine. Of two halves of a step's rows, one is always
half a layer ahead, so that the network's stages of one lie beside the other's arithmetic:

    first half    attention  dispatch |          experts           combine | attention          dispatch           ...
    second half                       | attention         dispatch         |           experts           combine   ...

All ranks launch in this order: a rank decides from what all of them know (the most rows of any rank), and one without
rows runs the same stages with none. Attentions follow each other also on the device: the second half may hold the later
part of a prompt whose earlier part is in the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from configs.schema import ParallelConfig

HALVES_FROM_ROWS = 8192
"""Rows of the fullest rank from which parallel.overlap=halves splits a step, unless parallel.overlap_rows says another
number. Measured on two H200s over one_sided, where splitting never paid, so `auto` never splits. The time of a step in
halves over that of a whole one, 6 layers, the same rows on both ranks:

    rows     qwen3, fast   qwen3, exact   dsv2-lite, fast   dsv2-lite, exact
    1024         1.40          3.33            1.32               -
    2048         1.23          6.99            1.11              1.05
    4096         1.13          2.35            1.05              1.00
    8192         1.10          1.05            1.08              1.07
    16384        1.12          1.06            1.10              1.09

From the parts' own times, N(T) of the network less 2 X(T / 2) - X(T) of products made in two, a gain from 8,192 rows on
had been reckoned: the launches that move rows and those that multiply take multiprocessors from each other, and with
exact sums few rows wait for a launch that has no room. A network several times slower than NVLink may turn this round,
for which the way stays."""

T = TypeVar("T")
Stages = Generator[None, None, Tensor]
"""Runs one stage after another, each up to a `yield`: four for each layer. Returns the rows after the last."""


class Overlap(NamedTuple):
    """What may run beside what. `shared`: shared experts, beside the router, rows that travel and routed experts;
    `decoding`: in steps without prompts alone. `halves_from`: the rows of the fullest rank from which a step is split;
    None: never."""

    shared: bool = False
    halves_from: int | None = None
    decoding: bool = False

    def shared_in(self, *, prompts: bool) -> bool:
        """Whether shared experts go beside in a step with prompts, or without."""
        return self.shared and not (self.decoding and prompts)

    def rounds_open(self, num_rows: int) -> int:
        """How many dispatches of a step of so many rows may be on their way at a time: one of each half."""
        return 1 if self.halves_from is None or num_rows < self.halves_from else 2

    def __str__(self) -> str:
        halves = f"steps from {self.halves_from} rows in halves" if self.halves_from is not None else ""
        shared = "shared experts beside routed ones" if self.shared else ""
        shared += " in steps of decoding rows alone" if shared and self.decoding else ""
        return " and ".join(each for each in (shared, halves) if each) or "nothing"


NO_OVERLAP = Overlap()


def choose_overlap(parallel: ParallelConfig, num_ranks: int, device: torch.device) -> Overlap:
    """Of `parallel.overlap`. With one rank nothing travels, so nothing is split; on the CPU there is no second stream
    for shared experts.

    Shared experts go beside however few rows there are: in a graph fork and join took 0.4 to 1.5 us up to 64 rows. us a
    layer on one H200, in turn | beside, for 1, 64 and 4,096 rows, with a kernel that only waits, as long as one_sided's
    dispatch of these takes, in its place: dsv3 47.2 | 33.2, 59.9 | 43.0, 740 | 643; dsv2-lite 34.4 | 19.6, 36.8 | 21.5,
    288 | 228. The router, whose launches mostly wait, has them beside it too, with one rank in steps of decoding rows;
    whole layers of dsv2-lite in graphs, in turn | beside, for 1, 8, 64 and 256 rows: 100.5 | 91.3, 220.3 | 210.5,
    365.8 | 353.9, 436.6 | 422.3. Beside prompts it has not been measured. Of few tokens on one rank they come along in
    the launch of the others where that can be (kernels/experts_few.py), and so beside nothing.
    """
    if parallel.overlap == "none":
        return Overlap()
    if num_ranks == 1:
        return Overlap(shared=True, decoding=True) if device.type == "cuda" else Overlap()
    halves_from = None
    if parallel.overlap == "halves":
        halves_from = parallel.overlap_rows or HALVES_FROM_ROWS
    return Overlap(device.type == "cuda", halves_from)


class SideStream:
    """A second stream of a GPU; on the CPU the only one there is. Inside a CUDA graph a fork is a branch of it.

    Tensors made on either stream may be read on the other between `fork` and `join`; their memory is used again only
    behind the next fork or join, if whoever made them holds them until the join.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fork(self) -> None:
        """What is launched on the side from here on comes after what was launched before."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Launch on the side."""
        with torch.cuda.stream(self.stream):  # None changes nothing
            yield

    def join(self) -> None:
        """What is launched from here on comes after everything on the side."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def run_through(stages: Generator[None, None, T]) -> T:
    """All stages, one after another."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


def run_halves(first: Stages, second: Stages, num_layers: int, side: SideStream) -> tuple[Tensor, Tensor]:
    """Both halves in turns, as drawn above: the first on the current stream, the second on the side."""
    turns = _Turns(side)
    front, back = turns.of(first), turns.of(second, on_side=True)
    side.fork()
    front(attends=True)
    front()
    for _ in range(2 * num_layers - 1):
        front, back = back, front
        front(attends=True)
        back()
        front()  # a dispatch that waits for its counts comes when the other's experts keep the device busy
        back()
    front()
    front()
    # Only their ends are left: nothing is launched any more.
    ends = run_through(first), run_through(second)
    side.join()
    return ends


class _Turns:
    """Lets one stage run at a time, on the stream of its half."""

    def __init__(self, side: SideStream) -> None:
        self.side = side
        self.attended: torch.cuda.Event | None = None  # the last attention, of either half

    def of(self, stages: Stages, *, on_side: bool = False) -> Callable[..., None]:
        def advance(*, attends: bool = False) -> None:
            with self.side.use() if on_side else contextlib.nullcontext():
                if attends and self.attended is not None:
                    self.attended.wait()
                next(stages)
                if attends and self.side.stream is not None:
                    self.attended = attended = torch.cuda.Event()
                    attended.record()

        return advance
