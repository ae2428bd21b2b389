"""What an engine will take before anything is loaded: weights, steps, cache, host memory, and which experts live where.

Knows shapes, keys and the sizes of a machine; allocates nothing. `launch.plan` prints it, and an engine decides by it
which experts it holds on the GPU, then compares it with what it measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from configs.schema import BalanceConfig, Config, OffloadConfig
from expert_parallel.choice import automatic_row_cap, choose, planned_bytes
from expert_parallel.host_store import arena_bytes
from expert_parallel.offload_plan import OffloadPlan, Room, choose_held, held_bytes, held_within, staging_slots
from expert_parallel.placement import Placement
from kernels.checks import cdiv
from kv_cache.layout import KVLayout
from moe.engine.balance import moving_bytes
from moe.engine.machine import Machine
from moe.engine.memory_plan import GIB, DeviceMemory, MemoryPlan, plan_memory
from moe.engine.workspace import Device, StepLimits, Workspace, measure_by_shapes
from moe.model.config import ModelConfig
from moe.model.host_experts import layer_shapes
from moe.model.load_model import first_placements
from moe.model.overlap import choose_overlap
from moe.model.weight_sizes import WeightSizes, weight_sizes

TOKENS_PER_SEQ = 1024
"""Where offload.tokens_per_seq leaves it open, and a checkpoint allows so many."""
TOLERANCE = 0.05
"""Beyond it the sum is wrong, or somebody else uses the device."""
BEYOND_PLAN = 1 << 27
"""That contexts, kernels' modules and steps may take more than was planned, so that a cache planned for the longest
sequence holds it. An H200 showed 0.101 GiB."""
CPU_SHARE = 4
"""On the CPU held experts are copies that gain nothing: a quarter, so that all that a GPU does happens there too."""


@dataclass(frozen=True)
class Subject:
    """What is to run: a model as it will be held, its cache, the longest sequence and the largest steps."""

    model: ModelConfig
    dtype: torch.dtype
    layout: KVLayout
    limits: StepLimits


@dataclass(frozen=True)
class Forecast:
    """`offload` None: all experts are on the GPU. `plan` None: it does not fit, and `problem` says why."""

    weights: WeightSizes
    workspace: Workspace
    offload: OffloadPlan | None
    plan: MemoryPlan | None
    problem: str | None

    @property
    def weight_bytes(self) -> int:
        """On the GPU."""
        return self.weights.rest + (self.weights.experts if self.offload is None else self.offload.gpu_bytes)

    @property
    def host_bytes(self) -> int:
        return 0 if self.offload is None else self.offload.host_bytes

    def misses(self, actual: MemoryPlan) -> bool:
        """Whether what is no cache, lies between ranks or in the host came out more than 5 % from what was planned."""
        pairs = [(self.host_bytes, actual.host_bytes)]
        if self.plan is not None:
            pairs.append((self.plan.buffer_bytes + self.plan.moving_bytes, actual.buffer_bytes + actual.moving_bytes))
        if actual.total_bytes is not None:
            measured = actual.weight_bytes + actual.workspace_bytes
            pairs.append((self.weight_bytes + self.workspace.num_bytes, measured))
        return any(abs(planned - found) > TOLERANCE * found for planned, found in pairs)

    def against(self, actual: MemoryPlan) -> str:
        """Planned and measured bytes, side by side."""
        pairs = {"weights": (self.weight_bytes, actual.weight_bytes)}
        if actual.total_bytes is not None:
            pairs["workspace"] = (self.workspace.num_bytes, actual.workspace_bytes)
        if self.plan is not None:
            if self.plan.buffer_bytes or actual.buffer_bytes:
                pairs["rows between ranks"] = (self.plan.buffer_bytes, actual.buffer_bytes)
            if self.plan.moving_bytes or actual.moving_bytes:
                pairs["experts between ranks"] = (self.plan.moving_bytes, actual.moving_bytes)
            pairs["KV cache"] = (self.plan.kv_bytes, actual.kv_bytes)
        if self.host_bytes or actual.host_bytes:
            pairs["host memory"] = (self.host_bytes, actual.host_bytes)
        texts = (f"{name} {planned / GIB:.3f} and {found / GIB:.3f}" for name, (planned, found) in pairs.items())
        return f"planned and actual, GiB: {', '.join(texts)}"


def forecast(config: Config, subject: Subject, machine: Machine) -> Forecast:
    """Of the rank `machine.rank`. ValueError where offload.* cannot be; what does not fit otherwise is a `problem`."""
    slots = _placement(config, subject, machine).num_slots(machine.rank)
    weights = weight_sizes(subject.model, slots, subject.dtype)
    resident = _forecast(config, subject, machine, weights, None)
    if config.offload.regime == "off":
        return resident
    offload = plan_offload(config, subject, machine, weights)
    return resident if offload is None else _forecast(config, subject, machine, weights, offload)


def plan_offload(config: Config, subject: Subject, machine: Machine, weights: WeightSizes) -> OffloadPlan | None:
    """Which experts this rank holds on its GPU, as offload.* says or as serves best; None: all of them.

    Ranks share host memory, so whether experts live there is one answer for all, that of the rank with most slots. How
    many of its own each one holds is its own business.
    """
    if not weights.num_layers:
        raise ValueError(
            f"offload.regime={config.offload.regime}, but the model has no layer with experts; leave it out."
        )
    placement = _placement(config, subject, machine)
    fullest = max(range(machine.num_ranks), key=placement.num_slots)
    most, own = (placement.num_slots(rank) * weights.num_layers for rank in (fullest, machine.rank))
    if _held(config, subject, replace(machine, rank=fullest), weights) == most:
        return None
    held = min(_held(config, subject, machine, weights), own - 1)
    offload = config.offload
    host_bytes = _host_bytes(subject, machine, weights)
    return OffloadPlan(
        regime=offload.regime,
        num_slots=weights.num_slots,
        num_held=held,
        staging_slots=staging_slots(weights.num_slots - held // weights.num_layers, weights.bundle),
        num_layers=weights.num_layers,
        bundle_bytes=weights.bundle,
        tier=offload.tier,
        host_bytes=_within_host(offload, machine, host_bytes, weights),
    )


def _held(config: Config, subject: Subject, machine: Machine, weights: WeightSizes) -> int:
    """H of the rank `machine.rank`."""
    offload, num_layers = config.offload, weights.num_layers
    num_slots = _placement(config, subject, machine).num_slots(machine.rank)
    shape = (num_slots, num_layers, weights.bundle)
    if offload.slots_per_layer is not None:
        return min(offload.slots_per_layer, num_slots) * num_layers
    if offload.gpu_gb is not None:
        held = held_within(*shape, int(offload.gpu_gb * GIB))
        if held is None:
            raise ValueError(
                f"offload.gpu_gb={offload.gpu_gb:g} has no room for the two buffers that experts pass through, "
                f"{held_bytes(shape[0], 0, *shape[1:]) / GIB:.3f} GiB; raise it, or leave it out."
            )
        return held
    if machine.total is None:
        return max(1, num_slots // CPU_SHARE) * num_layers
    room = cache_room(config, subject, machine, weights)
    held = choose_held(*shape, room)
    if held is None:
        raise ValueError(
            f"offload.regime={offload.regime}: beside other weights and steps {max(room.shared, 0) / GIB:.3f} GiB of "
            f"{machine.name} are left, less than buffers for experts and a cache for one sequence take "
            f"({(held_bytes(shape[0], 0, *shape[1:]) + room.least) / GIB:.3f} GiB); lower engine.max_batched_tokens or "
            "engine.max_num_seqs, raise cache.memory_fraction, or add GPU memory."
        )
    return held


def cache_room(config: Config, subject: Subject, machine: Machine, weights: WeightSizes) -> Room:
    """What experts and cache share on a GPU, and what the cache makes of it. With cache.num_blocks it is said."""
    assert machine.total is not None, "the CPU has no room to share out"
    layout, longest = subject.layout, subject.limits.max_model_len
    per_seq, of_longest = (
        cdiv(length, layout.block_size) * layout.bytes_per_block
        for length in (tokens_per_seq(config.offload, longest), longest)
    )
    # No request is refused so that more experts are held, as long as the cache may be large enough for it.
    wanted = max(wanted_seqs(config.offload, subject) * per_seq, of_longest + BEYOND_PLAN)
    if config.cache.num_blocks is not None:
        wanted = per_seq = config.cache.num_blocks * layout.bytes_per_block
    budget = int(machine.total * config.cache.memory_fraction)
    shared, resident = (
        budget
        - _taken(config, subject, machine, weights, weights.rest, _workspace(config, subject, machine, each)).taken
        for each in (True, False)
    )
    return Room(shared, resident, wanted, per_seq)


def tokens_per_seq(offload: OffloadConfig, max_model_len: int) -> int:
    """That the cache is sized for."""
    return min(offload.tokens_per_seq or TOKENS_PER_SEQ, max_model_len)


def wanted_seqs(offload: OffloadConfig, subject: Subject) -> int:
    """That the cache gets room for: as many as may run; with regime=cache as many as a cache of experts pays for: from
    E / K on nearly all experts are asked for in every step."""
    moe, most = subject.model.moe, subject.limits.max_num_seqs
    return min(most, max(1, moe.num_experts // moe.rule.top_k)) if offload.regime == "cache" else most


def _forecast(
    config: Config, subject: Subject, machine: Machine, weights: WeightSizes, offload: OffloadPlan | None
) -> Forecast:
    on_gpu = weights.rest + (weights.experts if offload is None else offload.gpu_bytes)
    workspace = _workspace(config, subject, machine, offload is not None)
    memory = _taken(config, subject, machine, weights, on_gpu, workspace)
    cache = config.cache
    plan, problem = None, None
    try:
        plan = plan_memory(
            subject.layout,
            replace(memory, host=0 if offload is None else offload.host_bytes),
            num_blocks=cache.num_blocks,
            memory_fraction=cache.memory_fraction,
            cpu_gb=cache.cpu_gb,
            max_model_len=subject.limits.max_model_len,
        )
    except ValueError as error:
        problem = str(error)
    return Forecast(weights, workspace, offload, plan, problem)


def _taken(
    config: Config, subject: Subject, machine: Machine, weights: WeightSizes, weight_bytes: int, workspace: Workspace
) -> DeviceMemory:
    """All of a device that is no cache; `weight_bytes` of the weights are on it."""
    on_cpu, row_cap = machine.total is None, _row_cap(config, subject, machine)
    return DeviceMemory(
        name=machine.name,
        total=machine.total,
        weights=weight_bytes,
        workspace=0 if on_cpu else workspace.num_bytes,
        other=0 if on_cpu else machine.other,
        buffers=_buffer_bytes(config, subject, machine, row_cap),
        moving=moving_bytes(config.balance, _placement(config, subject, machine), weights.bundle),
        row_cap=row_cap,
    )


def _placement(config: Config, subject: Subject, machine: Machine) -> Placement:
    """Of a layer at the start; all have as many slots."""
    balance = config.balance if machine.num_ranks > 1 else BalanceConfig()
    return next(iter(first_placements(subject.model, balance, machine.num_ranks).values()))


def _buffer_bytes(config: Config, subject: Subject, machine: Machine, row_cap: int | None) -> int:
    """Of the rows between ranks, as the dispatchers that will be chosen say of themselves."""
    if machine.num_ranks == 1:
        return 0
    parallel, model, device = config.parallel, subject.model, torch.device("cpu" if machine.total is None else "cuda")
    most = config.engine.max_batched_tokens
    at_a_time = choose_overlap(parallel, machine.num_ranks, device).rounds_open(most)
    return at_a_time * planned_bytes(
        choose(parallel.dispatcher, machine.num_ranks, device, machine.problems),
        machine.rank,
        _placement(config, subject, machine),
        cdiv(most, at_a_time),
        model.hidden_size,
        subject.dtype,
        top_k=model.moe.rule.top_k,
        combine="fast" if parallel.combine == "fast" else "exact",
        row_cap=row_cap,
        fp8_rows=model.fp8_experts,
    )


def _workspace(config: Config, subject: Subject, machine: Machine, offloaded: bool) -> Workspace:
    graphs = config.engine.cuda_graphs and machine.total is not None and not offloaded
    return measure_by_shapes(
        subject.model,
        subject.dtype,
        subject.limits,
        Device(hopper=machine.hopper, graphs=graphs),
        num_ranks=machine.num_ranks,
        row_cap=_row_cap(config, subject, machine),
        offloaded=offloaded,
    )


def _row_cap(config: Config, subject: Subject, machine: Machine) -> int | None:
    if machine.num_ranks == 1:
        return None
    top_k, most = subject.model.moe.rule.top_k, config.engine.max_batched_tokens
    return automatic_row_cap(config.parallel.row_cap, machine.num_ranks, top_k, most)


def _host_bytes(subject: Subject, machine: Machine, weights: WeightSizes) -> int:
    """Of this rank: its slots, or an equal part of all experts where the ranks share one host."""
    shared = machine.num_ranks > 1 and machine.ranks_here == machine.num_ranks
    rows = subject.model.moe.num_experts if shared else weights.num_slots
    layer = subject.model.layers_with_experts[0]
    one = arena_bytes(layer_shapes(subject.model, layer, rows, subject.dtype))
    return one * weights.num_layers // (machine.num_ranks if shared else 1)


def _within_host(offload: OffloadConfig, machine: Machine, wanted: int, weights: WeightSizes) -> int:
    """Pinned bytes of this rank. tier=disk: as many as offload.host_gb gives it. ValueError where the host has less."""
    here, text = machine.ranks_here, _host_sum(wanted, machine, weights)
    budget = None if offload.host_gb is None else int(offload.host_gb * GIB)
    if offload.tier == "disk":
        assert budget is not None, "the disk tier is checked to have a budget"
        wanted = min(wanted, budget // here)
    elif budget is not None and wanted * here > budget:
        raise ValueError(
            f"offload.host_gb={offload.host_gb:g} is less than the {wanted * here / GIB:.3f} GiB of the experts "
            f"({text}); raise it, or give offload.tier=disk."
        )
    if machine.host is not None:
        way_out = "free memory, raise that limit, or give offload.tier=disk and a lower offload.host_gb."
        machine.host.check(wanted * here, f"experts ({text})", way_out)
    return wanted


def _host_sum(wanted: int, machine: Machine, weights: WeightSizes) -> str:
    each = f"{weights.num_layers} layers of {weights.bundle / 2**20:.2f} MiB an expert"
    ranks = "" if machine.ranks_here == 1 else f" x {machine.ranks_here} ranks"
    return f"{each}: {wanted / GIB:.3f} GiB{ranks}"
