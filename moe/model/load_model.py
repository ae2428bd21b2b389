"""From a folder to a network that is ready to run. Knows the order of steps; knows nothing of families or kernels.

Everything a checkpoint can be wrong in is found before the first tensor is allocated.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from moe.model.causal_lm import CausalLM
from moe.model.checkpoint import Checkpoint, Progress
from moe.model.dummy import fill_dummy
from moe.model.families.registry import read_config
from moe.model.linear import forbid_split_k

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    max_model_len: int,
    mla_workspace_tokens: int = 32768,
    progress: Progress | None = None,
) -> CausalLM:
    """The network of `folder` with its weights, or with weights from `seed` for load_format=dummy (config.json alone).

    On a GPU this forbids split-K in the vendor library, for the whole process. Raises ValueError for a config.json or a
    checkpoint that does not fit; nothing is allocated by then.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}.")
    config = read_config(folder)
    checkpoint = None if load_format == "dummy" else Checkpoint.open(folder, config)
    if device.type == "cuda":
        forbid_split_k()
    model = CausalLM(
        config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        mla_workspace_tokens=mla_workspace_tokens,
    )
    if checkpoint is None:
        fill_dummy(model.targets(), seed, model.experts)
    else:
        report = checkpoint.load_into(model.targets(), model.experts, progress)
        logger.info("read %.1f MB of weights in %.1f s", report.num_bytes / 1e6, report.seconds)
    model.finalize()
    return model
