"""Routed experts held in fp8: taken from the file as they are, or quantised at load; what the network makes of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.quantize import FP8, dequantize_blocks, quantize_blocks
from moe.model.causal_lm import CausalLM
from moe.model.checkpoint import Checkpoint
from moe.model.dummy import fill_dummy
from moe.model.experts import Experts, Fp8Experts
from moe.model.families.registry import read_config
from moe.model.layer import MoELayer
from moe.model.load_model import load_model
from tests.checkpoints import change_config, edit_tensors, expected_from, poisoned_targets
from tests.compare import assert_same_bits, rel_norm
from tests.step_driver import StepDriver
from tests.tiny_models import VOCAB_SIZE, write_variant

CPU = torch.device("cpu")


def load(folder: Path, quantization: str = "auto", dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    options = {"device": CPU, "max_model_len": 256, "mla_workspace_tokens": 64} | options
    return load_model(folder, dtype=dtype, quantization=quantization, **options)


def values_of(targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """By name, in fp32, with the experts' fp8 times their scales."""
    values = {}
    for name, tensor in targets.items():
        if name.endswith("_scale"):
            continue
        if tensor.dtype == FP8:
            scales = targets[f"{name}_scale"]
            parts = dequantize_blocks(tensor.unflatten(1, (scales.shape[1], -1)), scales)
            values[name] = parts.flatten(1, 2)
        else:
            values[name] = tensor.float()
    return values


def experts_of(model: CausalLM) -> list[type]:
    return [type(block.mlp.experts) for block in model.blocks if isinstance(block.mlp, MoELayer)]


