"""The network as a whole: the router's precision in a bf16 model, load counts, what is refused, dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.routing import Routing, route_reference
from moe.model.causal_lm import CausalLM
from moe.model.layer import MoELayer
from moe.model.load_model import load_model
from router.gate import Gate, Router
from router.load import LoadCounter
from tests.compare import assert_same_bits, max_rel
from tests.step_driver import StepDriver
from tests.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, max_model_len: int = 1024, **options) -> CausalLM:
    return load_model(folder, dtype=dtype, device=CPU, max_model_len=max_model_len, mla_workspace_tokens=512, **options)


def tokens_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def test_C32_a_tied_head_is_the_embedding_also_where_the_vocabulary_is_padded(tmp_path: Path) -> None:
    """One storage, and transformers' logits; with 32 more rows than the tokenizer has ids, as padded releases have."""
    theirs = write_tiny(tmp_path, "mixtral", tie_word_embeddings=True, vocab_size=VOCAB_SIZE + 32)
    network = load(tmp_path)
    assert "lm_head.weight" not in network.targets()
    embedding_VD, head_VD = network.embedding.weight_VD, network.head.weight_VD
    assert head_VD.data_ptr() == embedding_VD.data_ptr() and head_VD.shape == (VOCAB_SIZE + 32, 64)
    prompt = tokens_of(20, seed=3)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    logits = StepDriver(network).run(prefill={"a": prompt})["a"]
    assert logits.shape == (20, VOCAB_SIZE + 32) and max_rel(logits, expected) <= 2e-4
    embedding_VD.mul_(2)
    doubled = StepDriver(network).run(prefill={"a": prompt})["a"]
    assert max_rel(doubled, logits) > 0.5, "the head did not follow the embedding"


class RecordingGate(Router):
    """Passes rows to the gate of a layer and keeps what went in and out."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.rows: list[Tensor] = []
        self.routings: list[Routing] = []

    def __call__(self, x_TD: Tensor, real_T: Tensor | None = None) -> Routing:
        self.rows.append(x_TD.clone())
        self.routings.append(self.gate(x_TD, real_T))
        return self.routings[-1]


def test_C31_a_bf16_model_routes_as_an_fp32_router_for_batches_of_1_and_512(tmp_path: Path) -> None:
    """4096 tokens through a bf16 DeepSeek-V3, 512 at a time: in each layer the ids an fp32 router chooses for the same
    rows, all of them; one row at a time the very same ids and weights."""
    write_tiny(tmp_path, "deepseek_v3", dtype="bfloat16", num_hidden_layers=2)
    model = load(tmp_path, torch.bfloat16)
    layers = [block.mlp for block in model.blocks if isinstance(block.mlp, MoELayer)]
    recorders = [RecordingGate(layer.gate) for layer in layers if isinstance(layer.gate, Gate)]
    for layer, recorder in zip(layers, recorders, strict=True):
        layer.gate = recorder
    for batch in range(8):
        StepDriver(model, num_blocks=40).run(prefill={"a": tokens_of(512, seed=batch)}, hidden=True)
    for recorder in recorders:
        gate, x_TD = recorder.gate, torch.cat(recorder.rows)
        assert x_TD.shape[0] == 4096 and x_TD.dtype == torch.bfloat16
        ids_TK = torch.cat([routing.expert_ids_TK for routing in recorder.routings])
        weights_TK = torch.cat([routing.weights_TK for routing in recorder.routings])
        fp32_router = route_reference(x_TD.float() @ gate.weight_ED.float().T, gate.bias_E, gate.rule)
        assert_same_bits(ids_TK, fp32_router.expert_ids_TK)
        for t in range(0, 4096, 4):  # every fourth row, to save time; the batch's other rows cannot matter
            single = gate(x_TD[t : t + 1])
            assert_same_bits(single.expert_ids_TK[0], ids_TK[t])
            assert_same_bits(single.weights_TK[0], weights_TK[t])
        rounded = (x_TD @ gate.weight_ED.T).float()
        changed = route_reference(rounded, gate.bias_E, gate.rule).expert_ids_TK != ids_TK
        assert changed.any(), "logits rounded to bf16 choose the same experts here: the test could not fail"


@pytest.mark.parametrize("family", FAMILIES)
def test_load_counts_every_row_of_every_sparse_layer(family: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, family)
    model = load(tmp_path)
    model.load = LoadCounter(model.config.num_layers, model.config.moe.num_experts, CPU)
    driver = StepDriver(model)
    driver.run(prefill={"a": tokens_of(20, 0), "b": tokens_of(3, 1)})
    driver.run(prefill={"c": tokens_of(5, 2)}, decode={"a": 1, "b": 2})
    rows = model.load.snapshot().sum(dim=1).tolist()
    top_k = model.config.moe.rule.top_k
    assert rows == [30 * top_k if sparse else 0 for sparse in model.config.sparse_layers]
    model.load = LoadCounter(1, 3, CPU)
    with pytest.raises(AssertionError, match="1 layers of 3 experts"):
        driver.run(decode={"a": 1})


def test_C40_the_position_table_is_as_long_as_the_longest_sequence(tmp_path: Path) -> None:
    """Its length is what the engine admits, below and above the checkpoint's own 64; past it the host speaks first."""
    theirs = write_tiny(tmp_path, "mixtral", max_position_embeddings=64)
    for max_model_len in (48, 64, 200):
        model = load(tmp_path, max_model_len=max_model_len)
        assert model.cos_sin_PR.shape[0] == max_model_len
        prompt = tokens_of(max_model_len, 0)
        driver = StepDriver(model)
        logits = torch.cat([driver.run(prefill={"a": prompt[:-1]})["a"], driver.run(decode={"a": prompt[-1]})["a"]])
        with torch.no_grad():
            assert max_rel(logits, theirs(torch.tensor([prompt])).logits[0]) <= 2e-4
        with pytest.raises(AssertionError, match=f"{max_model_len + 1} positions .* holds {max_model_len}"):
            driver.run(decode={"a": 1})
        with pytest.raises(AssertionError, match=f"{max_model_len + 1} positions"):
            driver.run(prefill={"b": [*prompt, 1]})


