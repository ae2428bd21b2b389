"""Makes what experts in host memory need: their memory, copies, and the buffers on the device. Knows no steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from expert_parallel.copy_engine import CopyEngine, make_engine
from expert_parallel.disk_source import Read
from expert_parallel.group import ExpertGroup
from expert_parallel.layout import ExpertLayout
from expert_parallel.offload_plan import OffloadPlan
from moe.model.config import ModelConfig
from moe.model.host_experts import layer_shapes, make_file_experts, make_host_experts
from moe.model.offloaded_experts import Offload

MakeEngine = Callable[[torch.device], CopyEngine]


def make_offload(
    plan: OffloadPlan,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layout: ExpertLayout,
    group: ExpertGroup | None = None,
    *,
    engine: MakeEngine = make_engine,
    files: Read | None = None,
) -> Offload:
    """Allocated, not filled: load into the network's targets, then `Offload.fill`. Ranks of a group call it together.

    `files`: what reads a bundle, for plan.tier=disk. Raises ValueError where host memory cannot be pinned, or holds too
    few bundles.
    """
    layers, copies = config.layers_with_experts, engine(device)
    pin_for = device if device.type == "cuda" else None
    bundle = [(shape[1:], each) for shape, each in layer_shapes(config, layers[0], 1, dtype).values()]
    if plan.tier == "disk":
        assert files is not None, "experts on disk are read by somebody"
        host = make_file_experts(plan, config, dtype, layout, files, copies, pin_for=pin_for)
    else:
        host = make_host_experts(config, dtype, layout, group, pin_for=pin_for)
    return Offload(plan, layers, bundle, host, copies, device)
