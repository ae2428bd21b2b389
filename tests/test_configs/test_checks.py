"""Each check names key, value and way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.checks import check, freeze
from configs.schema import Config


def changed(**values: Any) -> Config:
    """A default config with dotted keys (written with __) set."""
    config = Config()
    for name, value in values.items():
        group, _, key = name.rpartition("__")
        setattr(getattr(config, group) if group else config, key, value)
    return config


def test_defaults_pass() -> None:
    check(Config())


def test_numbers_of_other_libraries_and_paths_are_values() -> None:
    check(
        changed(
            model=Path("folder"), engine__max_model_len=np.int64(64), cache__cpu_gb=np.float32(2), cache__num_blocks=9
        )
    )


def test_paths_are_texts_once_closed() -> None:
    """Whoever reads a key of a closed config joins, hashes and prints it as a text."""
    config = freeze(changed(model=Path("folder"), job__report=Path("r"), job__more_input=[Path("a"), "b"], input="c"))
    assert (config.model, config.job.report, config.job.more_input) == ("folder", "r", ["a", "b"])
    assert freeze(config).model == "folder"


def test_experts_in_host_memory_have_keys_that_go_together() -> None:
    for beside in ({}, {"offload__gpu_gb": 3.0}, {"offload__slots_per_layer": 0}, {"offload__tokens_per_seq": 640}):
        check(changed(offload__regime="auto", offload__host_gb=200.0, **beside))
    freeze(freeze(changed(offload__regime="stream", offload__tier="disk", offload__host_gb=4.0)))  # checked once closed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"engine__max_model_len": "64"},
            "engine.max_model_len='64' is no value for this key; it takes a whole",
        ),
        ({"engine__seed": 1.5}, "engine.seed=1.5 is no value for this key; it takes a whole number."),
        ({"engine__max_num_seqs": True}, "engine.max_num_seqs=True is no value for this key"),
        (
            {"cache__prefix_caching": "no"},
            "cache.prefix_caching='no' is no value for this key; it takes true or",
        ),
        ({"cache__memory_fraction": None}, "cache.memory_fraction=None is no value for this key; it takes a number."),
        ({"sampling__stop": ["a", 5]}, "sampling.stop=['a', 5] is no value for this key; it takes a list of texts."),
        ({"model": 5}, "model=5 is no value for this key; it takes text."),
        (
            {"engine__step_timeout_s": 1e12},
            "engine.step_timeout_s=1000000000000.0 is out of range; give a value above 0 to",
        ),
        ({"job__line_timeout_s": 1e300}, "job.line_timeout_s=1e+300 is out of range"),
        ({"cache__cpu_gb": 1e300}, "cache.cpu_gb=1e+300 is out of range; give a value above 0 to 1000000000"),
        (
            {"cache__num_blocks": 2**31},
            "cache.num_blocks=2147483648 is out of range; give a value from 1 to 2147483647",
        ),
        ({"dtype": "fp16"}, "dtype='fp16' is unknown; give auto or bfloat16 or float16 or float32."),
        ({"load_format": "pickle"}, "load_format='pickle' is unknown"),
        ({"quantization": "int4"}, "quantization='int4' is unknown; give auto or none or fp8."),
        ({"model": ""}, "model='' is empty"),
        ({"output": ""}, "output='' is empty"),
        ({"engine__device": "tpu"}, "engine.device='tpu' is unknown"),
        ({"engine__max_model_len": 0}, "engine.max_model_len=0 is out of range; give a value from 2 up."),
        ({"engine__max_num_seqs": 0}, "engine.max_num_seqs=0 is out of range"),
        ({"engine__step_timeout_s": 0.0}, "engine.step_timeout_s=0.0 is out of range; give a value above 0 to 1"),
        ({"engine__prefill_chunk": 17000}, "engine.prefill_chunk=17000 exceeds engine.max_batched_tokens=16384"),
        ({"sampling__temperature": -1.0}, "sampling.temperature=-1.0 is out of range"),
        ({"sampling__temperature": float("nan")}, "sampling.temperature=nan is out of range"),
        ({"sampling__top_p": 0.0}, "sampling.top_p=0.0 is out of range; give a value above 0 to 1."),
        ({"sampling__top_k": -2}, "sampling.top_k=-2 is out of range"),
        ({"sampling__stop": ["a", ""]}, "has an empty string"),
        ({"sampling__stop_token_ids": [3, -1]}, "sampling.stop_token_ids=-1 is out of range"),
        (
            {"sampling__min_tokens": 9, "sampling__max_tokens": 5},
            "sampling.min_tokens=9 exceeds sampling.max_tokens=5; lower the first or raise the second.",
        ),
        (
            {"sampling__min_tokens": 64, "engine__max_model_len": 64},
            "sampling.min_tokens=64 does not fit engine.max_model_len=64",
        ),
        (
            {"sampling__temperature": 1e7},
            "sampling.temperature=10000000.0 is out of range; give a value from 0 to 1000000.",
        ),
        (
            {"sampling__seed": 2**65},
            f"sampling.seed={2**65} is out of range; give a value from {-(2**63)} to {2**64 - 1}.",
        ),
        ({"sampling__top_k": 2**31}, f"sampling.top_k={2**31} is out of range; give a value from -1 to {2**31 - 1}."),
        ({"sampling__repetition_penalty": 0.0}, "is out of range; give a value from 0.001 to 1000."),
        ({"balance__move": "maybe"}, "balance.move='maybe' is unknown; give gain or always or never."),
        ({"balance__interval": -1}, "balance.interval=-1 is out of range"),
        ({"balance__window": 0}, "balance.window=0 is out of range"),
        ({"balance__layers_per_step": 0}, "balance.layers_per_step=0 is out of range"),
        ({"balance__buffer_mb": 0.0}, "balance.buffer_mb=0.0 is out of range"),
        ({"balance__redundant_experts": -1}, "balance.redundant_experts=-1 is out of range"),
        ({"balance__profile_steps": 0}, "balance.profile_steps=0 is out of range"),
        ({"balance__plan": ""}, "balance.plan='' is empty; leave the key out or give a file."),
        ({"balance__plan": "p", "balance__profile": "q"}, "which balance.profile=q would change; leave one of them"),
        ({"balance__plan": "p", "balance__redundant_experts": 2}, "which balance.redundant_experts=2 would change"),
        ({"balance__plan": "p", "balance__move": "always"}, "which balance.move=always would change"),
        ({"balance__move": "always"}, "balance.move=always needs looks to move after; give balance.interval"),
        ({"parallel__overlap": "yes"}, "parallel.overlap='yes' is unknown; give auto or none or shared or halves."),
        (
            {"parallel__overlap_rows": 64},
            "steps are split in halves, which parallel.overlap=auto never does; leave it out, or give "
            "parallel.overlap=halves",
        ),
        ({"parallel__overlap": "halves", "parallel__overlap_rows": 1}, "parallel.overlap_rows=1 is out of range"),
        ({"cache__block_size": 512}, "cache.block_size=512 is out of range; give a value from 1 to 256."),
        ({"cache__block_size": 24}, "cache.block_size=24 is no power of two"),
        ({"cache__memory_fraction": 1.5}, "cache.memory_fraction=1.5 is out of range; give a value above 0 to 1."),
        ({"cache__dtype": "fp4"}, "cache.dtype='fp4' is unknown; give auto or bfloat16 or float16 or float32 or fp8"),
        ({"cache__scales": "s"}, "cache.scales=s has no effect with cache.dtype=auto; use cache.dtype=fp8-layer"),
        ({"cache__dtype": "fp8", "cache__scales": "s.json"}, "has no effect with cache.dtype=fp8;"),
        ({"cache__dtype": "fp8-layer", "cache__scales": ""}, "cache.scales='' is empty; leave the key out"),
        (
            {"parallel__dispatcher": "deepep"},
            "parallel.dispatcher='deepep' is unknown; give auto or local or all_to_all or all_gather or one_sided or "
            "deep_ep.",
        ),
        (
            {"parallel__dispatcher": "deep_ep"},
            "parallel.dispatcher=deep_ep sums rows on their way, which parallel.combine=exact rules out; give "
            "parallel.combine=fast, or another dispatcher.",
        ),
        ({"offload__regime": "on"}, "offload.regime='on' is unknown; give off or auto or cache or stream."),
        ({"offload__regime": "auto", "offload__tier": "nvme"}, "offload.tier='nvme' is unknown; give host or disk."),
        ({"offload__regime": "auto", "offload__slots_per_layer": -1}, "offload.slots_per_layer=-1 is out of range"),
        ({"offload__regime": "auto", "offload__gpu_gb": 0.0}, "offload.gpu_gb=0.0 is out of range"),
        ({"offload__regime": "auto", "offload__host_gb": -1.0}, "offload.host_gb=-1.0 is out of range"),
        ({"offload__regime": "auto", "offload__tokens_per_seq": 0}, "offload.tokens_per_seq=0 is out of range"),
        (
            {"offload__slots_per_layer": 0},
            "offload.slots_per_layer=0 has no effect with offload.regime=off; give offload.regime=auto, or leave",
        ),
        ({"offload__tier": "disk"}, "offload.tier=disk has no effect with offload.regime=off"),
        (
            {"offload__regime": "auto", "offload__slots_per_layer": 2, "offload__gpu_gb": 3.0},
            "offload.slots_per_layer=2 and offload.gpu_gb=3.0 both say how many experts the GPU holds; leave one",
        ),
        (
            {"offload__regime": "auto", "offload__gpu_gb": 3.0, "offload__tokens_per_seq": 8},
            "sizes the cache before the experts, whose room offload.gpu_gb=3.0 says already; leave one of them out.",
        ),
        (
            {"offload__regime": "cache", "offload__slots_per_layer": 0},
            "offload.slots_per_layer=0 holds no expert on the GPU, so offload.regime=cache has nothing to keep",
        ),
        ({"offload__regime": "auto", "offload__tier": "disk"}, "nothing says how large; give offload.host_gb"),
        (
            {"offload__regime": "auto", "offload__tier": "disk", "offload__host_gb": 4.0, "load_format": "dummy"},
            "offload.tier=disk reads experts from the checkpoint's files, and load_format=dummy has none",
        ),
        ({"parallel__combine": "quick"}, "parallel.combine='quick' is unknown; give exact or fast."),
        ({"job__shards": 0}, "job.shards=0 is out of range"),
        ({"job__max_errors": -1}, "job.max_errors=-1 is out of range"),
        ({"job__line_timeout_s": 0.0}, "job.line_timeout_s=0.0 is out of range"),
        ({"job__resume": "maybe"}, "job.resume='maybe' is unknown; give auto or require or never or force"),
        ({"job__resume": "false", "job__retry_errors": True}, "job.retry_errors=true is about an unfinished run"),
        ({"job__limit": 0}, "job.limit=0 is out of range"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(changed(**values))
    assert message in str(caught.value)
