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

import gc
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from expert_parallel.group import Ranks
from launch import bench_engine, bench_ep, bench_ranks
from launch.bench_attention import LISTED, HeadLayout, head_layout, measure_attention
from launch.bench_engine import EngineBench
from launch.bench_layer import TOKENS, LayerShape, layer_shape, measure_layer
from launch.bench_serving import CONCURRENCY, LENGTHS, measure_serving
from launch.command_line import compose_config, parse
from launch.console import set_up_logging, set_up_rank_logging
from launch.figure import ROOT, Figure, load_baselines, print_figures
from launch.machine import machine_record
from launch.result_file import begin_record, write_record
from launch.roofline import Ceilings
from launch.roofline_picture import check_matplotlib, draw
from launch.words import (
    check_rest,
    flag,
    helped,
    number_above_zero,
    output_file,
    own_words,
    positive,
    positives,
    refuse,
    split_list,
    unknown_word,
)
from moe.engine.engine import Engine
from moe.engine.parts import resolve_device
from moe.model.causal_lm import CausalLM

KERNEL_WORKLOADS = ("w5", "w4")  # in this order, before an engine fills the memory
ENGINE_WORKLOADS = ("w1", "w2", "w3", "serving")  # in the order that they are asked for
WORKLOADS = (*KERNEL_WORKLOADS, *ENGINE_WORKLOADS, "ep")
Piece = tuple[str, Callable[[], list[Figure]]]
"""What is measured in one go, and what it is called: a run that is cut loses the one that it was at."""

