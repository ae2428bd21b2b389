"""The network on a GPU: Triton kernels against the CPU's references, bits at sizes of real layers, no waiting."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.model.causal_lm import CausalLM
from moe.model.load_model import load_model
from router.load import LoadCounter
from tests.compare import assert_same_bits, host_never_waits, max_rel
from tests.step_driver import StepDriver
from tests.tiny_models import VARIANTS, write_variant

pytestmark = pytest.mark.gpu

_COMMON = {"vocab_size": 4096, "hidden_size": 1024, "num_hidden_layers": 3, "max_position_embeddings": 8192}
_MLA = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
# Head widths and kinds of layers of the released models, few of them.
MID_SIZE: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 1536,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "sliding_window": 200,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
    },
    "deepseek_v2": _MLA
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": _MLA
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 384,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def load_mid_size(folder: Path, name: str, device: str, dtype: torch.dtype) -> CausalLM:
    config = _COMMON | {"rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"} | MID_SIZE[name]
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(
        folder,
        dtype=dtype,
        device=torch.device(device),
        load_format="dummy",
        max_model_len=4096,
        mla_workspace_tokens=1024,
    )


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 4096, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def copy_weights(source: CausalLM, to: CausalLM) -> None:
    for name, target in to.targets().items():
        target.copy_(source.targets()[name])
    to.finalize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_tiny_networks_as_on_the_cpu(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Odd widths of every variant: prefill of several prompts, then decode rows beside a chunk."""
    write_variant(tmp_path, variant, dtype="bfloat16")
    rows = []
    for device, of_device in (("cpu", torch.float32), ("cuda", dtype)):
        model = load_model(
            tmp_path, dtype=of_device, device=torch.device(device), max_model_len=512, mla_workspace_tokens=64
        )
        driver = StepDriver(model)
        prompts = {str(n): [token % 288 for token in tokens_of(n, n)] for n in (1, 17, 100)}
        first = driver.run(prefill=prompts)
        second = driver.run(prefill={"c": prompts["100"][:40]}, decode={"1": 5, "100": 7})
        rows.append(torch.cat([*first.values(), *second.values()]).cpu())
    if dtype == torch.float32:
        assert max_rel(rows[1], rows[0]) <= 2e-4
    else:  # the median row: near ties between experts may flip in single ones
        assert float(((rows[1] - rows[0]).norm(dim=1) / rows[0].norm(dim=1)).median()) < 0.04


@pytest.mark.parametrize("name", list(MID_SIZE))
def test_mid_size_networks_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    """bf16 on the GPU against fp32 on the CPU with the same weights."""
    gpu = load_mid_size(tmp_path, name, "cuda", torch.bfloat16)
    cpu = load_mid_size(tmp_path, name, "cpu", torch.float32)
    copy_weights(gpu, cpu)
    rows = []
    for model in (cpu, gpu):
        driver = StepDriver(model)
        first = driver.run(prefill={"a": tokens_of(300, 0), "b": tokens_of(17, 1)}, hidden=True)
        second = driver.run(prefill={"c": tokens_of(60, 2)}, decode={"a": 3, "b": 4}, hidden=True)
        rows.append(torch.cat([*first.values(), *second.values()]).float().cpu())
    assert float(((rows[1] - rows[0]).norm(dim=1) / rows[0].norm(dim=1)).median()) < 0.03


@pytest.mark.parametrize("name", list(MID_SIZE))
def test_mid_size_bits_do_not_depend_on_batch_or_chunks(name: str, tmp_path: Path) -> None:
    """A prompt of 1500 (two rounds of MLA's workspace) alone, beside others, in chunks; its decode among 0 and 130."""
    model = load_mid_size(tmp_path, name, "cuda", torch.bfloat16)
    tokens = tokens_of(1500, 0)
    lonely = StepDriver(model, num_blocks=200)
    alone_TD = lonely.run(prefill={"a": tokens}, hidden=True)["a"]
    busy = StepDriver(model, num_blocks=700, seed=1)
    names = [f"other {n}" for n in range(130)]
    busy.run(prefill={name: tokens_of(1 + 7 * n % 60, n) for n, name in enumerate(names)})
    together = busy.run(prefill={"a": tokens}, decode=dict.fromkeys(names, 9), hidden=True)
    assert_same_bits(together["a"], alone_TD)
    for size in (1000, 640, 177):
        driver = StepDriver(model, num_blocks=200, seed=size)
        parts = [
            driver.run(prefill={"a": tokens[start : start + size]}, hidden=True)["a"] for start in range(0, 1500, size)
        ]
        assert_same_bits(torch.cat(parts), alone_TD)
    for step in range(4):
        expected_TD = lonely.run(decode={"a": 20 + step}, hidden=True)["a"]
        rows = busy.run(decode={**dict.fromkeys(names, 11), "a": 20 + step}, hidden=True)
        assert_same_bits(rows["a"], expected_TD)


@pytest.mark.parametrize("name", list(MID_SIZE))
def test_a_step_never_waits_for_the_device(name: str, tmp_path: Path) -> None:
    """From token ids to logits, prefill chunks and decode rows together: any host sync raises."""
    model = load_mid_size(tmp_path, name, "cuda", torch.bfloat16)
    model.load = LoadCounter(model.config.num_layers, model.config.moe.num_experts, "cuda")
    driver = StepDriver(model, num_blocks=300)
    driver.run(prefill={"a": tokens_of(40, 0), "b": tokens_of(1200, 1)})
    driver.run(prefill={"c": tokens_of(90, 2)}, decode={"a": 3, "b": 4})  # compile for both kinds of rows
    step = driver.plan([("a", [5]), ("b", [6]), ("c", tokens_of(90, 3))], num_decode=2)
    with host_never_waits():
        logits = model.forward(step, driver.kv_caches)
    assert torch.isfinite(logits).all()


def test_products_are_chosen_and_reported(tmp_path: Path) -> None:
    """Each distinct shape of linears, and the head: library, unsplit, or either by the number of rows."""
    model = load_mid_size(tmp_path, "deepseek_v3", "cuda", torch.bfloat16)
    shapes = {str(list(product.weight_NK.shape)) for product in model.parameters.linears.values()}
    assert set(model.products) == shapes | {"head"}
    for chosen in model.products.values():
        assert re.fullmatch(r"library|unsplit|unsplit to \d+ rows, library above", chosen), chosen
