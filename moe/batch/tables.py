"""Rows of a Parquet file, or of a dataset that Hugging Face `datasets` saved to disk, as records of lines.

Knows tables and which of their columns make a line; knows nothing of what a field means. Reading holds a few hundred
rows, whatever the table's size. The one file that imports pyarrow and datasets (the extra `jobs`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.batch.lines import BadLine, InputFault, Line

ROWS_AT_A_TIME = 128
BUFFER_BYTES = 1 << 20
DATASET_FILES, SPLITS_FILE = ("state.json", "dataset_info.json"), "dataset_dict.json"


@dataclass(frozen=True)
class Table:
    """A table that was opened once and found whole as far as its ends tell. `columns`: name -> what is wrong with its
    type for a record of JSON, or None."""

    path: Path
    columns: dict[str, str | None]
    num_rows: int
    is_dataset: bool

    def rows(self, wanted: Mapping[str, str]) -> Iterator[Line | BadLine]:
        """All rows as lines, the first is number 1. `wanted`: field of the record -> column. InputFault where the file
        is damaged.

        Empty cells are left out, in objects inside of lists too: a column has a place for every key of any row.
        """
        number = 0
        columns = list(dict.fromkeys(wanted.values()))
        try:
            for batch in (_dataset_batches if self.is_dataset else _parquet_batches)(self.path, columns):
                num_bytes = 2 * batch.nbytes // max(batch.num_rows, 1)
                for index in range(batch.num_rows):
                    number += 1
                    yield _line(number, batch, index, wanted, num_bytes)
        except (OSError, ValueError, MemoryError, NotImplementedError, KeyError) as error:  # pyarrow's own are of these
            raise InputFault(_first_line(error)) from error


def open_parquet(path: Path) -> Table:
    """ValueError, without the file's name, where it cannot be read; its footer is read, which a torn file lacks."""
    arrow = _arrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except (OSError, ValueError) as error:
        raise ValueError(
            f"is no whole Parquet file: {_first_line(error)}; it may be cut off, so write or fetch it again."
        ) from error
    return _checked(path, schema, num_rows, is_dataset=False)


def open_dataset(folder: Path) -> Table:
    """The same for a folder written by Dataset.save_to_disk."""
    if (folder / SPLITS_FILE).is_file():
        splits = json.loads((folder / SPLITS_FILE).read_text("utf-8")).get("splits", [])
        names = " or ".join(str(folder / name) for name in splits)
        raise ValueError(f"is a dataset of several splits; give one of them: {names}.")
    if not all((folder / name).is_file() for name in DATASET_FILES):
        raise ValueError(
            f"is a folder, and no dataset that was saved to disk; give its files, as in {folder / '*.parquet'}."
        )
    try:
        dataset = _datasets().load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"is no whole dataset: {type(error).__name__}: {_first_line(error)}; save or fetch it again."
        ) from error
    return _checked(folder, dataset.features.arrow_schema, dataset.num_rows, is_dataset=True)


def _checked(path: Path, schema: Any, num_rows: int, *, is_dataset: bool) -> Table:
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise ValueError(f"has more than one column {min(twice)!r}; rename one.")
    return Table(path, {field.name: _no_json(field.type) for field in schema}, num_rows, is_dataset)


def _no_json(kind: Any) -> str | None:
    """The part of a column's type that JSON lacks; None where there is none."""
    types = _arrow().types
    if types.is_dictionary(kind):
        return _no_json(kind.value_type)
    if types.is_struct(kind):
        return next((wrong for inner in kind if (wrong := _no_json(inner.type))), None)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _no_json(kind.value_type)
    texts = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    plain = texts or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
    return None if plain else str(kind)


def _line(number: int, batch: Any, index: int, wanted: Mapping[str, str], num_bytes: int) -> Line | BadLine:
    """One row of a batch. A cell that JSON cannot hold makes a bad line, of which the rest is read."""
    record: dict[str, Any] = {}
    reason = None
    for field, column in wanted.items():
        try:
            value = _filled(batch.column(column)[index].as_py())
        except ValueError as error:
            reason = reason or f"column {column!r}: {_first_line(error)}"
            continue
        if value is not None:
            record[field] = value
    if reason is not None:
        return BadLine(number, reason, record, num_bytes=num_bytes)
    return Line(number, record, num_bytes=num_bytes)


def _parquet_batches(path: Path, columns: list[str]) -> Iterator[Any]:
    # A buffer of its own for each column: without one, whole column chunks of a row group would be read at once.
    with _arrow().parquet.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        yield from file.iter_batches(batch_size=ROWS_AT_A_TIME, columns=columns)


def _dataset_batches(folder: Path, columns: list[str]) -> Iterator[Any]:
    dataset = _datasets().load_from_disk(str(folder)).select_columns(columns).with_format("arrow")
    yield from dataset.iter(batch_size=ROWS_AT_A_TIME)


def _filled(value: Any) -> Any:
    """The value without empty cells of objects; an empty content is what a message says. ValueError for NaN."""
    if isinstance(value, dict):
        return {
            name: _filled(inner)
            for name, inner in value.items()
            if inner is not None or (name == "content" and "role" in value)
        }
    if isinstance(value, list):
        return [_filled(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    return value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            "is a Parquet file, which needs the package pyarrow; install sortyard[jobs], or write it as JSONL."
        ) from error
    return pyarrow


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "is a saved dataset, which needs the package datasets; install sortyard[jobs], or write it as JSONL."
        ) from error
    return datasets
