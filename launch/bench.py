"""Time whole workloads through the engine on dummy weights: `python -m launch.bench workload=w1 model=qwen3-30b-a3b`.

w1 offline throughput: 512 requests of random ids, all at once; output tokens/s of the second run.
w2 decode step: 512-token prompts, 128 outputs, batches of 1, 8, 64 and 256; ms of the steps without a prompt chunk.
w3 prefill: 16 prompts of 4096 tokens, one output; prompt tokens/s.

`model` names a shape in benchmarks/models/ or is what it is for launch.generate; every other key=value is a key of
launch.generate, over this file's own: dummy weights, no prefix cache (repeated runs would find their prompts in it).
Prompts are random token ids, tokens are sampled at temperature 1, end of sequence is ignored. Knows the engine, not
what the numbers should be.
"""

from __future__ import annotations

import json
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from configs.schema import Config
from launch.command_line import compose_config, parse
from launch.console import set_up_logging
from moe.batch.report import percentile
from moe.engine.engine import Engine
from moe.engine.request import Request, SamplingParams
from moe.version import __version__

ROOT = Path(__file__).resolve().parent.parent
OWN_KEYS = ("workload", "result")
DEFAULTS = ("load_format=dummy", "cache.prefix_caching=false", "engine.max_model_len=8192")
DECODE_BATCHES = (1, 8, 64, 256)


@dataclass(frozen=True)
class Prompt:
    """So many random token ids, and how many to generate behind them."""

    token_ids: list[int]
    num_outputs: int


@dataclass(frozen=True)
class Run:
    """One pass over a set of prompts. Seconds; `decode_seconds` are of the steps that held no prompt chunk."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    decode_seconds: list[float]


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
    _synchronize(engine)
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=prompt.num_outputs, temperature=1.0, seed=index, ignore_eos=True, detokenize=False
        )
        engine.add_request(Request(f"{name}-{index}", prompt.token_ids, params))
    decode_seconds = []
    while engine.has_unfinished:
        chunks, started = stats.chunks, time.perf_counter()
        for output in engine.step():
            if output.error is not None:
                raise ValueError(f"request {output.request_id} did not run: {output.error}")
        if stats.chunks == chunks:
            decode_seconds.append(time.perf_counter() - started)
    _synchronize(engine)
    seconds = time.perf_counter() - begin
    return Run(seconds, stats.prompt_tokens - prompt_before, stats.output_tokens - output_before, decode_seconds)


def measure(engine: Engine, workload: str, limit: int | None) -> list[dict[str, Any]]:
    """The figures of one workload, each with its raw samples; the first run of each set of prompts warms up."""
    vocab = engine.vocab_size
    if workload == "w1":
        prompts = throughput_prompts(vocab)[:limit]
        warm, run = (run_prompts(engine, prompts, f"w1-{turn}") for turn in range(2))
        samples = {"warm_up_seconds": warm.seconds, "seconds": run.seconds, "prompt_tokens": run.prompt_tokens}
        samples["output_tokens"] = run.output_tokens
        return [{"name": "output tokens/s", "value": run.output_tokens / run.seconds, "samples": samples}]
    if workload == "w2":
        figures = []
        for batch in DECODE_BATCHES[:limit]:
            prompts = even_prompts(vocab, batch, 512, 128)
            run_prompts(engine, prompts[:1], f"w2-{batch}-warm")
            run = run_prompts(engine, prompts, f"w2-{batch}")
            steps_ms = [seconds * 1e3 for seconds in run.decode_seconds]
            spread = {"p5": percentile(steps_ms, 5), "p95": percentile(steps_ms, 95)}
            figures.append(
                {"name": f"decode step at batch {batch}, ms", "value": statistics.median(steps_ms), **spread}
                | {"samples": {"step_ms": steps_ms}}
            )
        return figures
    prompts = even_prompts(vocab, 16, 4096, 1)[:limit]
    run_prompts(engine, prompts, "w3-warm")
    runs = [run_prompts(engine, prompts, f"w3-{turn}") for turn in range(3)]
    rates = [run.prompt_tokens / run.seconds for run in runs]
    return [{"name": "prompt tokens/s", "value": statistics.median(rates), "samples": {"rates": rates}}]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one workload, print its figures, write the result file. 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        own, config = _read(words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    set_up_logging(Console(stderr=True))
    engine = Engine(config)
    before = _clocks()
    figures = measure(engine, own["workload"], config.job.limit)
    record = {
        "workload": own["workload"],
        "model": Path(config.model).name,
        "command": shlex.join(["python", "-m", "launch.bench", *words]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": _git_commit(),
        "device": torch.cuda.get_device_name() if engine.parts.device.type == "cuda" else platform.processor() or "cpu",
        "software": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "clocks": {"before": before, "after": _clocks()},
        "kv_blocks": engine.plan.num_blocks,
        "figures": figures,
        "stats": engine.count_experts().as_dict(),
    }
    engine.close()
    _print(record)
    if own.get("result"):
        Path(own["result"]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"result: {own['result']}")
    return 0


def _read(words: Sequence[str]) -> tuple[dict[str, str], Config]:
    """This file's own keys, and the engine's config with this file's defaults under what was typed."""
    own = {name: text for name, _, text in (word.partition("=") for word in words) if name in OWN_KEYS}
    if own.get("workload") not in ("w1", "w2", "w3"):
        raise ValueError(f"workload={own.get('workload')} is unknown; give workload=w1, w2 or w3.")
    rest = [_model_folder(word) for word in words if word.partition("=")[0] not in OWN_KEYS]
    return own, compose_config(parse([*DEFAULTS, *rest]))


def _model_folder(word: str) -> str:
    """`model=NAME` of a shape in benchmarks/models/ becomes that folder; any other word stays."""
    name, _, text = word.partition("=")
    folder = ROOT / "benchmarks" / "models" / text
    return f"--model={folder}" if name == "model" and text and (folder / "config.json").is_file() else word


def _synchronize(engine: Engine) -> None:
    if engine.parts.device.type == "cuda":
        torch.cuda.synchronize()


def _clocks() -> str | None:
    fields = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    return _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])


def _git_commit() -> str | None:
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit} with uncommitted changes" if commit and changed else commit


def _output(command: list[str]) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _print(record: dict[str, Any]) -> None:
    table = Table(title=f"{record['workload']} {record['model']} on {record['device']}")
    for column in ("figure", "value", "p5", "p95"):
        table.add_column(column)
    for figure in record["figures"]:
        spread = [f"{figure[name]:,.2f}" if name in figure else "" for name in ("p5", "p95")]
        table.add_row(figure["name"], f"{figure['value']:,.2f}", *spread)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
