"""The peer computes the same layer as ours, so that the ratio of times means something."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from launch.bench_layer import LayerBank, LayerShape, layer_call

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers.py"


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """benchmarks/ is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("benchmark_peers", PEERS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_layers_agree(peers: ModuleType) -> None:
    """bf16, weights of std 0.02: both round, so a percent of the largest value."""
    for operands in LayerBank(LayerShape("even", 6, 2, 64, 48), torch.device("cpu")).operands(20):
        ours = layer_call(operands)()
        theirs = peers.grouped_mm_layer(operands)
        assert isinstance(ours, torch.Tensor)
        assert (ours.float() - theirs.float()).abs().max() < 0.02 * ours.float().abs().max()


def test_wrong_words(peers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["workload=w5"]) == 2
    assert "has no peer here" in capsys.readouterr().err
