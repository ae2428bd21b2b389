"""A network over a cache in e4m3: near the same network over a cache in its own dtype, token by token."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from moe.model.load_model import load_model
from tests.compare import rel_norm
from tests.step_driver import StepDriver
from tests.tiny_models import VOCAB_SIZE, write_variant


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", ["mixtral-window", "qwen3_moe", "deepseek_v2-lite", "deepseek_v3-yarn"])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_logits_are_near_those_over_a_plain_cache(
    tmp_path: Path, variant: str, device: str, dtype: torch.dtype
) -> None:
    """A prompt of 70 tokens, then 5 decoded. Half a step of e4m3 is 1/16 of a value: a few percent remain,
    and more where a token goes to other experts for it (these models have random weights).
    """
    write_variant(tmp_path, variant)
    model = load_model(tmp_path, dtype=dtype, device=torch.device(device), max_model_len=256, mla_workspace_tokens=64)
    plain, coded = StepDriver(model, seed=1), StepDriver(model, seed=1, quantization="fp8")
    prompt = tokens_of(70, seed=2)
    errors = [rel_norm(coded.run(prefill={"a": prompt})["a"], plain.run(prefill={"a": prompt})["a"])]
    for token in tokens_of(5, seed=3):
        errors.append(rel_norm(coded.run(decode={"a": token})["a"], plain.run(decode={"a": token})["a"]))
    assert min(errors) > 1e-4 and median(errors) < 0.06 and max(errors) < 0.4, errors
