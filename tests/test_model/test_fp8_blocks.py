"""fp8 weights and their scales: the dequantised twin's values, every scale dtype, every bad scale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe.model.fp8_blocks import dequantize, scale_values
from tests.checkpoints import (
    INDEX,
    assert_loaded,
    edit_tensors,
    expected_from,
    load,
    open_folder,
    read_config,
)
from tests.compare import assert_same_bits
from tests.tiny_models import write_variant


@pytest.mark.parametrize("layout", ["original", "stacked"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3"])
def test_fp8_blocks_load_as_their_dequantised_twin(tmp_path: Path, variant: str, layout: str):
    """Edge blocks on both sides (192 and 40 against 128), scales in other files than their weights."""
    model = write_variant(tmp_path, variant, layout=layout, shards=3, fp8=True, dtype="bfloat16", hidden_size=192)
    stored = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert any(stored[name] != stored[f"{name}_scale_inv"] for name in stored if f"{name}_scale_inv" in stored)
    expected = expected_from(model, read_config(tmp_path))
    assert_loaded(load(tmp_path), expected)
    part = load(tmp_path, experts=[3])
    assert_same_bits(part["layers.2.moe.experts.w13"][0], expected["layers.2.moe.experts.w13"][3])


def test_fp8_is_decided_by_each_tensors_own_dtype(tmp_path: Path):
    """A layer kept in bf16 inside an fp8 checkpoint (modules_to_not_convert) has no scales and needs none."""
    write_variant(tmp_path, "qwen3_moe", fp8=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    plain = torch.randn(128, 64).bfloat16()
    edit_tensors(tmp_path / "model.safetensors", **{name: plain, f"{name}_scale_inv": None})
    assert_same_bits(load(tmp_path)["layers.0.attn.qkv.weight"][:128], plain.float())


@pytest.mark.parametrize("stacked", [False, True])
def test_C29_scales_as_float32_e8m0_and_uint8_mean_the_same(stacked: bool):
    """An expert [256, 256] with scales 2^-7, 1, 1, 2^-3; the exponent bytes are 120, 127, 127, 124."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    plain = torch.tensor([[2.0**-7, 1.0], [1.0, 2.0**-3]])
    exponents = torch.tensor([[120, 127], [127, 124]], dtype=torch.uint8)
    if stacked:
        plain, exponents = plain.expand(4, 2, 2), exponents.expand(4, 2, 2).contiguous()
    expected = weight.float()
    expected[:128, :128] *= 2.0**-7
    expected[128:, 128:] *= 2.0**-3
    for scale in (plain, plain.bfloat16(), exponents, exponents.view(torch.float8_e8m0fnu)):
        values = scale_values(scale, "w_scale_inv")
        assert_same_bits(values, plain.contiguous())
        assert_same_bits(dequantize(weight, values[3] if stacked else values, (128, 128)), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("layout", ["original", "stacked"])
def test_C29_a_checkpoint_with_exponent_scales_loads_the_same(tmp_path: Path, layout: str, dtype: torch.dtype):
    """Power-of-two scales stored as numbers and as exponent bytes give the same weights."""
    write_variant(tmp_path, "qwen3_moe", fp8=True, layout=layout, hidden_size=192)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    scales = {name: tensor.log2().round() for name, tensor in tensors.items() if name.endswith("_scale_inv")}
    save_file(tensors | {name: exponent.exp2() for name, exponent in scales.items()}, file)
    expected = load(tmp_path)
    bytes_of = {name: (exponent + 127).to(torch.uint8).view(dtype) for name, exponent in scales.items()}
    save_file(tensors | bytes_of, file)
    assert_loaded(load(tmp_path), expected)


@pytest.mark.parametrize("layout", ["original", "stacked"])
def test_C29_a_missing_or_misshapen_scale_is_named(tmp_path: Path, layout: str):
    write_variant(tmp_path, "deepseek_v3", fp8=True, layout=layout)
    file = tmp_path / "model.safetensors"
    name = sorted(name for name in load_file(file) if "experts" in name and name.endswith("_scale_inv"))[0]
    scale = load_file(file)[name]
    doubled = torch.cat([scale, scale], -1)
    edit_tensors(file, **{name: doubled})
    said = f"fp8 scales (1): {name} is {list(doubled.shape)}, expected {list(scale.shape)} for blocks of [128, 128]"
    with pytest.raises(ValueError, match=re.escape(said)):
        open_folder(tmp_path)
    edit_tensors(file, **{name: scale.to(torch.int32)})
    with pytest.raises(ValueError, match=rf"{name} is I32, known: F32, BF16, F16, F8_E8M0, U8"):
        open_folder(tmp_path)
    edit_tensors(file, **{name: None})
    with pytest.raises(ValueError, match=rf"fp8 scales \(1\): {name} is missing"):
        open_folder(tmp_path)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_C29_a_scale_that_is_no_positive_number_is_named(tmp_path: Path, bad: float):
    write_variant(tmp_path, "qwen3_moe", fp8=True, hidden_size=192)
    name = "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv"
    scale = load_file(tmp_path / "model.safetensors")[name]
    scale[0, 1] = bad
    edit_tensors(tmp_path / "model.safetensors", **{name: scale})
    with pytest.raises(ValueError, match=rf"{name}: 1 of 2 weight scales are not finite positive numbers"):
        load(tmp_path)
    load(tmp_path, experts=[0, 1])  # not read by a rank without that expert


def test_a_fault_in_one_of_many_files_stops_the_readers_and_is_told(tmp_path: Path):
    write_variant(tmp_path, "qwen3_moe", fp8=True, shards=12)
    name = "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv"
    file = json.loads((tmp_path / INDEX).read_text())["weight_map"][name]
    edit_tensors(tmp_path / file, **{name: torch.zeros(1, 1)})
    with pytest.raises(ValueError, match=f"{name}: 1 of 1 weight scales are not finite positive"):
        load(tmp_path)


def test_C29_the_nan_of_an_exponent_byte_is_named():
    with pytest.raises(ValueError, match="x_scale_inv: 1 of 2 weight scales"):
        scale_values(torch.tensor([255, 127], dtype=torch.uint8), "x_scale_inv")
