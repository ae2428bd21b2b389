"""Strict loading: the values of transformers' own models in every layout, a refusal for all that does not fit."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe.model.checkpoint import Checkpoint
from moe.model.fill_count import FillCount
from tests.checkpoints import (
    assert_loaded,
    edit_tensors,
    expected_from,
    load,
    open_folder,
    poisoned_targets,
    read_config,
)
from tests.compare import assert_same_bits
from tests.tiny_models import VARIANTS, write_config, write_shards, write_tiny, write_variant


@pytest.mark.parametrize("variant", VARIANTS)
def test_C07_both_layouts_give_the_values_of_transformers(tmp_path: Path, variant: str):
    for layout, shards in (("original", 1), ("original", 3), ("stacked", 1), ("stacked", 2)):
        folder = tmp_path / f"{layout}-{shards}"
        model = write_variant(folder, variant, layout=layout, shards=shards)
        assert_loaded(load(folder), expected_from(model, read_config(folder)))


@pytest.mark.parametrize("layout", ["original", "stacked"])
@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "deepseek_v2-groups", "deepseek_v3"])
def test_C07_a_renamed_expert_tensor_stops_the_load_with_two_lists(tmp_path: Path, variant: str, layout: str):
    write_variant(tmp_path, variant, layout=layout)
    file = tmp_path / "model.safetensors"
    name = next(
        name
        for name in sorted(load_file(file))
        if ".experts." in name and name.endswith((".w2.weight", "down_proj.weight", "down_proj"))
    )
    renamed = name.replace("experts", "expert")
    edit_tensors(file, **{renamed: load_file(file)[name], name: None})
    with pytest.raises(ValueError) as caught:
        open_folder(tmp_path)
    text = str(caught.value)
    assert f"parameters not filled (1): {name} -> layers." in text and "moe.experts.w2" in text
    assert f"tensors not used (1): {renamed}" in text
    assert f"is {renamed} meant to be {name}?" in text
    assert str(tmp_path) in text


def test_C07_a_layer_in_each_layout_is_refused_not_half_loaded(tmp_path: Path):
    write_variant(tmp_path / "stacked", "qwen3_moe", layout="stacked")
    write_variant(tmp_path / "original", "qwen3_moe")
    mixed = load_file(tmp_path / "stacked/model.safetensors")
    for name in [name for name in mixed if name.startswith("model.layers.2.mlp.experts")]:
        del mixed[name]
    others = load_file(tmp_path / "original/model.safetensors")
    mixed |= {name: tensor for name, tensor in others.items() if name.startswith("model.layers.2.mlp.experts")}
    save_file(mixed, tmp_path / "stacked/model.safetensors")
    with pytest.raises(
        ValueError, match=r"(?s)not filled \(2\): model.layers.2.mlp.experts.gate_up_proj .*not used \(24\)"
    ):
        open_folder(tmp_path / "stacked")


@pytest.mark.parametrize("layout", ["original", "stacked"])
def test_a_rank_reads_only_its_own_experts(tmp_path: Path, layout: str):
    """Slots in any order, with a replica and an empty slot; the bytes read fall accordingly."""
    model = write_variant(tmp_path, "deepseek_v3", layout=layout, shards=2)
    config = read_config(tmp_path)
    experts = [6, None, 1, 6]
    targets = poisoned_targets(config, len(experts))
    seen: list[tuple[int, int]] = []
    report = Checkpoint.open(tmp_path, config).load_into(
        targets, experts, lambda done, total: seen.append((done, total))
    )
    expected = expected_from(model, config)
    for name, tensor in targets.items():
        if "experts" not in name:
            assert_same_bits(tensor, expected[name])
            continue
        for slot, expert in enumerate(experts):
            if expert is None:
                assert bool(tensor[slot].isnan().all()), f"{name}: an empty slot was written"
            else:
                assert_same_bits(tensor[slot], expected[name][expert])
    everything = sum(entry.numel() * 4 for entry in expected.values())
    all_experts = sum(tensor.numel() * 4 for name, tensor in expected.items() if "experts" in name)
    assert report.num_bytes == everything - all_experts * 6 // 8  # two of eight experts
    assert seen[-1] == (report.num_bytes, report.num_bytes) and seen == sorted(seen)


def test_a_rank_without_experts_reads_none(tmp_path: Path):
    write_variant(tmp_path, "mixtral")
    targets = load(tmp_path, experts=[])
    assert targets["layers.0.moe.experts.w13"].shape[0] == 0
    assert not targets["layers.0.moe.gate.weight"].isnan().any()


def test_dtypes_are_cast_and_the_selection_bias_stays_fp32(tmp_path: Path):
    model = write_variant(tmp_path, "deepseek_v3", dtype="bfloat16")
    expected = expected_from(model, read_config(tmp_path))
    targets = load(tmp_path, dtype=torch.bfloat16)
    assert_loaded(targets, expected)
    bias = "layers.1.moe.gate.bias"
    assert targets[bias].dtype == torch.float32
    assert not torch.equal(expected[bias], expected[bias].bfloat16().float())  # rounding would have been seen


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_loading_into_a_gpu_gives_the_same_bits(tmp_path: Path, fp8: bool):
    write_variant(tmp_path, "deepseek_v3", shards=2, fp8=fp8, hidden_size=192)
    on_cpu = load(tmp_path, dtype=torch.bfloat16)
    on_gpu = load(tmp_path, dtype=torch.bfloat16, device="cuda")
    for name, tensor in on_cpu.items():
        assert_same_bits(on_gpu[name].cpu(), tensor)


def test_a_row_written_never_or_twice_is_noticed():
    targets = {"a.weight": torch.zeros(4, 2), "layers.0.moe.experts.w2": torch.zeros(3, 4, 2)}

    def count(*ranges: tuple[str, int | None, int, int]) -> FillCount:
        counted = FillCount(targets, lambda name: [0, 2])
        for written in ranges:
            counted.add(*written)
        return counted

    whole = ("a.weight", None, 0, 4)
    experts = [("layers.0.moe.experts.w2", slot, 0, 4) for slot in (0, 2)]
    count(whole, *experts).check()
    count(("a.weight", None, 2, 4), ("a.weight", None, 0, 2), *experts).check()
    with pytest.raises(AssertionError, match=r"a.weight: rows 2 to 4 were never written"):
        count(("a.weight", None, 0, 2), *experts).check()
    with pytest.raises(AssertionError, match=r"a.weight: rows 0 to 2 were never written"):
        count(("a.weight", None, 2, 4), *experts).check()
    with pytest.raises(AssertionError, match=r"a.weight: row 0 was written twice"):
        count(whole, whole, *experts).check()
    with pytest.raises(AssertionError, match=r"w2\[2\]: rows 0 to 4 were never written"):
        count(whole, experts[0]).check()


def test_a_rule_lost_from_the_table_is_noticed_while_loading(tmp_path: Path):
    write_variant(tmp_path, "mixtral")
    whole = open_folder(tmp_path)
    rules = tuple(rule for rule in whole.rules if not rule.source.endswith("layers.1.self_attn.k_proj.weight"))
    targets = poisoned_targets(whole.config, 8)
    with pytest.raises(AssertionError, match=r"layers.1.attn.qkv.weight: rows 128 to 192 were never written"):
        Checkpoint(whole.config, whole.files, rules).load_into(targets, range(8))


def test_targets_of_another_config_are_an_error_of_ours(tmp_path: Path):
    write_variant(tmp_path, "mixtral")
    checkpoint = open_folder(tmp_path)
    targets = poisoned_targets(checkpoint.config, 8)
    del targets["norm.weight"]
    with pytest.raises(AssertionError, match=r"parameter_shapes: norm.weight"):
        checkpoint.load_into(targets, range(8))


def test_C32_a_tied_model_needs_no_head_and_other_cases_say_what_they_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = write_variant(tmp_path, "mixtral", tie_word_embeddings=True)
    expected = expected_from(model, read_config(tmp_path))
    assert "lm_head.weight" not in expected and "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert_loaded(load(tmp_path), expected)
        # the same head stored once more is no reason to worry
        edit_tensors(tmp_path / "model.safetensors", lm_head__weight=expected["embed.weight"].clone())
        assert_loaded(load(tmp_path), expected)
    assert caplog.text == ""
    # the flag in text_config alone: the same
    config = json.loads((tmp_path / "config.json").read_text())
    write_config(tmp_path, {"model_type": "outer", "text_config": config})
    assert_loaded(load(tmp_path), expected)


def test_C32_a_tied_model_with_another_head_keeps_the_embedding_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = write_variant(tmp_path, "mixtral", tie_word_embeddings=True)
    edit_tensors(tmp_path / "model.safetensors", lm_head__weight=torch.zeros(288, 64))
    with caplog.at_level(logging.WARNING):
        assert_loaded(load(tmp_path), expected_from(model, read_config(tmp_path)))
    assert "lm_head.weight differs from the embedding; the embedding is used as the head" in caplog.text


def test_C32_an_untied_model_without_a_head_is_refused(tmp_path: Path):
    write_variant(tmp_path, "mixtral")
    edit_tensors(tmp_path / "model.safetensors", lm_head__weight=None)
    with pytest.raises(ValueError, match=r"not filled \(1\): lm_head.weight .*\n.*set tie_word_embeddings to true"):
        open_folder(tmp_path)


def test_long_lists_are_cut_and_counted(tmp_path: Path):
    write_variant(tmp_path, "mixtral")
    extra = {f"model.extra.{i:03}": torch.zeros(1) for i in range(45)}
    edit_tensors(tmp_path / "model.safetensors", **extra)
    with pytest.raises(ValueError, match=r"not used \(45\): model.extra.000, .*model.extra.019, and 25 more") as caught:
        open_folder(tmp_path)
    assert "model.extra.020" not in str(caught.value)


def test_a_wrong_shape_names_tensor_file_and_both_shapes(tmp_path: Path):
    write_variant(tmp_path, "qwen3_moe")
    edit_tensors(tmp_path / "model.safetensors", model__layers__0__self_attn__k_proj__weight=torch.zeros(64, 63))
    with pytest.raises(
        ValueError,
        match=r"wrong shapes \(1\): model.layers.0.self_attn.k_proj.weight in model.safetensors is \[64, 63\]",
    ):
        open_folder(tmp_path)


def test_a_stacked_tensor_in_the_other_orientation_is_refused(tmp_path: Path):
    write_variant(tmp_path, "qwen3_moe", layout="stacked")
    edit_tensors(tmp_path / "model.safetensors", model__layers__0__mlp__experts__down_proj=torch.zeros(8, 40, 64))
    with pytest.raises(ValueError, match=r"down_proj in \S+ is \[8, 40, 64\], expected \[8, 64, 40\]"):
        open_folder(tmp_path)


def test_a_dtype_that_cannot_be_loaded_is_named(tmp_path: Path):
    write_variant(tmp_path, "mixtral")
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(tmp_path / "model.safetensors", **{name: torch.zeros(64, 64, dtype=torch.int8)})
    with pytest.raises(ValueError, match=rf"cannot be loaded \(1\): {name} in \S+ is I8; known: F32, BF16, F16"):
        open_folder(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", **{name: torch.zeros(64, 64).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=r"is F8_E4M3; known: .*where quantization_config declares fp8 blocks"):
        open_folder(tmp_path)


def test_C14_bfloat16_weights_in_float16_warn_and_overflow_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_tiny(tmp_path, "mixtral", dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        load(tmp_path, dtype=torch.bfloat16)
        assert caplog.text == ""
        load(tmp_path, dtype=torch.float16)
    assert "dtype=float16, but" in caplog.text and "use dtype=bfloat16" in caplog.text
    name = "model.layers.1.self_attn.o_proj.weight"
    weight = load_file(tmp_path / "model.safetensors")[name]
    weight[0, 0] = 70000.0
    edit_tensors(tmp_path / "model.safetensors", **{name: weight})
    with pytest.raises(ValueError, match=f"tensor {name} holds values beyond float16's 65504"):
        load(tmp_path, dtype=torch.float16)


def test_many_shards_load_as_one_file(tmp_path: Path):
    """More files than reading threads."""
    model = write_variant(tmp_path, "deepseek_v2-groups")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, tensors, 20)
    assert_loaded(load(tmp_path), expected_from(model, read_config(tmp_path)))
