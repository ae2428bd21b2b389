"""Checks of a whole config that need neither a model nor a GPU, and `freeze`, which runs them and closes the config.

Each message names the key, its value, what it conflicts with and the way out.
"""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from configs.schema import Config, Section, known_keys, owner_of

DTYPES = ("auto", "bfloat16", "float16", "float32")
CACHE_DTYPES = (*DTYPES, "fp8", "fp8-layer", "int4")
QUANTIZATIONS = ("auto", "none", "fp8")
OVERLAPS = ("auto", "none", "shared", "halves")
RESUMES = ("auto", "require", "never", "force", "true", "false")
REGIMES = ("off", "auto", "cache", "stream")
DISPATCHERS = ("auto", "local", "all_to_all", "all_gather", "one_sided", "deep_ep")

# Beyond these the system's waits and sizes overflow, long after they have lost their meaning.
MOST_SECONDS = 1_000_000_000
MOST_BYTES = 1_000_000_000  # in GiB or MiB, as the key says


class Range(NamedTuple):
    """From `low` (above it, if open) to `high`, which None leaves open."""

    low: float
    high: float | None = None
    low_open: bool = False


# Of the numbers among the sampling parameters, whoever sets them: key, line or call. Where no limit lies in the
# meaning, it is what fp32 logits and 64-bit ids hold with room to spare: beyond, a step fails and all in it.
SAMPLING_RANGES = {
    "n": Range(1, 1024),
    "max_tokens": Range(1),
    "min_tokens": Range(0),
    "temperature": Range(0, 1e6),
    "top_p": Range(0, 1, low_open=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(1e-3, 1e3),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(-(2**63), 2**64 - 1),
    "logprobs": Range(0, 128),
    "prompt_logprobs": Range(0, 128),
}


def freeze(config: Config) -> Config:
    """Check `config`, write its paths as texts, then close it and its sections against any later change. Returns the
    same object."""
    check(config)
    for each in known_keys():
        owner, name = owner_of(config, each.name)
        value = getattr(owner, name)
        text = [_as_text(item) for item in value] if isinstance(value, list) else _as_text(value)
        if text != value:
            setattr(owner, name, text)
    for section in (*vars(config).values(), config):
        if isinstance(section, Section):
            object.__setattr__(section, "_frozen", True)
    return config


def check(config: Config) -> None:
    """Raise ValueError for the first key that is of another type, out of its range or in conflict with another."""
    for each in known_keys():
        value = attrgetter(each.name)(config)
        if not (each.nullable if value is None else _has_type(value, each.base)):
            raise ValueError(f"{each.name}={value!r} is no value for this key; it takes {each.words}.")
    _check_choices(config)
    _check_sampling(config)
    _check_engine(config)
    _check_cache(config)
    _check_balance(config)
    _check_offload(config)
    _check_job(config)


def _check_choices(config: Config) -> None:
    _one_of("dtype", config.dtype, DTYPES)
    _one_of("load_format", config.load_format, ("auto", "safetensors", "dummy"))
    _one_of("quantization", config.quantization, QUANTIZATIONS)
    _one_of("engine.device", config.engine.device, ("auto", "cuda", "cpu"))
    _one_of("parallel.dispatcher", config.parallel.dispatcher, DISPATCHERS)
    _one_of("parallel.combine", config.parallel.combine, ("exact", "fast"))
    _one_of("parallel.overlap", config.parallel.overlap, OVERLAPS)
    _one_of("cache.dtype", config.cache.dtype, CACHE_DTYPES)
    if not config.model:
        raise ValueError("model='' is empty; give a folder, a hub id, or demo.")
    for name in ("revision", "tokenizer", "input", "output"):
        if getattr(config, name) == "":
            raise ValueError(f"{name}='' is empty; leave the key out or give a value.")


def _check_sampling(config: Config) -> None:
    sampling = config.sampling
    for name, allowed in SAMPLING_RANGES.items():
        _number(f"sampling.{name}", getattr(sampling, name), *allowed)
    if "" in sampling.stop:
        raise ValueError(
            f"sampling.stop={sampling.stop} has an empty string, which would match everywhere; leave it out."
        )
    for token_id in sampling.stop_token_ids:
        _number("sampling.stop_token_ids", token_id, 0)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise ValueError(
            f"sampling.min_tokens={sampling.min_tokens} exceeds sampling.max_tokens={sampling.max_tokens}; "
            "lower the first or raise the second."
        )


def _check_engine(config: Config) -> None:
    engine, sampling = config.engine, config.sampling
    _number("engine.max_model_len", engine.max_model_len, 2)  # a prompt of one token and a token
    _number("engine.max_num_seqs", engine.max_num_seqs, 1)
    _number("engine.max_batched_tokens", engine.max_batched_tokens, 1)
    _number("engine.prefill_chunk", engine.prefill_chunk, 1)
    _number("engine.mla_workspace_tokens", engine.mla_workspace_tokens, 1)
    _number("engine.capture_seconds", engine.capture_seconds, 0, MOST_SECONDS)
    _number("engine.step_timeout_s", engine.step_timeout_s, 0, MOST_SECONDS, low_open=True)
    _number("engine.force_preempt_every", engine.force_preempt_every, 0)
    if engine.prefill_chunk is not None and engine.prefill_chunk > engine.max_batched_tokens:
        raise ValueError(
            f"engine.prefill_chunk={engine.prefill_chunk} exceeds engine.max_batched_tokens="
            f"{engine.max_batched_tokens}, so no step could hold it; lower the first or raise the second."
        )
    if engine.max_model_len is not None and sampling.min_tokens >= engine.max_model_len:
        raise ValueError(
            f"sampling.min_tokens={sampling.min_tokens} does not fit engine.max_model_len={engine.max_model_len}, "
            "which counts the prompt too; lower the first or raise the second."
        )


def _check_cache(config: Config) -> None:
    cache = config.cache
    _number("cache.block_size", cache.block_size, 1, 256)
    _number("cache.num_blocks", cache.num_blocks, 1, 2**31 - 1)  # tables of blocks are of 32 bits
    _number("cache.memory_fraction", cache.memory_fraction, 0, 1, low_open=True)
    _number("cache.cpu_gb", cache.cpu_gb, 0, MOST_BYTES, low_open=True)
    if config.parallel.dispatcher == "deep_ep" and config.parallel.combine == "exact":
        raise ValueError(
            "parallel.dispatcher=deep_ep sums rows on their way, which parallel.combine=exact rules out; give "
            "parallel.combine=fast, or another dispatcher."
        )
    _number("parallel.row_cap", config.parallel.row_cap, 1)
    _number("parallel.timeout_s", config.parallel.timeout_s, 0, MOST_SECONDS, low_open=True)
    _number("parallel.overlap_rows", config.parallel.overlap_rows, 2)
    if config.parallel.overlap_rows is not None and config.parallel.overlap != "halves":
        raise ValueError(
            f"parallel.overlap_rows={config.parallel.overlap_rows} says from where steps are split in halves, which "
            f"parallel.overlap={config.parallel.overlap} never does; leave it out, or give parallel.overlap=halves."
        )
    if cache.scales == "":
        raise ValueError("cache.scales='' is empty; leave the key out or give a JSON file.")
    if cache.scales is not None and cache.dtype != "fp8-layer":
        raise ValueError(
            f"cache.scales={cache.scales} has no effect with cache.dtype={cache.dtype}; use cache.dtype=fp8-layer or "
            "leave the scales out."
        )
    if cache.block_size & (cache.block_size - 1):
        raise ValueError(f"cache.block_size={cache.block_size} is no power of two; 16 suits most checkpoints, 64 MLA.")


def _check_balance(config: Config) -> None:
    balance = config.balance
    _one_of("balance.move", balance.move, ("gain", "always", "never"))
    _number("balance.interval", balance.interval, 0)
    _number("balance.window", balance.window, 1)
    _number("balance.layers_per_step", balance.layers_per_step, 1)
    _number("balance.buffer_mb", balance.buffer_mb, 0, MOST_BYTES, low_open=True)
    _number("balance.redundant_experts", balance.redundant_experts, 0)
    _number("balance.profile_steps", balance.profile_steps, 1)
    for name in ("plan", "profile", "load_file"):
        if getattr(balance, name) == "":
            raise ValueError(f"balance.{name}='' is empty; leave the key out or give a file.")
    if balance.plan is not None:
        beside = {
            "balance.profile": balance.profile,
            "balance.redundant_experts": balance.redundant_experts,
            "balance.move": "always" if balance.move == "always" else None,
        }
        if wrong := next((name for name, value in beside.items() if value), None):
            raise ValueError(
                f"balance.plan={balance.plan} says where every expert is for the whole run, which {wrong}="
                f"{beside[wrong]} would change; leave one of them out."
            )
    if balance.move == "always" and not balance.interval:
        raise ValueError("balance.move=always needs looks to move after; give balance.interval, or leave it out.")


def _check_offload(config: Config) -> None:
    offload = config.offload
    _one_of("offload.regime", offload.regime, REGIMES)
    _one_of("offload.tier", offload.tier, ("host", "disk"))
    _number("offload.slots_per_layer", offload.slots_per_layer, 0)
    _number("offload.gpu_gb", offload.gpu_gb, 0, MOST_BYTES, low_open=True)
    _number("offload.host_gb", offload.host_gb, 0, MOST_BYTES, low_open=True)
    _number("offload.tokens_per_seq", offload.tokens_per_seq, 1)
    beside = {
        name: getattr(offload, name) for name in ("slots_per_layer", "gpu_gb", "host_gb", "tokens_per_seq", "tier")
    }
    beside = {name: value for name, value in beside.items() if value not in (None, "host")}
    if offload.regime == "off" and beside:
        name, value = next(iter(beside.items()))
        raise ValueError(
            f"offload.{name}={value} has no effect with offload.regime=off; give offload.regime=auto, or leave it out."
        )
    given = {name: value for name, value in beside.items() if name in ("slots_per_layer", "gpu_gb")}
    if len(given) == 2:
        raise ValueError(
            f"offload.slots_per_layer={offload.slots_per_layer} and offload.gpu_gb={offload.gpu_gb} both say how many "
            "experts the GPU holds; leave one of them out."
        )
    if given and offload.tokens_per_seq is not None:
        name, value = next(iter(given.items()))
        raise ValueError(
            f"offload.tokens_per_seq={offload.tokens_per_seq} sizes the cache before the experts, whose room "
            f"offload.{name}={value} says already; leave one of them out."
        )
    if offload.regime == "cache" and offload.slots_per_layer == 0:
        raise ValueError(
            "offload.slots_per_layer=0 holds no expert on the GPU, so offload.regime=cache has nothing to keep; give 1 "
            "or more, or offload.regime=stream."
        )
    if offload.tier == "disk":
        _check_disk(config)


def _check_disk(config: Config) -> None:
    if config.offload.host_gb is None:
        raise ValueError(
            "offload.tier=disk reads experts through a part of host memory, and nothing says how large; give "
            "offload.host_gb, or offload.tier=host."
        )
    if config.load_format == "dummy":
        raise ValueError(
            "offload.tier=disk reads experts from the checkpoint's files, and load_format=dummy has none; give "
            "offload.tier=host."
        )


def _check_job(config: Config) -> None:
    _number("job.limit", config.job.limit, 1)
    _one_of("job.resume", config.job.resume, RESUMES)
    _number("job.max_errors", config.job.max_errors, 0)
    _number("job.line_timeout_s", config.job.line_timeout_s, 0, MOST_SECONDS, low_open=True)
    _number("job.shards", config.job.shards, 1, 99_999)
    if config.job.retry_errors and config.job.resume_mode == "never":
        raise ValueError(
            "job.retry_errors=true is about an unfinished run, which job.resume=never does not go on with; leave out "
            "one of them."
        )
    _check_input(config)
    _number("job.report_every_s", config.job.report_every_s, 0, MOST_SECONDS, low_open=True)
    if config.job.report == "":
        raise ValueError("job.report='' is empty; leave the key out or give a folder.")


def _check_input(config: Config) -> None:
    job = config.job
    _one_of("job.order", job.order, ("auto", "file", "prefix"))
    _number("job.look_ahead", job.look_ahead, 1)
    _number("job.look_ahead_mb", job.look_ahead_mb, 0, MOST_BYTES, low_open=True)
    if "" in job.more_input:
        raise ValueError(f"job.more_input={job.more_input} has an empty name; leave it out.")
    if job.more_input and config.input in (None, "-"):
        raise ValueError(
            f"job.more_input={job.more_input} is read after files that input names, and input="
            f"{'null' if config.input is None else '-'} names none; give the first file as input."
        )
    if config.input == "-" and job.strict:
        raise ValueError(
            "job.strict=true reads every line before the first is answered, and input=- (standard input) can be read "
            "once; write it to a file first, or leave job.strict out."
        )


def file_to_write(name: str, value: str) -> Path:
    """The file that the key `name` names, for something that is written at the end of much work. ValueError where it
    could not be, as far as can be told before."""
    path = Path(value)
    folder = Path(os.path.realpath(path)).parent
    # Not Path's methods: they raise where the system refuses the very question.
    if not os.path.isdir(folder):
        raise ValueError(f"{name}={value} cannot be written: there is no folder {folder}; make it first.")
    if os.path.isdir(path):
        raise ValueError(f"{name}={value} cannot be written: it is a folder; give the name of a file.")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise ValueError(f"{name}={value} cannot be written: it is closed to this user; give another.")
    # A file is put in its place whole (moe/engine/whole_file.py), which is a right of the folder; a device is not.
    if (os.path.isfile(path) or not os.path.exists(path)) and not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={value} cannot be written: {folder} is closed to this user; give another folder.")
    return path


def _has_type(value: object, base: str) -> bool:
    """Whether a key of type `base` takes a value: a path is a text too, and numbers may be another library's."""
    if base.startswith("list["):
        return isinstance(value, list) and all(_has_type(each, base[5:-1]) for each in value)
    if isinstance(value, bool) or base == "bool":
        return isinstance(value, bool) and base == "bool"
    return isinstance(value, {"str": str | os.PathLike, "int": Integral, "float": Real}[base])


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; give {' or '.join(choices)}.")


def in_range(value: float, low: float, high: float | None = None, low_open: bool = False) -> bool:
    """Whether a number is finite and within; whole numbers of any size may be asked."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return (low < value if low_open else low <= value) and (high is None or value <= high)


def _number(name: str, value: float | None, low: float, high: float | None = None, low_open: bool = False) -> None:
    """None passes: it stands for a default."""
    if value is None or in_range(value, low, high, low_open):
        return
    if high is not None:
        allowed = f"{'above' if low_open else 'from'} {_shown(low)} to {_shown(high)}"
    else:
        allowed = f"above {_shown(low)}" if low_open else f"from {_shown(low)} up"
    raise ValueError(f"{name}={value} is out of range; give a value {allowed}.")


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.12g}"
