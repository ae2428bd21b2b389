"""What a job's answers follow from, as names and values: a run goes on with another's records only where all are equal.

Knows configs, checkpoint folders and versions. Weights are not read whole: names, sizes, headers and samples of each
file tell one checkpoint from another, in a second for hundreds of gigabytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import torch

from configs.schema import Config
from moe.engine.parts import resolve_device
from moe.model.checkpoint_file import readable
from moe.model.hub import resolve_model, resolve_tokenizer
from moe.version import __version__

# Keys beside the sampling ones that change an answer's tokens or its record.
KEYS = (
    "model",
    "dtype",
    "load_format",
    "quantization",
    "engine.max_model_len",
    "engine.seed",
    "cache.dtype",
    "parallel.combine",
    "job.columns",
)
LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "msgspec")  # the last writes the records' numbers
WEIGHTS = ".safetensors"
SAMPLE_BYTES, SAMPLES = 1 << 14, 16
"""Of each weight file, spread over it: a checkpoint trained on has the same names and sizes."""


def job_fingerprint(config: Config, source: Mapping[str, str]) -> dict[str, str]:
    """`source`: what the input says of its identity. ValueError where the model cannot be found."""
    folder = resolve_model(config.model, config.revision)
    found = {name: _value(attrgetter(name)(config)) for name in KEYS}
    found |= {f"sampling.{item.name}": _value(getattr(config.sampling, item.name)) for item in fields(config.sampling)}
    found["model's weights"] = _digest(_weights(folder))
    found["model's other files"] = _digest(_small_files(folder))
    if config.tokenizer is not None:
        found["tokenizer's files"] = _digest(_small_files(resolve_tokenizer(config.tokenizer)))
    found["job.chat_template"] = _content(config.job.chat_template)
    found["cache.scales"] = _content(config.cache.scales)
    found["device"] = _device(config)
    found["sortyard"] = __version__
    return {**source, **found, **{name: _version(name) for name in LIBRARIES}}


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _weights(folder: Path) -> Iterable[bytes]:
    for path in sorted(folder.glob(f"*{WEIGHTS}")):
        with readable(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            yield f"{path.name} {size}".encode()
            header = int.from_bytes(file.read(8), "little")
            yield file.read(min(header, 64 << 20))
            for index in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                yield file.read(SAMPLE_BYTES)


def _small_files(folder: Path) -> Iterable[bytes]:
    """Configs, tokenizer, template and index: everything but the weights and what is there to be read by people."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".txt", ".tiktoken", ".model") and path.is_file():
            with readable(path):
                content = path.read_bytes()
            yield path.name.encode()
            yield content


def _content(given: str | None) -> str:
    """What was given as a file, or as its text."""
    if given is None:
        return "null"
    try:
        return _digest([Path(given).read_bytes()])
    except (OSError, ValueError):
        return _digest([given.encode("utf-8", "surrogatepass")])


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(b"%d:" % len(part))
        found.update(part)
    return found.hexdigest()


def _device(config: Config) -> str:
    device = resolve_device(config.engine.device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
