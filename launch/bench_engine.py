"""w1 to w3: whole workloads through the engine.

w1 offline throughput: 512 requests of random ids, all at once; output tokens/s, and ms a step by kinds of steps.
w2 decode step: 512-token prompts, 128 outputs, batches of 1, 8, 64 and 256; ms of the steps without a prompt chunk.
w3 prefill: 16 prompts of 4096 tokens, one output; prompt tokens/s.

Prompts are random ids. Tokens are drawn at so high a temperature that they are random ids too, from each request's
seed, through the engine's own sampler at its full cost: dummy weights would else repeat themselves, and with that
their routing. The first pass of each set of prompts warms up everything that the timed one does (kernels, graphs) and
counts, for the floor, what its steps were and which experts they hit.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from launch.figure import Figure, baseline
from launch.roofline import Ceilings, NetworkCost, StepWork, Work, mean_work
from launch.step_record import StepRecorder
from moe.batch.report import percentile
from moe.engine.engine import Engine
from moe.engine.request import Request, SamplingParams

DECODE_BATCHES = (1, 8, 64, 256)
DECODE_PROMPT, DECODE_OUTPUTS = 512, 128
COUNTED_STEPS = 16  # full decode steps of w2's warm-up: so many tell how many experts such a step hits
RANDOM_TEMPERATURE = 1000.0
KIND_ROWS = (8, 32, 64, 128, 256, 384, 512, 1024)  # w1's steps without a prompt chunk are told apart by these


@dataclass(frozen=True)
class Prompt:
    """So many random token ids, and how many to generate behind them."""

    token_ids: list[int]
    num_outputs: int


class StepTime(NamedTuple):
    """From the arrival of the last step's tokens to that of this one's, when the engine counts it."""

    seconds: float
    tokens: int
    has_chunk: bool


@dataclass(frozen=True)
class Run:
    """One pass over a set of prompts."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: list[StepTime]
    ttft_seconds: list[float]


def throughput_prompts(vocab_size: int, num_requests: int = 512) -> list[Prompt]:
    """w1's prompts: all lengths first, then the ids, from one generator."""
    r = random.Random("throughput-0")
    lengths = [(r.randint(64, 1024), r.randint(32, 512)) for _ in range(num_requests)]
    return [Prompt([r.randrange(vocab_size) for _ in range(prompt)], output) for prompt, output in lengths]


def even_prompts(vocab_size: int, num_prompts: int, num_tokens: int, num_outputs: int) -> list[Prompt]:
    """Prompts of one length, from a seed of their own."""
    r = random.Random(f"{num_prompts}x{num_tokens}")
    return [Prompt([r.randrange(vocab_size) for _ in range(num_tokens)], num_outputs) for _ in range(num_prompts)]


def run_prompts(engine: Engine, prompts: Sequence[Prompt], name: str) -> Run:
    """Submit everything at once and take steps until all is answered."""
    stats = engine.stats
    prompt_before, output_before = stats.prompt_tokens, stats.output_tokens
    stats.ttft_seconds.clear()
    _synchronize(engine)
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=prompt.num_outputs, temperature=RANDOM_TEMPERATURE, seed=index, ignore_eos=True, detokenize=False
        )
        engine.add_request(Request(f"{name}-{index}", prompt.token_ids, params))
    steps = []
    arrived = time.perf_counter()
    engine.join()  # the steps of other ranks too, where there are any
    while engine.has_unfinished:
        chunks, tokens, started = stats.chunks, stats.output_tokens, arrived
        for output in engine.step():
            if output.error is not None:
                raise ValueError(f"request {output.request_id} did not run: {output.error}")
        arrived = time.perf_counter()
        steps.append(StepTime(arrived - started, stats.output_tokens - tokens, stats.chunks > chunks))
    _synchronize(engine)
    seconds = time.perf_counter() - begin
    return Run(
        seconds,
        stats.prompt_tokens - prompt_before,
        stats.output_tokens - output_before,
        steps,
        list(stats.ttft_seconds),
    )


