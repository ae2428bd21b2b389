"""What placements do to the evenness of ranks and to their links, without GPUs: `python -m launch.simulate ranks=8,64`.

A trace of routing is played look by look against every setting: experts in order (static), EPLB over all ranks (global)
or node by node (hierarchical, where the router has groups), with so many redundant slots. The balancer sees the looks
before and is judged by the next. The trace is the window of a run's load file (load=FILE), or drawn by Zipf's law.

The table: balancedness (mean over max of the ranks' rows, averaged over layers and looks; the worst of them), the
heaviest rank's rows over the mean, other ranks and nodes that a token reaches, MB that the busiest rank receives from
its node and from other nodes in one dispatch of a layer and sends there in one combine, and the experts that a
rebalance copies in a layer. The defaults are DeepSeek-V3's shape. Knows words, tables and files: expert_parallel/
simulate.py plays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from expert_parallel.simulate import Outcome, Setting, StaticOrPolicy, Trace, play
from kernels.quantize import quantized_bytes
from launch.canvas import check_matplotlib
from launch.figure import number, short
from launch.simulate_picture import PlacedPoint, draw_points
from launch.words import (
    flag,
    helped,
    number_above_zero,
    output_file,
    positive,
    positives,
    refuse,
    split_list,
    unknown_word,
)
from moe.engine.whole_file import write_whole
from router.load_window import read_load
from router.synthetic import skewed_routing

POLICIES: tuple[StaticOrPolicy, ...] = ("static", "global", "hierarchical")
ZIPF_KEYS = ("experts", "layers", "looks", "tokens", "exponent", "topk_groups", "seed")
KEYS = {
    "load": "a load file that a run wrote; its window is the trace",
    "experts": "experts of a layer (256)",
    "top_k": "experts of a token (8)",
    "groups": "the router's groups of experts (8; 1: none)",
    "topk_groups": "groups that a token may use (4)",
    "layers": "layers of the trace (4)",
    "looks": "looks of the trace (4)",
    "tokens": "tokens of a look (8192)",
    "exponent": "popularity of experts: 0 is even, 1 is Zipf's law (0.5)",
    "seed": "of the trace (0)",
    "ranks": "8,16,32,64,128,256,512",
    "ranks_per_node": "8",
    "redundant": "redundant slots of EPLB: 0,32,64",
    "policies": ",".join(POLICIES),
    "window": "looks that the balancer sees (4)",
    "adjust": "true: change the placement there is where that is as even; false: a new one each time",
    "hindsight": "true: the balancer knows the look to come, the best it could do",
    "hidden": "width of a row (7168)",
    "rows": "bf16, or fp8: dispatched rows carry a scale for 128 numbers",
    "combine": "exact: a row for each (token, expert) comes home; fast: one for each (token, rank)",
    "batch": "tokens of a rank in a step (128)",
    "result": "a JSON file",
    "picture": "a PNG: balancedness and the busiest link over the number of ranks",
}


@dataclass(frozen=True)
class Links:
    """Bytes of one layer in one step, on the links of the busiest rank."""

    near_dispatch: float
    far_dispatch: float
    near_combine: float
    far_combine: float


@dataclass(frozen=True)
class RowBytes:
    """What rows weigh. Combined rows are bf16; exact: one for each (token, expert)."""

    hidden: int
    fp8: bool
    exact: bool
    batch: int

    def links(self, outcome: Outcome) -> Links:
        """`batch` tokens on every rank."""
        plain = 2 * self.hidden
        dispatched = quantized_bytes(1, self.hidden) if self.fp8 else plain
        near, far = outcome.near_rows, outcome.far_rows
        near_home, far_home = (outcome.near_expert_rows, outcome.far_expert_rows) if self.exact else (near, far)
        rows = (near * dispatched, far * dispatched, near_home * plain, far_home * plain)
        return Links(*(self.batch * each for each in rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Play, print the table, write result and picture. 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__, KEYS):
        return 0
    try:
        own = read_words(words)
        result, picture = output_file(own, "result"), output_file(own, "picture")
        if picture is not None:
            check_matplotlib()
        row_bytes = _row_bytes(own)
        trace = make_trace(own)
        settings = make_settings(own, trace.counts_ILE.shape[2])
        outcomes = [play(trace, setting) for setting in settings]
    except ValueError as error:
        return refuse(error)
    links = [row_bytes.links(outcome) for outcome in outcomes]
    Console(width=200).print(outcome_table(outcomes, links))
    if result is not None:
        record = {"command": ["python", "-m", "launch.simulate", *words]} | outcome_record(outcomes, links)
        write_whole(result, json.dumps(record, indent=1) + "\n")
        print(f"result: {result}")
    if picture is not None:
        draw_points([_point(*pair) for pair in zip(outcomes, links, strict=True)], picture)
        print(f"picture: {picture}")
    return 0


def read_words(words: Sequence[str]) -> dict[str, str]:
    """key=value words, each key known and given once."""
    own: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in KEYS:
            raise unknown_word(word, KEYS, "the simulator")
        if name in own:
            raise ValueError(f"{name} is given twice, as {own[name]} and {text}; leave one out.")
        own[name] = text
    if "load" in own and "top_k" not in own:
        raise ValueError(f"load={own['load']} does not say how many experts a token has; give top_k beside it.")
    if "load" in own and (extra := [name for name in ZIPF_KEYS if name in own]):
        raise ValueError(f"{extra[0]}={own[extra[0]]} shapes a drawn trace; leave it out beside load={own['load']}.")
    return own


def make_trace(own: Mapping[str, str]) -> Trace:
    """From the load file, its layers that saw rows; or drawn, a seed for each layer."""
    top_k = number_above_zero(own, "top_k", int, 8)
    if "load" in own:
        record = read_load(Path(own["load"]))
        if len(record.trace_ILE) < 2:
            raise ValueError(
                f"load={own['load']} holds {len(record.trace_ILE)} looks, the trace needs two; "
                "record a longer run, with balance.window=2 or more."
            )
        return Trace(record.trace_ILE[:, list(record.sparse_layers)], top_k)
    experts, groups = number_above_zero(own, "experts", int, 256), number_above_zero(own, "groups", int, 8)
    layers, looks = number_above_zero(own, "layers", int, 4), number_above_zero(own, "looks", int, 4)
    tokens = number_above_zero(own, "tokens", int, 8192)
    exponent, seed = _not_negative(own, "exponent", 0.5), int(_not_negative(own, "seed", 0))
    topk_groups = number_above_zero(own, "topk_groups", int, min(4, groups))
    ids = []
    for layer in range(layers):
        routing = skewed_routing(
            looks * tokens,
            experts,
            top_k,
            exponent=exponent,
            num_groups=groups,
            topk_groups=topk_groups,
            seed=seed + layer,
        )
        ids.append(routing.expert_ids_TK.numpy().reshape(looks, tokens, top_k))
    return Trace.of_tokens(np.stack(ids, axis=1), experts)


def make_settings(own: Mapping[str, str], num_experts: int) -> list[Setting]:
    """Every number of ranks with every policy that fits it. Ranks that fill no node are one node."""
    named = split_list(own.get("policies", ",".join(POLICIES)))
    if unknown := [name for name in named if name not in POLICIES]:
        raise ValueError(f"policies={unknown[0]} is unknown; use {', '.join(POLICIES)}.")
    policies: list[StaticOrPolicy] = [policy for policy in POLICIES if policy in named]
    redundant = [_whole("redundant", text) for text in split_list(own.get("redundant", "0,32,64"))]
    per_node = number_above_zero(own, "ranks_per_node", int, 8)
    settings = []
    for num_ranks in positives(own, "ranks", (8, 16, 32, 64, 128, 256, 512)):
        if num_ranks > per_node and num_ranks % per_node:
            raise ValueError(f"ranks={num_ranks} fills no whole number of nodes of ranks_per_node={per_node}.")
        for policy in policies:
            for slots in redundant if policy != "static" else (0,):
                setting = Setting(
                    num_ranks=num_ranks,
                    policy=policy,
                    redundant=slots,
                    num_nodes=max(1, num_ranks // per_node),
                    num_groups=number_above_zero(own, "groups", int, 1 if "load" in own else 8),
                    window=number_above_zero(own, "window", int, 4),
                    adjust=flag(own, "adjust", True),
                    hindsight=flag(own, "hindsight", False),
                )
                if policy != "hierarchical" or setting.shape(num_experts).policy == "hierarchical":
                    settings.append(setting)
    if not settings:
        raise ValueError("policies=hierarchical fits none of the ranks: groups must divide over several nodes.")
    return settings


def _row_bytes(own: Mapping[str, str]) -> RowBytes:
    for name, known in (("rows", ("bf16", "fp8")), ("combine", ("exact", "fast"))):
        if own.get(name, known[0]) not in known:
            raise ValueError(f"{name}={own[name]} must be {' or '.join(known)}.")
    return RowBytes(
        hidden=number_above_zero(own, "hidden", int, 7168),
        fp8=own.get("rows") == "fp8",
        exact=own.get("combine", "exact") == "exact",
        batch=number_above_zero(own, "batch", int, 128),
    )


def _whole(name: str, text: str) -> int:
    return 0 if text == "0" else positive(name, text)


def _not_negative(own: Mapping[str, str], name: str, default: float) -> float:
    return 0.0 if own.get(name) in ("0", "0.0") else number_above_zero(own, name, float, default)


def setting_name(setting: Setting) -> str:
    """
    >>> setting_name(Setting(8, "static")), setting_name(Setting(8, "global", 32))
    ('static', 'global +32')
    """
    return setting.policy if setting.policy == "static" else f"{setting.policy} +{setting.redundant}"


def outcome_table(outcomes: Sequence[Outcome], links: Sequence[Links]) -> Table:
    """One row for each setting."""
    table = Table(title="balancedness, and MB on the busiest rank's links in one layer of a step")
    for column in ("ranks", "nodes", "experts", "balanced", "worst", "max/mean", "ranks/token", "nodes/token"):
        table.add_column(column, justify="left" if column == "experts" else "right", no_wrap=True)
    for column in ("near dispatch", "far dispatch", "near combine", "far combine", "moves/layer"):
        table.add_column(column, justify="right", no_wrap=True)
    for index, (outcome, each) in enumerate(zip(outcomes, links, strict=True)):
        setting = outcome.setting
        if index and setting.num_ranks != outcomes[index - 1].setting.num_ranks:
            table.add_section()
        cells = [outcome.balancedness, outcome.worst, outcome.heaviest, outcome.ranks_reached, outcome.nodes_reached]
        cells += [x / 1e6 for x in asdict(each).values()]
        place = (str(setting.num_ranks), str(setting.num_nodes), setting_name(setting))
        table.add_row(*place, *(f"{x:.3f}" for x in cells), number(outcome.moves))
    return table


def outcome_record(outcomes: Sequence[Outcome], links: Sequence[Links]) -> dict[str, Any]:
    """JSON-ready: numbers to six digits."""
    rows = []
    for outcome, each in zip(outcomes, links, strict=True):
        numbers = {name: value for name, value in asdict(outcome).items() if isinstance(value, float)}
        numbers |= {f"{name}_bytes": value for name, value in asdict(each).items()}
        rows.append(
            {"setting": asdict(outcome.setting)}
            | {name: short(value) for name, value in numbers.items()}
            | {"balancedness_of_looks": [short(value) for value in outcome.balancedness_I]}
        )
    return {"outcomes": rows}


def _point(outcome: Outcome, links: Links) -> PlacedPoint:
    """The link that counts: between nodes where there are several."""
    setting = outcome.setting
    num_bytes = links.far_dispatch if setting.num_nodes > 1 else links.near_dispatch
    return PlacedPoint(setting_name(setting), setting.num_ranks, outcome.balancedness, num_bytes / 1e6)


if __name__ == "__main__":
    sys.exit(main())
