"""What a job would ask of the engine, counted line by line without one: job.dry_run.

Knows lines, the tokenizer and the limits of requests; knows nothing of weights, devices or printing. Holds a few
numbers for each line.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from configs.schema import SamplingConfig
from moe.batch.lines import BadLine, Line
from moe.batch.prompts import BatchTokenizer, prompt_ids
from moe.batch.protocol import resolve_params
from moe.batch.records import parse
from moe.engine.intake import longest_answer
from moe.engine.memory_plan import MemoryPlan
from moe.engine.tokenizer import truncate_prompt


@dataclass
class Forecast:
    """Lines counted so far. `plan` None: the size of the cache is known only when the weights are loaded."""

    sampling: SamplingConfig
    tokenizer: BatchTokenizer | None
    vocab_size: int
    max_model_len: int
    bytes_per_token: float
    plan: MemoryPlan | None
    prompts: array[int] = field(default_factory=lambda: array("q"))  # tokens of each line that can run
    positions: array[int] = field(default_factory=lambda: array("q"))  # of the cache that it takes at most
    output_tokens: int = 0  # at most

    def add(self, line: Line | BadLine) -> None:
        """Count a line; ValueError with the reason where it cannot run."""
        parsed = parse(line)
        defaults = self.tokenizer.generation_defaults if self.tokenizer is not None else {}
        params = resolve_params(parsed, self.sampling, defaults)
        ids = truncate_prompt(prompt_ids(parsed, self.tokenizer), params.truncate_prompt_tokens)
        longest = longest_answer(params, ids, self.vocab_size, self.max_model_len, self.plan)
        self.prompts.append(len(ids))
        self.output_tokens += params.n * longest
        self.positions.append(len(ids) + params.n * (longest - 1))  # samples share the prompt

    def rows(self, num_lines: int) -> list[tuple[str, str]]:
        """Name and value of each line of a table."""
        num_good = len(self.prompts)
        rows = [("lines read / cannot be run", f"{num_lines:,} / {num_lines - num_good:,}")]
        if not num_good:
            return rows
        prompts, positions = sorted(self.prompts), sorted(self.positions)
        spread = f"{prompts[0]:,} / {prompts[(num_good - 1) // 2]:,} / {prompts[-1]:,}"
        rows += [
            ("prompt tokens", f"{sum(prompts):,}"),
            ("prompt tokens, min / median / max", spread),
            ("output tokens, at most", f"{self.output_tokens:,}"),
            ("cache positions, median / max", f"{positions[(num_good - 1) // 2]:,} / {positions[-1]:,}"),
            ("cache positions of all, at most", f"{sum(positions):,}"),
            ("bytes of a cache position", f"{self.bytes_per_token:,.0f}"),
        ]
        plan = self.plan
        if plan is None:
            return [*rows, ("cache", "sized when the weights are loaded")]
        size = f"{plan.capacity_tokens:,} positions, {plan.kv_bytes / 2**20:,.1f} MiB"
        median = positions[(num_good - 1) // 2]
        return [
            *rows,
            (f"cache, by {plan.chosen_by}", size),
            ("median lines that it holds", f"{plan.capacity_tokens // median:,}"),
        ]
