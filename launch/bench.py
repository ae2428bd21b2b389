"""Time workloads on dummy weights: `python -m launch.bench workload=w1,w2,w3 model=qwen3-30b-a3b result=r.json`.

w1 offline throughput, w2 decode step, w3 prefill: launch/bench_engine.py. w4 one MoE layer: launch/bench_layer.py.
w5 paged attention: launch/bench_attention.py. serving, latencies: launch/bench_serving.py. ep, rows between ranks that
torchrun starts, alone: launch/bench_ep.py. w1 under torchrun, ranks that share the experts: launch/bench_ranks.py. Each
figure comes with its
floor (what must be read and computed, over the card's rates), its target and what others reach
(benchmarks/baselines.json).

`model` names shapes in benchmarks/models/ (several with commas), or is what it is for launch.generate; key=value words
that are not this file's own are keys of launch.generate, over this file's: dummy weights, no prefix cache (a repeated
run would find its prompts there). Knows which bench measures what; not what the numbers should be.
"""

from __future__ import annotations

import difflib
import gc
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from expert_parallel.group import Ranks
from launch import bench_ep, bench_ranks
from launch.bench_attention import LISTED, HeadLayout, head_layout, measure_attention
from launch.bench_engine import EngineBench
from launch.bench_layer import TOKENS, LayerShape, layer_shape, measure_layer
from launch.bench_serving import CONCURRENCY, LENGTHS, measure_serving
from launch.command_line import compose_config, parse
from launch.console import set_up_logging, set_up_rank_logging
from launch.figure import ROOT, Figure, load_baselines, print_figures, short
from launch.machine import clocks, machine_record
from launch.roofline import Ceilings, measure_ceilings
from launch.roofline_picture import check_matplotlib, draw
from launch.words import (
    flag,
    helped,
    number_above_zero,
    output_file,
    own_words,
    positive,
    positives,
    refuse,
    split_list,
)
from moe.engine.engine import Engine
from moe.engine.parts import resolve_device
from moe.model.causal_lm import CausalLM

WORKLOADS = (
    "w5",
    "w4",
    "w1",
    "w2",
    "w3",
    "serving",
    "ep",
)  # in this order: the kernels' benches before the engine fills the memory
ENGINE_WORKLOADS = ("w1", "w2", "w3", "serving")
DEFAULTS = ("load_format=dummy", "cache.prefix_caching=false", "engine.max_model_len=8192")
OWN_KEYS = {
    "workload": "w1, w2, w3, w4, w5, serving; several with commas; ep alone, under torchrun",
    "model": "w1 to w3, serving: names in benchmarks/models/, or a model of launch.generate",
    "device": "auto, cuda or cpu",
    "limit": "w1, w3: only so many requests; w2: only so many of its batches",
    "skew": "w1 under torchrun: rows are routed by a table: 0 evenly, 1 after Zipf's law",
    "rounds": "timed passes of w1 (1), w2 (1), w3 (3)",
    "lengths": f"serving: {','.join(LENGTHS)}",
    "concurrency": "serving: requests in flight, 1,16,64",
    "shapes": "w4: mixtral,qwen3,dsv3-ep8 (ep: dsv3,qwen3), or sizes such as E60-k4-D2880-F1408; with -fp8 behind, "
    "experts in fp8",
    "tokens": "w4: 1,8,64,...; ep: of each rank, 16,128,...",
    "dispatchers": f"ep: {','.join(bench_ep.NAMES)}",
    "parts": "w4: true or false, each kernel alone as well",
    "attention": f"w5: {','.join(LISTED)}",
    "points": "w5: 1x512,64x4096: sequences x length, instead of the listed ones",
    "seconds": "w4, w5, ep: device time of each point's samples",
    "commit": "the commit, where the tree cannot say it",
    "result": "a JSON file; it is written again after every workload",
    "picture": "a PNG: the figures under the card's roofline",
}

logger = logging.getLogger("launch.bench")


