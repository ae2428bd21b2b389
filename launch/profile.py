"""Where a step's time goes: `python -m launch.profile model=qwen3-30b-a3b batch=1,64,256 prefill=4x4096 result=p.md`.

Decode steps at each batch size, and a prefill, each warmed up and then recorded by torch's profiler on the device
alone: per kernel its launches, their time and its share, and how long the device had nothing to do. Every table is
printed, and written to `result`, as soon as it is measured: a run may be cut at any time. Keys of launch.generate go
through. Knows engines and kernel names; knows nothing of what a kernel is for.

A kernel may begin, and wait, while the one before it still runs. So beside its own time, from its start to its end,
there is the time from the latest end before it to its own: these sum to the whole, idle time included.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from launch.bench_engine import DECODE_PROMPT, RANDOM_TEMPERATURE, even_prompts
from launch.command_line import compose_config, parse
from launch.console import set_up_logging
from launch.figure import ROOT
from launch.machine import device_name, git_commit
from launch.words import check_rest, helped, output_file, own_words, positive, positives, refuse, split_list
from moe.engine.engine import Engine
from moe.engine.request import Request, SamplingParams
from moe.engine.whole_file import write_whole

DEFAULTS = ("load_format=dummy", "cache.prefix_caching=false", "engine.max_model_len=8192")
OWN_KEYS = ("model", "batch", "prefill", "commit", "result")
WARM_STEPS, RECORDED_STEPS = 24, 4
SHOWN_KERNELS = 24
NAME_LENGTH = 60


@dataclass(frozen=True)
class Span:
    """One thing the device did, in microseconds of the profiler's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class KernelShare:
    """All launches of one kernel, per step. `ms`: from their starts to their ends; `added_ms`: from the latest end
    before each to its own."""

    name: str
    launches: float
    ms: float
    added_ms: float


@dataclass(frozen=True)
class StepProfile:
    """`wall_ms`: of one step without the profiler. `span_ms`: from the first kernel's start to the last one's end over
    the recorded steps, per step; `busy_ms`: the part of it in which at least one kernel ran."""

    title: str
    wall_ms: float
    span_ms: float
    busy_ms: float
    kernels: tuple[KernelShare, ...]


def summarize(title: str, wall_ms: float, spans: Iterable[Span], num_steps: int) -> StepProfile:
    """Adds up what the device did over `num_steps` steps. Kernels may overlap: their own times can sum to more than the
    whole, the added ones sum to it.

    >>> each = summarize("", 1.0, [Span("a", 0, 6e3), Span("b", 4e3, 8e3), Span("a", 9e3, 10e3)], 2)
    >>> each.busy_ms, [(kernel.name, kernel.ms, kernel.added_ms) for kernel in each.kernels]
    (4.5, [('a', 3.5, 4.0), ('b', 2.0, 1.0)])
    """
    ordered = sorted(spans, key=lambda span: span.start_us)
    assert ordered, "the profiler saw no kernel"
    times: dict[str, list[tuple[float, float]]] = {}
    busy_us, until_us = 0.0, ordered[0].start_us
    for span in ordered:
        added_us = max(0.0, span.end_us - until_us)
        times.setdefault(short_name(span.name), []).append((span.end_us - span.start_us, added_us))
        busy_us += min(added_us, span.end_us - span.start_us)
        until_us += added_us
    kernels = []
    for name, each in times.items():
        own_us, added_us = map(sum, zip(*each))
        kernels.append(KernelShare(name, len(each) / num_steps, own_us / num_steps / 1e3, added_us / num_steps / 1e3))
    kernels.sort(key=lambda kernel: kernel.added_ms, reverse=True)
    span_ms = (until_us - ordered[0].start_us) / num_steps / 1e3
    return StepProfile(title, wall_ms, span_ms, busy_us / num_steps / 1e3, tuple(kernels))


def short_name(name: str) -> str:
    """A C++ kernel's name without its arguments and template parameters, cut to a column's width.

    >>> short_name("void at::native::index_kernel<long, 4>(int, at::Tensor const&)")
    'at::native::index_kernel'
    """
    name = re.sub(r"^void ", "", name.replace("(anonymous namespace)::", ""))
    depth, kept = 0, []
    for character in name:
        if character == "(" and depth == 0:
            break
        depth += (character == "<") - (character == ">")
        if depth == 0 and character != ">":
            kept.append(character)
    return ("".join(kept) or name)[:NAME_LENGTH]


