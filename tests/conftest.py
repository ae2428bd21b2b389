"""Which tests run where: `gpu` needs a GPU, `interpret` needs TRITON_INTERPRET=1 (a choice of the whole process)."""

from __future__ import annotations

import gc
import os

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that cannot run in this process says so instead of failing in the middle."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("interpret") and not interpreted:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 in the environment"))
        if item.get_closest_marker("gpu") and num_gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("multi_gpu") and num_gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two NVIDIA GPUs"))


_KEPT_BYTES = 2 << 30


def pytest_runtest_teardown() -> None:
    """Processes that share a GPU give back what their tests have left with the allocator."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _KEPT_BYTES:
        gc.collect()
        torch.cuda.empty_cache()
