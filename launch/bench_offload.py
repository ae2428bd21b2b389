"""Experts in host memory under an engine's steps: what crosses the link, what waits for it, what it costs.

Figures come from steps of an engine that decodes (benchmarks/offload.py builds it and says what to measure):

stream   all sequences decode and every expert that is not held crosses the link: tokens/s against sequences x link /
         bytes streamed, the copy engine's busy share of the steps, GB/s
cache    one sequence: ms a token with guesses and without; how often guesses are right; the time products waited for
         copies beside its bound, the sum over these copies of max(0, copy time - work between order and use)
regimes  both ways for the same sequences, fewer and fewer: where they cross. Rows are to be routed by a table: under
         dummy weights a sequence asks for the same experts in step after step

Copies are counted between the arrivals of two steps' tokens, by events that wait for nothing. Knows engines, counters
and clocks; changes no way of computing but the regime, and whether guesses are made.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch

from launch.bench_engine import RANDOM_TEMPERATURE, Prompt
from launch.figure import Figure
from moe.engine.engine import Engine
from moe.engine.memory_plan import GIB
from moe.engine.request import Request, SamplingParams
from moe.model.offloaded_experts import Offload

SKIPPED = 2  # steps: one is on its way, under what was before, and the next one's first copies follow it
# Reading the counters may wait for the device, and then no step is on its way: the next one is launched while nothing
# runs, and only the arrival of the one behind it is a whole step later.
UNTIMED = 2
LINK_BYTES = 1 << 30  # of one copy that the link's rate is taken from
DUE = 1.25  # measured stall over its bound, at most


@dataclass(frozen=True)
class Steps:
    """Steps of decoding in a row. `times`: of each, from arrival to arrival. `counts`: what offload counted meanwhile,
    and in the UNTIMED steps before them."""

    times: tuple[float, ...]
    tokens: int
    counts: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(self.times) / len(self.times)

    def each(self, name: str) -> float:
        """A count of one step."""
        return self.counts[name] / (len(self.times) + UNTIMED)

    def share(self, name: str, *others: str) -> float | None:
        """A count's part of itself and others, in percent."""
        whole = sum(self.counts[each] for each in (name, *others))
        return 100 * self.counts[name] / whole if whole else None


