"""The working space from shapes against the tensors that the network makes, and against what an H200 showed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moe.engine.workspace import Device, StepLimits, Workspace, measure_by_shapes
from moe.model.config import MLAConfig, ModelConfig
from moe.model.families.registry import read_config

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


class Case(NamedTuple):
    """What a step is and which layers of a model it runs through; `why` it is in the list."""

    name: str
    layers: tuple[int, ...]
    limits: StepLimits
    why: str
    fp8: bool = False
    capability: tuple[int, int] = (9, 0)
    heads: int | None = None  # others than the model's


def limits(tokens: int, seqs: int, length: int) -> StepLimits:
    return StepLimits(tokens, seqs, length, block_size=16, mla_tokens=32768)


CASES = (
    Case("qwen3-30b-a3b", (0, 1), limits(8192, 1024, 8192), "the sampler's peak"),
    Case("qwen3-30b-a3b", (0, 1), limits(65536, 4, 4096), "the experts'"),
    Case("qwen3-30b-a3b", (0, 1), limits(16384, 16, 2048), "experts in fp8", fp8=True),
    Case("mixtral-8x7b", (0, 1), limits(8192, 1024, 8192), "experts; decode: partial results of attention"),
    Case("mixtral-8x7b", (0,), limits(256, 200, 32768), "decode alone: attention over long sequences"),
    Case("dsv2-lite", (0, 1), limits(16384, 16, 8192), "MLA's prefill in rounds, a dense layer"),
    Case("dsv2-lite", (1,), limits(16384, 16, 2048), "MLA in one round, keys put together", capability=(8, 0)),
    Case("dsv2-lite", (1,), limits(1024, 1000, 65536), "MLA's decode"),
    Case("dsv2-lite", (1,), limits(1024, 1000, 131072), "MLA's decode by a list, which is a megabyte", heads=128),
)


def words(case: Case) -> dict[str, Any]:
    return {
        "folder": f"benchmarks/models/{case.name}",
        "layers": case.layers,
        "limits": vars(case.limits),
        "fp8": case.fp8,
        "capability": case.capability,
        "heads": case.heads,
    }


def cut(name: str, layers: Sequence[int] | None = None, *, fp8: bool = False) -> ModelConfig:
    model = read_config(ROOT / "benchmarks" / "models" / name)
    layers = range(model.num_layers) if layers is None else layers
    return replace(
        model,
        num_layers=len(layers),
        sparse_layers=tuple(model.sparse_layers[index] for index in layers),
        sliding_windows=tuple(model.sliding_windows[index] for index in layers),
        fp8_experts=fp8,
    )


def by_shapes(case: Case) -> Workspace:
    device = Device(hopper=case.capability >= (9, 0))
    model = cut(case.name, case.layers, fp8=case.fp8)
    if case.heads is not None:
        assert isinstance(model.attention, MLAConfig)
        model = replace(model, attention=replace(model.attention, num_heads=case.heads))
    return measure_by_shapes(model, torch.bfloat16, case.limits, device)


@pytest.fixture(scope="module")
def shadows() -> dict[Case, dict[str, int]]:
    """tests/shadow_steps.py changes torch, so it has a process of its own."""
    cases = json.dumps([words(case) for case in CASES])
    command = [sys.executable, "-W", "ignore", "-m", "tests.shadow_steps"]
    done = subprocess.run(command, input=cases, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.why}")
def test_the_largest_set_of_tensors_is_the_network_s(case: Case, shadows: dict[Case, dict[str, int]]) -> None:
    """Within 1 % and 512 KiB, for tables of a few numbers a row and the allocator's granules."""
    planned, found = by_shapes(case), shadows[case]
    for step in ("prefill", "decode"):
        assert getattr(planned, step) == pytest.approx(found[step], rel=0.01, abs=MIB / 2), (step, found)


def test_what_stands_all_the_time_is_the_network_s(shadows: dict[Case, dict[str, int]]) -> None:
    """Beside parameters a network holds its rope table and, of MLA, a copy of half of kv_b; the rest of it (tables of
    places and of a step, the vendor library's workspace) is the engine's."""
    for case, found in shadows.items():
        seqs, blocks = case.limits.max_num_seqs, case.limits.max_model_len // 16
        engine = 2 * seqs * blocks * 4 + case.limits.max_batched_tokens * 24
        library = (32 << 20) if case.capability >= (9, 0) else 8320 << 10
        assert by_shapes(case).standing - engine - library == pytest.approx(found["held"], abs=8192), case


@pytest.mark.parametrize(
    ("name", "tokens", "gib", "within"),
    [
        ("qwen3-30b-a3b", 8192, 3.885, 0.005),
        ("mixtral-8x7b", 8192, 1.242, 0.005),
        ("qwen3-30b-a3b", 16384, 3.885, 0.005),
        ("dsv2-lite", 16384, 2.741, 0.025),
    ],
)
def test_an_H200_took_as_much(name: str, tokens: int, gib: float, within: float) -> None:
    """Measured by moe/engine/measure.py in bench w1: 1024 sequences, so many tokens a step, 8192 positions, graphs."""
    planned = measure_by_shapes(cut(name), torch.bfloat16, limits(tokens, 1024, 8192), Device())
    assert planned.num_bytes / 2**30 == pytest.approx(gib, rel=within)


def test_more_never_takes_less() -> None:
    """More tokens, sequences or positions, graphs, ranks whose rows meet."""
    for name in ("qwen3-30b-a3b", "mixtral-8x7b", "dsv2-lite"):
        model = cut(name)
        assert isinstance(model.attention, MLAConfig) == (name == "dsv2-lite")
        base = limits(2048, 64, 2048)
        least = measure_by_shapes(model, torch.bfloat16, base, Device(graphs=False)).num_bytes
        for changed in ({"max_batched_tokens": 8192}, {"max_num_seqs": 512}, {"max_model_len": 32768}):
            more = measure_by_shapes(model, torch.bfloat16, replace(base, **changed), Device(graphs=False)).num_bytes
            assert more > least, (name, changed)
        assert measure_by_shapes(model, torch.bfloat16, base, Device(graphs=True)).num_bytes > least
        capped = [
            measure_by_shapes(model, torch.bfloat16, base, Device(graphs=False), num_ranks=ranks, row_cap=cap).num_bytes
            for ranks, cap in ((8, 4096 * 8), (8, None))
        ]
        assert least <= capped[0] <= capped[1], name
