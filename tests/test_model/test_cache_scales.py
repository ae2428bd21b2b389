"""Case C49: where scales of an fp8 cache come from, what is refused, and that they reach every attention."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kernels.quantize import FP8
from kv_cache.layout import LayerScales
from moe.model.cache_scales import find_cache_scales
from moe.model.config import ModelConfig
from moe.model.families.registry import read_config
from moe.model.load_model import load_model
from tests.compare import assert_same_bits, rel_norm
from tests.step_driver import StepDriver
from tests.tiny_models import VOCAB_SIZE, write_variant

GQA, MLA = "mixtral", "deepseek_v3-yarn"


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Each of three layers."""
    made: dict[str, ModelConfig] = {}
    for variant in (GQA, MLA):
        folder = tmp_path_factory.mktemp(variant)
        write_variant(folder, variant)
        made[variant] = read_config(folder)
    return made


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with these tensors among others."""
    save_file(tensors | {"model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return folder


def written(folder: Path, content: Any) -> str:
    file = folder / "scales.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def found(config: ModelConfig, *, file: str | None = None, folder: Path | None = None, cache_dtype: str = "fp8-layer"):
    return find_cache_scales(cache_dtype, file, folder, config, torch.bfloat16)


def by_name(*parts: str, layers: int = 3, scale: float = 0.04) -> dict[str, float]:
    """Layer i has scale + i / 100."""
    return {f"model.layers.{i}.self_attn.{part}_scale": scale + i / 100 for i in range(layers) for part in parts}


def vllm_file(**layers: Any) -> dict[str, Any]:
    scales = layers or {str(i): 0.04 + i / 100 for i in range(3)}
    return {"model_type": "any", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": scales}}}


WANTED = [pytest.approx((0.04 + i / 100, 0.04 + i / 100), rel=1e-6) for i in range(3)]
CALIBRATED = ("k", "v"), ("k_proj.k", "v_proj.v"), ("attn.k", "attn.v"), ("kv",)


@pytest.mark.parametrize("parts", CALIBRATED, ids=lambda parts: parts[0])
@pytest.mark.parametrize("variant", [GQA, MLA])
def test_C49_scales_of_a_checkpoint_and_of_a_file(configs, tmp_path, variant, parts):
    """Every name a calibration gives them, one number each, as a tensor of any shape and dtype."""
    named = by_name(*parts)
    shapes = [(), (1,), (1, 1)]
    tensors = {name: torch.tensor(scale).view(shapes[i % 3]) for i, (name, scale) in enumerate(named.items())}
    assert list(found(configs[variant], folder=stored(tmp_path, tensors))) == WANTED
    doubled = {name: 2 * scale for name, scale in named.items()}
    scales = found(configs[variant], folder=tmp_path, file=written(tmp_path, doubled))
    assert [scale.key / 2 for scale in scales] == pytest.approx([0.04, 0.05, 0.06]), "the file comes before"


@pytest.mark.parametrize("variant", [GQA, MLA])
def test_C49_the_file_that_vllm_reads(configs, tmp_path, variant):
    assert list(found(configs[variant], file=written(tmp_path, vllm_file()))) == WANTED


def test_C49_keys_and_values_apart_and_latents_by_keys_alone(configs, tmp_path):
    named = by_name("k") | by_name("v", scale=0.5)
    assert found(configs[GQA], file=written(tmp_path, named))[1] == LayerScales(0.05, 0.51)
    assert found(configs[MLA], file=written(tmp_path, named))[1] == LayerScales(0.05, 0.05)
    assert found(configs[MLA], file=written(tmp_path, by_name("k")))[1] == LayerScales(0.05, 0.05)


def test_C49_none_is_one_warning_with_the_value(configs, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert found(configs[GQA], folder=stored(tmp_path, {})) == (LayerScales(1.0, 1.0),) * 3
    (line,) = caplog.messages
    assert "neither cache.scales nor the checkpoint gives scales" in line and "every layer takes 1.0" in line


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int4"])
def test_C49_scales_that_are_not_used_are_named(configs, tmp_path, caplog, cache_dtype):
    tensors = {name: torch.tensor(scale) for name, scale in by_name("k", "v").items()}
    with caplog.at_level(logging.WARNING):
        assert found(configs[GQA], folder=stored(tmp_path, tensors), cache_dtype=cache_dtype) == ()
    (line,) = caplog.messages
    assert "6 calibrated scales of the KV cache are not used (model.layers.0.self_attn.k_scale, ...)" in line


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e38])
def test_C49_numbers_that_are_no_scale(configs, tmp_path, scale):
    tensors = {name: torch.tensor(value) for name, value in by_name("k", "v").items()}
    tensors["model.layers.1.self_attn.v_scale"] = torch.tensor(scale)
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.v_scale is .*must be above 0 and at most .*fp8, which"
    ):
        found(configs[GQA], folder=stored(tmp_path, tensors))
    named = by_name("k", "v") | {"model.layers.1.self_attn.v_scale": scale}
    with pytest.raises(ValueError, match=r"cache\.scales=.*layers\.1\.self_attn\.v_scale is .*must be above 0"):
        found(configs[GQA], file=written(tmp_path, named))


def test_C49_a_scale_that_float16_cannot_hold(configs, tmp_path):
    """448 times 147 is beyond 65504."""
    file = written(tmp_path, by_name("k", "v", scale=147.0))
    assert find_cache_scales("fp8-layer", file, None, configs[GQA], torch.bfloat16)[0] == LayerScales(147.0, 147.0)
    with pytest.raises(ValueError, match=r"k_scale is 147\.0, and a scale must be above 0 and at most 146\.214"):
        find_cache_scales("fp8-layer", file, None, configs[GQA], torch.float16)


WITHOUT_ONE = {name: scale for name, scale in by_name("k", "v").items() if "layers.2.self_attn.v" not in name}
REFUSED = [
    pytest.param(
        WITHOUT_ONE, r"none for 1 places: v_scale of layer 2; give all, or use cache\.dtype=fp8", id="one-missing"
    ),
    pytest.param(
        by_name("k", "v", layers=4), r"layers\.3\.self_attn\.k_scale is of no layer, this model has 3", id="more"
    ),
    pytest.param(by_name("k", "kv", "v"), r"are two scales for one place; keep one", id="twice"),
    pytest.param(
        vllm_file(**{"0": 0.1, "2": 0.1}), r"none for 2 places: k_scale of layer 1, v_scale of", id="vllm-missing"
    ),
    pytest.param(
        {"kv_cache": {"dtype": "float8_e5m2", "scaling_factor": {"0": {"0": 1.0}}}},
        r"kv_cache\.dtype='float8_e5m2' is not float8_e4m3fn",
        id="other-dtype",
    ),
    pytest.param(
        {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 1.0}, "1": {"0": 2.0}}}},
        r"other scales for each of 2 tensor-parallel ranks",
        id="ranks-that-differ",
    ),
    pytest.param(
        {"kv_cache": {"dtype": "float8_e4m3fn"}}, r"scaling_factor holds no scales; it must be", id="no-factors"
    ),
    pytest.param({"k": 1.0}, r"names what is no scale: k; it must be", id="unknown-name"),
    pytest.param({}, r"holds no scales; it must be", id="empty"),
    pytest.param("{", r"is no JSON", id="torn"),
    pytest.param(
        by_name("k", "v") | {"model.layers.0.self_attn.k_scale": "a"}, r"k_scale is 'a'; a scale is a", id="text"
    ),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_C49_files_that_do_not_fit(configs, tmp_path, content, message):
    with pytest.raises(ValueError, match=rf"cache\.scales=.*{message}"):
        found(configs[GQA], file=written(tmp_path, content))


def test_C49_a_file_that_is_not_there_and_a_tensor_of_many_numbers(configs, tmp_path):
    with pytest.raises(ValueError, match=r"cache\.scales=no\.json does not exist"):
        found(configs[GQA], file="no.json")
    tensors = {"model.layers.0.self_attn.k_scale": torch.ones(2)}
    with pytest.raises(ValueError, match=r"k_scale in .* has shape \[2\]; .* is one number for a layer"):
        found(configs[GQA], folder=stored(tmp_path, tensors))


@pytest.mark.parametrize("variant", [GQA, MLA])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_C49_given_scales_reach_the_cache_and_every_kernel(tmp_path, variant, device, dtype):
    """What is stored is the plain cache's numbers over the layer's own scale, to half a step of e4m3, and logits are
    near those of a plain cache; at a scale that reaches too little, entries are cut and counted, never NaN."""
    write_variant(tmp_path, variant)
    model = load_model(tmp_path, dtype=dtype, device=torch.device(device), max_model_len=128, mla_workspace_tokens=64)
    scales = tuple(LayerScales(0.02 + i / 100, 0.03 + i / 100) for i in range(model.config.num_layers))
    plain = StepDriver(model, seed=1)
    coded = StepDriver(model, seed=1, quantization="fp8-layer", layer_scales=scales)
    prompt = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    assert 1e-4 < rel_norm(coded.run(prefill={"a": prompt})["a"], plain.run(prefill={"a": prompt})["a"]) < 0.4
    assert 1e-4 < rel_norm(coded.run(decode={"a": 5})["a"], plain.run(decode={"a": 5})["a"]) < 0.4
    first = coded.pool.caches[0]  # layers behind it have other inputs already
    assert first.values.dtype == FP8 and first.scales is not None
    blocks = torch.tensor(coded.tracks["a"].blocks, device=device)
    codes, numbers = first.values[blocks].float(), plain.pool.caches[0].values[blocks].float()
    scale = first.scales[blocks].float() if variant == GQA else first.scales[blocks].float()[..., :1]
    scale = scale[..., None] if variant == GQA else scale
    known = ~numbers.isnan()
    error = (codes * scale - numbers).abs()
    assert bool((error <= numbers.abs() * 2**-4 + scale * 2**-9 + numbers.abs() * 2**-7)[known].all())
    assert coded.pool.count_saturated() == 0
    tight = StepDriver(model, seed=1, quantization="fp8-layer", layer_scales=(LayerScales(1e-4, 1e-4),) * len(scales))
    assert not tight.run(prefill={"a": prompt})["a"].isnan().any()
    assert (
        tight.pool.count_saturated() > 40
        and float(tight.pool.caches[0].values[blocks].float().nan_to_num().max()) == 448
    )


def test_C49_other_tensors_in_the_place_of_weights_change_nothing(tmp_path):
    """Scales are the pool's, not the model's: parameters may be exchanged after it was made."""
    write_variant(tmp_path, GQA)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    scales = (LayerScales(0.03, 0.03),) * 3
    before = StepDriver(model, quantization="fp8-layer", layer_scales=scales)
    first = before.run(prefill={"a": [1, 2, 3, 4]})["a"]
    model.parameters.tensors = {name: tensor.clone() for name, tensor in model.parameters.tensors.items()}
    again = StepDriver(model, quantization="fp8-layer", layer_scales=scales)
    assert_same_bits(again.run(prefill={"a": [1, 2, 3, 4]})["a"], first)
