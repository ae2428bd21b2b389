"""The schema lists its own keys, composes through omegaconf, and closes for good."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from configs.checks import freeze
from configs.schema import Config, known_keys


def test_every_key_has_a_help_text_and_a_known_type() -> None:
    keys = known_keys()
    assert len({key.name for key in keys}) == len(keys) > 40
    for key in keys:
        assert key.help and key.base in {"str", "int", "float", "bool", "list[str]", "list[int]"}, key
        assert key.default is not None or key.nullable, key


def test_the_keys_of_the_design_are_there() -> None:
    names = {key.name for key in known_keys()}
    expected = "model input output dtype load_format sampling.max_tokens sampling.min_tokens sampling.temperature "
    expected += (
        "sampling.top_p sampling.top_k sampling.min_p sampling.seed sampling.n sampling.stop sampling.ignore_eos "
    )
    expected += "engine.max_model_len engine.max_num_seqs engine.max_batched_tokens engine.cuda_graphs engine.device "
    expected += "cache.block_size cache.num_blocks cache.dtype cache.prefix_caching cache.memory_fraction "
    expected += (
        "parallel.dispatcher parallel.combine parallel.row_cap parallel.timeout_s job.strict job.limit job.report"
    )
    assert set(expected.split()) <= names


def test_omegaconf_round_trip_gives_equal_dataclasses() -> None:
    assert OmegaConf.to_object(OmegaConf.structured(Config)) == Config()


def test_list_defaults_are_not_shared() -> None:
    first = Config()
    first.sampling.stop.append("x")
    assert Config().sampling.stop == []


def test_a_frozen_config_cannot_change() -> None:
    config = freeze(Config())
    with pytest.raises(AttributeError, match="Config is frozen; model is set when"):
        config.model = "other"
    with pytest.raises(AttributeError, match="SamplingConfig is frozen; n is set when"):
        config.sampling.n = 2
    Config().sampling.n = 2  # another config is not concerned