class Decoding:
    """Sequences that decode, from the end of the last prompt on."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], name: str, temperature: float = RANDOM_TEMPERATURE
    ) -> None:
        self.engine = engine
        self.ids = [f"{name}-{index}" for index in range(len(prompts))]
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=prompt.num_outputs, temperature=temperature, seed=index, ignore_eos=True, detokenize=False
            )
            engine.add_request(Request(self.ids[index], prompt.token_ids, params))
        while True:
            chunks, tokens = engine.stats.chunks, engine.stats.output_tokens
            self._step()
            if engine.stats.chunks == chunks and engine.stats.output_tokens - tokens == len(prompts):
                return

    def run(self, num_steps: int, skip: int = SKIPPED) -> Steps:
        """So many steps, after some that do not count."""
        for _ in range(skip):
            self._step()
        stats, before = self.engine.stats, _counts(self.engine)
        for _ in range(UNTIMED):
            self._step()
        tokens, arrived, times = stats.output_tokens, time.perf_counter(), []
        for _ in range(num_steps):
            self._step()
            now = time.perf_counter()
            times.append(now - arrived)
            arrived = now
        counts = {name: value - before[name] for name, value in _counts(self.engine).items()}
        return Steps(tuple(times), stats.output_tokens - tokens, counts)

    def keep(self, number: int) -> None:
        """End all sequences but the first so many."""
        for request_id in self.ids[number:]:
            self.engine.abort(request_id)
        del self.ids[number:]

    def end(self) -> None:
        """Until the engine has nothing to do."""
        self.keep(0)
        while self.engine.has_unfinished:
            self.engine.step()

    def _step(self) -> None:
        for output in self.engine.step():
            if output.error is not None:
                raise ValueError(f"request {output.request_id} did not run: {output.error}")
            assert output.request_id not in self.ids, f"{output.request_id} ended while it was measured"


def offload_of(engine: Engine) -> Offload:
    """ValueError where everything is on the GPU."""
    offload = engine.parts.offload
    if offload is None:
        raise ValueError("all experts are on the GPU, so that nothing crosses the link; hold fewer.")
    return offload


def measure_link(engine: Engine) -> float:
    """Bytes/s of large copies from the pinned memory in which the experts lie: the best of four."""
    offload = offload_of(engine)
    whole = max(offload.host.tensors.values(), key=lambda each: each.nbytes)
    source = whole[: max(1, LINK_BYTES * whole.shape[0] // whole.nbytes)]
    target = torch.empty_like(source, device=offload.device)
    rates = []
    for _ in range(4):
        offload.engine.drain()
        _synchronize(offload.device)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _synchronize(offload.device)
        rates.append(source.nbytes / (time.perf_counter() - begin))
    return max(rates)


def stream_figure(engine: Engine, subject: str, prompts: Sequence[Prompt], num_steps: int) -> Figure:
    """tokens/s of all sequences; the floor is what the link of this run allows."""
    offload = offload_of(engine)
    set_regime(engine, "stream")
    decoding = Decoding(engine, prompts, "stream")
    steps = decoding.run(num_steps)
    decoding.end()
    bound = len(prompts) * measure_link(engine) / offload.plan.streamed_bytes
    busy_seconds, num_bytes = steps.each("busy_seconds"), steps.each("num_bytes")
    extra = {
        "step ms": statistics.median(steps.times) * 1e3,
        "busy %": 100 * busy_seconds / steps.seconds,
        "GB/s": num_bytes / 1e9 / busy_seconds if busy_seconds else 0.0,
        "GB/step": num_bytes / 1e9,
        "planned": offload.plan.streamed_bytes / 1e9,
        "waited %": 100 * steps.each("stall_seconds") / steps.seconds,
    }
    name = f"stream, {len(prompts)} sequences, {_held(offload)}"
    rates = tuple(len(prompts) / each for each in steps.times)
    value = steps.tokens / sum(steps.times)
    return Figure("offload", subject, name, value, "tokens/s", bound, target=0.85 * bound, extra=extra, samples=rates)


def cache_figure(
    engine: Engine,
    subject: str,
    prompt: Prompt,
    *,
    guesses: bool,
    num_steps: int,
    warm: int,
    what: str,
    temperature: float = RANDOM_TEMPERATURE,
) -> Figure:
    """ms a token of one sequence. `stall/due`: at most DUE is wanted; copies that all come in time have neither."""
    offload = offload_of(engine)
    set_regime(engine, "cache")
    with nullcontext() if guesses else demand_only(engine):
        decoding = Decoding(engine, [prompt], f"{what}-{guesses}", temperature)
        decoding.run(warm)
        steps = decoding.run(num_steps, skip=0)
        decoding.end()
    shares = {
        "hit %": steps.share("hits", "misses"),
        "right %": _percent(steps.counts["guessed_right"], steps.counts["guessed"]),
        "fetched, used %": steps.share("fetched_and_used", "fetched_in_vain"),
    }
    stall, due = steps.counts["stall_seconds"], steps.counts["due_seconds"]
    extra = {name: value for name, value in shares.items() if value is not None} | {
        "copies": steps.each("num_copies"),
        "GB": steps.each("num_bytes") / 1e9,
        "busy ms": steps.each("busy_seconds") * 1e3,
        "stall ms": steps.each("stall_seconds") * 1e3,
        "due ms": steps.each("due_seconds") * 1e3,
        "stall/due": stall / due if due else float(stall > 0),
    }
    samples = tuple(1e3 * each for each in steps.times)
    name = f"{what}, {'guesses' if guesses else 'demand only'}, {_held(offload)}"
    return Figure("offload", subject, name, statistics.median(samples), "ms", extra=extra, samples=samples)


def regime_figures(
    engine: Engine, subject: str, prompts: Sequence[Prompt], batches: Sequence[int], num_steps: int, what: str
) -> Generator[Figure, None, None]:
    """ms of a step, both ways, for each number of sequences as it is found: the most first, of which some end. On
    demand alone: guesses are made of fewer rows than can be streamed."""
    offload = offload_of(engine)
    top_k = engine.parts.model.moe.rule.top_k
    set_regime(engine, "stream")  # the prompts
    with demand_only(engine):
        decoding = Decoding(engine, prompts[: max(batches)], f"regimes-{what}")
        try:
            for batch in sorted(batches, reverse=True):
                decoding.keep(batch)
                found: dict[str, Steps] = {}
                for regime, skip in (("stream", 1), ("cache", SKIPPED + 1)):  # what is asked for often has to be found
                    set_regime(engine, regime)
                    found[regime] = decoding.run(num_steps, skip)
                # Not medians: where launching takes most of a step, arrivals are seen late and the next one early.
                samples = {regime: steps.seconds * 1e3 for regime, steps in found.items()}
                cache = found["cache"]
                extra = {
                    "rows/slot": batch * top_k / offload.plan.num_slots,
                    "stream ms": samples["stream"],
                    "cache/stream": samples["cache"] / samples["stream"],
                    "asked/layer": (cache.each("hits") + cache.each("misses")) / offload.plan.num_layers,
                    "hit %": cache.share("hits", "misses") or 0.0,
                    "cache GB": cache.each("num_bytes") / 1e9,
                    "busy ms": cache.each("busy_seconds") * 1e3,
                }
                times = tuple(1e3 * each for each in cache.times)
                name = f"cache, {batch} sequences, {what}"
                yield Figure("regimes", subject, name, samples["cache"], "ms", extra=extra, samples=times)
        finally:
            decoding.end()


def byte_figures(engine: Engine, subject: str, host_peak: int) -> list[Figure]:
    """GiB of what was planned before loading, as floor, and of what there was. `host_peak`: of the process, beyond what
    it had before."""
    planned, actual = engine.parts.forecast, engine.plan
    assert planned is not None, "the engine loaded its own parts"
    pairs = {"weights": (planned.weight_bytes, actual.weight_bytes)}
    if actual.total_bytes is not None:
        pairs["working space"] = (planned.workspace.num_bytes, actual.workspace_bytes)
        known = actual.weight_bytes + actual.workspace_bytes + actual.kv_bytes
        pairs["GPU, most at a time"] = (known, torch.cuda.max_memory_allocated(engine.parts.device))
    if planned.host_bytes:
        pairs["host, pinned"] = (planned.host_bytes, actual.host_bytes)
        pairs["host, most at a time"] = (planned.host_bytes, host_peak)
    return [
        Figure("bytes", subject, name, found / GIB, "GiB", floor=wanted / GIB)
        for name, (wanted, found) in pairs.items()
    ]


class HostPeak:
    """The most memory of this process's own at a time, beyond what it had at the beginning: read every 20 ms."""

    def __init__(self) -> None:
        gc.collect()  # what goes meanwhile would hide what comes
        self.before = _own_bytes()
        self.most = self.before
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def num_bytes(self) -> int:
        return self.most - self.before

    def __enter__(self) -> HostPeak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.most = max(self.most, _own_bytes())

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, _own_bytes())