@dataclass(frozen=True)
class Choice:
    """The command line, taken apart and checked."""

    workloads: tuple[str, ...]
    models: tuple[str, ...]
    device: str
    limit: int | None
    skew: float | None
    rounds: int | None
    lengths: tuple[str, ...]
    concurrency: tuple[int, ...]
    shapes: tuple[LayerShape, ...]
    tokens: tuple[int, ...]
    dispatchers: tuple[str, ...]
    parts: bool
    layouts: tuple[HeadLayout, ...]
    points: tuple[tuple[int, int], ...] | None
    seconds: float
    commit: str | None
    result: Path | None
    picture: Path | None
    engine_words: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workloads, print their figures, write the result file. 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__, OWN_KEYS):
        return 0
    try:
        choice = read_choice(words)
        if any(workload in ENGINE_WORKLOADS for workload in choice.workloads):
            for model in choice.models:
                compose_config(
                    parse(_engine_words(choice, model))
                )  # a wrong key before the first second of device time
        spread = "RANK" in os.environ or choice.workloads == ("ep",)
        ranks = bench_ep.begin_ranks(choice.device) if spread else None
        device = resolve_device(choice.device) if ranks is None else ranks.device
    except ValueError as error:
        return refuse(error)
    if ranks is not None and choice.workloads == ("ep",):
        _measure_ep(choice, ranks, words)
        return 0
    if ranks is None or ranks.everyone.rank == 0:
        set_up_logging(Console(stderr=True))
    else:
        set_up_rank_logging(Console(stderr=True), ranks.everyone.rank)
    baselines = load_baselines()
    if ranks is not None:
        _measure_spread(choice, ranks, baselines, words)
        return 0
    record, ceilings = begin_record(device, baselines, ["python", "-m", "launch.bench", *words], choice.commit)
    figures: list[Figure] = []
    console = Console(width=240)
    for measured, facts in _measure_all(choice, device, ceilings, baselines):
        figures += measured
        record["engines"] |= facts
        print_figures(measured, console)
        write_record(record, figures, choice.result)
    if choice.result is not None:
        print(f"result: {choice.result}")
    if choice.picture is not None:
        draw(figures, ceilings, choice.picture)
        print(f"picture: {choice.picture}")
    return 0


def _measure_ep(choice: Choice, ranks: Ranks, words: Sequence[str]) -> None:
    """Every rank measures; the first one prints and writes."""
    first, console = ranks.everyone.rank == 0, Console(width=240)
    missing = bench_ep.left_out(ranks.everyone, ranks.device, choice.dispatchers)
    names = [name for name in choice.dispatchers if name not in missing]
    command = shlex.join(["torchrun", f"--nproc-per-node={ranks.everyone.size}", "-m", "launch.bench", *words])
    record = machine_record(ranks.device, command, choice.commit) | {"left_out": missing}
    if first:
        print("\n".join(f"{name} is left out: {why}" for name, why in missing.items()))
    figures: list[Figure] = []
    for shape in choice.shapes:
        for measured in bench_ep.measure_ep(ranks, shape, choice.tokens, names, choice.seconds):
            figures += measured
            if first:
                print_figures(measured, console)
                write_record(record, figures, choice.result)
    if first and choice.result is not None:
        print(f"result: {choice.result}")
    ranks.everyone.barrier()  # nobody leaves while another still reaches for its memory
    ranks.close()


def _measure_spread(choice: Choice, ranks: Ranks, baselines: dict[str, Any], words: Sequence[str]) -> None:
    """w1 of experts that all ranks share. Every rank measures; the first one prints and writes."""
    group = ranks.everyone
    command = ["torchrun", f"--nproc-per-node={group.size}", "-m", "launch.bench", *words]
    record, ceilings = begin_record(ranks.device, baselines, command, choice.commit)
    figures: list[Figure] = []
    for model in choice.models:
        started = time.perf_counter()
        engine = Engine(compose_config(parse(_engine_words(choice, model))), ranks=ranks)
        facts = {"start_seconds": round(time.perf_counter() - started, 2), "kv_blocks": engine.plan.num_blocks}
        name = Path(model).name
        if choice.skew is not None and isinstance(engine.parts.network, CausalLM):
            bench_ranks.skew_routing(engine.parts.network, choice.skew)
        bench = EngineBench(engine, name, ceilings, baselines)
        figure, more = bench_ranks.measure_w1(engine, bench, ranks, choice.limit, choice.rounds or 1)
        figures.append(figure)
        record["engines"] |= {name: facts | more}
        if group.rank == 0:
            print_figures([figure], Console(width=240))
            write_record(record, figures, choice.result)
        engine.conclude()
        engine.close()
        del engine, bench
        _release(ranks.device)
    if group.rank == 0 and choice.result is not None:
        print(f"result: {choice.result}")
    group.barrier()  # nobody leaves while another still reaches for its memory
    ranks.close()