def as_markdown(each: StepProfile) -> str:
    """A heading, a line of totals, a table of the kernels that take the most."""
    idle = each.span_ms - each.busy_ms
    lines = [
        f"## {each.title}",
        "",
        f"A step takes {each.wall_ms:.2f} ms; under the profiler {each.span_ms:.2f} ms, of which the device is idle "
        f"{idle:.2f} ms ({idle / each.span_ms:.1%}).",
        "",
        "| kernel | launches | us each | ms a step | ms added | share of it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    shown, rest = each.kernels[:SHOWN_KERNELS], each.kernels[SHOWN_KERNELS:]
    if rest:
        sums = (sum(k.launches for k in rest), sum(k.ms for k in rest), sum(k.added_ms for k in rest))
        shown = (*shown, KernelShare(f"{len(rest)} others", *sums))
    for kernel in shown:
        lines.append(
            f"| `{kernel.name}` | {kernel.launches:g} | {kernel.ms * 1e3 / kernel.launches:.1f} | {kernel.ms:.3f} | "
            f"{kernel.added_ms:.3f} | {kernel.added_ms / each.span_ms:.1%} |"
        )
    return "\n".join(lines) + "\n"


class Profiler:
    """Runs steps of one engine and records what the device does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._passes = 0

    def decode(self, batch: int) -> StepProfile:
        """`batch` sequences behind prompts of DECODE_PROMPT tokens, in the middle of their outputs."""
        timed = RECORDED_STEPS * 4
        prompt_steps = -(-batch * DECODE_PROMPT // self.engine.config.engine.max_batched_tokens) + 1
        self._add(batch, DECODE_PROMPT, WARM_STEPS + timed + RECORDED_STEPS + prompt_steps + 8)
        self._steps(WARM_STEPS + prompt_steps)
        wall_ms = self._wall_ms(lambda: self._steps(timed)) / timed
        spans = self._recorded(lambda: self._steps(RECORDED_STEPS))
        self._finish()
        return summarize(f"decode, {batch} sequences of {DECODE_PROMPT}+ positions", wall_ms, spans, RECORDED_STEPS)

    def prefill(self, num_prompts: int, length: int) -> StepProfile:
        """All steps of so many prompts with one output each; the times are those of one step of them on average."""
        self._add(num_prompts, length, 1)
        num_steps = self._finish()
        self._add(num_prompts, length, 1)
        wall_ms = self._wall_ms(self._finish) / num_steps
        self._add(num_prompts, length, 1)
        spans = self._recorded(self._finish)
        return summarize(f"prefill, {num_prompts} prompts of {length}, {num_steps} steps", wall_ms, spans, num_steps)

    def _add(self, num_prompts: int, length: int, num_outputs: int) -> None:
        self._passes += 1
        for index, prompt in enumerate(even_prompts(self.engine.vocab_size, num_prompts, length, num_outputs)):
            params = SamplingParams(
                max_tokens=num_outputs, temperature=RANDOM_TEMPERATURE, seed=index, ignore_eos=True, detokenize=False
            )
            self.engine.add_request(Request(f"{self._passes}-{index}", prompt.token_ids, params))

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def _finish(self) -> int:
        """Steps until nothing is left, and how many."""
        count = 0
        while self.engine.has_unfinished:
            self.engine.step()
            count += 1
        return count

    def _wall_ms(self, run: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    def _recorded(self, run: Callable[[], object]) -> list[Span]:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recording:
            run()
            torch.cuda.synchronize()
        return [
            Span(event.name, event.time_range.start, event.time_range.end)
            for event in recording.events() or ()
            if event.device_type.name == "CUDA"
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Profile one model, print the tables, write them to `result`. 2: a wrong command line, or a model that cannot be
    loaded."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__):
        return 0
    own, others = own_words(words, OWN_KEYS)
    try:
        check_rest(others, OWN_KEYS)
        if "model" not in own:
            raise ValueError("model= is missing; name shapes in benchmarks/models/, or a model of launch.generate.")
        batches = positives(own, "batch", (1, 64, 256))
        prompts = [
            tuple(positive("prefill", size) for size in text.split("x"))
            for text in split_list(own.get("prefill", "4x4096"))
        ]
        if any(len(sizes) != 2 for sizes in prompts):
            raise ValueError(f"prefill={own['prefill']} must be prompts x length, such as 4x4096.")
        result = output_file(own, "result")
        config = compose_config(parse(engine_words(own["model"], others)))
        if not torch.cuda.is_available():
            raise ValueError("a profile needs an NVIDIA GPU, and there is none here.")
    except ValueError as error:
        return refuse(error)
    set_up_logging(Console(stderr=True))
    try:
        engine = Engine(config)
    except ValueError as error:
        return refuse(error)
    try:
        profiler = Profiler(engine)
        pieces = [partial(profiler.decode, batch) for batch in batches]
        pieces += [partial(profiler.prefill, *sizes) for sizes in prompts]
        command = shlex.join(["python", "-m", "launch.profile", *words])
        head = f"`{command}`, commit {own.get('commit') or git_commit()}, {device_name(engine.parts.device)}.\n"
        write_pieces(head, (measure() for measure in pieces), result)
    finally:
        engine.close()
    return 0


def write_pieces(head: str, profiles: Iterable[StepProfile], result: Path | None) -> None:
    """The head and each table as soon as it is there: printed, and in the file, which is whole after each."""
    text = ""
    for piece in chain([head], map(as_markdown, profiles)):
        print(piece, flush=True)
        text += piece + "\n"
        if result is not None:
            write_whole(result, text)


def engine_words(model: str, rest: Sequence[str]) -> list[str]:
    """What compose_config gets: this file's defaults, then the caller's words."""
    folder: Path = ROOT / "benchmarks" / "models" / model
    path = folder if (folder / "config.json").is_file() else model
    return [*DEFAULTS, f"--model={path}", *rest]


if __name__ == "__main__":
    sys.exit(main())
