"""Host memory for the experts of a rank: which bundle lies in which row, and who fills it.

Knows parameter names, ranks and placements; knows nothing of steps. One process has its slots' bundles to itself. Ranks
of one node hold each expert once: there row e of a layer is logical expert e, each is loaded by the first rank that has
a slot for it, and an expert that moves to another slot or rank leaves its bytes where they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expert_parallel.copy_engine import CopyEngine
from expert_parallel.disk_source import DiskSource, Read
from expert_parallel.group import ExpertGroup
from expert_parallel.host_store import Arena, Shapes, SharedFiles, arena_bytes, make_arenas, node_key
from expert_parallel.layout import ExpertLayout
from expert_parallel.offload_plan import OffloadPlan
from expert_parallel.slot_buffer import ExpertSource, HostSource
from moe.model.config import ModelConfig
from moe.model.parameter_shapes import bundle_names, parameter_shapes
from moe.model.slot_experts import SlotExperts


@dataclass(frozen=True)
class HostExperts:
    """The store of one rank. `tensors`: by parameter name, [rows, ...]. `filled_here[layer][row]`: the logical expert
    that this rank loads into a row, None where another one does; None: bundles stay in their files. `by_table`: any
    rank finds any expert, so one that moves changes tables alone."""

    tensors: Mapping[str, Tensor]
    filled_here: SlotExperts | None
    source: ExpertSource
    num_bytes: int  # of this rank: an equal part of what is shared
    by_table: bool


def make_host_experts(
    config: ModelConfig,
    dtype: torch.dtype,
    layout: ExpertLayout,
    group: ExpertGroup | None,
    *,
    pin_for: torch.device | None,
) -> HostExperts:
    """One arena a layer. Ranks of a group call it together; ValueError where memory cannot be pinned."""
    layers, experts = config.layers_with_experts, layout.experts
    shared = group is not None and group.size > 1 and len(set(group.gather_objects(node_key()))) == 1
    num_rows = config.moe.num_experts if shared else layout.num_slots
    shapes = [layer_shapes(config, layer, num_rows, dtype) for layer in layers]
    sizes = [arena_bytes(each) for each in shapes]
    if shared:
        assert group is not None, "ranks that share are a group"
        arenas = _shared_arenas(shapes, sizes, group, pin_for=pin_for)
        filled_here = {layer: _first_here(layout, layer, num_rows) for layer in layers}
    else:
        arenas = [each.tensors for each in make_arenas(shapes, [None] * len(shapes), pin_for=pin_for)]
        filled_here = experts
    bundles = {layer: list(tensors.values()) for layer, tensors in zip(layers, arenas, strict=True)}
    return HostExperts(
        tensors={name: tensor for tensors in arenas for name, tensor in tensors.items()},
        filled_here=filled_here,
        source=HostSource(bundles, experts if shared else None),
        num_bytes=sum(sizes) // (group.size if shared and group is not None else 1),
        by_table=shared,
    )


def make_file_experts(
    plan: OffloadPlan,
    config: ModelConfig,
    dtype: torch.dtype,
    layout: ExpertLayout,
    read: Read,
    engine: CopyEngine,
    *,
    pin_for: torch.device | None,
) -> HostExperts:
    """One arena of as many bundles as `plan.host_bytes` holds; ValueError where that is too few to pass chunks."""
    layer = config.layers_with_experts[0]
    shapes = layer_shapes(config, layer, 1, dtype).values()
    bundle_bytes = sum(math.prod(shape) * each.itemsize for shape, each in shapes)
    least = 2 * plan.staging_slots + 1
    num_rows = plan.host_bytes // bundle_bytes
    if num_rows < least:
        raise ValueError(
            f"offload.host_gb leaves this rank {plan.host_bytes} bytes, which hold {num_rows} experts of "
            f"{bundle_bytes} bytes; at least {least} must fit, two chunks of {plan.staging_slots} and one: raise it."
        )
    arena = Arena(layer_shapes(config, layer, num_rows, dtype), pin_for=pin_for)
    source = DiskSource(list(arena.tensors.values()), layout.experts, read, engine)
    return HostExperts({}, None, source, arena.num_bytes, by_table=True)


def layer_shapes(config: ModelConfig, layer: int, num_rows: int, dtype: torch.dtype) -> Shapes:
    """Of all that the expert slots of a layer hold."""
    specs = parameter_shapes(config, num_rows)
    return {name: (specs[name].shape, specs[name].dtype(dtype)) for name in bundle_names(layer, specs)}


def _first_here(layout: ExpertLayout, layer: int, num_experts: int) -> list[int | None]:
    """The experts for which no lower rank has a slot."""
    placement = layout.placements[layer]
    lower = {expert for rank in range(layout.rank) for expert in placement.experts_of(rank)}
    own = set(placement.experts_of(layout.rank)) - lower
    return [expert if expert in own else None for expert in range(num_experts)]


def _shared_arenas(
    shapes: Sequence[Shapes], sizes: Sequence[int], group: ExpertGroup, *, pin_for: torch.device | None
) -> list[dict[str, Tensor]]:
    """The first rank makes the files, all map them, and only then are they closed."""
    files = SharedFiles.make(sizes) if group.rank == 0 else None
    names = group.gather_objects(None if files is None else files.names)[0]
    files = files or SharedFiles.open(names)
    arenas = make_arenas(shapes, files.files, pin_for=pin_for)
    group.barrier()
    files.close()
    return [each.tensors for each in arenas]
