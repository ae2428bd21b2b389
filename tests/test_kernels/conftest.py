"""Where a kernel test runs: in Triton's interpreter on the CPU, or compiled on a GPU. The same tests serve both."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch


class Backend(NamedTuple):
    """A device and the dtype of model data there. The interpreter's dot is wrong in bf16, so it gets fp32 and fp16."""

    device: str
    dtype: torch.dtype


@pytest.fixture(
    params=[
        pytest.param(Backend("cpu", torch.float32), marks=pytest.mark.interpret, id="interpret-fp32"),
        pytest.param(Backend("cpu", torch.float16), marks=pytest.mark.interpret, id="interpret-fp16"),
        pytest.param(Backend("cuda", torch.bfloat16), marks=pytest.mark.gpu, id="gpu-bf16"),
        pytest.param(Backend("cuda", torch.float32), marks=pytest.mark.gpu, id="gpu-fp32"),
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param
