"""ep: rows to their experts' ranks and back, by every dispatcher that can run here: `torchrun ... workload=ep`.

Knows shapes, routings and clocks; knows nothing of how rows travel. All dispatchers take turns in one run, on the same
rows. A burst is a few rounds of dispatch and combine, launched while the GPUs sleep, so that launching is not timed
(where a dispatcher waits for the device on the host, that wait is); the first round of a burst is left out, since its
dispatch waits for the slowest rank to be launched. Dispatchers fit for graphs are also replayed from one: `graph us`,
dispatch and combine together. A figure is the median of the slowest rank.

The floor of each is a plain copy of the bytes that must cross from this rank to others, to its neighbour, all ranks at
once; GB/s are those bytes over the time, also of a dispatcher that moves more.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from configs.torchrun import without_multicast
from expert_parallel.choice import DISPATCHERS, Choice, Dispatchers, dispatcher_problems, make_dispatchers
from expert_parallel.dispatcher import Dispatcher, ExpertInput
from expert_parallel.group import ExpertGroup, Ranks, RankValues, bring_up, rank_device
from expert_parallel.peer_memory import symmetric_memory
from expert_parallel.placement import Placement
from expert_parallel.replicas import ReplicaTable, most_replicas
from expert_parallel.rounds import Combine, RoundInput
from kernels.peer_layout import PeerLayout
from kernels.routing import Routing
from launch.bench_layer import LayerShape
from launch.figure import Figure
from launch.replay import Replay
from router.synthetic import skewed_routing

TOKENS = (16, 128, 1024, 4096, 16384)
SHAPES = (LayerShape("dsv3", 256, 8, 7168, 2048), LayerShape("qwen3", 128, 8, 2048, 768))
COMBINES: tuple[Combine, ...] = ("exact", "fast")
SIZES = ("even", "uneven")
NAMES = tuple(name for name in DISPATCHERS if name not in ("auto", "local"))
_ROUNDS = 6
"""Of one burst."""
_SLEEP_CYCLES = 10_000_000  # about 5 ms, in which a burst is launched
_TIMEOUT_S = 120.0


class Rows(NamedTuple):
    """What this rank brings: as many rows as every other; those that fill up have the id -1."""

    x_TD: Tensor
    routing: Routing


class Times(NamedTuple):
    """Seconds of each round."""

    dispatch: list[float]
    combine: list[float]


@dataclass(frozen=True)
class Crossing:
    """Bytes that must cross from this rank to others, there and back."""

    dispatch: int
    combine: int


def begin_ranks(device: str, timeout_s: float = _TIMEOUT_S) -> Ranks:
    """The ranks that torchrun started. ValueError where it started none."""
    if "RANK" not in os.environ:
        raise ValueError(
            "workload=ep times rows between ranks; start it with torchrun --nproc-per-node=N -m launch.bench ..."
        )
    values = RankValues.of(os.environ)
    without_multicast()
    gpu = device != "cpu" and torch.cuda.is_available()
    own = rank_device(values, "cuda" if gpu else "cpu", torch.cuda.device_count() if gpu else 0)
    if gpu:
        torch.cuda.set_device(own)
    return bring_up(values, own, timeout_s, say=lambda text: print(text) if values.rank == 0 else None)


def left_out(group: ExpertGroup, device: torch.device, names: Sequence[str]) -> dict[str, str]:
    """Why some of `names` are not timed here. All ranks call it together."""
    problems = dispatcher_problems(group, device, deep_ep="deep_ep" in names)
    return {name: why for name, why in problems.items() if name in names}


def measure_ep(
    ranks: Ranks, shape: LayerShape, tokens: Sequence[int], names: Sequence[str], seconds: float
) -> Iterator[list[Figure]]:
    """The figures of one number of tokens after another; the same on every rank."""
    group, device = ranks.everyone, ranks.device
    placement = Placement.contiguous(shape.num_experts, group.size)
    for combine in COMBINES:
        made = _make(group, placement, shape, combine, names, device)
        dispatchers = _by_name(made)
        copier = _Copier(group, max(tokens) * shape.top_k, shape.hidden, device)
        # The largest first: buffers that stay are made for it.
        for num_tokens in sorted(tokens, reverse=True):
            for sizes in SIZES:
                rows = make_rows(group, shape, num_tokens, sizes, device)
                crossing = bytes_to_cross(group, placement, shape, rows.routing, combine)
                times, graphs = _time_all(group, dispatchers, rows, shape, seconds, device)
                copies = [copier.seconds(num_bytes) for num_bytes in (crossing.dispatch, crossing.combine)]
                everyone: list[_Measured] = group.gather_objects(_Measured(times, graphs, copies, crossing))
                yield _figures(everyone, shape, combine, num_tokens, sizes)
        for each in made.values():
            each.close()


def make_rows(group: ExpertGroup, shape: LayerShape, num_tokens: int, sizes: str, device: torch.device) -> Rows:
    """even: every rank has `num_tokens` rows. uneven: rank 0 does, the last one has none, others a quarter."""
    x_TD = torch.randn(num_tokens, shape.hidden, generator=torch.Generator().manual_seed(group.rank))
    seed = 1000 * num_tokens + group.rank
    ids_TK, weights_TK = skewed_routing(num_tokens, shape.num_experts, shape.top_k, seed=seed)
    if sizes == "uneven" and group.rank:
        ids_TK[0 if group.rank == group.size - 1 else num_tokens // 4 :] = -1
    return Rows(x_TD.to(device, torch.bfloat16), Routing(ids_TK.to(device), weights_TK.to(device)))


def bytes_to_cross(
    group: ExpertGroup, placement: Placement, shape: LayerShape, routing: Routing, combine: Combine
) -> Crossing:
    """bf16 rows: once to each other rank that holds any expert of a token; back once for each of those (fast), or for
    each choice there (exact)."""
    table = ReplicaTable(placement, most_replicas(placement), "cpu")
    ranks_TK = table.choose(routing.expert_ids_TK.cpu(), group.rank).ranks_TK
    away_TK = (ranks_TK >= 0) & (ranks_TK != group.rank)
    goes_TN = (ranks_TK[:, :, None] == torch.arange(group.size)).any(dim=1)
    goes_TN[:, group.rank] = False
    row_bytes, once = 2 * shape.hidden, int(goes_TN.sum())
    return Crossing(once * row_bytes, (int(away_TK.sum()) if combine == "exact" else once) * row_bytes)


def _make(
    group: ExpertGroup,
    placement: Placement,
    shape: LayerShape,
    combine: Combine,
    names: Sequence[str],
    device: torch.device,
) -> dict[str, Dispatchers]:
    """Each by its name."""
    made: dict[str, Dispatchers] = {}
    for name in names:
        if name == "deep_ep" and combine == "exact":
            continue  # it sums on the way
        made[name] = make_dispatchers(
            Choice(name, name, "timed"),
            group,
            placement,
            top_k=shape.top_k,
            combine=combine,
            row_cap=None,
            timeout_s=_TIMEOUT_S,
            device=device,
        )
    return made


def _by_name(made: Mapping[str, Dispatchers]) -> dict[str, Dispatcher]:
    """Where decode has one of its own, that too."""
    dispatchers: dict[str, Dispatcher] = {}
    for name, both in made.items():
        dispatchers[name] = both.prefill
        if both.decode is not both.prefill:
            dispatchers[f"{name} decode"] = both.decode
    return dispatchers


class _Measured(NamedTuple):
    """Of one rank."""

    times: dict[str, Times]
    graphs: dict[str, float]
    copies: list[float | None]
    crossing: Crossing


@torch.inference_mode()
def _time_all(
    group: ExpertGroup,
    dispatchers: Mapping[str, Dispatcher],
    rows: Rows,
    shape: LayerShape,
    seconds: float,
    device: torch.device,
) -> tuple[dict[str, Times], dict[str, float]]:
    """Bursts in turns for about `seconds`, as many on every rank; then graphs."""
    rounds = {name: _Round(dispatcher, rows, shape) for name, dispatcher in dispatchers.items()}
    # Compiles, and makes buffers. DeepEP's decode takes few rows at a time.
    rounds = {name: each for name, each in rounds.items() if each.takes_all()}
    for each in rounds.values():
        _burst(each, device)
    first = {name: _burst(each, device) for name, each in rounds.items()}
    took = sum(sum(times.dispatch) + sum(times.combine) for times in first.values())
    turns = max(group.gather_objects(max(2, min(20, int(seconds / max(took, 1e-6))))))
    times = {name: Times([], []) for name in rounds}
    for _ in range(turns):
        for name, each in rounds.items():
            group.barrier()
            burst = _burst(each, device)
            times[name].dispatch.extend(burst.dispatch[1:])
            times[name].combine.extend(burst.combine[1:])
    graphs = {}
    if device.type == "cuda":
        for name, each in rounds.items():
            if dispatchers[name].graph_safe:
                graphs[name] = _graph_seconds(each, device)
    return times, graphs


class _Round:
    """Dispatch and combine of the same rows, with results of experts that are made up."""

    def __init__(self, dispatcher: Dispatcher, rows: Rows, shape: LayerShape) -> None:
        self.dispatcher, self.rows = dispatcher, rows
        self.y_RD = rows.x_TD.new_ones(0, shape.hidden)

    def takes_all(self) -> bool:
        """Whether one round does."""
        inputs = self.dispatch()
        self.combine(inputs)
        return not (isinstance(inputs, RoundInput) and inputs.more)

    def dispatch(self) -> ExpertInput:
        return self.dispatcher.dispatch(self.rows.x_TD, *self.rows.routing)

    def combine(self, inputs: ExpertInput) -> Tensor:
        if self.y_RD.shape[0] < inputs.num_rows:
            self.y_RD = self.y_RD.new_ones(inputs.num_rows, self.y_RD.shape[1])
        return self.dispatcher.combine(self.y_RD[: inputs.num_rows], inputs.handle)

    def __call__(self) -> Tensor:
        return self.combine(self.dispatch())


def _burst(each: _Round, device: torch.device) -> Times:
    times = Times([], [])
    if device.type != "cuda":
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            inputs = each.dispatch()
            halfway = time.perf_counter()
            each.combine(inputs)
            times.dispatch.append(halfway - started)
            times.combine.append(time.perf_counter() - halfway)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * _ROUNDS + 1)]
    torch.cuda._sleep(_SLEEP_CYCLES)
    marks[0].record()
    for index in range(_ROUNDS):
        inputs = each.dispatch()
        marks[2 * index + 1].record()
        each.combine(inputs)
        marks[2 * index + 2].record()
    torch.cuda.synchronize(device)
    spans = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
    times.dispatch.extend(spans[::2])
    times.combine.extend(spans[1::2])
    return times


def _graph_seconds(each: _Round, device: torch.device) -> float:
    """Of dispatch and combine, by replays of a graph that holds several."""
    replay = Replay([each] * _ROUNDS, device)
    replay.run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        replay.run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / (10 * _ROUNDS)


class _Copier:
    """Plain copies into the next rank's memory, where it can be reached."""

    def __init__(self, group: ExpertGroup, num_rows: int, width: int, device: torch.device) -> None:
        self.group, self.device = group, device
        self.target: Tensor | None = None
        if group.size > 1 and "one_sided" not in dispatcher_problems(group, device):
            layout = PeerLayout(group.size, -(-num_rows // group.size), width, 1, torch.bfloat16, torch.bfloat16, True)
            self._peers = symmetric_memory(group, layout, device)
            self.target = self._peers.buffers[(group.rank + 1) % group.size]
            self.source = torch.empty_like(self._peers.own)

    def seconds(self, num_bytes: int) -> float | None:
        """Median of several, all ranks at once; None where there is no way, or nothing to copy."""
        if self.target is None:
            return None
        self.group.barrier()
        target, source = self.target[:num_bytes], self.source[:num_bytes]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
        torch.cuda._sleep(_SLEEP_CYCLES)
        for mark in marks:
            mark.record()
            target.copy_(source)
        torch.cuda.synchronize(self.device)
        spans = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
        return statistics.median(spans[1:]) if num_bytes else None


def _figures(
    everyone: Sequence[_Measured], shape: LayerShape, combine: Combine, num_tokens: int, sizes: str
) -> list[Figure]:
    """One for each dispatcher and way, of the slowest rank."""
    figures = []
    for name in everyone[0].times:
        for index, way in enumerate(("dispatch", "combine")):
            medians = [statistics.median(getattr(of_rank.times[name], way)) for of_rank in everyone]
            slowest = max(range(len(medians)), key=medians.__getitem__)
            copies = [of_rank.copies[index] for of_rank in everyone]
            copy = max((each for each in copies if each is not None), default=None)
            num_bytes = max(getattr(of_rank.crossing, way) for of_rank in everyone)
            extra = {"GB/s": num_bytes / medians[slowest] / 1e9}
            if copy is not None:
                extra["copy GB/s"] = num_bytes / copy / 1e9
            if name in everyone[0].graphs:
                extra["graph us"] = 1e6 * max(of_rank.graphs[name] for of_rank in everyone)
            figure = Figure(
                "ep",
                f"{shape.name} x{len(everyone)} {combine}",
                f"T={num_tokens} {sizes} {way} {name}",
                1e6 * medians[slowest],
                "us",
                floor=None if copy is None else 1e6 * copy,
                extra=extra,
                samples=tuple(1e6 * sample for sample in getattr(everyone[slowest].times[name], way)),
            )
            figures.append(replace(figure, target=_target(figure, name, num_tokens, sizes)))
    return figures


def _target(figure: Figure, name: str, num_tokens: int, sizes: str) -> float | None:
    """Of one_sided: 1.3 times a copy of its bytes where they are many, 25 us where they are few."""
    if name != "one_sided" or sizes != "even":
        return None
    if num_tokens >= 4096:
        return None if figure.floor is None else 1.3 * figure.floor
    return 25.0 if num_tokens <= 128 else None
