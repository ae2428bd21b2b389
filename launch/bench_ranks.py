"""w1 on ranks that share the experts: `torchrun --nproc-per-node=2 -m launch.bench workload=w1 model=...`.

Knows shares of requests and rates; knows nothing of how rows travel. There are 512 requests for each rank (`requests`:
so many for all together: requests=512 is one GPU's workload, spread), and request i is rank i mod N's. Ranks step
together, so a pass ends on all of them when the last request does; the figure is the tokens of all over that time. Its
floor is that of the rank with most to read and compute; what travels is not in it.

`warm=short` runs short forms of the requests first, where `whole` runs them as they are: kernels are compiled, graphs
captured and busy experts moved, but what the steps will be is not recorded, and there is no floor.

`skew=1` routes rows by a table after Zipf's law (router/synthetic.py), of each layer its own, instead of by the
model's router: dummy weights route evenly. Which entry of the table a row takes depends on the row's bits alone.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from expert_parallel.group import Ranks
from kernels.routing import Routing
from launch.bench_engine import EngineBench, Prompt, Run, recorded_steps, run_prompts, throughput_prompts
from launch.figure import Figure
from moe.engine.engine import Engine
from moe.engine.stats import EngineStats
from moe.model.causal_lm import CausalLM
from moe.model.layer import MoELayer
from router.gate import Router
from router.load import balancedness
from router.synthetic import skewed_routing

REQUESTS_OF_A_RANK = 512
SHORT_PROMPT, SHORT_OUTPUTS = 64, 160  # tokens, at most
_TABLE_ROWS = 4093  # a prime: neighbouring bit patterns spread


def check_words(own: Mapping[str, str]) -> None:
    """ValueError where ranks' words stand in one process, or its own among ranks; and for a way to warm up that is
    none."""
    for name in ("requests", "skew", "warm") if "RANK" not in os.environ else ():
        if name in own:
            raise ValueError(
                f"{name}={own[name]} needs ranks; start it with torchrun --nproc-per-node=N -m launch.bench ..."
            )
    if "limit" in own and "RANK" in os.environ:
        raise ValueError(
            f"limit={own['limit']} is one process's; under torchrun give requests=, of all ranks together."
        )
    if own.get("warm", "whole") not in ("whole", "short"):
        raise ValueError(f"warm={own['warm']} is unknown; use whole or short.")


def read_skew(own: Mapping[str, str]) -> float | None:
    """Of w1's made-up routing; 0 is a number of its own."""
    if "skew" not in own:
        return None
    try:
        skew = float(own["skew"])
    except ValueError:
        skew = -1.0
    if not 0 <= skew < 10:
        raise ValueError(f"skew={own['skew']} must be a number from 0 (even) up to 10; 1 is Zipf's law.")
    return skew


class SkewedGate(Router):
    """Routes by a table of made-up routings."""

    def __init__(self, table: Routing) -> None:
        self.table = table

    def __call__(self, x_TD: Tensor, real_T: Tensor | None = None) -> Routing:
        """The same row gets the same experts in any batch. Rows that `real_T` calls padding get ids of -1."""
        words_TW = x_TD[:, : 8 // x_TD.element_size()].contiguous().view(torch.int32).long()
        entry_T = (words_TW[:, 0] * 31 + words_TW[:, 1]) % _TABLE_ROWS
        ids_TK, weights_TK = self.table.expert_ids_TK[entry_T], self.table.weights_TK[entry_T]
        if real_T is not None:
            ids_TK = ids_TK.where(real_T[:, None] != 0, -1)
        return Routing(ids_TK, weights_TK)


def skew_routing(network: CausalLM, exponent: float) -> None:
    """From now on every sparse layer routes by a table. Before any graph is captured."""
    moe = network.config.moe
    for block in network.blocks:
        if isinstance(block.mlp, MoELayer):
            table = skewed_routing(
                _TABLE_ROWS,
                moe.num_experts,
                moe.rule.top_k,
                exponent=exponent,
                seed=block.mlp.index,
                device=network.device,
            )
            block.mlp.gate = SkewedGate(table)


def short_forms(prompts: Sequence[Prompt]) -> list[Prompt]:
    """As many prompts that end one after another, so that steps of any number of rows come about."""
    last = max(len(prompts) - 1, 1)
    return [
        Prompt(each.token_ids[:SHORT_PROMPT], 2 + (SHORT_OUTPUTS - 2) * index // last)
        for index, each in enumerate(prompts)
    ]


def measure_w1(
    engine: Engine, bench: EngineBench, ranks: Ranks, total: int, rounds: int, *, whole: bool
) -> tuple[Figure, dict[str, Any]]:
    """The figure of `total` requests on all ranks and what they did, the same on each. All call it together. `whole`:
    they warm up as they are, else in short."""
    group = ranks.everyone
    prompts = throughput_prompts(engine.vocab_size, total)[group.rank :: group.size]
    name = f"{total}-{group.rank}"
    steps = []
    if whole:
        steps = recorded_steps(engine, prompts, f"warm-{name}")
    else:
        run_prompts(engine, short_forms(prompts), f"warm-{name}")
    before = _counts(engine)
    runs: list[Run] = []
    for turn in range(rounds):
        group.barrier()
        runs.append(run_prompts(engine, prompts, f"w1-{turn}-{name}"))
    own_floor_s = bench.cost.seconds(steps, bench.ceilings)
    rows = (_counts(engine) - before).sum(dim=1).tolist()
    everyone: list[tuple[list[Run], float, list[int], EngineStats]] = group.gather_objects(
        (runs, own_floor_s, rows, engine.count_experts())
    )
    of_ranks = [each[0] for each in everyone]
    tokens = sum(each[0].output_tokens for each in of_ranks)
    rates = [tokens / max(run.seconds for run in of_turn) for of_turn in zip(*of_ranks, strict=True)]
    stats = EngineStats.of_ranks([each[3] for each in everyone])
    extra = {
        "ranks": float(group.size),
        "requests": float(total),
        "rank balance": balancedness(torch.tensor([each[2] for each in everyone]).T),
        "experts moved": float(stats.experts_moved),
    }
    parallel = engine.config.parallel
    figure = Figure(
        "w1",
        f"{bench.model} x{group.size}",
        f"output tokens, {total} requests, {parallel.dispatcher} {parallel.combine}",
        statistics.median(rates),
        "tokens/s",
        floor=tokens / max(each[1] for each in everyone) if whole else None,
        seconds=statistics.median(run.seconds for run in runs),
        extra=extra,
        samples=tuple(rates),
    )
    return figure, {"stats": stats.as_dict()}


def _counts(engine: Engine) -> Tensor:
    load = engine.parts.network.load
    assert load is not None, "an engine counts its experts' load"
    return load.snapshot()
