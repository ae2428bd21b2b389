"""Whether a model fits, and how fast it can be, before anything is loaded: `python -m launch.plan model=qwen3-30b-a3b`.

Reads config.json and the headers of the weights, in seconds and without a GPU, and prints what a GPU would hold:
weights by kind, experts there and in host memory, the cache, a step's working space; how many sequences of the given
lengths go on at a time, and the floor of a step. It is the sum that an engine makes at its start. Where it does not
fit, it says what to change. Exit codes: 0 it fits, 1 it does not, 2 a wrong command line or model.

`model` names shapes in benchmarks/models/, or is what it is for launch.generate; words that are not this file's own are
keys of launch.generate. Knows words and what to try; moe/engine/forecast.py knows what fits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from configs.checks import freeze
from configs.schema import Config
from expert_parallel.host_memory import HostMemory, read_host_memory
from kv_cache.layout import LayerScales
from launch.command_line import compose_config, parse
from launch.figure import ROOT
from launch.plan_table import amount, plan_table
from launch.roofline import Ceilings
from launch.speed import Load, Rates, Speed, speed
from launch.words import check_rest, helped, number_above_zero, own_words, positive, refuse
from moe.engine.forecast import Forecast, Subject, forecast
from moe.engine.machine import OTHER_BYTES, Machine
from moe.engine.memory_plan import GIB
from moe.engine.parts import step_limits
from moe.engine.resolve import kv_layout, resolve_dtype, resolve_max_model_len
from moe.model.hub import resolve_model
from moe.model.load_model import open_model

KEYS = {
    "gpus": "1; more share the experts, and each holds all else",
    "gpus_per_host": "8",
    "gpu_gb": "GiB of a GPU as its driver shows it; the GPU here, else 80",
    "other_gb": "GiB of it that contexts and kernels take (0.75)",
    "capability": "compute capability of the GPU (9.0)",
    "host_gb": "GiB of host memory that experts may have; what this machine has available",
    "lengths": "prompt and answer of a sequence in tokens (512+128)",
    "memory_tb_s": "TB/s that a GPU reads from its memory (4.42, measured on an H200)",
    "tflops": "TFLOP/s of its products (700, an H200's that has worked for seconds)",
    "link_gb_s": "GB/s from the host's pinned memory (55.4, measured on an H200)",
}
GPU = torch.device("cuda")
DEFAULT_GPU_GB = 80.0
FP8_CAPABILITY = 8.9


@dataclass(frozen=True)
class Ask:
    """The command line: what is to run, where, on what."""

    model: str
    folder: Path
    config: Config
    gpus: int
    gpus_per_host: int
    gpu_bytes: int
    other_bytes: int
    capability: float
    host: HostMemory
    prompt: int
    answer: int
    rates: Rates


@dataclass(frozen=True)
class Outcome:
    """What became of it. `problem` None: it fits."""

    ask: Ask
    subject: Subject
    forecast: Forecast | None
    speed: Speed | None
    seqs: int  # at a time, of the given lengths
    problem: str | None
    told: tuple[str, ...] = ()  # keys that follow from the lengths


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and print."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__, KEYS):
        return 0
    try:
        ask = read_ask(words)
        outcome = evaluate(ask)
    except ValueError as error:
        return refuse(error)
    console = Console(width=150, highlight=False, soft_wrap=True)
    if outcome.forecast is not None:
        console.print(plan_table(ask.model, outcome.subject, outcome.forecast, outcome.speed, ask.gpus, outcome.seqs))
    if outcome.problem is None:
        keys = "" if not outcome.told else f" The engine is told of them by {' '.join(outcome.told)}."
        console.print(f"It fits: up to {outcome.seqs} sequences of {ask.prompt}+{ask.answer} at a time.{keys}")
        if text := faster(ask, outcome):
            console.print(text)
        return 0
    console.print(f"It does not fit: {outcome.problem}")
    console.print(way_out(ask))
    return 1


def read_ask(words: Sequence[str]) -> Ask:
    """ValueError for a word that is none, and for a model that cannot be read."""
    own, others = own_words(words, KEYS)
    check_rest(others, KEYS)
    model = next((word.split("=", 1)[1] for word in reversed(others) if word.startswith("model=")), Config.model)
    shapes = ROOT / "benchmarks" / "models" / model
    if model and shapes.is_dir():
        others = [*(word for word in others if not word.startswith("model=")), f"model={shapes}"]
    config = compose_config(parse(others))
    folder = resolve_model(config.model, config.revision, weights=False)
    if config.load_format != "dummy" and not any(folder.glob("*.safetensors")):
        config = changed(config, {"load_format": "dummy"})  # shapes alone: what its weights would be
    prompt, answer = _lengths(own.get("lengths", "512+128"))
    ceilings = Ceilings(
        number_above_zero(own, "memory_tb_s", float, 4.42) * 1e12,
        number_above_zero(own, "tflops", float, 700.0) * 1e12,
        "given",
    )
    return Ask(
        model=model,
        folder=folder,
        config=config,
        gpus=positive("gpus", own.get("gpus", "1")),
        gpus_per_host=positive("gpus_per_host", own.get("gpus_per_host", "8")),
        gpu_bytes=_gpu_bytes(own),
        other_bytes=int(number_above_zero(own, "other_gb", float, OTHER_BYTES / GIB) * GIB),
        capability=number_above_zero(own, "capability", float, 9.0),
        host=_host(own),
        prompt=prompt,
        answer=answer,
        rates=Rates(ceilings, number_above_zero(own, "link_gb_s", float, 55.4) * 1e9),
    )


def _lengths(text: str) -> tuple[int, int]:
    prompt, plus, answer = text.partition("+")
    if not plus:
        raise ValueError(f"lengths={text} is no PROMPT+ANSWER, such as 512+128.")
    return positive("lengths", prompt), positive("lengths", answer)


def _gpu_bytes(own: Mapping[str, str]) -> int:
    if "gpu_gb" not in own and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return int(number_above_zero(own, "gpu_gb", float, DEFAULT_GPU_GB) * GIB)


def _host(own: Mapping[str, str]) -> HostMemory:
    if "host_gb" not in own:
        return read_host_memory()
    given = number_above_zero(own, "host_gb", float, 0.0)
    return HostMemory(int(given * GIB), f"host_gb={own['host_gb']}")


def changed(config: Config, values: Mapping[str, object]) -> Config:
    """The same config with these keys (dotted) set, checked again."""
    for name, value in values.items():
        group, _, key = name.rpartition(".")
        section = replace(getattr(config, group), **{key: value}) if group else value
        config = replace(config, **{group or key: section})
    return freeze(config)


def evaluate(ask: Ask) -> Outcome:
    """ValueError where keys and model contradict each other; what does not fit is a problem of the outcome."""
    config = ask.config
    subject = make_subject(ask)
    length = ask.prompt + ask.answer
    if length > subject.limits.max_model_len:
        raise ValueError(
            f"lengths={ask.prompt}+{ask.answer} exceeds engine.max_model_len={subject.limits.max_model_len}; shorten "
            "them, or raise it as far as the checkpoint allows."
        )
    told: dict[str, object] = {}
    if config.offload.regime != "off" and _sizes_itself(config):
        told = {"offload.tokens_per_seq": length}
        config = changed(config, told)
    machine = Machine(
        name=f"a GPU of {ask.gpu_bytes / GIB:.1f} GiB",
        total=ask.gpu_bytes,
        other=ask.other_bytes,
        hopper=ask.capability >= 9,
        host=ask.host,
        num_ranks=ask.gpus,
        rank=0,  # where experts do not divide evenly the first ranks hold one more
        ranks_here=min(ask.gpus, ask.gpus_per_host),
    )
    try:
        planned = forecast(config, subject, machine)
    except ValueError as error:
        return Outcome(ask, subject, None, None, 0, str(error))
    if planned.plan is None:
        return Outcome(ask, subject, planned, None, 0, planned.problem)
    blocks = -(-length // subject.layout.block_size)
    seqs = min(planned.plan.num_blocks // blocks, subject.limits.max_num_seqs)
    if not seqs:
        problem = f"the cache holds {planned.plan.capacity_tokens} tokens, fewer than one sequence of {length} takes."
        return Outcome(ask, subject, planned, None, 0, problem)
    load = Load(seqs, ask.prompt, ask.answer, subject.limits.max_batched_tokens, ask.gpus)
    fast = speed(subject.model, subject.layout, subject.dtype.itemsize, planned.offload, load, ask.rates)
    return Outcome(ask, subject, planned, fast, seqs, None, tuple(f"{key}={value}" for key, value in told.items()))


def faster(ask: Ask, outcome: Outcome) -> str | None:
    """What more experts on the GPU bring, where the cache keeps room for a sequence longer than those asked for."""
    length = ask.prompt + ask.answer
    if outcome.forecast is None or outcome.forecast.offload is None or length == outcome.subject.limits.max_model_len:
        return None
    other = evaluate(replace(ask, config=changed(ask.config, {"engine.max_model_len": length})))
    if outcome.speed is None or other.speed is None or other.speed.tokens_per_s < 1.01 * outcome.speed.tokens_per_s:
        return None
    return (
        f"With engine.max_model_len={length} the cache keeps no room for longer ones, and experts take it: at most "
        f"{amount(other.speed.tokens_per_s)} tokens/s."
    )


def _sizes_itself(config: Config) -> bool:
    """Whether the cache's room follows from the length of sequences, and nobody has said how long they are."""
    offload = config.offload
    return offload.tokens_per_seq is None and offload.slots_per_layer is None and offload.gpu_gb is None


