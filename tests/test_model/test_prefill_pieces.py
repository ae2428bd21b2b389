"""The list of pieces of prefill: made for the form of attention that reads one, and for no other.

On a CPU the Hopper kernel is taken to be there: what it would be given is asked of it, and the reference answers in its
place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import attention_prefill_hopper
from kernels.attention_prefill import attention_prefill, piece_queries
from kv_cache.layout import Quantization
from moe.model import attention, mla
from moe.model.load_model import load_model
from tests.step_driver import StepDriver
from tests.tiny_models import write_tiny

_LATENT = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 2,
}  # as released models have them
_LITE = _LATENT | {"q_lora_rank": None}


CASES = [
    pytest.param("qwen3_moe", {"head_dim": 64}, "none", 64, id="two-heads-a-piece"),
    pytest.param("qwen3_moe", {"head_dim": 64}, "fp8", None, id="fp8-cache"),
    pytest.param("qwen3_moe", {"head_dim": 64}, "int4", None, id="int4-cache"),
    pytest.param("qwen3_moe", {"head_dim": 32}, "none", None, id="no-width-of-its"),
    pytest.param("deepseek_v3", _LATENT, "none", 128, id="latent"),
    pytest.param("deepseek_v3", _LATENT, "fp8", 128, id="latent-fp8-cache"),  # it reads what was expanded
    pytest.param("deepseek_v3", _LATENT | {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32}, "none", None, id="rest"),
    pytest.param("deepseek_v2", _LITE, "none", 128, id="queries-beside-latents"),
    pytest.param("deepseek_v2", _LITE | {"kv_lora_rank": 40}, "none", None, id="rows-that-are-not-aligned"),
]


@pytest.mark.parametrize(("family", "options", "quantization", "queries"), CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_list_is_made_where_it_is_read(
    device: str,
    family: str,
    options: dict[str, Any],
    quantization: Quantization,
    queries: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In three steps: a prompt, its next chunk beside another and a decode row, in rounds of one page where there are
    rounds. Layer for layer the operands say what the network had planned by."""
    asked: list[int | None] = []
    given: list[bool] = []

    def recorded(q_THC: Tensor, *caches: Tensor, **rest: Any) -> Any:
        k_cache, v_cache = caches[:2] or (rest["k_cache_NPGC"], rest["v_cache_NPGV"])
        asked.append(piece_queries(q_THC, k_cache, v_cache, rest.get("scales"), rest.get("k_rest_NPR")))
        given.append(rest["pieces_I"] is not None)
        return attention_prefill(q_THC, *caches, **rest)

    if device == "cpu":
        monkeypatch.setattr(attention_prefill_hopper, "device_generation", lambda x: 9)
    elif torch.cuda.get_device_capability()[0] != 9:
        queries = None
    for module in (attention, mla):
        monkeypatch.setattr(module, "attention_prefill", recorded)
    write_tiny(tmp_path, family, dtype="bfloat16", num_hidden_layers=2, **options)
    of = torch.device(device)
    model = load_model(tmp_path, dtype=torch.bfloat16, device=of, max_model_len=128, mla_workspace_tokens=16)
    driver = StepDriver(model, quantization=quantization)
    driver.run(prefill={"a": range(9)})
    driver.run(prefill={"b": range(3), "c": range(18)}, decode={"a": 1})
    driver.run(prefill={"b": range(4)}, decode={"c": 1})
    assert len(asked) >= 3 * model.config.num_layers
    assert asked == [queries] * len(asked) and given == [queries is not None] * len(given)
