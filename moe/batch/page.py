"""The report for people: one HTML file that needs nothing else, made from the record of `monitor.py` and `report.html`.

Knows the record's fields and how each is best shown; nothing of jobs. Whatever text stands in the record is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moe.batch.charts import Line, heat_map, histogram_chart, line_chart
from moe.batch.report import show_seconds

GIB = 2**30
SHOWN_EXPERTS = 8
OUTCOMES = {
    "complete": ("complete", "good"),
    "some failed": ("complete, some lines failed", "warn"),
    "stopped": ("stopped before the end", "warn"),
    "fault": ("ended by a fault", "bad"),
    "running": ("still running", "warn"),
}
TIMES = {
    "first_token": ("Time to first token", "from the reading of a line; the wait in the queue is part of it"),
    "between_tokens": ("Between tokens", "of one answer; preemptions are part of it"),
    "answer": ("Whole answer", "from the reading of a line to its last token"),
}


def render_page(metrics: Mapping[str, Any]) -> str:
    """The HTML text. ValueError where a field is missing or of another kind."""
    try:
        outcome, mood = OUTCOMES.get(metrics["outcome"], (metrics["outcome"], "warn"))
        return (
            _environment()
            .get_template("report.html")
            .render(
                m=metrics,
                outcome=outcome,
                mood=mood,
                tiles=_tiles(metrics),
                charts=_charts(metrics),
                times=_times(metrics["latencies"]),
                errors=_errors(metrics),
                experts=_experts(metrics["expert_counts"]),
                moved=_moved(metrics),
                memory=_memory(metrics),
                settings=_settings(metrics["config"], set(metrics["changed_keys"])),
            )
        )
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"no report can be drawn from these numbers: {type(error).__name__}: {error}") from error


@cache
def _environment() -> Environment:
    """Made once: a template is compiled when it is first wanted, and a report is written many times."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"time": show_seconds, "gib": _gib, "moment": _moment}
    return environment