def kind_of(step: StepWork) -> str:
    """What w1 calls a step.

    >>> kind_of(StepWork((7, 9), (), 2, 0.0)), kind_of(StepWork((7,) * 300, (), 300, 0.0))
    ('decode, to 8 rows', 'decode, to 384 rows')
    """
    if step.chunks:
        return "prefill and decode" if step.decode_lens else "prefill"
    rows = len(step.decode_lens)
    return f"decode, to {next((most for most in KIND_ROWS if rows <= most), rows)} rows"


def recorded_steps(engine: Engine, prompts: Sequence[Prompt], name: str) -> list[StepWork]:
    """Run the prompts once, untimed, and say what every step was."""
    with StepRecorder(engine) as recorder:
        run_prompts(engine, prompts, name)
    assert recorder.steps, "the engine ran without asking its scheduler"
    return recorder.steps


class EngineBench:
    """The workloads of one engine."""

    def __init__(self, engine: Engine, model: str, ceilings: Ceilings, baselines: dict[str, Any]) -> None:
        self.engine, self.model, self.ceilings, self.baselines = engine, model, ceilings, baselines
        size = engine.parts.dtype.itemsize
        self.cost = NetworkCost(engine.parts.model, weight_bytes=size, cache_bytes=size)
        self._passes = 0  # request ids must differ from pass to pass; seeds are the requests' own

    def measure(self, workload: str, *, limit: int | None = None, rounds: int | None = None) -> list[Figure]:
        """The figures of one workload; `limit`: only so many requests (w2: batches); `rounds`: timed passes."""
        if workload == "w1":
            return self.throughput(limit, rounds or 1)
        if workload == "w2":
            return self.decode(DECODE_BATCHES[:limit], rounds or 1)
        return [self.prefill(limit, rounds or 3)]

    def throughput(self, limit: int | None, rounds: int) -> list[Figure]:
        """w1: the rate, then how long each kind of step takes."""
        prompts = throughput_prompts(self.engine.vocab_size)[:limit]
        steps = recorded_steps(self.engine, prompts, self._name("w1"))
        runs = [run_prompts(self.engine, prompts, self._name("w1")) for _ in range(rounds)]
        rates = [run.output_tokens / run.seconds for run in runs]
        floor_s = self.cost.seconds(steps, self.ceilings)
        ttft = [seconds for run in runs for seconds in run.ttft_seconds]
        extra = {f"ttft p{percent} s": percentile(ttft, percent) or 0.0 for percent in (50, 95, 99)}
        extra |= {"steps": float(len(steps)), "prompt tok/s": runs[0].prompt_tokens / runs[0].seconds}
        rate = self._rate("w1", "output tokens", rates, runs, runs[0].output_tokens / floor_s, steps, extra)
        return [rate, *self._by_kind(steps, runs)]

    def _by_kind(self, steps: list[StepWork], runs: list[Run]) -> list[Figure]:
        """A step of each kind on average, in the order in which they come; `s over`: all of them over their floor."""
        of_kinds: dict[str, list[tuple[StepWork, float]]] = {}
        for step, *taken in zip(steps, *(run.steps for run in runs), strict=True):
            seconds = statistics.mean(each.seconds for each in taken)
            of_kinds.setdefault(kind_of(step), []).append((step, seconds))
        figures = []
        for kind, each in of_kinds.items():
            works, all_s = [self.cost.step(step) for step, _ in each], sum(seconds for _, seconds in each)
            work, floor_s = mean_work(works), sum(map(self.ceilings.seconds, works))
            extra = {"steps": float(len(each)), "rows": statistics.mean(step.num_tokens for step, _ in each)}
            figures.append(
                Figure(
                    "w1",
                    self.model,
                    kind,
                    all_s / len(each) * 1e3,
                    "ms",
                    floor=floor_s / len(each) * 1e3,
                    seconds=all_s / len(each),
                    bytes=work.bytes,
                    flops=work.flops,
                    extra=extra | {"s": all_s, "s over": all_s - floor_s},
                )
            )
        return figures

    def prefill(self, limit: int | None, rounds: int) -> Figure:
        """w3"""
        prompts = even_prompts(self.engine.vocab_size, 16, 4096, 1)[:limit]
        steps = recorded_steps(self.engine, prompts, self._name("w3"))
        runs = [run_prompts(self.engine, prompts, self._name("w3")) for _ in range(rounds)]
        rates = [run.prompt_tokens / run.seconds for run in runs]
        floor_s = self.cost.seconds(steps, self.ceilings)
        return self._rate("w3", "prompt tokens", rates, runs, runs[0].prompt_tokens / floor_s, steps, {})

    def _rate(
        self,
        workload: str,
        name: str,
        rates: list[float],
        runs: list[Run],
        floor: float,
        steps: list[StepWork],
        extra: dict[str, float],
    ) -> Figure:
        peers, target = baseline(self.baselines, workload, self.model)
        work = sum((self.cost.step(step) for step in steps), Work(0.0, 0.0))
        return Figure(
            workload,
            self.model,
            name,
            statistics.median(rates),
            "tokens/s",
            floor=floor,
            seconds=statistics.median(run.seconds for run in runs),
            bytes=work.bytes,
            flops=work.flops,
            target=target,
            peers=peers,
            extra=extra,
            samples=tuple(rates),
        )

    def decode(self, batches: Sequence[int], rounds: int) -> list[Figure]:
        """w2. The rounds of all batches take turns."""
        vocab = self.engine.vocab_size
        prompts = {batch: even_prompts(vocab, batch, DECODE_PROMPT, DECODE_OUTPUTS) for batch in batches}
        hits = {}
        for batch in batches:
            steps = recorded_steps(self.engine, self._counted(prompts[batch]), self._name("w2"))
            full = [step.experts_hit for step in steps if len(step.decode_lens) == batch and not step.chunks]
            assert full, f"no decode step of {batch} rows was recorded"
            hits[batch] = statistics.mean(full)
        times: dict[int, list[float]] = {batch: [] for batch in batches}
        for _ in range(rounds):
            for batch in batches:
                run = run_prompts(self.engine, prompts[batch], self._name("w2"))
                # The first sequences decode, and end, before the last: steps of part of the batch are another thing.
                times[batch] += [step.seconds for step in run.steps if step.tokens == batch and not step.has_chunk]
        return [self._decode_figure(batch, prompts[batch], hits[batch], times[batch]) for batch in batches]

    def _counted(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The same prompts with just as many outputs as give COUNTED_STEPS steps in which all of them decode."""
        budget = self.engine.config.engine.max_batched_tokens
        prefill_steps = -(-sum(len(each.token_ids) for each in prompts) // max(budget - len(prompts), 1))
        outputs = COUNTED_STEPS + prefill_steps + 1
        return [Prompt(each.token_ids, min(outputs, each.num_outputs)) for each in prompts]

    def _decode_figure(self, batch: int, prompts: Sequence[Prompt], hit: float, times: list[float]) -> Figure:
        # The first output comes from the prefill; decode step i sees the prompt and i tokens.
        prompt, outputs = len(prompts[0].token_ids), prompts[0].num_outputs
        steps = [
            self.cost.step(StepWork((prompt + done,) * batch, (), batch, hit)) for done in range(1, max(outputs, 2))
        ]
        work = mean_work(steps)
        median = statistics.median(times)
        peers, target = baseline(self.baselines, "w2", self.model, str(batch))
        num_sparse = sum(self.engine.parts.model.sparse_layers)
        extra = {"hit/layer": hit / num_sparse}
        extra |= {f"p{percent}": (percentile(times, percent) or 0.0) * 1e3 for percent in (5, 95)}
        return Figure(
            "w2",
            self.model,
            f"batch {batch}",
            median * 1e3,
            "ms",
            floor=self.ceilings.seconds(work) * 1e3,
            seconds=median,
            bytes=work.bytes,
            flops=work.flops,
            target=target,
            peers=peers,
            extra=extra,
            samples=tuple(each * 1e3 for each in times),
        )

    def _name(self, workload: str) -> str:
        self._passes += 1
        return f"{workload}-{self._passes}"


def _synchronize(engine: Engine) -> None:
    if engine.parts.device.type == "cuda":
        torch.cuda.synchronize()
