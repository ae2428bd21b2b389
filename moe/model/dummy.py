"""Weights from a seed, for benchmarks and tests of size: no file is read. Knows our parameter names only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.quantize import FP8
from moe.model.fp8_blocks import expert_blocks
from moe.model.parameter_shapes import is_expert_parameter, scale_name
from moe.model.slot_experts import SlotExperts, experts_in_slots

_STD = 0.02


def fill_dummy(
    targets: Mapping[str, Tensor],
    seed: int,
    experts: SlotExperts | None = None,
    device: torch.device | None = None,
) -> None:
    """Fills every target in place: norms 1, the selection bias 0, all else normal with std 0.02.

    Experts in fp8 are those of bfloat16 quantised.

    Numbers are drawn on `device`, or on the target's own where that is left out: experts in host memory are those that
    the GPU would hold. What a tensor holds depends on its name, its shape, dtype, that device's kind, and the seed; for
    an expert on its logical number, not its slot: `experts[s]` is the expert in slot s (None: an empty slot, left
    alone), by default expert s. So the experts of a rank are the same whatever the number of ranks.
    """
    for name, tensor in targets.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("moe.gate.bias"):
            tensor.zero_()
        elif is_expert_parameter(name):
            if name.endswith("_scale"):
                continue  # filled with its values
            held = range(tensor.shape[0]) if experts is None else experts_in_slots(name, experts)
            for slot, expert in enumerate(held):
                if expert is None:
                    continue
                if tensor.dtype == FP8:
                    scales = targets[scale_name(name)][slot]
                    _fill_blocks(tensor[slot], scales, f"{name}.{expert}", seed, device or tensor.device)
                else:
                    _fill_normal(tensor[slot], f"{name}.{expert}", seed, device or tensor.device)
        else:
            _fill_normal(tensor, name, seed, device or tensor.device)


def _fill_blocks(values_ND: Tensor, scales_PMG: Tensor, name: str, seed: int, device: torch.device) -> None:
    weight_ND = torch.empty(values_ND.shape, dtype=torch.bfloat16, device=device)
    _fill_normal(weight_ND, name, seed, device)
    blocks = expert_blocks(weight_ND, None, None, parts=scales_PMG.shape[0])
    values_ND.copy_(blocks.values)
    scales_PMG.copy_(blocks.scales)


def _fill_normal(tensor: Tensor, name: str, seed: int, device: torch.device) -> None:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little"))
    drawn = tensor if tensor.device.type == device.type else torch.empty_like(tensor, device=device)
    drawn.normal_(0.0, _STD, generator=generator)
    if drawn is not tensor:
        tensor.copy_(drawn)
