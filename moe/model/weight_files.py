"""The safetensors files of a checkpoint folder: which file supplies which tensor, all headers checked, nothing loaded.

Knows file names, the index and headers; knows nothing of models or devices. The index decides: a file or a copy of a
tensor that it does not name is ignored, and said so in one line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moe.model.checkpoint_file import is_named, read_small
from moe.model.safetensors_header import TensorEntry, read_header

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_LISTED = 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the file that supplies it."""

    file: Path
    entry: TensorEntry


@dataclass(frozen=True)
class WeightFiles:
    """Everything a folder stores, by name on disk. `ignored`: files and copies that the index does not name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    ignored: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """ValueError names the folder and the missing files, or each bad file with its fault."""
        if not folder.is_dir():
            raise ValueError(f"model folder {folder} does not exist; check the path.")
        if not is_named(folder / INDEX_NAME):
            return cls._open_single(folder)
        weight_map = _read_index(folder / INDEX_NAME)
        file_names = sorted(set(weight_map.values()))
        missing = [name for name in file_names if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{folder}: {INDEX_NAME} names {len(file_names)} files, of which {len(missing)} are missing: "
                f"{listed(missing)}; incomplete download: fetch the missing files."
            )
        headers = _read_headers([folder / name for name in file_names])
        return cls._from_index(folder, weight_map, headers)

    @classmethod
    def _open_single(cls, folder: Path) -> WeightFiles:
        file = folder / SINGLE_NAME
        if not is_named(file):
            raise ValueError(_no_weights(folder))
        tensors = {name: StoredTensor(file, entry) for name, entry in read_header(file).items()}
        return cls(folder, tensors, _ignored_files(folder, {SINGLE_NAME}))

    @classmethod
    def _from_index(
        cls, folder: Path, weight_map: dict[str, str], headers: dict[str, dict[str, TensorEntry]]
    ) -> WeightFiles:
        absent = [f"{name} (in {file})" for name, file in weight_map.items() if name not in headers[file]]
        if absent:
            raise ValueError(
                f"{folder}: {INDEX_NAME} names {len(absent)} tensors that their files do not hold: {listed(absent)}; "
                "index and files belong to different versions: fetch the folder again."
            )
        tensors = {name: StoredTensor(folder / file, headers[file][name]) for name, file in weight_map.items()}
        copies = [
            f"{name} in {file}" for file, header in headers.items() for name in header if weight_map.get(name) != file
        ]
        if copies:
            logger.warning("%s: ignored tensors that the index does not place there: %s", folder, listed(copies))
        return cls(folder, tensors, _ignored_files(folder, set(headers)) + tuple(copies))


def listed(names: list[str]) -> str:
    """At most 20 of the names, and how many more there are."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f", and {more} more" if more > 0 else "")


def _read_index(file: Path) -> dict[str, str]:
    text = read_small(file)
    try:
        weight_map = json.loads(text)["weight_map"]
        valid = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    except (ValueError, KeyError, TypeError):
        weight_map, valid = {}, False
    if not valid or not weight_map:
        raise ValueError(f"{file} of {len(text)} bytes has no usable weight_map; fetch it again.")
    outside = sorted({name for name in weight_map.values() if Path(name).name != name})
    if outside:
        raise ValueError(
            f"{file} names files by a path: {listed(outside)}; they must lie beside it, named by their names alone."
        )
    return weight_map


def _read_headers(files: list[Path]) -> dict[str, dict[str, TensorEntry]]:
    """All headers, read side by side; every bad file is reported, not only the first."""

    def read(file: Path) -> dict[str, TensorEntry] | ValueError:
        try:
            return read_header(file)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(16, len(files))) as pool:
        results = list(pool.map(read, files))
    faults = [str(result) for result in results if isinstance(result, ValueError)]
    if faults:
        raise ValueError("\n".join(faults[:_MAX_LISTED]))
    return {file.name: result for file, result in zip(files, results) if not isinstance(result, ValueError)}


def _no_weights(folder: Path) -> str:
    present = sorted(file.name for file in folder.iterdir())
    pickles = [name for name in present if name.endswith(_PICKLE_SUFFIXES)]
    shards = [name for name in present if name.endswith(".safetensors")]
    if shards:
        return (
            f"{folder}: holds {listed(shards)} but neither {INDEX_NAME} nor {SINGLE_NAME}; without the index nothing "
            "says which files belong together: fetch it too."
        )
    if pickles:
        return (
            f"{folder}: holds pickle files only ({listed(pickles)}), which can run code when read and are refused; "
            "use a revision with safetensors or convert them."
        )
    return (
        f"{folder}: no weights: expected {SINGLE_NAME}, or {INDEX_NAME} with its files; found "
        f"{listed(present) or 'an empty folder'}. Fetch the weights, or use load_format=dummy."
    )


def _ignored_files(folder: Path, used: set[str]) -> tuple[str, ...]:
    others = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in used)
    if others:
        logger.warning("%s: ignored weight files that the checkpoint does not name: %s", folder, listed(others))
    return tuple(others)