def make_subject(ask: Ask) -> Subject:
    """As an engine on such a GPU would hold the model."""
    config, quantization = ask.config, ask.config.quantization
    if ask.capability < FP8_CAPABILITY:
        asked = {"quantization": config.quantization, "cache.dtype": config.cache.dtype}
        if wrong := next((f"{key}={value}" for key, value in asked.items() if value.startswith("fp8")), None):
            raise ValueError(f"{wrong}, but capability={ask.capability:g} has no fp8 (8.9 and above have it).")
        quantization = "none"
    model = open_model(ask.folder, config.load_format, quantization, torch.device("cpu")).config
    dtype = resolve_dtype(config.dtype, model.dtype, GPU)
    scales = (LayerScales(1.0, 1.0),) * model.num_layers if config.cache.dtype == "fp8-layer" else ()
    layout = kv_layout(model, config.cache.block_size, dtype, config.cache.dtype, torch.device("cpu"), scales)
    limits = step_limits(config, resolve_max_model_len(config.engine.max_model_len, model), GPU)
    return Subject(model, dtype, layout, limits)


def way_out(ask: Ask) -> str:
    """The first change with which it fits, as words for this command line."""
    for values, gpus in alternatives(ask):
        try:
            outcome = evaluate(replace(ask, config=changed(ask.config, values), gpus=gpus))
        except ValueError:
            continue  # keys that do not go together
        if outcome.problem is None and outcome.speed is not None:
            words = [f"{key}={'null' if value is None else value}" for key, value in values.items()] + [
                f"gpus={gpus}"
            ] * (gpus != ask.gpus)
            rate = amount(outcome.speed.tokens_per_s)
            return f"It fits with {' '.join(words)}: up to {outcome.seqs} sequences at a time, at most {rate} tokens/s."
    return "Neither experts in host memory nor fp8, fewer sequences or up to 64 GPUs make it fit."


def alternatives(ask: Ask) -> Iterator[tuple[dict[str, object], int]]:
    """(keys to change, number of GPUs): what costs nothing but speed first, what costs GPUs last."""
    config, limits = ask.config, make_subject(ask).limits
    offload: dict[str, object] = {"offload.regime": "auto"}
    fp8: dict[str, object] = {"quantization": "fp8"}
    fewer = max(1, limits.max_num_seqs // 2)
    ways = [offload, fp8, offload | fp8] if config.offload.regime == "off" else [fp8]
    if config.offload.slots_per_layer is not None or config.offload.gpu_gb is not None:
        ways.insert(0, {"offload.slots_per_layer": None, "offload.gpu_gb": None})
    for way in ways:
        yield way, ask.gpus
    while fewer:
        for way in ({}, *ways):
            yield way | {"engine.max_num_seqs": fewer, "engine.max_batched_tokens": max(fewer, 2048)}, ask.gpus
        fewer //= 4
    for way in ({}, *ways):
        for times in (2, 4, 8, 16, 32, 64):
            if ask.gpus * times <= 64:
                yield way, ask.gpus * times


if __name__ == "__main__":
    sys.exit(main())
