"""A job's numbers in Prometheus' text form, for the textfile collector. Knows the record of `monitor.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Samples = Sequence[tuple[Mapping[str, Any], float | None]]

# Bounds of the histograms, in seconds; the record's own buckets are much finer.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
HISTOGRAMS = {
    "first_token": ("time_to_first_token_seconds", "From the reading of a line to its first token."),
    "between_tokens": ("between_tokens_seconds", "Between two tokens of one answer."),
    "answer": ("answer_seconds", "From the reading of a line to its last token."),
}


def prometheus_text(metrics: Mapping[str, Any]) -> str:
    """All of it; ends with a line end, as the form demands."""
    return "".join(f"{line}\n" for line in _lines(metrics))


def _lines(metrics: Mapping[str, Any]) -> Iterator[str]:
    info = {name: metrics[name] for name in ("model", "device", "version", "outcome")}
    yield from _metric("info", "gauge", "Which job this is; always 1.", [(info, 1)])
    lines = [({"state": "answered"}, metrics["answered"]), ({"state": "failed"}, metrics["failed"])]
    yield from _metric("lines", "gauge", "Lines that have a record.", lines)
    errors = [({"kind": each["kind"]}, each["count"]) for each in metrics["errors"]]
    yield from _metric("errors", "gauge", "Error records by kind.", errors)
    for name, text in (
        ("prompt_tokens", "Tokens of prompts that were accepted."),
        ("cached_tokens", "Of those, found in the prefix cache."),
        ("computed_prompt_tokens", "Prompt tokens that were computed, again after a preemption included."),
        ("output_tokens", "Tokens generated."),
        ("preemptions", "Sequences that gave their memory to older ones."),
        ("steps", "Steps of the engine."),
    ):
        yield from _metric(f"{name}_total", "counter", text, [({}, metrics[name])])
    yield from _metric("seconds", "gauge", "Time that the job has taken.", [({}, metrics["seconds"])])
    rate = metrics["output_tokens_per_second"]
    yield from _metric("output_tokens_per_second", "gauge", "Over the whole job.", [({}, rate)])
    yield from _metric("kv_blocks", "gauge", "Blocks of the KV cache.", [({}, metrics["kv_blocks_total"])])
    peak = "Largest share of the KV cache's blocks in use at once."
    yield from _metric("kv_peak_use_ratio", "gauge", peak, [({}, metrics["kv_peak_use"])])
    balance = "Mean over largest load of experts; 1 is even."
    yield from _metric("expert_balance_ratio", "gauge", balance, [({}, metrics["expert_balance"])])
    yield from _moved(metrics)
    memory = [({"of": name}, value) for name, value in metrics["memory_used"].items()]
    yield from _metric("memory_peak_bytes", "gauge", "Largest use of memory.", memory)
    for name, (metric, text) in HISTOGRAMS.items():
        yield from _histogram(metric, text, metrics["latencies"].get(name, {"count": 0}))


def _moved(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Of experts that move between ranks, and of those that come from host memory."""
    if metrics["rank_balance"] is not None:
        text = "Mean over largest load of ranks; 1 is even."
        yield from _metric("rank_balance_ratio", "gauge", text, [({}, metrics["rank_balance"])])
        moved = "Experts that went to another rank."
        yield from _metric("experts_moved_total", "counter", moved, [({}, metrics["experts_moved"])])
    if (offload := metrics["offload"]) is None:
        return
    asked = [({"found": "yes"}, offload["hits"]), ({"found": "no"}, offload["misses"])]
    yield from _metric("offload_experts_total", "counter", "Experts with tokens: were they on the device?", asked)
    ahead = [({"use": "used"}, offload["fetched_and_used"]), ({"use": "in vain"}, offload["fetched_in_vain"])]
    yield from _metric("offload_fetched_ahead_total", "counter", "Experts fetched before they were asked for.", ahead)
    for name, field, text in (
        ("copies", "num_copies", "Copies of experts to the device."),
        ("copied_bytes", "num_bytes", "Bytes of them."),
        ("busy_seconds", "busy_seconds", "Time in which bytes were on their way."),
        ("stall_seconds", "stall_seconds", "Time in which products waited for experts."),
    ):
        yield from _metric(f"offload_{name}_total", "counter", text, [({}, offload[field])])


def _metric(name: str, kind: str, text: str, samples: Samples) -> Iterator[str]:
    """Nothing at all where no sample has a value."""
    known = [(labels, value) for labels, value in samples if value is not None]
    if known:
        yield f"# HELP sortyard_job_{name} {text}"
        yield f"# TYPE sortyard_job_{name} {kind}"
    for labels, value in known:
        yield f"sortyard_job_{name}{_labels(labels)} {_number(value)}"


def _histogram(name: str, text: str, times: Mapping[str, Any]) -> Iterator[str]:
    """A fine bucket counts where its upper end lies, so a bound is right within 4.4 %."""
    if not times["count"]:
        return
    yield f"# HELP sortyard_job_{name} {text}"
    yield f"# TYPE sortyard_job_{name} histogram"
    for bound in (*BOUNDS, math.inf):
        below = sum(count for end, count in times["buckets"] if end <= bound)
        yield f"sortyard_job_{name}_bucket{_labels({'le': _number(bound)})} {below}"
    yield f"sortyard_job_{name}_sum {_number(times['sum'])}"
    yield f"sortyard_job_{name}_count {times['count']}"


def _labels(labels: Mapping[str, Any]) -> str:
    escaped = (
        (name, str(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"'))
        for name, value in labels.items()
    )
    inside = ",".join(f'{name}="{value}"' for name, value in escaped)
    return f"{{{inside}}}" if inside else ""


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(value)
