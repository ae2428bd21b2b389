"""Experts spread over ranks and in host memory: one copy for all ranks of a node, each row the bits of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import BalanceConfig, ParallelConfig
from expert_parallel.offload_plan import OffloadPlan
from moe.model import host_experts
from moe.model.causal_lm import CausalLM
from moe.model.load_model import Spread, load_model
from tests.compare import assert_same_bits
from tests.ranks import run_ranks, world
from tests.simulated_copies import SimulatedEngine
from tests.step_driver import StepDriver
from tests.test_model.test_network_ranks import STEPS, load, take_step, take_steps
from tests.tiny_models import write_variant


def load_offloaded(folder: Path, spread: Spread, regime: str, num_slots: int, tier: str, quantization: str) -> CausalLM:
    plan = OffloadPlan(regime, num_slots, 1, 2, num_layers=1, bundle_bytes=1, tier=tier, host_bytes=10**6)
    options: dict[str, Any] = {"max_model_len": 128, "mla_workspace_tokens": 64, "quantization": quantization}
    copies = lambda device: SimulatedEngine(seed=spread.group.rank)  # noqa: E731
    device = torch.device("cpu")
    return load_model(folder, dtype=torch.float32, device=device, spread=spread, offload=plan, copies=copies, **options)


def take_all_steps(
    rank: int, num_ranks: int, folder: Path, kinds: Sequence[tuple[str, str]], quantization: str, redundant: int
) -> list[Any]:
    """Of each (regime, tier): the logits of this rank's rows in each step, and the bytes its store counts as its own.
    The last kind is done by ranks that take each other for those of another node."""
    results = []
    for number, (regime, tier) in enumerate(kinds):
        group = world(rank, num_ranks)
        if number == len(kinds) - 1:
            host_experts.node_key = lambda: f"node {rank}"  # pyright: ignore
        spread = Spread(group, ParallelConfig(), 64, BalanceConfig(redundant_experts=redundant))
        num_slots = -(-(8 + redundant) // num_ranks)
        model = load_offloaded(folder, spread, regime, num_slots, tier, quantization)
        found = take_steps(model, rank)
        assert model.offload is not None
        results.append((found, model.offload.host_bytes, model.offload.host.by_table))
    return results


@pytest.mark.parametrize(
    ("variant", "num_ranks", "quantization", "redundant"),
    [("qwen3_moe", 2, "none", 2), ("deepseek_v3", 2, "fp8", 0), ("mixtral-window", 4, "none", 0)],
)
def test_rows_have_the_bits_of_one_rank(
    tmp_path: Path, variant: str, num_ranks: int, quantization: str, redundant: int
) -> None:
    """With replicas, in fp8, and with two slots a rank."""
    write_variant(tmp_path, variant)
    driver = StepDriver(load(tmp_path) if quantization == "none" else _fp8(tmp_path))
    expected = [[take_step(driver, of_rank, None) if of_rank else {} for of_rank in step] for step in STEPS]
    kinds = [("stream", "host"), ("cache", "host"), ("auto", "disk"), ("cache", "host")]
    results = run_ranks(take_all_steps, num_ranks, tmp_path, kinds, quantization, redundant)
    for number, _ in enumerate(kinds):
        for rank, of_rank in enumerate(results):
            for step, found in enumerate(of_rank[number][0]):
                for name, logits in found.items():
                    assert_same_bits(logits, expected[step][rank][name])
    shared, apart = results[0][0], results[0][3]
    assert shared[2] and not apart[2]
    # Each expert lies there once, whatever the replicas.
    assert apart[1] / shared[1] == pytest.approx(-(-(8 + redundant) // num_ranks) / (8 / num_ranks), rel=0.2)


def _fp8(folder: Path) -> CausalLM:
    options: dict[str, Any] = {"max_model_len": 128, "mla_workspace_tokens": 64, "quantization": "fp8"}
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"), **options)