def test_logits_of_the_wanted_rows_only(tmp_path: Path) -> None:
    """Any rows in any order, none twice computed differently; no row at all gives no logits."""
    write_tiny(tmp_path, "mixtral")
    model = load(tmp_path)
    driver = StepDriver(model)
    step = driver.plan([("a", tokens_of(9, 0))], num_decode=0)
    every = model.forward(step, driver.kv_caches)
    for rows in ([8], [8, 0, 3], []):
        wanted = step.__class__(**{**step.__dict__, "logits_rows_B": torch.tensor(rows, dtype=torch.int64)})
        assert_same_bits(model.forward(wanted, driver.kv_caches), every[rows])


def test_an_id_of_minus_one_spoils_its_own_row_only(tmp_path: Path) -> None:
    """The sampler marks a row of NaN by id -1; fed back before the host has seen it, it must not reach other rows."""
    write_tiny(tmp_path, "mixtral")
    rows = []
    for token in (-1, 5):
        driver = StepDriver(load(tmp_path))
        driver.run(prefill={"a": tokens_of(9, 0), "b": tokens_of(4, 1)})
        rows.append(driver.run(decode={"a": 7, "b": token})["a"])
    assert_same_bits(*rows)


def test_dummy_weights_need_a_config_alone_and_follow_the_seed(tmp_path: Path) -> None:
    write_tiny(tmp_path / "whole", "deepseek_v3")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    prompt = {"a": tokens_of(9, 0)}
    logits = [
        StepDriver(load(tmp_path / "bare", load_format="dummy", seed=seed)).run(prefill=prompt)["a"]
        for seed in (1, 1, 2)
    ]
    assert torch.isfinite(logits[0]).all()
    assert_same_bits(logits[0], logits[1])
    assert max_rel(logits[0], logits[2]) > 0.1


def test_faults_of_a_checkpoint_come_before_any_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, "mixtral")
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] += 1

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was allocated before its checkpoint was checked")

    monkeypatch.setattr("moe.model.load_model.CausalLM", no_network)
    with pytest.raises(ValueError, match="load_format='gguf' is not known; use one of auto, safetensors, dummy"):
        load(tmp_path, load_format="gguf")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="parameters not filled"):
        load(tmp_path)
