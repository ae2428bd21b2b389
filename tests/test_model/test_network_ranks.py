"""The network with its experts spread over ranks: every row has the bits of one rank, whatever others bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import ParallelConfig
from moe.model.causal_lm import CausalLM
from moe.model.load_model import Spread, load_model
from moe.model.step_input import StepInput, StepOfAll
from router.load import LoadCounter
from tests.compare import assert_same_bits
from tests.ranks import run_ranks, world
from tests.step_driver import StepDriver
from tests.tiny_models import write_variant

PROMPTS = {"a": list(range(30, 49)), "b": [7], "c": list(range(100, 133)), "d": [3, 1, 4, 1, 5]}
# What each rank brings to each step: prompts, then decode rows. The last rank has nothing at first, then all have
# nothing but rank 0, and rank 1 prefills while rank 0 decodes.
STEPS: tuple[tuple[dict[str, Sequence[int]], ...], ...] = (
    ({"a": PROMPTS["a"], "b": PROMPTS["b"]}, {"c": PROMPTS["c"]}),
    ({"a": [11], "b": [12]},),
    ({"a": [13]}, {"d": PROMPTS["d"]}),
    ({"a": [14], "b": [15]}, {"c": [16]}),
)


def load(folder: Path, spread: Spread | None = None) -> CausalLM:
    options = {"max_model_len": 128, "mla_workspace_tokens": 64, "spread": spread}
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"), **options)
    model.load = LoadCounter(model.config.num_layers, model.config.moe.num_experts, "cpu", model.layout.experts)
    return model


def take_step(driver: StepDriver, names: Mapping[str, Sequence[int]], of_all: StepOfAll | None) -> dict[str, Tensor]:
    """Single tokens of a known sequence are decode rows, all else is a prompt."""
    decode = [(name, list(ids)) for name, ids in names.items() if name in driver.tracks]
    chunks = decode + [(name, list(ids)) for name, ids in names.items() if name not in driver.tracks]
    if not chunks:
        assert of_all is not None
        empty = driver.model.forward(StepInput.empty(of_all, driver.model.device), driver.kv_caches)
        assert empty.shape == (0, driver.model.config.vocab_size)
        return {}
    step = replace(driver.plan(chunks, num_decode=len(decode)), of_all=of_all)
    rows = driver.model.forward(step, driver.kv_caches).split([len(ids) for _, ids in chunks])
    return {name: part for (name, _), part in zip(chunks, rows, strict=True)}


def take_steps(model: CausalLM, rank: int) -> list[dict[str, Tensor]]:
    """The logits of this rank's rows in each of STEPS."""
    driver, found, seen = StepDriver(model), [], set()
    for step in STEPS:
        counts = [sum(len(ids) for ids in of_rank.values()) for of_rank in step]
        starts = {name for of_rank in step for name in of_rank} - seen
        seen |= starts
        of_all = StepOfAll(max(counts), has_prefill=bool(starts))
        found.append(take_step(driver, step[rank] if rank < len(step) else {}, of_all))
    return found


def take_all_steps(rank: int, num_ranks: int, folder: Path, parallels: Sequence[ParallelConfig]) -> list[Any]:
    """One rank: for each of `parallels` the logits of its rows in each step, its experts' load and their bytes."""
    results = []
    for parallel in parallels:
        model = load(folder, Spread(world(rank, num_ranks), parallel, max_rows=64))
        found = take_steps(model, rank)
        assert model.load is not None
        held = sum(tensor.nbytes for name, tensor in model.targets().items() if ".moe.experts." in name)
        results.append((found, model.load.snapshot(), held))
    return results


@pytest.mark.parametrize(
    ("variant", "num_ranks", "row_cap"),
    [
        ("mixtral-window", 2, None),
        ("deepseek_v3", 3, 24),  # experts do not divide evenly, several rounds
        ("mixtral-window", 5, None),  # a rank without an expert
        ("qwen3_moe", 4, 16),
        ("deepseek_v2-groups", 2, None),
    ],
)
def test_rows_have_the_bits_of_one_rank(variant: str, num_ranks: int, row_cap: int | None, tmp_path: Path) -> None:
    write_variant(tmp_path, variant)
    alone = load(tmp_path)
    driver = StepDriver(alone)
    expected = [
        take_step(driver, {name: ids for of_rank in step for name, ids in of_rank.items()}, None) for step in STEPS
    ]
    assert alone.load is not None
    whole = sum(tensor.nbytes for name, tensor in alone.targets().items() if ".moe.experts." in name)
    parallels = [ParallelConfig(dispatcher=name, row_cap=row_cap) for name in ("auto", "all_gather")]
    for results in zip(*run_ranks(take_all_steps, num_ranks, tmp_path, parallels), strict=True):
        for number in range(len(STEPS)):
            found = {name: rows for of_rank, _, _ in results for name, rows in of_rank[number].items()}
            assert found.keys() == expected[number].keys()
            for name, rows in found.items():
                assert_same_bits(rows, expected[number][name])
        assert torch.equal(torch.stack([load for _, load, _ in results]).sum(dim=0), alone.load.snapshot())
        assert sum(held for _, _, held in results) == whole and min(held for _, _, held in results) < whole
