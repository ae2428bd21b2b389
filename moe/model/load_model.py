"""From a folder to a network that is ready to run. Knows the order of steps; knows nothing of families or kernels.

Everything a checkpoint can be wrong in is found before the first tensor is allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from configs.schema import BalanceConfig, ParallelConfig
from expert_parallel.choice import automatic_row_cap, choose, dispatcher_problems, make_dispatchers
from expert_parallel.copy_engine import make_engine
from expert_parallel.group import ExpertGroup
from expert_parallel.layout import ExpertLayout
from expert_parallel.offload_plan import OffloadPlan
from expert_parallel.placement import Placement
from expert_parallel.plan_file import ModelShape, load_plan
from kernels.quantize import supports_fp8
from moe.model.causal_lm import CausalLM
from moe.model.checkpoint import Checkpoint, Progress
from moe.model.config import ModelConfig
from moe.model.dummy import fill_dummy
from moe.model.expert_files import ExpertFiles
from moe.model.families.registry import read_config
from moe.model.linear import forbid_split_k
from moe.model.offload_setup import MakeEngine, make_offload
from moe.model.overlap import NO_OVERLAP, Overlap, choose_overlap

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")
QUANTIZATIONS = ("auto", "none", "fp8")


@dataclass(frozen=True)
class Spread:
    """The ranks that share the routed experts, how rows travel, the most rows that one brings to a step, and where the
    experts are to begin with."""

    group: ExpertGroup
    parallel: ParallelConfig
    max_rows: int
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    problems: Mapping[str, str] | None = None  # why they cannot use a dispatcher; None: not looked at


class Opened(NamedTuple):
    """What a network will be, with the precision in which experts are held, and the checkpoint whose headers fit it;
    None: its weights are made up."""

    config: ModelConfig
    checkpoint: Checkpoint | None


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    quantization: str = "auto",
    seed: int = 0,
    max_model_len: int,
    mla_workspace_tokens: int = 32768,
    progress: Progress | None = None,
    spread: Spread | None = None,
    overlap: Overlap = NO_OVERLAP,
    offload: OffloadPlan | None = None,
    copies: MakeEngine = make_engine,
    opened: Opened | None = None,
) -> CausalLM:
    """The network of `folder` with its weights, or with weights from `seed` for load_format=dummy (config.json alone).

    `quantization`: the routed experts as they are stored (auto), in fp8, or in `dtype` (none); all else is in `dtype`.
    `spread`: this rank holds its share of the experts alone, and overlaps what its `parallel` says; None: it holds all
    of them, and overlaps what `overlap` says. The network's own `config` says which
    it became. `offload`: how many experts are on the device, the others in host memory; `copies` brings them.
    `opened`: what `open_model` said of the same model, if that was asked before.
    On a GPU this forbids split-K in the vendor library, for the whole process. Raises ValueError for a
    config.json or a checkpoint that does not fit; nothing is allocated by then.
    """
    config, checkpoint = opened or open_model(folder, load_format, quantization, device)
    if device.type == "cuda":
        forbid_split_k()
    if spread is None:
        layout = ExpertLayout.whole(config.layers_with_experts, config.moe.num_experts, device)
        group = None
    else:
        layout, group = _layout(spread, config, device), spread.group
        overlap = choose_overlap(spread.parallel, spread.group.size, device)
    files = None if offload is None or checkpoint is None else ExpertFiles(checkpoint, device)
    if offload is not None and overlap.decoding:
        overlap = NO_OVERLAP  # copies have streams of their own: not measured beside a third
    made = offload and make_offload(offload, config, dtype, device, layout, group, engine=copies, files=files)
    model = CausalLM(
        config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        mla_workspace_tokens=mla_workspace_tokens,
        layout=layout,
        overlap=overlap,
        offload=made,
    )
    experts = model.layout.experts if made is None else made.host.filled_here
    if checkpoint is None:
        fill_dummy(model.targets(), seed, experts, device)
    else:
        report = checkpoint.load_into(model.targets(), experts, progress, device)
        logger.info("read %.1f MB of weights in %.1f s", report.num_bytes / 1e6, report.seconds)
    model.finalize()
    return model


def open_model(folder: Path, load_format: str, quantization: str, device: torch.device) -> Opened:
    """Headers alone are read. ValueError for what does not fit."""
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}.")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not known; use one of {', '.join(QUANTIZATIONS)}.")
    config = read_config(folder)
    checkpoint = None if load_format == "dummy" else Checkpoint.open(folder, config)
    stored = config.fp8_block is not None if checkpoint is None else checkpoint.stores_fp8_experts
    config = replace(config, fp8_experts=_holds_fp8_experts(quantization, stored, config, device))
    return Opened(config, checkpoint and replace(checkpoint, config=config))


def model_shape(config: ModelConfig) -> ModelShape:
    """What a plan of placements must agree with."""
    return ModelShape(config.num_layers, config.moe.num_experts, config.layers_with_experts)


def first_placements(config: ModelConfig, balance: BalanceConfig, num_ranks: int) -> Mapping[int, Placement]:
    """Where the experts of every layer are to begin with: in order over the ranks, or where `balance.plan` says.

    One rank holds each expert once, whatever `balance.redundant_experts` is.
    """
    if balance.plan is not None:
        return load_plan(Path(balance.plan), model_shape(config), num_ranks)
    redundant, most = balance.redundant_experts, config.moe.num_experts * (num_ranks - 1)
    if num_ranks == 1:
        redundant = 0
    elif redundant > most:
        raise ValueError(
            f"balance.redundant_experts={redundant} exceeds {most}, with which each of the {num_ranks} ranks could "
            f"hold every one of the {config.moe.num_experts} experts; lower it."
        )
    placement = Placement.contiguous(config.moe.num_experts, num_ranks, redundant)
    return dict.fromkeys(config.layers_with_experts or (0,), placement)


def _layout(spread: Spread, config: ModelConfig, device: torch.device) -> ExpertLayout:
    """As `parallel.*` and `balance.*` say; the first rank tells how rows travel and why."""
    parallel, group, top_k = spread.parallel, spread.group, config.moe.rule.top_k
    placements = first_placements(config, spread.balance, group.size)
    if len(set(group.gather_objects(repr(sorted(placements.items()))))) > 1:
        raise ValueError(f"balance.plan={spread.balance.plan} is another file on some ranks; give all the same.")
    placement = next(iter(placements.values()))  # as many slots in every layer
    if group.size == 1:
        return ExpertLayout.local(placements, group.rank, device)
    problems = spread.problems
    if problems is None:
        problems = dispatcher_problems(group, device, deep_ep=parallel.dispatcher == "deep_ep")
    choice = choose(parallel.dispatcher, group.size, device, problems)
    row_cap = automatic_row_cap(parallel.row_cap, group.size, top_k, spread.max_rows)
    dispatchers = make_dispatchers(
        choice,
        group,
        placement,
        top_k=top_k,
        combine="fast" if parallel.combine == "fast" else "exact",
        row_cap=row_cap,
        fp8_rows=config.fp8_experts,
        timeout_s=parallel.timeout_s,
        device=device,
    )
    if group.rank == 0 and group.size > 1:
        slots = [placement.num_slots(rank) for rank in range(group.size)]
        logger.info("%d experts on %d ranks: %s slots each", placement.num_experts, group.size, _from_to(slots))
        logger.info("rows travel by %s; combine=%s, at most %d rows a round", choice, parallel.combine, row_cap)
        logger.info("overlap: %s (parallel.overlap=%s)", choose_overlap(parallel, group.size, device), parallel.overlap)
    return ExpertLayout.spread(group.rank, placements, dispatchers, device)


def _from_to(counts: list[int]) -> str:
    return str(max(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _holds_fp8_experts(quantization: str, stored: bool, config: ModelConfig, device: torch.device) -> bool:
    """Whether routed experts are held in fp8; `stored`: they lie in the file as they would be held."""
    if quantization == "none":
        return False
    supported = supports_fp8(device)
    if quantization == "fp8":
        if not supported:
            raise ValueError(
                f"quantization=fp8, but {torch.cuda.get_device_name(device)} has no fp8 (compute capability 8.9 and "
                "above have it); use quantization=none."
            )
        return True
    if config.fp8_block is not None and not (stored and supported):
        why = "this GPU has no fp8" if stored else "their blocks are not 128 x 128 of one matrix each"
        logger.warning("fp8 weights of the experts are loaded as dtype, which takes twice the memory: %s", why)
    return stored and supported