def begin_record(
    device: torch.device, baselines: dict[str, Any], command: list[str], commit: str | None
) -> tuple[dict[str, Any], Ceilings]:
    """The head of a result file, and the card's rates: the recorded bandwidth where there is one (floors of different
    runs then compare), the product's rate from this run."""
    probe = measure_ceilings(device)
    record = machine_record(device, shlex.join(command), commit)
    known = baselines.get("ceilings", {}).get(record["device"])
    ceilings = probe
    if known is not None:
        ceilings = Ceilings(known["read_tb_s"] * 1e12, probe.flops_per_s, f"recorded bandwidth; {probe.source}")
    for name, each in (("ceilings", ceilings), ("probe", probe)):
        rates = {"tb_s": short(each.bytes_per_s / 1e12), "tflop_s": short(each.flops_per_s / 1e12)}
        record[name] = rates | {"source": each.source}
    logger.info(
        "floors: %.2f TB/s, %.1f TFLOP/s (probe: %.2f TB/s; %s)",
        ceilings.bytes_per_s / 1e12,
        ceilings.flops_per_s / 1e12,
        probe.bytes_per_s / 1e12,
        probe.source,
    )
    return record | {"baselines": baselines.get("source"), "engines": {}}, ceilings


def write_record(record: dict[str, Any], figures: Sequence[Figure], path: Path | None) -> None:
    """The result file as it stands; a run that is cut short leaves what it had."""
    if path is None:
        return
    record["clocks"]["after"] = clocks()
    whole = record | {"figures": [figure.as_dict() for figure in figures]}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _measure_all(
    choice: Choice, device: torch.device, ceilings: Ceilings, baselines: dict[str, Any]
) -> Iterator[tuple[list[Figure], dict[str, Any]]]:
    """Figures and facts of one piece after another."""
    for workload in choice.workloads:
        if workload == "w4":
            for shape in choice.shapes:
                yield (
                    measure_layer(
                        shape, choice.tokens, device, ceilings, baselines, parts=choice.parts, seconds=choice.seconds
                    ),
                    {},
                )
        if workload == "w5":
            for layout in choice.layouts:
                yield (
                    measure_attention(
                        layout, device, ceilings, baselines, seconds=choice.seconds, points=choice.points
                    ),
                    {},
                )
        _release(device)
    engine_workloads = [workload for workload in choice.workloads if workload in ENGINE_WORKLOADS]
    for model in choice.models if engine_workloads else ():
        yield from _measure_engine(choice, model, engine_workloads, ceilings, baselines)
        _release(device)


