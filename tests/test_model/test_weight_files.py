"""Files, headers and the index: what is missing, damaged or superfluous in a checkpoint folder."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import Config, EngineConfig
from moe.batch.fingerprint import job_fingerprint
from moe.model.checkpoint import Checkpoint, LoadReport
from moe.model.families.registry import read_config
from moe.model.load_model import load_model
from moe.model.safetensors_header import read_header
from tests.checkpoints import (
    INDEX,
    assert_loaded,
    change_config,
    edit_tensors,
    expected_from,
    load,
    open_folder,
    poisoned_targets,
)
from tests.tiny_models import write_variant


@pytest.mark.parametrize("fp8", [False, True])
def test_C02_a_shard_the_index_names_must_exist(tmp_path: Path, fp8: bool):
    write_variant(tmp_path, "qwen3_moe", shards=2, fp8=fp8)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names 2 files, of which 1 are missing: model-00002-of-00002") as caught:
        open_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_C02_a_folder_with_a_config_only_has_no_weights(tmp_path: Path):
    write_variant(tmp_path, "qwen3_moe")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no weights: expected model.safetensors, .*found config.json"):
        open_folder(tmp_path)


def test_C02_pickles_and_shards_without_an_index_are_refused(tmp_path: Path):
    write_variant(tmp_path, "qwen3_moe", shards=2)
    config = read_config(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=f"but neither {INDEX} nor model.safetensors"):
        Checkpoint.open(tmp_path, config)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"pickle files only \(pytorch_model.bin\)"):
        Checkpoint.open(tmp_path, config)
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        Checkpoint.open(tmp_path / "nowhere", config)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[]"])
def test_C02_an_index_that_cannot_be_used_is_named(tmp_path: Path, text: str):
    write_variant(tmp_path, "mixtral", shards=2)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"{INDEX} of {len(text)} bytes has no usable weight_map"):
        open_folder(tmp_path)


@pytest.mark.parametrize("folder", ["../", "shards/", "./"])
def test_C02_an_index_may_not_point_out_of_its_folder_nor_into_another(tmp_path: Path, folder: str):
    write_variant(tmp_path, "mixtral", shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = f"{folder}model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"names files by a path: {re.escape(folder)}model-00001.*beside it"):
        open_folder(tmp_path)


def test_C02_a_tensor_the_index_promises_must_be_in_its_file(tmp_path: Path):
    write_variant(tmp_path, "mixtral", shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"that their files do not hold: lm_head.weight \(in model-00002-of-00002"):
        open_folder(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut", "misfit"])
def test_C02_nothing_is_allocated_for_a_checkpoint_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
):
    """Files, headers, names: all of it is refused before the network, which allocates every parameter, is made."""
    write_variant(tmp_path, "qwen3_moe", shards=2)
    last = tmp_path / "model-00002-of-00002.safetensors"
    if damage == "missing":
        last.unlink()
    elif damage == "cut":
        _cut_data(last)
    else:
        change_config(tmp_path, num_hidden_layers=5)

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was made first")

    monkeypatch.setattr("moe.model.load_model.CausalLM", no_network)
    with pytest.raises(ValueError, match=r"are missing|not filled|ends past the end"):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, mla_workspace_tokens=64)


def _cut_data(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _cut_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:300])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _lfs_pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n")


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(8))


def _past_the_end(file: Path) -> None:
    """The last tensor is said to lie 8 bytes later than it does; the file keeps its size."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    header[last]["data_offsets"] = [offset + 8 for offset in header[last]["data_offsets"]]
    _write_header(file, header)


def _longer_than_its_shape(file: Path) -> None:
    header = _header(file)
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"][1] += 4
    _write_header(file, header)


def _overlapping(file: Path) -> None:
    """Two tensors of one size share their bytes; the file's size still fits."""
    header = _header(file)
    places: dict[int, list[int]] = {}
    for name in sorted(name for name in header if name != "__metadata__"):
        begin, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = places.setdefault(end - begin, [begin, end])
    _write_header(file, header)


def _unknown_dtype(file: Path) -> None:
    header = _header(file)
    header[next(name for name in header if name != "__metadata__")]["dtype"] = "Q4"
    _write_header(file, header)


