"""The list of pieces of decode over a latent: made once a step for the form of attention that reads one, and for no
other.

On a CPU the Hopper kernels are taken to be there: what they would be given is asked of them, and the reference answers
in their place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import mla_decode_hopper
from kernels.linear import head_linear
from kernels.mla_decode import mla_decode
from kernels.mla_decode_hopper import list_rule
from kernels.mla_order import PieceList, list_pieces
from kernels.mla_values import mla_decode_values
from kv_cache.layout import Quantization
from moe.model import mla
from moe.model.load_model import load_model
from tests.step_driver import StepDriver
from tests.tiny_models import write_tiny

_MANY = {"num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

CASES = [
    pytest.param("deepseek_v3", _MANY, "none", True, id="many-heads"),
    pytest.param("deepseek_v2", _MANY | {"q_lora_rank": None}, "none", True, id="queries-beside-latents"),
    pytest.param("deepseek_v3", _MANY | {"num_attention_heads": 32}, "none", False, id="few-heads"),
    pytest.param("deepseek_v3", _MANY, "fp8", False, id="fp8-cache"),
    pytest.param("deepseek_v3", _MANY | {"kv_lora_rank": 64}, "none", False, id="no-width-of-theirs"),
]


@pytest.mark.parametrize(("family", "options", "quantization", "reads"), CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_list_is_made_where_it_is_read(
    device: str,
    family: str,
    options: dict[str, Any],
    quantization: Quantization,
    reads: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two steps, beside a prompt and without one. Layer for layer the operands say what the network had planned by,
    and all layers of a step are given one list, that of the step's lengths."""
    given: list[Any] = []

    def recorded(*operands: Tensor, scales_NP2: Tensor | None, pieces: PieceList | None, **rest: Any) -> Tensor:
        rule = list_rule(*operands[:3]) if scales_NP2 is None else None
        assert (rule is None) == (pieces is None)
        if rule is not None and pieces is not None:
            expected = list_pieces(operands[4], rule, max_kv_len=rest["max_kv_len"])
            assert pieces.counts.tolist() == expected.counts.tolist()
            number = int(expected.counts[0])
            assert pieces.pieces_I4[:number].tolist() == expected.pieces_I4[:number].tolist()
        given.append(pieces)
        if device == "cuda":
            return mla_decode_values(*operands, scales_NP2=scales_NP2, pieces=pieces, **rest)
        return head_linear(mla_decode(*operands[:5], scales_NP2=scales_NP2, pieces=pieces, **rest), operands[5])

    if device == "cpu":
        monkeypatch.setattr(mla_decode_hopper, "device_generation", lambda x: 9)
    elif torch.cuda.get_device_capability()[0] != 9:
        reads = False
    monkeypatch.setattr(mla, "mla_decode_values", recorded)
    write_tiny(tmp_path, family, dtype="bfloat16", num_hidden_layers=2, **options)
    of = torch.device(device)
    model = load_model(tmp_path, dtype=torch.bfloat16, device=of, max_model_len=128, mla_workspace_tokens=128)
    driver = StepDriver(model, quantization=quantization)
    driver.run(prefill={"a": range(9), "b": range(70)})
    assert not given
    driver.run(prefill={"c": range(5)}, decode={"a": 1, "b": 2})
    driver.run(decode={"a": 1, "b": 2, "c": 3})
    layers = model.config.num_layers
    assert len(given) == 2 * layers
    for step in (given[:layers], given[layers:]):
        assert all(each is step[0] for each in step) and (step[0] is not None) == reads
    assert not reads or given[0] is not given[layers]