@pytest.mark.parametrize("layout", ["original", "stacked"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3"])
def test_stored_blocks_are_taken_as_they_are(tmp_path: Path, variant: str, layout: str):
    """Widths 192 and 128: edge blocks in one direction. What fp8 and scale say is what the file's twin holds."""
    options = {"layout": layout, "shards": 3, "fp8": True, "hidden_size": 192, "moe_intermediate_size": 128}
    expected = expected_from(write_variant(tmp_path, variant, **options), read_config(tmp_path))
    model = load(tmp_path)
    assert model.config.fp8_experts and set(experts_of(model)) == {Fp8Experts}
    values = values_of(model.targets())
    assert values.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(values[name], tensor)
    assert set(experts_of(load(tmp_path, "none"))) == {Experts}


def test_gate_and_up_of_any_width_keep_their_own_blocks(tmp_path: Path):
    """F = 40: both lie in one block each, of their own, and the file's fp8 is taken as it is."""
    expected = expected_from(write_variant(tmp_path, "qwen3_moe", fp8=True), read_config(tmp_path))
    model = load(tmp_path)
    assert model.targets()["layers.2.moe.experts.w13_scale"].shape == (8, 2, 1, 1)
    values = values_of(model.targets())
    for name, tensor in expected.items():
        assert_same_bits(values[name], tensor)


def test_blocks_that_reach_from_gate_into_up_are_not_held(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Stacked with F = 40 the file has one block for both: auto gives up fp8 and says so, fp8 quantises anew."""
    expected = expected_from(write_variant(tmp_path, "qwen3_moe", fp8=True, layout="stacked"), read_config(tmp_path))
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert not model.config.fp8_experts and set(experts_of(model)) == {Experts}
    assert "loaded as dtype" in caplog.text and "128 x 128" in caplog.text
    for name, tensor in expected.items():
        assert_same_bits(model.targets()[name].float(), tensor)
    again = values_of(load(tmp_path, "fp8").targets())
    for name, tensor in expected.items():
        assert rel_norm(again[name], tensor) < (0.03 if "experts" in name else 1e-9)


def test_an_expert_kept_in_bf16_makes_auto_give_up_fp8(tmp_path: Path):
    write_variant(tmp_path, "qwen3_moe", fp8=True)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    edit_tensors(tmp_path / "model.safetensors", **{name: torch.ones(40, 64).bfloat16(), f"{name}_scale_inv": None})
    assert not load(tmp_path).config.fp8_experts
    w13 = values_of(load(tmp_path, "fp8").targets())["layers.2.moe.experts.w13"]
    assert_same_bits(w13[5, 40:], torch.ones(40, 64))


@pytest.mark.parametrize("layout", ["original", "stacked"])
def test_a_bf16_checkpoint_is_quantised_expert_by_expert(tmp_path: Path, layout: str):
    model = write_variant(tmp_path, "qwen3_moe", dtype="bfloat16", layout=layout, hidden_size=192)
    expected = expected_from(model, read_config(tmp_path))
    assert not load(tmp_path).config.fp8_experts
    targets = load(tmp_path, "fp8").targets()
    for name, tensor in expected.items():
        if "moe.experts" not in name:
            assert_same_bits(targets[name].float(), tensor)
            continue
        parts = targets[f"{name}_scale"].shape[1]
        blocks = quantize_blocks(tensor.unflatten(1, (parts, -1)))
        assert_same_bits(targets[name].float(), blocks.values.flatten(1, 2).float())
        assert_same_bits(targets[f"{name}_scale"], blocks.scales)


def test_weights_that_no_block_can_hold_are_named(tmp_path: Path):
    write_variant(tmp_path, "qwen3_moe")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    weight = load_file(tmp_path / "model.safetensors")[name]
    weight[3, 4] = torch.inf
    edit_tensors(tmp_path / "model.safetensors", **{name: weight})
    with pytest.raises(ValueError, match=rf"tensor {name}: holds values that are not finite.*quantization=none"):
        load(tmp_path, "fp8")
    load(tmp_path, "none")


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_C29_a_bad_scale_is_named_where_blocks_are_taken_as_they_are(tmp_path: Path, bad: float):
    write_variant(tmp_path, "qwen3_moe", fp8=True)
    name = "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv"
    edit_tensors(tmp_path / "model.safetensors", **{name: torch.full((1, 1), bad)})
    with pytest.raises(ValueError, match=rf"{name}: 1 of 1 weight scales are not finite positive"):
        load(tmp_path)


def test_C29_exponent_bytes_become_the_same_scales(tmp_path: Path):
    write_variant(tmp_path, "qwen3_moe", fp8=True)
    file = tmp_path / "model.safetensors"
    scales = {name: tensor.log2().round() for name, tensor in load_file(file).items() if name.endswith("_scale_inv")}
    edit_tensors(file, **{name: exponent.exp2() for name, exponent in scales.items()})
    expected = load(tmp_path).targets()
    edit_tensors(file, **{name: (exponent + 127).to(torch.uint8) for name, exponent in scales.items()})
    for name, tensor in load(tmp_path).targets().items():
        assert_same_bits(tensor.float(), expected[name].float())


def test_slots_hold_bundles_of_their_expert(tmp_path: Path):
    """A replica, an empty slot, an order of its own: values and scales move together."""
    write_variant(tmp_path, "deepseek_v3", fp8=True, hidden_size=192)
    config = replace(read_config(tmp_path), fp8_experts=True)
    checkpoint = replace(Checkpoint.open(tmp_path, read_config(tmp_path)), config=config)
    whole, part = poisoned_targets(config, config.moe.num_experts), poisoned_targets(config, 4)
    checkpoint.load_into(whole, range(config.moe.num_experts))
    experts = [5, None, 2, 5]
    checkpoint.load_into(part, experts)
    bundle = [name for name in whole if "moe.experts" in name]
    assert {name.rsplit(".", 1)[1] for name in bundle} == {"w13", "w13_scale", "w2", "w2_scale"}
    for name in bundle:
        for slot, expert in enumerate(experts):
            if expert is None:
                assert bool(part[name][slot].float().isnan().all())
            else:
                assert_same_bits(part[name][slot].float(), whole[name][expert].float())


def test_dummy_experts_in_fp8_are_those_of_bf16_quantised(tmp_path: Path):
    write_variant(tmp_path, "deepseek_v3", fp8=True, hidden_size=192)
    (tmp_path / "model.safetensors").unlink()
    assert load(tmp_path, load_format="dummy").config.fp8_experts
    assert not load(tmp_path, "none", load_format="dummy").config.fp8_experts
    config = read_config(tmp_path)
    plain = poisoned_targets(config, 4, torch.bfloat16)
    fp8 = poisoned_targets(replace(config, fp8_experts=True), 4, torch.bfloat16)
    experts = [1, None, 0, 7]
    fill_dummy(plain, 3, experts)
    fill_dummy(fp8, 3, experts)
    for name, tensor in plain.items():
        if "moe.experts" not in name:
            assert_same_bits(fp8[name], tensor)
            continue
        for slot, expert in enumerate(experts):
            scales = fp8[f"{name}_scale"][slot]
            if expert is None:
                assert bool(scales.isnan().all()) and bool(fp8[name][slot].float().isnan().all())
                continue
            blocks = quantize_blocks(tensor[slot].unflatten(0, (scales.shape[0], -1)))
            assert_same_bits(fp8[name][slot].float(), blocks.values.flatten(0, 1).float())
            assert_same_bits(scales, blocks.scales)


def test_weights_take_the_bytes_of_fp8(tmp_path: Path):
    """What the memory plan adds up: a byte for each weight of an expert and 4 for each block."""
    write_variant(tmp_path, "qwen3_moe", fp8=True, hidden_size=192)
    targets = load(tmp_path, dtype=torch.bfloat16).targets()
    # gate and up [40, 192]: 1 x 2 blocks each; down [192, 40]: 2 x 1
    assert sum(t.nbytes for name, t in targets.items() if name.startswith("layers.0.moe.experts")) == 8 * (
        3 * 40 * 192 + 4 * 6
    )


def test_an_unknown_quantization_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="quantization='int4' is not known; use one of auto, none, fp8"):
        load(tmp_path, "int4")


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_stay_near_those_of_dequantised_experts(tmp_path: Path, variant: str, device: str):
    """The same weights, the rows quantised or not: a few percent, which random networks of three layers show whole."""
    sizes = {"intermediate_size": 256} if variant == "mixtral" else {"moe_intermediate_size": 256}
    write_variant(tmp_path, variant, fp8=True, hidden_size=192, **sizes)
    tokens = torch.randint(0, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [
        StepDriver(load(tmp_path, name, dtype, device=torch.device(at))).run(prefill={"a": tokens})["a"].cpu()
        for name, dtype, at in (
            ("auto", torch.float32 if device == "cpu" else torch.bfloat16, device),
            ("none", torch.float32, "cpu"),
        )
    ]
    error_T = (rows[0] - rows[1]).norm(dim=1) / rows[1].norm(dim=1)
    assert 1e-4 < float(error_T.median()) < 0.1  # near ties between experts may flip in single rows


def test_other_blocks_than_128_are_loaded_as_dtype(tmp_path: Path):
    """Blocks of 64 x 32: dequantised by auto, held in fp8 on demand."""
    write_variant(tmp_path, "qwen3_moe", fp8=True)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 32]}
    change_config(tmp_path, quantization_config=quantization)
    file = tmp_path / "model.safetensors"
    scales = {n: t for n, t in load_file(file).items() if n.endswith("_scale_inv")}
    shapes = {n: t.shape for n, t in load_file(file).items()}
    finer = {}
    for name, scale in scales.items():
        rows, columns = shapes[name.removesuffix("_scale_inv")]
        grid = scale.repeat_interleave(2, 0).repeat_interleave(4, 1)
        finer[name] = grid[: -(-rows // 64), : -(-columns // 32)].contiguous()
    edit_tensors(file, **finer)
    plain = load(tmp_path)
    assert not plain.config.fp8_experts
    again = values_of(load(tmp_path, "fp8").targets())
    for name, tensor in plain.targets().items():
        assert rel_norm(again[name], tensor) < (0.03 if "experts" in name else 1e-9)