DEFAULTS = ("load_format=dummy", "cache.prefix_caching=false", "engine.max_model_len=8192")
OWN_KEYS = {
    "workload": "w1, w2, w3, w4, w5, serving; several with commas; ep alone, under torchrun",
    "model": "w1 to w3, serving: names in benchmarks/models/, or a model of launch.generate",
    "device": "auto, cuda or cpu",
    "limit": "w1, w3: only so many requests; w2: only so many of its batches",
    "requests": "w1 under torchrun: so many of all ranks, 512 each; several with commas",
    "skew": "w1 under torchrun: rows are routed by a table: 0 evenly, 1 after Zipf's law",
    "warm": "w1 under torchrun: whole, or short: without a floor, in half of the time",
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
    "result": "a JSON file; it is written again after every piece, and says whether it is complete",
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
    requests: tuple[int, ...]
    skew: float | None
    warm: str
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
    """Run the workloads, print their figures, write the result file. 2: a wrong command line, or a model that cannot be
    loaded."""
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
    pieces = _pieces(choice, device, ceilings, baselines, record["engines"])
    while True:
        try:
            piece = next(pieces, None)  # where a model is loaded that may not be there, or not fit
        except ValueError as error:
            return refuse(error)
        if piece is None:
            break
        name, measure = piece
        logger.info("measuring %s", name)
        measured = measure()
        figures += measured
        print_figures(measured, console)
        write_record(record, figures, choice.result, complete=False)
    write_record(record, figures, choice.result, complete=True)
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
                write_record(record, figures, choice.result, complete=False)
    if first:
        write_record(record, figures, choice.result, complete=True)
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
    totals = choice.requests or (bench_ranks.REQUESTS_OF_A_RANK * group.size,)
    for model in choice.models:
        started = time.perf_counter()
        engine = Engine(compose_config(parse(_engine_words(choice, model))), ranks=ranks)
        facts = {"start_seconds": round(time.perf_counter() - started, 2), "kv_blocks": engine.plan.num_blocks}
        name = Path(model).name
        if choice.skew is not None and isinstance(engine.parts.network, CausalLM):
            bench_ranks.skew_routing(engine.parts.network, choice.skew)
        bench = EngineBench(engine, name, ceilings, baselines)
        for total in totals:
            if group.rank == 0:
                logger.info("measuring w1 of %s, %d requests", name, total)
            rounds, whole = choice.rounds or 1, choice.warm == "whole"
            figure, more = bench_ranks.measure_w1(engine, bench, ranks, total, rounds, whole=whole)
            figures.append(figure)
            record["engines"] |= {name: facts | more}
            if group.rank == 0:
                print_figures([figure], Console(width=240))
                write_record(record, figures, choice.result, complete=False)
        engine.conclude()
        engine.close()
        del engine, bench
        _release(ranks.device)
    if group.rank == 0:
        write_record(record, figures, choice.result, complete=True)
    if group.rank == 0 and choice.result is not None:
        print(f"result: {choice.result}")
    group.barrier()  # nobody leaves while another still reaches for its memory
    ranks.close()


def _pieces(
    choice: Choice, device: torch.device, ceilings: Ceilings, baselines: dict[str, Any], engines: dict[str, Any]
) -> Iterator[Piece]:
    """Each is measured before the next is asked for. `engines` is told about those that are built."""
    common = {"seconds": choice.seconds}
    if "w5" in choice.workloads:
        for layout in choice.layouts:
            found = partial(measure_attention, layout, device, ceilings, baselines, points=choice.points, **common)
            yield f"w5 {layout.name}", found
        _release(device)
    if "w4" in choice.workloads:
        for shape in choice.shapes:
            found = partial(
                measure_layer, shape, choice.tokens, device, ceilings, baselines, parts=choice.parts, **common
            )
            yield f"w4 {shape.name}", found
        _release(device)
    workloads = [workload for workload in choice.workloads if workload in ENGINE_WORKLOADS]
    for model in choice.models if workloads else ():
        yield from _engine_pieces(choice, model, workloads, ceilings, baselines, engines)
        _release(device)


def _engine_pieces(
    choice: Choice,
    model: str,
    workloads: Sequence[str],
    ceilings: Ceilings,
    baselines: dict[str, Any],
    engines: dict[str, Any],
) -> Iterator[Piece]:
    """One engine, its weights filled once, for all its workloads."""
    started = time.perf_counter()
    engine = Engine(compose_config(parse(_engine_words(choice, model))))
    name = Path(model).name
    facts = {"start_seconds": round(time.perf_counter() - started, 2), "kv_blocks": engine.plan.num_blocks}
    engines[name] = facts
    try:
        bench = EngineBench(engine, name, ceilings, baselines)
        for workload in workloads:
            for point, measure in _workload_pieces(choice, engine, bench, workload):
                yield f"{point} of {name}", partial(_with_facts, measure, engine, facts)
    finally:
        engine.close()


def _with_facts(measure: Callable[[], list[Figure]], engine: Engine, facts: dict[str, Any]) -> list[Figure]:
    figures = measure()
    if engine.parts.device.type == "cuda":
        facts["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    facts["stats"] = engine.count_experts().as_dict()
    return figures


def _workload_pieces(choice: Choice, engine: Engine, bench: EngineBench, workload: str) -> Iterator[Piece]:
    if workload == "serving":
        yield workload, partial(measure_serving, engine, bench.model, choice.lengths, choice.concurrency)
    elif workload == "w2" and choice.rounds in (None, 1):
        for batch in bench_engine.DECODE_BATCHES[: choice.limit]:  # several rounds take turns, so they are one piece
            yield f"w2 batch {batch}", partial(bench.decode, (batch,), 1)
    else:
        yield workload, partial(bench.measure, workload, limit=choice.limit, rounds=choice.rounds)


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
        asked = f"workload={own['workload']} is unknown" if "workload" in own else "workload= is missing"
        raise ValueError(f"{asked}; give some of {','.join(sorted(WORKLOADS))}.")
    if "ep" in workloads and len(workloads) > 1:
        raise ValueError(f"workload={own['workload']}: ep needs ranks and the others need one process; give it alone.")
    if "RANK" in os.environ and workloads not in (("ep",), ("w1",)):
        raise ValueError(
            f"workload={own['workload']}: under torchrun give ep or w1, alone; the others need one process."
        )
    bench_ranks.check_words(own)
    if unknown := [name for name in split_list(own.get("dispatchers", "")) if name not in bench_ep.NAMES]:
        raise ValueError(f"dispatchers={unknown[0]} is unknown; use {', '.join(bench_ep.NAMES)}.")
    if rest and not any(workload in ENGINE_WORKLOADS for workload in workloads):
        raise unknown_word(rest[0], OWN_KEYS, f"workload={own['workload']}")
    check_rest(rest, OWN_KEYS)
    if unknown := [name for name in split_list(own.get("lengths", "")) if name not in LENGTHS]:
        raise ValueError(f"lengths={unknown[0]} is unknown; use {', '.join(LENGTHS)}.")
    if "picture" in own:
        check_matplotlib()
    return Choice(
        workloads=tuple(dict.fromkeys(sorted(workloads, key=_place))),
        models=split_list(own.get("model", "demo")),
        device=own.get("device", "auto"),
        limit=number_above_zero(own, "limit", int, None),
        requests=positives(own, "requests", ()),
        skew=bench_ranks.read_skew(own),
        warm=own.get("warm", "whole"),
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


def _place(workload: str) -> int:
    """Of kernels' workloads in their order, then of all others in any."""
    return (*KERNEL_WORKLOADS, workload).index(workload)


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
