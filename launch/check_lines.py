"""job.strict and job.dry_run: every line read, no weight loaded. What is wrong with lines goes to stderr, a table to
stdout.

strict asks what lines say of themselves; a dry run also tokenizes them and holds them against the model's limits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from configs.schema import Config
from launch.console import print_rows
from moe.batch.forecast import Forecast
from moe.batch.lines import BadLine, Line
from moe.batch.protocol import resolve_params
from moe.batch.records import parse
from moe.batch.sources import Source, resolve_order
from moe.engine.memory_plan import DeviceMemory, plan_memory
from moe.engine.parts import Outline, outline_parts, resolve_device

SHOWN_BAD_LINES = 10


def check_lines(config: Config, source: Source, *, silent: bool) -> bool:
    """Whether every line can run. Says which cannot, and why, unless `silent`: another rank does. job.quiet: no more
    than that."""

    def check(line: Line | BadLine) -> None:
        resolve_params(parse(line), config.sampling, {})

    num_lines, num_bad = _read_all(config, source, check, silent=silent)
    if not silent and not config.job.quiet:
        print(f"{num_lines} lines read, {num_bad} of them cannot be run")
    return not num_bad


def dry_run(config: Config, source: Source) -> bool:
    """Whether every line can run with this model. Prints what the job would ask of it."""
    outline = outline_parts(config, resolve_device(config.engine.device))
    forecast = forecast_of(config, outline)
    num_lines, _ = _read_all(config, source, forecast.add, silent=False)
    if not config.job.quiet:
        order = f"by {resolve_order(config, source)} (job.order={config.job.order})"
        print_rows(Console(), [*forecast.rows(num_lines), ("order", order)])
    return len(forecast.prompts) == num_lines


def forecast_of(config: Config, outline: Outline) -> Forecast:
    """Nothing counted yet. The cache's size is known on the CPU, or where cache.num_blocks gives it."""
    cache, plan = config.cache, None
    if outline.device.type == "cpu" or cache.num_blocks is not None:
        plan = plan_memory(
            outline.layout,
            DeviceMemory(outline.device.type, None, 0, 0),
            num_blocks=cache.num_blocks,
            memory_fraction=cache.memory_fraction,
            cpu_gb=cache.cpu_gb,
            max_model_len=outline.max_model_len,
        )
    return Forecast(
        config.sampling,
        outline.tokenizer,
        outline.model.vocab_size,
        outline.max_model_len,
        outline.layout.bytes_per_token,
        plan,
    )


def _read_all(
    config: Config, source: Source, check: Callable[[Line | BadLine], None], *, silent: bool
) -> tuple[int, int]:
    """Numbers of lines read, and of those that `check` refuses with a ValueError."""
    num_lines = num_bad = 0
    for line in source.lines(config.job.limit):
        num_lines += 1
        try:
            check(line)
        except ValueError as error:
            num_bad += 1
            if num_bad <= SHOWN_BAD_LINES and not silent:
                print(f"{line.origin or f'{source.name}:{line.number}'}: {error}", file=sys.stderr)
    if num_bad > SHOWN_BAD_LINES and not silent:
        print(f"... and {num_bad - SHOWN_BAD_LINES} more", file=sys.stderr)
    return num_lines, num_bad
