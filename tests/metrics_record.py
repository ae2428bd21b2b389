"""A finished job's record with something in every part of it, made by a real monitor fed with plausible numbers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from configs.schema import Config
from expert_parallel.copy_engine import CopyFigures
from expert_parallel.held_slots import SlotFigures
from expert_parallel.offload_figures import OffloadFigures
from moe.batch.monitor import ErrorNote, Monitor
from moe.batch.report import JobReport, Progress
from moe.engine.memory_plan import MemoryPlan
from moe.engine.stats import EngineStats

EVIL = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
NUM_BLOCKS, LAYERS, EXPERTS = 4000, 12, 64


def make_monitor(folder: Path, **job: Any) -> Monitor:
    """A monitor that writes into `folder`."""
    config = Config()
    config.model, config.input, config.output = "some/model", "prompts.jsonl", "answers.jsonl"
    config.job.report = str(folder)
    for name, value in job.items():
        setattr(config.job, name, value)
    return Monitor(config, ["model=some/model", "input=prompts.jsonl", EVIL])


def make_plan() -> MemoryPlan:
    return MemoryPlan(
        device="cpu",
        total_bytes=None,
        weight_bytes=700 << 20,
        workspace_bytes=90 << 20,
        other_bytes=0,
        bytes_per_block=1 << 16,
        block_size=16,
        num_blocks=NUM_BLOCKS,
        max_model_len=4096,
        chosen_by="cache.cpu_gb=0.25",
    )


def run_job(
    monitor: Monitor, *, steps: int = 1000, failed: int = 45, seed: int = 1, offloaded: bool = True
) -> JobReport:
    """Feed a monitor with a job's numbers; the report to finish it with. `offloaded`: experts lie in host memory, and
    move between ranks."""
    draw = random.Random(seed)
    stats = EngineStats(kv_blocks_total=NUM_BLOCKS)
    monitor.start(model="some/model", device="cpu", plan=make_plan())
    monitor.lines_total = 10_000
    seconds, done = 0.0, 0
    for step in range(steps):
        took = draw.uniform(0.02, 0.06)
        seconds += took
        stats.steps += 1
        stats.output_tokens += draw.randint(200, 256)
        stats.computed_prompt_tokens += draw.randint(0, 3000)
        stats.cached_tokens += draw.randint(0, 900)
        stats.prompt_tokens = stats.computed_prompt_tokens + stats.cached_tokens
        stats.num_running, stats.num_waiting = min(256, step), draw.randint(0, 40)
        stats.kv_blocks_used = int(NUM_BLOCKS * (0.6 + 0.3 * math.sin(step / 100) * draw.random()))
        stats.kv_blocks_peak = max(stats.kv_blocks_peak, stats.kv_blocks_used)
        stats.preemptions = step // 200
        stats.latencies.between_tokens.add(took * draw.lognormvariate(0, 0.2), 200)
        stats.latencies.first_token.add(draw.lognormvariate(-1, 0.6))
        stats.latencies.answer.add(draw.lognormvariate(2, 0.5))
        done += 2
        failures = failed * step // steps
        use = stats.kv_blocks_used / NUM_BLOCKS
        monitor.step(Progress(done + 300, done, failures, stats.output_tokens, use, seconds, stats))
    for number in range(failed):
        monitor.error(ErrorNote(number * 7 + 1, None, EVIL, "invalid_line", f"a prompt is needed; {EVIL}"))
    monitor.error(ErrorNote(5, "more/a b.jsonl:17", "x-5", "request_failed", "too long for engine.max_model_len"))
    stats.expert_counts = [[int(1000 * draw.lognormvariate(0, 0.5)) for _ in range(EXPERTS)] for _ in range(LAYERS)]
    stats.expert_balance = 0.41
    if offloaded:
        stats.rank_balance, stats.experts_moved, stats.rebalances, stats.balance_seconds = 0.83, 96, 4, 1.5
        slots = SlotFigures(hits=9_100, misses=900, fetched_and_used=700, fetched_in_vain=120)
        slots.guessed_right, slots.guessed = 640, 800
        copies = CopyFigures(num_copies=1720, num_bytes=51_600_000_000, busy_seconds=1.2, span_seconds=4.8)
        copies.stall_seconds, copies.due_seconds = 0.4, 0.3
        stats.offload = OffloadFigures(slots, copies)
    return JobReport.of(stats, model="some/model", device="cpu", answered=done, failed=failed + 1, seconds=seconds)


def make_record(folder: Path) -> dict[str, Any]:
    """What a finished job of that kind leaves in metrics.json; its other files lie beside it."""
    monitor = make_monitor(folder)
    monitor.finish(run_job(monitor), outcome="some failed")
    return json.loads((folder / "metrics.json").read_text("utf-8"))
