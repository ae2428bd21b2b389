"""A prompt's rows have the same bits alone, in a batch, in chunks, and decoded among any number of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kv_cache.layout import Quantization
from moe.model.load_model import load_model
from tests.compare import assert_same_bits
from tests.step_driver import StepDriver
from tests.tiny_models import VOCAB_SIZE, write_variant

FP32_VARIANTS = ("mixtral", "mixtral-window", "qwen3_moe", "deepseek_v2-lite", "deepseek_v2-groups", "deepseek_v3")
BF16_VARIANTS = ("mixtral-window", "qwen3_moe", "deepseek_v2-lite", "deepseek_v3")


class Kind(NamedTuple):
    variant: str
    dtype: torch.dtype
    device: str
    experts: str = "auto"
    cache: Quantization = "none"


CPU_KINDS = [
    *(Kind(variant, torch.float32, "cpu") for variant in FP32_VARIANTS),
    *(Kind(variant, torch.bfloat16, "cpu") for variant in BF16_VARIANTS),
    Kind("qwen3_moe", torch.float32, "cpu", "fp8"),
    Kind("deepseek_v3", torch.bfloat16, "cpu", "fp8"),
    *(Kind(variant, torch.bfloat16, "cpu", cache="fp8") for variant in ("mixtral-window", "deepseek_v3")),
]
GPU_KINDS = [
    *(Kind(variant, dtype, "cuda") for variant in FP32_VARIANTS for dtype in (torch.bfloat16, torch.float32)),
    *(Kind(variant, torch.bfloat16, "cuda", "fp8") for variant in ("mixtral", "qwen3_moe", "deepseek_v3")),
    *(Kind(variant, torch.bfloat16, "cuda", cache="fp8") for variant in BF16_VARIANTS),
]
KINDS = [*CPU_KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS)]

Drive = Callable[..., StepDriver]
"""A driver of the network, with a cache of its own."""


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def drive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drive:
    variant, dtype, device, experts, cache = request.param
    folder = tmp_path_factory.mktemp(variant)
    write_variant(folder, variant)
    # 64 rows of workspace: the longest prompt takes three rounds, and sequences take turns.
    model = load_model(
        folder,
        dtype=dtype,
        device=torch.device(device),
        quantization=experts,
        max_model_len=512,
        mla_workspace_tokens=64,
    )
    return partial(StepDriver, model, quantization=cache)


def tokens_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def chunks(tokens: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(tokens), size):
        yield tokens[start : start + size]


def alone(drive: Drive, tokens: list[int]) -> Tensor:
    return drive(seed=1).run(prefill={"a": tokens}, hidden=True)["a"]


def test_prefill_alone_in_a_batch_and_in_chunks(drive: Drive) -> None:
    tokens = tokens_of(150, seed=1)
    expected_TD = alone(drive, tokens)
    others = {str(n): tokens_of(n, seed=n) for n in (1, 16, 33, 70)}
    together = drive(seed=2).run(prefill={**others, "a": tokens}, hidden=True)
    assert_same_bits(together["a"], expected_TD)
    for size, length in ((1, 18), (16, 40), (17, 100), (64, 150)):
        driver = drive(seed=size)
        parts = [driver.run(prefill={"a": part}, hidden=True)["a"] for part in chunks(tokens[:length], size)]
        assert_same_bits(torch.cat(parts), expected_TD[:length])


def test_prefill_beside_decode_rows(drive: Drive) -> None:
    tokens, driver = tokens_of(90, seed=3), drive(seed=4)
    expected_TD = alone(drive, tokens)
    driver.run(prefill={str(n): tokens_of(n, seed=n) for n in (5, 40)})
    parts = []
    for step, part in enumerate(chunks(tokens, 30)):
        rows = driver.run(prefill={"a": part}, decode={"5": 7 + step, "40": 9 + step}, hidden=True)
        parts.append(rows["a"])
    assert_same_bits(torch.cat(parts), expected_TD)


@pytest.mark.parametrize("num_others", [6, 40])  # with its own row 7 and 41: on both sides of a 32-row block
def test_decode_among_any_number_of_others(drive: Drive, num_others: int) -> None:
    prompt, follow = tokens_of(30, seed=5), tokens_of(4, seed=6)
    lonely, busy = drive(seed=7), drive(num_blocks=160, seed=8)
    lonely.run(prefill={"a": prompt})
    names = [f"other {n}" for n in range(num_others)]
    busy.run(prefill={name: tokens_of(3 + 3 * n % 29, seed=n) for n, name in enumerate(names)})
    busy.run(prefill={"a": prompt})
    for step, token in enumerate(follow):
        expected_TD = lonely.run(decode={"a": token}, hidden=True)["a"]
        # Its place among the rows changes from step to step.
        place = step * 7 % (num_others + 1)
        order = [*names[:place], "a", *names[place:]]
        rows = busy.run(decode={name: token if name == "a" else 11 + step for name in order}, hidden=True)
        assert_same_bits(rows["a"], expected_TD)
