"""How many prompt tokens are computed where templates take turns: the file's order against job.order=prefix.

    python benchmarks/job_order.py templates=50 lines=400 template_tokens=96 blocks=120,1000

Each line is one of the templates, in turns, and a question of its own, with answers of different lengths. The demo
model's engine answers all of it on the CPU, with its own prefix cache. `blocks`: sizes of that cache, in blocks of 16
tokens, so that it holds few of the templates or all. Answers must not depend on the order, and are compared. Memory is
the resident set while lines are read and put in order alone, without an engine, over as many lines as `order_lines`.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's own folder is all that Python puts there

from configs.checks import freeze  # noqa: E402
from configs.schema import Config  # noqa: E402
from moe.batch.job import Job  # noqa: E402
from moe.batch.sources import Source, job_lines  # noqa: E402
from moe.engine.engine import Engine  # noqa: E402

DEFAULTS = {
    "templates": 50,
    "lines": 400,
    "template_tokens": 96,
    "question_tokens": 16,
    "blocks": "120,1000",
    "max_num_seqs": 16,
    "order_lines": 100_000,
}
ANSWER_TOKENS = (1, 2, 6)
IDS = (300, 2000)  # ordinary tokens of the demo's vocabulary
READINGS = 20


class Answers:
    """Takes records in place of a journal."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}

    def append(self, number: int, digest: int, record: bytes, kind: str = "") -> None:
        assert not kind, f"line {number} failed: {record!r}"
        self.token_ids[number] = json.loads(record)["token_ids"]


def write_lines(path: Path, templates: int, lines: int, template_tokens: int, question_tokens: int) -> int:
    """The workload; returns its prompt tokens."""
    chance = random.Random(0)
    heads = [[chance.randrange(*IDS) for _ in range(template_tokens)] for _ in range(templates)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(lines):
            ids = heads[number % templates] + [chance.randrange(*IDS) for _ in range(question_tokens)]
            record = {"prompt_token_ids": ids, "max_tokens": chance.choice(ANSWER_TOKENS), "ignore_eos": True}
            file.write(json.dumps(record | {"temperature": 0}) + "\n")
    return lines * (template_tokens + question_tokens)


def config_of(path: Path, order: str, blocks: int, max_num_seqs: int) -> Config:
    config = Config(input=str(path))
    config.job.order = order
    config.engine.device, config.engine.max_num_seqs, config.engine.max_batched_tokens = "cpu", max_num_seqs, 1024
    config.cache.num_blocks = blocks
    return freeze(config)


def answer(path: Path, order: str, blocks: int, max_num_seqs: int) -> tuple[dict[str, float], dict[int, list[int]]]:
    """Answer the workload; its figures and answers."""
    config = config_of(path, order, blocks, max_num_seqs)
    engine, answers = Engine(config), Answers()
    begin = time.perf_counter()
    Job(config, engine, engine.tokenizer, "demo").run(job_lines(config, Source.open(config)), answers)
    stats = engine.stats
    figures = {
        "computed": stats.prompt_tokens - stats.cached_tokens,
        "cached": stats.cached_tokens,
        "preemptions": stats.preemptions,
        "steps": stats.steps,
        "seconds": time.perf_counter() - begin,
    }
    engine.close()
    return figures, answers.token_ids


def memory_over(path: Path, order: str) -> list[float]:
    """Resident MiB while all lines pass."""
    config = config_of(path, order, 100, 1)
    lines = job_lines(config, Source.open(config))
    every = sum(1 for _ in path.open("rb")) // READINGS
    return [resident_mib() for number, _ in enumerate(lines) if number % every == every - 1]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def options_of(words: list[str]) -> Iterator[tuple[str, int | str]]:
    given = dict(word.partition("=")[::2] for word in words)
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        raise SystemExit(f"unknown key {min(unknown)}; there are {', '.join(DEFAULTS)}")
    for name, default in DEFAULTS.items():
        yield name, type(default)(given.get(name, default))


def main() -> None:
    """Both orders for every size of the cache, then memory."""
    options = dict(options_of(sys.argv[1:]))
    shape = [int(options[name]) for name in ("templates", "lines", "template_tokens", "question_tokens")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        total = write_lines(path, *shape)
        print(f"{shape[1]} lines of {shape[0]} templates in turns, {total:,} prompt tokens")
        results = []
        for blocks in map(int, str(options["blocks"]).split(",")):
            kept = {}
            for order in ("file", "prefix"):
                figures, kept[order] = answer(path, order, blocks, int(options["max_num_seqs"]))
                results.append({"order": order, "blocks": blocks, **figures})
                print(
                    "  ".join(
                        f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in results[-1].items()
                    )
                )
            assert kept["file"] == kept["prefix"], "answers depend on the order"
            print(f"  file / prefix, tokens computed: {results[-2]['computed'] / results[-1]['computed']:.2f}")
        shape[1] = int(options["order_lines"])
        write_lines(path, *shape)
        for order in ("file", "prefix"):
            seen = memory_over(path, order)
            results.append({"order": order, "lines": shape[1], "resident_mib": [round(value) for value in seen]})
            print(f"{order}: resident MiB over {shape[1]:,} lines: {' '.join(f'{value:.0f}' for value in seen)}")
        print(json.dumps(results))


if __name__ == "__main__":
    main()