def _tiles(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and a remark of each number at the top."""
    total, resumed = metrics["lines_total"], metrics["lines_resumed"]
    prompt, cached = metrics["prompt_tokens"], metrics["cached_tokens"]
    balance = metrics["expert_balance"]
    return [
        (
            "lines answered",
            f"{metrics['answered']:,}",
            ", ".join(
                ([f"of {total:,}"] if total is not None else [])
                + ([f"{resumed:,} by an earlier run"] if resumed else [])
            ),
        ),
        ("lines failed", f"{metrics['failed']:,}", ""),
        ("output tokens/s", f"{metrics['output_tokens_per_second']:,.1f}", f"{metrics['output_tokens']:,} tokens"),
        ("time", _long_time(metrics["seconds"]), f"{metrics['steps']:,} steps"),
        ("prefix hit rate", f"{cached / prompt:.1%}" if prompt else "-", f"{cached:,} of {prompt:,} prompt tokens"),
        ("KV cache, largest use", f"{metrics['kv_peak_use']:.1%}", f"{metrics['kv_blocks_total']:,} blocks"),
        ("preemptions", f"{metrics['preemptions']:,}", ""),
        ("expert balance", "-" if balance is None else f"{balance:.2f}", "mean over largest load; 1 is even"),
    ]


def _charts(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Title, legend and SVG of each curve over time; none of a job that took no step."""
    series = metrics["series"]
    seconds = series["seconds"]
    if not seconds:
        return []

    def rate(name: str) -> list[float]:
        return rates(seconds, series[name], series["bucket_s"] / 2)

    charts: list[tuple[str, list[Line], bool]] = [
        ("Output tokens/s", [Line("generated", rate("output_tokens"), filled=True)], False),
        (
            "Prompt tokens/s",
            [
                Line("computed", rate("computed_prompt_tokens"), filled=True),
                Line("found in the cache", rate("cached_tokens")),
            ],
            False,
        ),
        ("Lines/s", [Line("answered or failed", rate("lines_done"), filled=True)], False),
        ("Requests", [Line("running", series["running_mean"]), Line("waiting", series["waiting_mean"])], False),
        ("KV cache in use", [Line("mean, shaded to the largest", series["kv_use_mean"], series["kv_use_max"])], True),
    ]
    ends = [("Preemptions so far", "preemptions"), ("Failed lines so far", "lines_failed")]
    charts += [(title, [Line(title, series[name], filled=True)], False) for title, name in ends if series[name][-1]]
    return [
        {
            "title": title,
            "legend": [line.label for line in lines],
            "svg": line_chart(seconds, lines, percent=percent, name=title),
        }
        for title, lines, percent in charts
    ]


def rates(seconds: Sequence[float], counts: Sequence[float], over_s: float) -> list[float]:
    """Growth per second at each sample, over the `over_s` before it or a little more, so that two samples close to each
    other make no peak. The count at second 0 is 0.

    >>> rates([1.0, 2.0, 2.25], [10, 30, 35], over_s=0.5)
    [10.0, 20.0, 20.0]
    """
    times, values = [0.0, *seconds], [0, *counts]
    found, before = [], 0
    for place in range(1, len(times)):
        while before + 1 < place and times[place] - times[before + 1] >= over_s:
            before += 1
        took = times[place] - times[before]
        found.append((values[place] - values[before]) / took if took > 0 else 0.0)
    return found


def _times(latencies: Mapping[str, Any]) -> list[dict[str, Any]]:
    shown = []
    for name, (title, text) in TIMES.items():
        times = latencies.get(name, {})
        if times.get("count"):
            marks = [
                (f"{percent.upper()}: {show_seconds(times[percent])}", times[percent])
                for percent in ("p50", "p95", "p99")
            ]
            shown.append(
                {"title": title, "text": text, **times, "svg": histogram_chart(times["buckets"], marks, name=title)}
            )
    return shown


def _errors(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Errors by kind; each line with the address of its file, where there is one."""
    folder = PurePosixPath(metrics["folder"])
    return [
        {**each, "lines": [{**line, "link": _link(folder, line["origin"])} for line in each["lines"]]}
        for each in metrics["errors"]
    ]


def _link(folder: PurePosixPath, origin: str | None) -> str | None:
    """Browsers open the file; the line is for editors that understand it."""
    if origin is None:
        return None
    path, _, number = origin.rpartition(":")
    return f"{(folder / path).as_uri()}#L{number}" if path else None


def _experts(counts_LE: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """The heat map and where the load is least even; None of a model or a job without any load."""
    if not any(map(any, counts_LE)):
        return None
    loads = [
        (max(row) * len(row) / sum(row), layer, row.index(max(row))) for layer, row in enumerate(counts_LE) if any(row)
    ]
    worst = sorted(loads, reverse=True)[:SHOWN_EXPERTS]
    return {
        "svg": heat_map(counts_LE, name="Expert load"),
        "num_layers": len(counts_LE),
        "num_experts": len(counts_LE[0]),
        "worst": [
            {"layer": layer, "expert": expert, "times": times, "balance": 1 / times} for times, layer, expert in worst
        ],
    }


def _moved(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and a remark of what is known of experts that move between ranks, and of those that come from host
    memory; none where all stay where they are."""
    rows: list[tuple[str, str, str]] = []
    if metrics["rank_balance"] is not None:
        spent = f"{metrics['rebalances']:,} times rebalanced, {metrics['balance_seconds']:.1f} s"
        rows += [
            ("load of ranks", f"{metrics['rank_balance']:.2f}", "mean over largest; 1 is even"),
            ("experts moved between ranks", f"{metrics['experts_moved']:,}", spent),
        ]
    if (offload := metrics["offload"]) is not None:
        copied = f"{offload['num_copies']:,} copies at {offload['gb_per_second']:.1f} GB/s"
        busy = f"{offload['busy_seconds']:.1f} of {offload['span_seconds']:.1f} s"
        rows += [
            ("copied from host memory", f"{offload['num_bytes'] / 1e9:,.1f} GB", copied),
            ("link in use", f"{offload['busy_share']:.1%}", busy),
            ("waited for experts", f"{offload['stall_seconds']:.1f} s", f"{offload['due_seconds']:.1f} s at the least"),
        ]
        if offload["hit_rate"] is not None:
            asked = f"{offload['hits']:,} of {offload['hits'] + offload['misses']:,} that had tokens"
            ahead = f"{offload['fetched_in_vain']:,} more in vain"
            rows += [
                ("found on the device", f"{offload['hit_rate']:.1%}", asked),
                ("fetched ahead and used", f"{offload['fetched_and_used']:,}", ahead),
            ]
        if offload["guess_rate"] is not None:
            guesses = f"{offload['guessed_right']:,} of {offload['guessed']:,}"
            rows.append(("guesses that came true", f"{offload['guess_rate']:.1%}", guesses))
    return rows


def _memory(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """The plan's parts and what was used of them, in bytes."""
    plan, used = metrics["plan"], metrics["memory_used"]
    if plan is None:
        return None
    parts = [
        ("weights", plan["weight_bytes"], None),
        ("workspace", plan["workspace_bytes"], None),
        ("rows between ranks", plan["buffer_bytes"], None),
        ("KV cache", plan["kv_bytes"], plan["kv_bytes"] * metrics["kv_peak_use"]),
    ]
    parts = [part for part in parts if part[1]]
    planned = sum(part[1] for part in parts)
    on_device = "device_peak" in used
    return {
        "device": plan["device"],
        "parts": parts,
        "planned": planned,
        "used": used["device_peak"] if on_device else used["host_peak"],
        "used_label": "all of it" if on_device else "all of it (used: the whole process, with its libraries)",
        "total": plan["total_bytes"],
        "others": plan["other_bytes"] if plan["total_bytes"] is not None else 0,
        "host_peak": used["host_peak"] if on_device else None,
        "chosen_by": plan["chosen_by"],
        "num_blocks": plan["num_blocks"],
        "block_size": plan["block_size"],
    }


def _settings(config: Mapping[str, Any], changed: set[str], prefix: str = "") -> list[tuple[str, str, bool]]:
    """Dotted key, value as the command line takes it, and whether it is not the default."""
    found: list[tuple[str, str, bool]] = []
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found += _settings(value, changed, f"{key}.")
        else:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            found.append((key, shown, key in changed))
    return found


def _gib(num_bytes: float | None) -> str | Markup:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _moment(text: str) -> str:
    """An ISO time with its zone, for people."""
    return text.replace("T", " ").replace("+00:00", " UTC")


def _long_time(seconds: float) -> str:
    """A time for people: 12.3 s, 4 min 05 s, 3 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