def set_regime(engine: Engine, regime: str) -> None:
    """From the next step that is launched."""
    offload = offload_of(engine)
    if offload.plan.regime != regime:
        offload.plan = replace(offload.plan, regime=regime)
        _forget_captured(engine)


@contextmanager
def demand_only(engine: Engine) -> Iterator[None]:
    """Meanwhile no layer guesses what the next one asks for."""
    experts = offload_of(engine).experts.values()
    following = [each.following for each in experts]
    for each in experts:
        each.following = None
    _forget_captured(engine)
    try:
        yield
    finally:
        for each, kept in zip(experts, following, strict=True):
            each.following = kept
        _forget_captured(engine)


def _forget_captured(engine: Engine) -> None:
    """Graphs replay what was decided when they were captured; they are made anew when they are wanted."""
    if engine.graphs is not None:
        engine.graphs.close()


def _own_bytes() -> int:
    """Pages that are no file's: of the process and of memory that it shares; all of its pages where the system does not
    tell them apart."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    names = ("RssAnon", "RssShmem") if "RssAnon" in lines else ("VmRSS",)
    return sum(int(lines[name].split()[0]) * 1024 for name in names)


def _counts(engine: Engine) -> dict[str, float]:
    figures = offload_of(engine).statistics()
    return dict(vars(figures.copies)) | dict(vars(figures.slots))


def _held(offload: Offload) -> str:
    plan = offload.plan
    return f"{plan.num_held / plan.num_layers:g} of {plan.num_slots} held"


def _percent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
