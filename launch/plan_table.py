"""The planner's table: bytes in GiB, sequences, and floors of steps. Knows a forecast; decides nothing."""

from __future__ import annotations

from rich.table import Table

from launch.speed import Speed, StepTime
from moe.engine.forecast import Forecast, Subject
from moe.engine.memory_plan import GIB, MemoryPlan


def plan_table(name: str, subject: Subject, planned: Forecast, speed: Speed | None, gpus: int, seqs: int) -> Table:
    """Of one rank."""
    model = subject.model
    experts = "fp8" if model.fp8_experts else str(subject.dtype).removeprefix("torch.")
    where = "on one GPU" if gpus == 1 else f"on each of {gpus} GPUs"
    table = Table(title=f"{name} {where}: {subject.dtype}, experts in {experts}".replace("torch.", ""), box=None)
    for column, justify in (("", "left"), ("GiB", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # pyright: ignore[reportArgumentType]
    for label, num_bytes, note in _weights(planned) + _gpu(planned, subject):
        table.add_row(label, "" if num_bytes is None else f"{num_bytes / GIB:.3f}", note)
    if planned.offload is not None:
        offload = planned.offload
        table.add_row(
            "host memory, pinned", f"{offload.host_bytes / GIB:.3f}", f"offload.tier={offload.tier}, this GPU's"
        )
    if speed is not None:
        for label, note in _speed(speed, seqs):
            table.add_row(label, "", note)
    return table


def _weights(planned: Forecast) -> list[tuple[str, int | None, str]]:
    sizes, offload = planned.weights, planned.offload
    rows: list[tuple[str, int | None, str]] = [
        ("attention", sizes.attention, ""),
        ("dense MLPs", sizes.dense, ""),
        ("shared experts", sizes.shared, ""),
        ("embeddings, head", sizes.embeddings, ""),
        ("routers, norms", sizes.routers + sizes.norms, ""),
    ]
    rows = [row for row in rows if row[1]]
    one = f"{sizes.bundle / 2**20:.2f} MiB each"
    if offload is None:
        rows.append(("experts", sizes.experts, f"{sizes.num_slots} in each of {sizes.num_layers} layers, {one}"))
    else:
        held = offload.held_bytes
        rows.append(("experts held", held, f"{offload.held_words()}, {one}"))
        rows.append(("experts passing", offload.gpu_bytes - held, f"two buffers of {offload.staging_slots}"))
    return rows


def _gpu(planned: Forecast, subject: Subject) -> list[tuple[str, int | None, str]]:
    limits, plan = subject.limits, planned.plan
    steps = f"{limits.max_batched_tokens} tokens of prompts, {limits.max_num_seqs} of decoding; "
    steps += "with graphs" if planned.workspace.graphs else "without graphs"
    rows: list[tuple[str, int | None, str]] = [
        ("weights in all", planned.weight_bytes, ""),
        ("working space", planned.workspace.num_bytes, steps),
    ]
    if plan is None:
        return rows
    if plan.buffer_bytes:
        rows.append(("rows between ranks", plan.buffer_bytes, f"at most {plan.row_cap} in a round"))
    if plan.moving_bytes:
        rows.append(("experts between ranks", plan.moving_bytes, "while they move (balance.buffer_mb)"))
    rows.append(("others on the GPU", plan.other_bytes, ""))
    layout = subject.layout
    tokens = f"{plan.capacity_tokens:,} tokens of {layout.bytes_per_token:,.0f} bytes, {plan.num_blocks:,} blocks"
    rows.append(("KV cache", plan.kv_bytes, tokens))
    rows.append(("left free", _left(plan), f"by {plan.chosen_by}"))
    return rows


def _left(plan: MemoryPlan) -> int | None:
    used = plan.weight_bytes + plan.workspace_bytes + plan.buffer_bytes + plan.moving_bytes
    used += plan.other_bytes + plan.kv_bytes
    return None if plan.total_bytes is None else plan.total_bytes - used


def _speed(speed: Speed, seqs: int) -> list[tuple[str, str]]:
    load = speed.load
    return [
        ("sequences at a time", f"{seqs} of {load.prompt}+{load.answer} tokens"),
        ("decode step, at least", _step(speed.decode)),
        ("prompt step, at least", _step(speed.prefill)),
        ("decoding, at most", f"{amount(speed.tokens_per_s)} tokens/s" + _of_all(load.num_ranks)),
        ("in all, at most", f"{amount(speed.seqs_per_s)} sequences/s" + _of_all(load.num_ranks)),
    ]


def _step(step: StepTime) -> str:
    if step.regime is None:
        return f"{step.seconds * 1e3:.2f} ms"
    link = f"{step.link_bytes / GIB:.2f} GiB over the link in {step.link_s * 1e3:.1f} ms"
    beside = "beside" if step.regime == "stream" else "and, where no guess is right, after"
    return f"{step.seconds * 1e3:.2f} ms: {step.regime}, {link}, {beside} {step.gpu_s * 1e3:.2f} ms on the GPU"


def _of_all(num_ranks: int) -> str:
    return "" if num_ranks == 1 else f" of all {num_ranks} GPUs"


def amount(value: float) -> str:
    """Three digits at least.

    >>> amount(0.04567), amount(11156.7)
    ('0.0457', '11,157')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