def _measure_engine(
    choice: Choice, model: str, workloads: Sequence[str], ceilings: Ceilings, baselines: dict[str, Any]
) -> Iterator[tuple[list[Figure], dict[str, Any]]]:
    """One engine, its weights filled once, for all its workloads."""
    started = time.perf_counter()
    engine = Engine(compose_config(parse(_engine_words(choice, model))))
    facts = {"start_seconds": round(time.perf_counter() - started, 2), "kv_blocks": engine.plan.num_blocks}
    name = Path(model).name
    try:
        bench = EngineBench(engine, name, ceilings, baselines)
        for workload in workloads:
            if workload == "serving":
                figures = measure_serving(engine, name, choice.lengths, choice.concurrency)
            else:
                figures = bench.measure(workload, limit=choice.limit, rounds=choice.rounds)
            if engine.parts.device.type == "cuda":
                facts["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            yield figures, {name: facts | {"stats": engine.count_experts().as_dict()}}
    finally:
        engine.close()


def _engine_words(choice: Choice, model: str) -> list[str]:
    """What compose_config gets. A shape in benchmarks/models/ becomes its folder."""
    folder = ROOT / "benchmarks" / "models" / model
    path = folder if (folder / "config.json").is_file() else model
    return [*DEFAULTS, f"--model={path}", f"engine.device={choice.device}", *choice.engine_words]


def read_choice(words: Sequence[str]) -> Choice:
    """This file's own keys, checked; the other words are for launch.generate, if an engine is wanted at all."""
    own, rest = own_words(words, OWN_KEYS)
    workloads = split_list(own.get("workload", ""))
    if not workloads or any(workload not in WORKLOADS for workload in workloads):
        raise ValueError(f"workload={own.get('workload')} is unknown; give some of {','.join(sorted(WORKLOADS))}.")
    if "ep" in workloads and len(workloads) > 1:
        raise ValueError(f"workload={own['workload']}: ep needs ranks and the others need one process; give it alone.")
    if "RANK" in os.environ and workloads not in (("ep",), ("w1",)):
        raise ValueError(
            f"workload={own['workload']}: under torchrun give ep or w1, alone; the others need one process."
        )
    if unknown := [name for name in split_list(own.get("dispatchers", "")) if name not in bench_ep.NAMES]:
        raise ValueError(f"dispatchers={unknown[0]} is unknown; use {', '.join(bench_ep.NAMES)}.")
    if rest and not any(workload in ENGINE_WORKLOADS for workload in workloads):
        guess = difflib.get_close_matches(rest[0].partition("=")[0], OWN_KEYS, n=1)
        raise ValueError(
            f"{rest[0]} is no key of workload={own['workload']}; "
            + (f"did you mean {guess[0]}=?" if guess else f"the keys are {', '.join(OWN_KEYS)}.")
        )
    if unknown := [name for name in split_list(own.get("lengths", "")) if name not in LENGTHS]:
        raise ValueError(f"lengths={unknown[0]} is unknown; use {', '.join(LENGTHS)}.")
    if "picture" in own:
        check_matplotlib()
    return Choice(
        workloads=tuple(workload for workload in WORKLOADS if workload in workloads),
        models=split_list(own.get("model", "demo")),
        device=own.get("device", "auto"),
        limit=number_above_zero(own, "limit", int, None),
        skew=bench_ranks.read_skew(own),
        rounds=number_above_zero(own, "rounds", int, None),
        lengths=split_list(own.get("lengths", "short,mixed")),
        concurrency=positives(own, "concurrency", CONCURRENCY),
        shapes=_shapes(own, workloads),
        tokens=positives(own, "tokens", bench_ep.TOKENS if "ep" in workloads else TOKENS),
        dispatchers=split_list(own.get("dispatchers", ",".join(bench_ep.NAMES))),
        parts=flag(own, "parts", True),
        layouts=tuple(head_layout(text) for text in (split_list(own["attention"]) if "attention" in own else LISTED)),
        points=tuple(_point(text) for text in split_list(own["points"])) if "points" in own else None,
        seconds=number_above_zero(own, "seconds", float, 0.2),
        commit=own.get("commit"),
        result=output_file(own, "result"),
        picture=output_file(own, "picture"),
        engine_words=tuple(rest),
    )


def _shapes(own: dict[str, str], workloads: Sequence[str]) -> tuple[LayerShape, ...]:
    """ep has a layer by its whole, where w4 has one rank's share."""
    whole = {shape.name: shape for shape in bench_ep.SHAPES} if "ep" in workloads else {}
    names = split_list(own.get("shapes", ",".join(whole) or "mixtral,qwen3,dsv3-ep8"))
    return tuple(whole.get(name) or layer_shape(name) for name in names)


def _point(text: str) -> tuple[int, int]:
    sequences, _, length = text.partition("x")
    return positive("points", sequences), positive("points", length)


def _release(device: torch.device) -> None:
    """Give memory back before the next piece measures what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
