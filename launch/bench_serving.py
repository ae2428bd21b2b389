"""serving: what a waiting user sees. A fixed number of requests in flight; each that ends makes room for the next.

Time to first token counts from the request's arrival at the engine, time per output token from its first token to its
last. Requests are streamed, so every step hands out what it has, at that cost. A case runs twice and the second counts:
what a step holds depends on steps, not on the clock, so the first has compiled and captured everything.

short 128 prompt tokens and 128 outputs, long 4096 and 256, mixed 64 to 4096 and 32 to 256 from a seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from launch.bench_engine import RANDOM_TEMPERATURE, Prompt
from launch.figure import Figure
from moe.batch.report import percentile
from moe.engine.engine import Engine
from moe.engine.request import Request, SamplingParams

CONCURRENCY = (1, 16, 64)
LEAST_REQUESTS = 8
PERCENTS = (50, 95, 99)


def _fixed(num_prompt: int, num_outputs: int) -> Callable[[random.Random], tuple[int, int]]:
    return lambda r: (num_prompt, num_outputs)


LENGTHS: dict[str, Callable[[random.Random], tuple[int, int]]] = {
    "short": _fixed(128, 128),
    "long": _fixed(4096, 256),
    "mixed": lambda r: (r.randint(64, 4096), r.randint(32, 256)),
    "tiny": _fixed(5, 4),  # for a CPU
}


@dataclass
class Served:
    """Seconds of each request, in the order of their ends; the whole run's seconds and tokens."""

    ttft: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    seconds: float = 0.0
    output_tokens: int = 0


def serving_prompts(vocab_size: int, lengths: str, num_requests: int) -> list[Prompt]:
    """Random ids; the lengths of a case come first, so that they do not depend on the vocabulary."""
    r = random.Random(f"serving-{lengths}")
    sizes = [LENGTHS[lengths](r) for _ in range(num_requests)]
    return [Prompt([r.randrange(vocab_size) for _ in range(prompt)], outputs) for prompt, outputs in sizes]


def serve(
    engine: Engine,
    prompts: Sequence[Prompt],
    concurrency: int,
    name: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Served:
    """Answer all prompts, so many at a time, in order."""
    served = Served()
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    waiting = list(enumerate(prompts))[::-1]
    begin = clock()
    while waiting or engine.has_unfinished:
        while waiting and len(arrived) < concurrency:
            index, prompt = waiting.pop()
            params = SamplingParams(
                max_tokens=prompt.num_outputs,
                temperature=RANDOM_TEMPERATURE,
                seed=index,
                ignore_eos=True,
                detokenize=False,
            )
            request_id = f"{name}-{index}"
            arrived[request_id] = clock()
            engine.add_request(Request(request_id, prompt.token_ids, params), stream=True)
        outputs = engine.step()
        now = clock()
        for output in outputs:
            if output.error is not None:
                raise ValueError(f"request {output.request_id} did not run: {output.error}")
            num_tokens = len(output.outputs[0].token_ids)
            if num_tokens and output.request_id not in first:
                first[output.request_id] = now
                served.ttft.append(now - arrived[output.request_id])
            if output.finished:
                served.output_tokens += num_tokens
                served.per_token.append((now - first[output.request_id]) / max(num_tokens - 1, 1))
                del arrived[output.request_id]
    served.seconds = clock() - begin
    return served


def measure_serving(engine: Engine, model: str, lengths: Sequence[str], concurrencies: Sequence[int]) -> list[Figure]:
    """A figure for each case: output tokens/s, with both times' percentiles in ms beside it."""
    figures = []
    for kind in lengths:
        for concurrency in concurrencies:
            prompts = serving_prompts(engine.vocab_size, kind, max(LEAST_REQUESTS, 2 * concurrency))
            for turn in range(2):
                if engine.parts.device.type == "cuda":
                    torch.cuda.synchronize()
                served = serve(engine, prompts, concurrency, f"serving-{kind}-{concurrency}-{turn}")
            figures.append(_figure(model, f"{kind} x{concurrency}", served))
    return figures


def _figure(model: str, name: str, served: Served) -> Figure:
    extra = {
        f"{label} p{percent} ms": (percentile(times, percent) or 0.0) * 1e3
        for label, times in (("ttft", served.ttft), ("tpot", served.per_token))
        for percent in PERCENTS
    }
    rate = served.output_tokens / served.seconds
    return Figure("serving", model, name, rate, "tokens/s", seconds=served.seconds, extra=extra, samples=(rate,))
