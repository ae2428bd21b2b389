"""Who gets which bytes, against worked-out numbers; what does not fit is refused with the way out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.schema import Config
from kv_cache.layout import KVLayout
from moe import LLM
from moe.engine import measure
from moe.engine.measure import decode_step, make_pool, measure_memory, prefill_step
from moe.engine.memory_plan import GIB, DeviceMemory, MemoryPlan, plan_memory
from moe.engine.parts import resolve_device
from moe.engine.resolve import kv_layout, resolve_dtype, resolve_max_model_len
from moe.engine.sampler import Sampler
from moe.engine.workspace import StepLimits
from moe.model.config import GQAConfig, RopeConfig
from tests.test_engine.fake_network import FakeNetwork, fake_config, make_parts

LAYOUT = KVLayout.gqa(32, 16, 8, 128, torch.bfloat16)  # 2 MiB a block


def plan(memory: DeviceMemory, **changed: Any) -> MemoryPlan:
    keys: dict[str, Any] = {
        "num_blocks": None,
        "memory_fraction": 0.9,
        "cpu_gb": 1.0,
        "max_model_len": 4096,
    }
    return plan_memory(LAYOUT, memory, **(keys | changed))


GPU = DeviceMemory("card", 100 * GIB, weights=60 * GIB, workspace=5 * GIB, other=1 * GIB)


def test_the_fraction_leaves_the_rest_to_the_cache() -> None:
    """90 of 100 GiB less 60, 5 and 1: 24 GiB in blocks of 2 MiB."""
    result = plan(GPU)
    assert result.num_blocks == 24 * 512 and result.capacity_tokens == 24 * 512 * 16
    table = result.table()
    assert "24.000 GiB" in table and "10.000 GiB" in table, table  # the cache, and what is left free
    assert "12288 KV blocks of 16 tokens (by cache.memory_fraction=0.9): 196608 tokens, 48.0 sequences of 4096" in table


def test_C22_rows_between_ranks_are_in_the_plan_with_their_cap() -> None:
    """6 GiB of buffers leave 18 of 24 to the cache."""
    table = plan(replace(GPU, buffers=6 * GIB, row_cap=4096)).table()
    assert re.search(r"rows between ranks +6\.000 GiB\n", table) and "18.000 GiB" in table, table
    assert "at most 4096 rows in a buffer between ranks, more in rounds (parallel.row_cap)" in table
    assert "between ranks" not in plan(GPU).table()


def test_num_blocks_is_taken_as_given() -> None:
    assert plan(GPU, num_blocks=7).num_blocks == 7
    assert plan(DeviceMemory("cpu", None, 1, 0), num_blocks=7).chosen_by == "cache.num_blocks"


def test_the_cpu_goes_by_cpu_gb() -> None:
    result = plan(DeviceMemory("cpu", None, GIB, 0), cpu_gb=0.5)
    assert result.num_blocks == 256 and "total" not in result.table()
    assert "one sequence of engine.max_model_len=4096 tokens does not fit" not in result.table()


def test_a_pool_shorter_than_one_sequence_says_so() -> None:
    table = plan(GPU, num_blocks=10).table()
    assert "requests without max_tokens end at 161 tokens" in table


@pytest.mark.parametrize(
    ("memory", "changed", "message"),
    [
        (
            GPU,
            {"memory_fraction": 0.6},
            r"leaves no room for a KV block on card: of 100\.000 GiB, weights take 60\.000",
        ),
        (GPU, {"memory_fraction": 1.5}, r"cache\.memory_fraction=1\.5 must be above 0 and at most 1"),
        (GPU, {"num_blocks": 20000}, r"cache\.num_blocks=20000 takes .* at most 17408 blocks fit"),
        (GPU, {"num_blocks": 0}, r"cache\.num_blocks=0 must be at least 1"),
        (
            DeviceMemory("cpu", None, 1, 0),
            {"cpu_gb": 0.001},
            r"cache\.cpu_gb=0\.001 holds no KV block: one takes 2097152",
        ),
        (DeviceMemory("cpu", None, 1, 0), {"cpu_gb": 0.0}, r"cache\.cpu_gb=0 must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused(memory: DeviceMemory, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(memory, **changed)


def test_the_measured_steps_are_the_largest() -> None:
    """100 tokens with at most 48 a sequence: 48, 48 and 4; positions stay below it, nothing is written."""
    cpu = torch.device("cpu")
    step = prefill_step(StepLimits(100, 8, 48, 16, mla_tokens=64), cpu, latent=False)
    assert step.prefill is not None and step.prefill.query_lens_host == (48, 48, 4)
    assert step.prefill.query_starts_B1.tolist() == [0, 48, 96, 100]
    assert step.positions_T.max() == 47 and step.token_ids_T.shape == (100,) and (step.slot_mapping_T == -1).all()
    assert step.logits_rows_B.shape == (100,)
    decode = decode_step(8, 48, 16, cpu)
    assert decode.decode is not None and decode.decode.block_tables_BM.shape == (8, 3)
    assert decode.decode.kv_lens_B.tolist() == [48] * 8 and decode.positions_T.tolist() == [47] * 8


def test_prompts_of_mla_expand_as_many_keys_as_they_may() -> None:
    """Room for 64 keys, 64 of one prompt at a time at most: one prompt with twice as many. Of short ones several."""
    cpu = torch.device("cpu")
    step = prefill_step(StepLimits(100, 8, 4096, 16, mla_tokens=64), cpu, latent=True)
    assert step.prefill is not None and step.prefill.query_lens_host == (100,)
    assert step.prefill.kv_lens_host == (128,) and step.prefill.query_offsets_B.tolist() == [28]
    assert step.positions_T.tolist() == list(range(28, 128))
    step = prefill_step(StepLimits(100, 8, 24, 16, mla_tokens=256), cpu, latent=True)
    assert step.prefill is not None and step.prefill.query_lens_host == (13, 13, 13, 13, 12, 12, 12, 12)
    assert step.prefill.kv_lens_host == (24,) * 8  # of two pages each: 256 rows
    assert step.prefill.block_tables_BM.shape == (8, 2) and step.positions_T.max() == 23


def test_weights_are_counted_from_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = StepLimits(32, 4, 64, 16, mla_tokens=64)
    cpu = torch.device("cpu")
    measured = measure_memory(FakeNetwork(), Sampler(8), LAYOUT, cpu, limits=limits, cuda_graphs=True)
    assert measured == DeviceMemory("cpu", None, 16, 0)
    targets = {"a": torch.zeros(4), "layers.0.moe.experts.w2": torch.zeros(100)}  # the latter on the host
    monkeypatch.setattr(FakeNetwork, "targets", lambda self: targets)
    held = measure_memory(FakeNetwork(), Sampler(8), LAYOUT, cpu, limits=limits, cuda_graphs=True, held_experts=5)
    assert held.weights == 16 + 5


def test_the_length_limit_of_a_checkpoint() -> None:
    config = fake_config(max_positions=64)
    assert resolve_max_model_len(None, config) == 64 and resolve_max_model_len(32, config) == 32
    with pytest.raises(ValueError) as caught:
        resolve_max_model_len(65536, fake_config(max_positions=32768))
    assert str(caught.value) == (
        "engine.max_model_len=65536 exceeds this checkpoint's max_position_embeddings=32768; lower it, or use a "
        "checkpoint with rope scaling."
    )
    yarn = RopeConfig(theta=1e4, dim=2, scaling="yarn", factor=4.0, original_max_positions=64)
    scaled = replace(config, rope=yarn)
    assert resolve_max_model_len(256, scaled) == 256
    with pytest.raises(ValueError, match=r"engine\.max_model_len=257 exceeds"):
        resolve_max_model_len(257, scaled)
    with pytest.raises(ValueError, match=r"engine\.max_model_len=1 leaves no room"):
        resolve_max_model_len(1, config)


def test_dtypes_and_devices_by_name() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert resolve_dtype("auto", "bfloat16", cpu) is torch.float32
    assert resolve_dtype("auto", "bfloat16", gpu) is torch.bfloat16
    assert resolve_dtype("float16", "bfloat16", cpu) is torch.float16
    with pytest.raises(ValueError, match=r"dtype='fp16' is not known; use auto, float32, bfloat16, float16"):
        resolve_dtype("fp16", "bfloat16", cpu)
    with pytest.raises(ValueError, match=r"engine\.device='tpu' is not known"):
        resolve_device("tpu")
    assert resolve_device("cpu") == cpu
    with pytest.raises(ValueError, match=r"cache\.dtype='float16' differs from the model's float32.*=auto or fp8"):
        kv_layout(fake_config(), 16, torch.float32, "float16", cpu)
    assert kv_layout(fake_config(), 16, torch.float32, "float32", cpu).layer_shape(3) == (3, 2, 16, 1, 1)
    assert kv_layout(fake_config(), 16, torch.float32, "fp8", cpu).quantization == "fp8"


def test_an_fp8_cache_needs_a_gpu_that_has_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"cache\.dtype='fp8' needs .* 8\.9 or above, and NVIDIA A100 .*=auto"):
        kv_layout(fake_config(), 16, torch.bfloat16, "fp8", torch.device("cuda", 0))
    wider = replace(fake_config(), attention=GQAConfig(num_heads=1, num_kv_heads=1, head_dim=2))
    assert kv_layout(wider, 16, torch.bfloat16, "int4", torch.device("cuda", 0)).bytes_per_token == 2 * (1 + 8)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_plan_counts_the_graphs_memory(monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool) -> None:
    """Graphs are captured after the cache has taken the rest of the card, so their memory must be known before."""
    asked: list[bool] = []

    def measured(*_: object, cuda_graphs: bool, **__: object) -> DeviceMemory:
        asked.append(cuda_graphs)
        return DeviceMemory("a card", 10 * 2**30, 2**30, 2**30)

    monkeypatch.setattr(measure, "measure_memory", measured)
    measure.plan_cache(Config(), make_parts(None), LAYOUT, Sampler(8), cuda_graphs=cuda_graphs)
    assert asked == [cuda_graphs]


@pytest.mark.gpu
def test_graphs_take_the_largest_decode_step_once_more() -> None:
    planned = []
    for cuda_graphs in (False, True):
        with LLM("demo", device="cuda", num_blocks=1000, cuda_graphs=cuda_graphs) as llm:
            planned.append(llm.memory_plan.workspace_bytes)
    assert planned[0] < planned[1]


@pytest.mark.parametrize("given", [{"cpu_gb": 1e9}, {"num_blocks": 2**50}])
def test_a_cache_that_the_host_cannot_hold_is_refused_by_its_key(given: dict[str, float]) -> None:
    """Its memory is not measured before: the allocator's own words, and what to change."""
    found = plan(DeviceMemory("cpu", None, GIB, 0), **given)
    ((key, _),) = given.items()
    with pytest.raises(ValueError, match=rf"of \d+\.\d+ GiB \(by cache\.{key}.*\) cannot be allocated on cpu: .*less"):
        make_pool(LAYOUT, found, torch.device("cpu"))
