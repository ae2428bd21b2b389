"""What a run's identity follows from."""

from __future__ import annotations

from pathlib import Path

from configs.schema import CacheConfig, Config
from moe.batch.fingerprint import job_fingerprint


def test_C49_scales_of_the_cache_count_by_their_content(tmp_path: Path) -> None:
    """Answers under other scales are other answers, whatever the file is called."""
    first, same, other = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    first.write_text('{"model.layers.0.self_attn.kv_scale": 0.04}')
    same.write_bytes(first.read_bytes())
    other.write_text('{"model.layers.0.self_attn.kv_scale": 0.05}')
    found = [
        job_fingerprint(Config(cache=CacheConfig(dtype="fp8-layer", scales=str(file))), {})
        for file in (first, same, other)
    ]
    assert found[0] == found[1]
    assert [name for name in found[0] if found[0][name] != found[2][name]] == ["cache.scales"]
