"""Experts in host memory through the engine: `python benchmarks/offload.py workload=stream,cache,regimes,bytes`.

stream   many sequences decode; every expert that is not held crosses the link in each step
cache    one sequence, rows routed evenly and after Zipf's law, with guesses and on demand alone
regimes  both ways for fewer and fewer sequences, rows routed by a table, as skewed as `zipf` says
demo     cache, for both demo models, by their own routers on their own prompts
bytes    planned and measured bytes of GPU and host; with held=1 of an engine without offload

One engine on dummy weights for all but demo. Its routers choose by sigmoid(logit) + bias (launch/zipf_gates.py), so
that the same network routes evenly or skewed; by tables (launch/bench_ranks.py) in the end, for regimes. What is
measured, and how, is said in launch/bench_offload.py. Each figure is printed and written when it is found. Words that
are not this file's are keys of launch.generate.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's own folder is all that Python puts there

from rich.console import Console  # noqa: E402

from launch.bench_engine import Prompt, even_prompts  # noqa: E402
from launch.bench_offload import (  # noqa: E402
    HostPeak,
    byte_figures,
    cache_figure,
    measure_link,
    regime_figures,
    stream_figure,
)
from launch.bench_ranks import skew_routing  # noqa: E402
from launch.command_line import compose_config, parse  # noqa: E402
from launch.console import set_up_logging  # noqa: E402
from launch.figure import Figure, number, print_figures  # noqa: E402
from launch.machine import machine_record  # noqa: E402
from launch.result_file import write_record  # noqa: E402
from launch.words import (  # noqa: E402
    helped,
    number_above_zero,
    output_file,
    own_words,
    positive,
    positives,
    refuse,
    split_list,
)
from launch.zipf_gates import ZipfGates  # noqa: E402
from moe.engine.engine import Engine  # noqa: E402
from moe.engine.parts import load_parts, resolve_device  # noqa: E402
from moe.model.causal_lm import CausalLM  # noqa: E402
from moe.model.families.registry import read_config  # noqa: E402
from moe.model.hub import resolve_model  # noqa: E402

WORKLOADS = ("bytes", "stream", "cache", "demo", "regimes")  # in this order
KEYS = {
    "workload": ",".join(WORKLOADS),
    "model": "shapes in benchmarks/models/ or a folder with config.json (qwen3-30b-a3b)",
    "held": "share of expert bytes on the GPU (0.25); 1: all of them, without offload",
    "sequences": "of stream (1024)",
    "prompt": "tokens of each prompt (128)",
    "steps": "decode steps of stream and regimes (6)",
    "tokens": "of one sequence, measured in cache and demo (60), after two thirds as many that are not",
    "zipf": "exponents of cache and regimes (1,0); 0 is even",
    "batches": "sequences of regimes (2,8,16,24,32,48,64,96,128)",
    "demo_held": "share of the demo models' experts (0.5)",
    "limit": "seconds; figures that have not begun by then are left out",
    "device": "auto, cuda or cpu",
    "commit": "the commit, where the tree cannot say it",
    "result": "a JSON file; it is written again after every figure, and says whether it is complete",
}
DEMOS = ("demo", "demo-deepseek")
Figures = Generator[Figure, None, None]
DEMO_PROMPT = "Genesis 1\n1 In the beginning God created the heaven and the earth.\n2"


@dataclass(frozen=True)
class Choice:
    """The command line, taken apart and checked."""

    workloads: tuple[str, ...]
    model: Path
    held: float
    sequences: int
    prompt: int
    steps: int
    tokens: int
    zipf: tuple[float, ...]
    batches: tuple[int, ...]
    demo_held: float
    limit: float
    device: str
    commit: str | None
    result: Path | None
    engine_words: tuple[str, ...]


def read_choice(words: Sequence[str]) -> Choice:
    """ValueError for a word that is wrong."""
    own, rest = own_words(words, KEYS)
    workloads = split_list(own.get("workload", ""))
    if not workloads or any(each not in WORKLOADS for each in workloads):
        raise ValueError(f"workload={own.get('workload')} is unknown; give some of {','.join(WORKLOADS)}.")
    shapes = ROOT / "benchmarks" / "models" / own.get("model", "qwen3-30b-a3b")
    model = shapes if shapes.is_dir() else Path(own["model"])
    if not (model / "config.json").is_file():
        raise ValueError(f"model={model} holds no config.json; give a folder or a name in benchmarks/models/.")
    held, demo_held = (
        number_above_zero(own, name, float, default) for name, default in (("held", 0.25), ("demo_held", 0.5))
    )
    if held > 1 or demo_held >= 1:
        raise ValueError(f"held={held:g}, demo_held={demo_held:g} are shares; give up to 1, and of the demos less.")
    if held == 1 and set(workloads) - {"bytes", "demo"}:
        raise ValueError("held=1 holds all experts on the GPU, where nothing crosses the link; give workload=bytes.")
    return Choice(
        workloads=tuple(each for each in WORKLOADS if each in workloads),
        model=model,
        held=held,
        sequences=positive("sequences", own.get("sequences", "1024")),
        prompt=positive("prompt", own.get("prompt", "128")),
        steps=positive("steps", own.get("steps", "6")),
        tokens=positive("tokens", own.get("tokens", "60")),
        zipf=tuple(_exponent(text) for text in split_list(own.get("zipf", "1,0"))),
        batches=positives(own, "batches", (2, 8, 16, 24, 32, 48, 64, 96, 128)),
        demo_held=demo_held,
        limit=number_above_zero(own, "limit", float, float("inf")),
        device=own.get("device", "auto"),
        commit=own.get("commit"),
        result=output_file(own, "result"),
        engine_words=tuple(rest),
    )


def _exponent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise ValueError(f"zipf={text} must be numbers from 0 (even) up to 10; 1 is Zipf's law.")
    return value


def config_words(choice: Choice) -> list[str]:
    """Of the engine on dummy weights."""
    num_experts = read_config(choice.model).moe.num_experts
    words = ["load_format=dummy", "cache.prefix_caching=false", f"--model={choice.model}"]
    words += [f"engine.device={choice.device}", f"engine.max_num_seqs={choice.sequences}"]
    words += ["engine.max_batched_tokens=32768", "engine.max_model_len=1024", "engine.capture_seconds=0"]
    if choice.held < 1:
        slots = min(max(1, round(choice.held * num_experts)), num_experts - 1)
        words += ["offload.regime=auto", f"offload.slots_per_layer={slots}"]
    return [*words, *choice.engine_words]


class Bench:
    """Pieces of the workloads in turn: `figures` grows, and so does the result file."""

    def __init__(self, choice: Choice, command: str) -> None:
        self.choice = choice
        self.figures: list[Figure] = []
        self.begin = time.perf_counter()
        self.left_out = False
        device = resolve_device(choice.device)
        self.record: dict[str, Any] = machine_record(device, command, choice.commit) | {"engines": {}}
        self.console = Console(width=240)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def run(self) -> None:
        """All of it, or as much as the limit leaves."""
        workloads = [each for each in self.choice.workloads if each != "demo"]
        if workloads:
            self._of_shapes(workloads)
        if "demo" in self.choice.workloads:
            for model in DEMOS:
                self._piece(model, self._of_demo(model))
        write_record(self.record, self.figures, self.choice.result, complete=not self.left_out)

    def _of_shapes(self, workloads: Sequence[str]) -> None:
        choice, name = self.choice, self.choice.model.name
        config = compose_config(parse(config_words(choice)))
        with HostPeak() as host:
            parts = load_parts(config)
            loaded = self.seconds
            assert isinstance(parts.network, CausalLM), "an engine loads a network of ours"
            gates = ZipfGates(parts.network)
            engine = Engine(config, parts=parts)
        facts = {"load_seconds": round(loaded, 1), "start_seconds": round(self.seconds, 1), "plan": engine.plan.table()}
        self.record["engines"][name] = facts
        print(f"{name}: loaded in {loaded:.1f} s, ready in {self.seconds:.1f} s", flush=True)
        try:
            for workload in workloads:
                if workload == "stream":
                    self._piece("stream", self._stream(engine, name))
                for exponent in choice.zipf if workload in ("cache", "regimes") else ():
                    what = f"zipf {exponent:g}" if exponent else "even"
                    if workload == "cache":
                        gates.skew(exponent)
                        self._piece(f"cache, {what}", self._cache(engine, name, what))
                    else:
                        skew_routing(parts.network, exponent)
                        self._piece(f"regimes, {what}", self._regimes(engine, name, what))
            if choice.held < 1:
                facts["link_gb_s"] = round(measure_link(engine) / 1e9, 2)
            if "bytes" in workloads:
                self._piece("bytes", (each for each in byte_figures(engine, name, host.num_bytes)))
            facts["stats"] = engine.count_experts().as_dict()
        finally:
            engine.close()

    def _prompts(self, vocab_size: int, number: int) -> list[Prompt]:
        """Answers end when the bench ends them."""
        return even_prompts(vocab_size, number, self.choice.prompt, 1024 - self.choice.prompt)

    def _stream(self, engine: Engine, name: str) -> Figures:
        prompts = self._prompts(engine.vocab_size, self.choice.sequences)
        yield stream_figure(engine, name, prompts, self.choice.steps)

    def _cache(self, engine: Engine, name: str, what: str) -> Figures:
        (prompt,) = self._prompts(engine.vocab_size, 1)
        tokens = self.choice.tokens
        for guesses in (True, False):
            yield cache_figure(engine, name, prompt, guesses=guesses, num_steps=tokens, warm=tokens * 2 // 3, what=what)

    def _regimes(self, engine: Engine, name: str, what: str) -> Figures:
        choice = self.choice
        prompts = self._prompts(engine.vocab_size, max(choice.batches))
        yield from regime_figures(engine, name, prompts, choice.batches, max(2, choice.steps // 2), what)

    def _of_demo(self, model: str) -> Figures:
        choice = self.choice
        num_experts = read_config(resolve_model(model)).moe.num_experts
        words = [f"model={model}", f"engine.device={choice.device}", "engine.max_num_seqs=4", "dtype=bfloat16"]
        words += ["cache.prefix_caching=false", "cache.num_blocks=256", "offload.regime=auto"]
        engine = Engine(
            compose_config(parse([*words, f"offload.slots_per_layer={round(choice.demo_held * num_experts)}"]))
        )
        try:
            assert engine.tokenizer is not None, "demo models have tokenizers"
            prompt = Prompt(engine.tokenizer.encode_prompt(DEMO_PROMPT), 900)
            for guesses in (True, False):
                yield cache_figure(
                    engine,
                    model,
                    prompt,
                    guesses=guesses,
                    num_steps=choice.tokens,
                    warm=choice.tokens * 2 // 3,
                    what="own router",
                    temperature=1.0,
                )
        finally:
            engine.close()

    def _piece(self, name: str, figures: Figures) -> None:
        """Each figure as it is found, and one table in the end; a limit that has passed leaves out what is left."""
        begin, found = self.seconds, []
        if begin <= self.choice.limit:
            print(f"{name}: from {begin:.1f} s on", flush=True)
        with closing(figures):
            while self.seconds <= self.choice.limit:
                figure = next(figures, None)
                if figure is None:
                    break
                found.append(figure)
                self.figures.append(figure)
                values = {"": figure.value} | figure.extra
                print(
                    f"{figure.name}, {figure.unit}",
                    *(f"{key} {number(each)}" for key, each in values.items()),
                    flush=True,
                )
                write_record(self.record, self.figures, self.choice.result, complete=False)
            else:
                print(f"{name}: left out, {self.seconds:.0f} s have passed", flush=True)
                self.left_out = True
        print_figures(found, self.console)
        print(f"{name}: {self.seconds - begin:.1f} s, {self.seconds:.1f} in all", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__, KEYS):
        return 0
    try:
        choice = read_choice(words)
    except ValueError as error:
        return refuse(error)
    set_up_logging(Console(stderr=True))
    shown = [word for word in words if not word.startswith(("result=", "commit="))]
    bench = Bench(choice, shlex.join(["python", "benchmarks/offload.py", *shown]))
    bench.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
