"""The output as Parquet: the fields that all records share as columns, and the whole record as JSON text beside them.

Knows pyarrow, which is optional, and both forms of records; the one file that writes Parquet.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from moe.batch.lines import content_of

GROUP_BYTES = 32 << 20
GROUP_RECORDS = 50_000
COLUMNS = {
    "id": "string",
    "line": "int64",
    "text": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "error_type": "string",
    "error": "string",
    "record": "string",
}


def check_pyarrow(output: Path) -> None:
    """ValueError where the package is missing, before anything is computed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"output={output} asks for Parquet, which needs the package pyarrow; install sortyard[jobs], or give a "
            ".jsonl name."
        ) from error


class ParquetOutput:
    """Rows gathered into groups of bounded size."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        self._schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in COLUMNS.items()])
        self._table = pyarrow.Table
        self._file = path.open("wb")
        self._writer = parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._num_bytes = 0

    def write(self, number: int, record: bytes) -> None:
        self._rows.append(row_of(number, json.loads(record), record))
        self._num_bytes += len(record)
        if self._num_bytes >= GROUP_BYTES or len(self._rows) >= GROUP_RECORDS:
            self._write_group()

    def close(self) -> None:
        """Write the rest and sync it; the file is closed even where that fails."""
        with self._file:
            if self._rows:
                self._write_group()
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())

    def _write_group(self) -> None:
        self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._num_bytes = [], 0


def row_of(number: int, record: dict[str, Any], raw: bytes) -> dict[str, Any]:
    """The columns of the record of line `number`, of either form; what it lacks is null. Of several samples `text` is
    the first."""
    row: dict[str, Any] = {"record": raw.decode("utf-8").removesuffix("\n"), "line": number}
    row["id"] = _id(record.get("custom_id") if "custom_id" in record else record.get("id"))
    error = record.get("error")
    if error is not None:
        return row | {"error_type": error.get("type", error.get("code")), "error": _text(error["message"])}
    if "custom_id" not in record:
        sample = record.get("outputs", [record])[0]
        row |= {"text": sample["text"], "finish_reason": sample["finish_reason"]}
        return row | {name: record[name] for name in ("prompt_tokens", "completion_tokens")}
    body = record["response"]["body"]
    choice = body["choices"][0]
    row["text"] = choice["message"]["content"] if "message" in choice else choice["text"]
    row["finish_reason"] = choice["finish_reason"]
    return row | {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}


def _id(value: Any) -> str | None:
    """Ids of any JSON type in one column: a text as it is, anything else as JSON, in the form of the record."""
    if value is None:
        return None
    return _text(value) if isinstance(value, str) else content_of(value).decode("utf-8")


def _text(value: str) -> str:
    """Half of a surrogate pair, from the id of a line that could not be read or the name of a file, is no UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
