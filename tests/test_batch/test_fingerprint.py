"""What tells one job from another: any change that changes answers, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from configs.schema import Config
from moe.batch.fingerprint import job_fingerprint
from moe.model.hub import resolve_model


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one | other if one.get(name) != other.get(name)}


def test_keys_versions_and_input_are_in_it() -> None:
    plain = job_fingerprint(Config(), {"input.0": "a"})
    assert {"sortyard", "torch", "triton", "transformers", "tokenizers", "device", "dtype", "sampling.seed"} <= set(
        plain
    )
    config = Config(dtype="bfloat16")
    config.sampling.stop, config.engine.max_num_seqs, config.job.limit = ["x"], 3, 5
    config.job.columns = ["prompt:question"]
    assert changed(plain, job_fingerprint(config, {"input.0": "b"})) == {
        "dtype",
        "sampling.stop",
        "input.0",
        "job.columns",
    }


def test_a_byte_of_weights_config_or_template_changes_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("demo"), folder)
    config = Config(model=str(folder))
    before = job_fingerprint(config, {})
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # same names, shapes and size
    weights.write_bytes(bytes(content))
    after = job_fingerprint(config, {})
    assert changed(before, after) == {"model's weights"}
    (folder / "README.md").write_text("for people")
    assert job_fingerprint(config, {}) == after
    (folder / "generation_config.json").write_text("{}")
    assert changed(after, job_fingerprint(config, {})) == {"model's other files"}
    template = tmp_path / "chat.jinja"
    template.write_text("a")
    config.job.chat_template = str(template)
    one = job_fingerprint(config, {})
    template.write_text("b")
    assert changed(one, job_fingerprint(config, {})) == {"job.chat_template"}
    config.job.chat_template = "b"  # the text itself is the same template
    assert job_fingerprint(config, {})["job.chat_template"] != one["job.chat_template"]