def _malformed_entry(file: Path) -> None:
    header = _header(file)
    header[next(name for name in header if name != "__metadata__")].pop("shape")
    _write_header(file, header)


def _not_safetensors(file: Path) -> None:
    file.write_bytes(b"\x80\x02PK pickled tensors, renamed" * 10)


def _not_json(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[:8] + b"?" * 8 + raw[16:])


def _header(file: Path) -> dict[str, dict]:
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def _write_header(file: Path, header: dict[str, dict]) -> None:
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (size - len(text))
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut_data, r"the file has {size} bytes, expected at least {whole}.*ends past the end.*incomplete download"),
        (_cut_header, r"the file has 300 bytes, expected at least \d+: it ends inside its header; incomplete download"),
        (_empty, r"the file has 0 bytes, expected at least 8 .*incomplete download"),
        (_lfs_pointer, r"Git LFS pointer of {size} bytes, .*\(expected 4976698672 bytes\).*git lfs pull"),
        (_append, r"the file has {size} bytes, expected {whole}: 8 bytes follow the last tensor"),
        (_past_the_end, r"the file has {size} bytes, expected at least \d+: tensor \S+ ends past the end"),
        (_longer_than_its_shape, r"tensor \S+: offsets \d+ to \d+ hold \d+ bytes, but dtype F32 and shape .* need \d+"),
        (_overlapping, r"tensor \S+ begins at offset \d+, but the one before it \(\S+\) ends at \d+"),
        (_unknown_dtype, r"tensor \S+ has dtype 'Q4', which is unknown; known: BF16"),
        (_malformed_entry, r"tensor \S+: its header entry .* is malformed"),
        (_not_safetensors, r"this is not a safetensors file"),
        (_not_json, r"its header of \d+ bytes is not JSON"),
    ],
)
def test_C20_a_damaged_shard_is_named_with_its_size(tmp_path: Path, damage, said: str):
    write_variant(tmp_path, "mixtral", shards=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    whole = file.stat().st_size
    damage(file)
    said = said.replace("{size}", str(file.stat().st_size)).replace("{whole}", str(whole))
    with pytest.raises(ValueError, match=said) as caught:
        open_folder(tmp_path)
    assert str(file) in str(caught.value) and "model-00001" not in str(caught.value)


def _dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("../blobs/4d7a")


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _closed(file: Path) -> None:
    file.chmod(0)


@pytest.mark.parametrize(
    ("shards", "name"),
    [(1, "config.json"), (1, "model.safetensors"), (2, INDEX), (2, "model-00002-of-00002.safetensors")],
)
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_dangling, r"it is a link to \.\./blobs/4d7a, which is not there; fetch it again"),
        (_folder, "it is a folder; fetch the checkpoint again"),
        pytest.param(
            _closed,
            "it is closed to this user; change its rights",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything"),
        ),
    ],
)
def test_C20_what_stands_in_the_place_of_a_file_is_named(tmp_path: Path, shards: int, name: str, damage, said: str):
    """As in a hub's cache whose blobs were deleted, or another user's. The job's look at what it is made from, too."""
    write_variant(tmp_path, "mixtral", shards=shards)
    damage(tmp_path / name)
    is_weights = name.endswith(".safetensors")
    missing = f"|1 are missing: {name}" if is_weights and shards == 2 else ""
    with pytest.raises(ValueError, match=f"{name} cannot be read: {said}{missing}"):
        Checkpoint.open(tmp_path, read_config(tmp_path))
    if is_weights:
        with pytest.raises(ValueError, match=f"{name} cannot be read: {said}"):
            job_fingerprint(Config(model=str(tmp_path), engine=EngineConfig(device="cpu")), {})


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_C20_pointers_stand_for_json_files_too(tmp_path: Path, name: str):
    write_variant(tmp_path, "mixtral", shards=2)
    _lfs_pointer(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: this is a Git LFS pointer of \d+ bytes, .*git lfs pull"):
        Checkpoint.open(tmp_path, read_config(tmp_path))


def test_C20_every_damaged_shard_is_listed_at_once(tmp_path: Path):
    write_variant(tmp_path, "mixtral", shards=3)
    for shard in (1, 3):
        _cut_data(tmp_path / f"model-0000{shard}-of-00003.safetensors")
    with pytest.raises(ValueError, match=r"(?s)model-00001-of-00003.*\n.*model-00003-of-00003") as caught:
        open_folder(tmp_path)
    assert "model-00002" not in str(caught.value)


def test_C20_headers_agree_with_the_library(tmp_path: Path):
    write_variant(tmp_path, "deepseek_v3", fp8=True, dtype="bfloat16")
    entries = read_header(tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: entry.shape for name, entry in entries.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {entry.dtype for entry in entries.values()} == {"BF16", "F8_E4M3", "F32"}
    assert all(entries[name].num_bytes == tensors[name].nbytes for name in tensors)


def test_C53_declared_mtp_layers_are_skipped_and_others_are_errors(tmp_path: Path):
    model = write_variant(tmp_path, "deepseek_v3", num_hidden_layers=2, mtp=True, shards=2)
    assert_loaded(load(tmp_path), expected_from(model, read_config(tmp_path)))
    change_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"tensors not used \(\d+\): model.layers.2.eh_proj.weight"):
        open_folder(tmp_path)


def test_C53_a_declared_mtp_layer_need_not_be_there(tmp_path: Path):
    model = write_variant(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    assert read_config(tmp_path).num_mtp_layers == 1
    assert_loaded(load(tmp_path), expected_from(model, read_config(tmp_path)))


def test_C53_a_stray_layer_is_an_error(tmp_path: Path):
    write_variant(tmp_path, "deepseek_v3", mtp=True)
    edit_tensors(tmp_path / "model.safetensors", model__layers__9__x=torch.zeros(2))
    with pytest.raises(ValueError, match=r"tensors not used \(1\): model.layers.9.x"):
        open_folder(tmp_path)


def test_C53_the_index_decides_which_copy_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = write_variant(tmp_path, "mixtral", shards=2)
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    other = "model-00002-of-00002.safetensors"
    assert index[gate] != other
    edit_tensors(tmp_path / other, **{gate: torch.zeros(8, 64), "model.layers.9.x": torch.zeros(1)})
    save_file({"tok_embeddings.weight": torch.zeros(4)}, tmp_path / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        checkpoint = open_folder(tmp_path)
    targets = poisoned_targets(checkpoint.config, 8)
    report: LoadReport = checkpoint.load_into(targets, range(8))
    assert_loaded(targets, expected_from(model, checkpoint.config))
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "consolidated.safetensors" in line]) == 1
    assert len([line for line in lines if f"{gate} in {other}" in line]) == 1
    assert set(report.ignored) == {"consolidated.safetensors", f"{gate} in {other}", f"model.layers.9.x in {other}"}


def test_C53_a_shard_beside_a_single_file_is_ignored_too(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = write_variant(tmp_path, "mixtral")
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        assert_loaded(load(tmp_path), expected_from(model, read_config(tmp_path)))
    assert "ignored weight files that the checkpoint does not name: consolidated.safetensors" in caplog.text


def test_C53_old_rope_tables_are_allowed(tmp_path: Path):
    model = write_variant(tmp_path, "mixtral")
    table = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(16) for i in range(3)}
    edit_tensors(tmp_path / "model.safetensors", **table)
    assert_loaded(load(tmp_path), expected_from(model, read_config(tmp_path)))


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
def test_C49_calibrated_scales_of_the_cache_are_known_names(tmp_path: Path, names: tuple[str, str]):
    """No parameters, and no tensors too many: `cache_scales.py` reads them, or says that it does not."""
    model = write_variant(tmp_path, "mixtral")
    scales = {f"model.layers.{i}.self_attn.{name}": torch.tensor(0.04) for i in range(3) for name in names}
    edit_tensors(tmp_path / "model.safetensors", **scales)
    assert_loaded(load(tmp_path), expected_from(model, read_config(tmp_path)))
    edit_tensors(tmp_path / "model.safetensors", **{"model.layers.0.self_attn.q_scale": torch.tensor(0.04)})
    with pytest.raises(ValueError, match=r"tensors not used \(1\): model.layers.0.self_attn.q_scale"):
        load(tmp_path)
