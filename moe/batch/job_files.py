"""Where a job's lines come from and its answers go, checked before any model is loaded. Knows names; reads nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from moe.batch.output import is_parquet
from moe.batch.parquet_output import check_pyarrow
from moe.batch.report_files import check_report_folder
from moe.batch.run_files import RunFiles
from moe.batch.sources import Source

# Names under which nobody expects JSONL.
OTHER_FORMS = frozenset(
    (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".csv", ".tsv", ".xlsx", ".arrow", ".db")
)


@dataclass(frozen=True)
class JobFiles:
    """The input, opened; the output with all that lies beside it. `overwrite`: what is there may be replaced; of the
    demo's own output that is not asked."""

    source: Source
    run: RunFiles
    overwrite: bool
    report: Path | None = None

    @property
    def output(self) -> Path:
        return self.run.output


def job_files(config: Config) -> JobFiles:
    """The job's files. ValueError where one is wrong: missing, of the wrong kind, or another one's name."""
    source = Source.open(config)
    if config.output is not None:
        _check_name(config.output)
    output = Path(config.output) if config.output is not None else _default_output(config, source)
    run = RunFiles(output, config.job.shards)
    _check_output(output, source, run)
    report = None
    if config.job.report is not None:
        others = {"output": run.base} | {f"input ({path})": path for path in source.paths}
        report = check_report_folder(config.job.report, others)
    overwrite = config.job.overwrite or (config.input is None and config.output is None)
    return JobFiles(source, run, overwrite, report)


def _default_output(config: Config, source: Source) -> Path:
    """NAME.answers.jsonl in the current folder."""
    if config.input is None:
        return Path("demo.answers.jsonl")
    if not source.paths:
        return Path("answers.jsonl")
    name = source.paths[0].name
    for suffix in (".gz", ".zst", ".jsonl", ".json", ".parquet"):
        name = name.removesuffix(suffix) or name
    return Path(f"{name}.answers.jsonl")


def _check_name(name: str) -> None:
    """ValueError where a name asks for something else than a file of records: it would hold them all the same."""
    if name == "-":
        raise ValueError(
            "output=- is no file: answers are not written to standard output. Give a name (./- for this one)."
        )
    if name.endswith(os.sep):
        raise ValueError(f"output={name} is a folder's name; give the name of a file in it.")
    if Path(name).suffix.lower() in OTHER_FORMS:
        raise ValueError(
            f"output={name} asks by its name for a form that is not written: there are JSONL and .parquet. Give "
            "such a name, and pack or convert the file when it is whole."
        )


def _check_output(output: Path, source: Source, run: RunFiles) -> None:
    for final in (output, *run.finals):
        if os.path.isdir(final):
            raise ValueError(f"output={final} is a folder; give the name of a file in it.")
    if os.path.exists(output) and not os.path.isfile(output):
        raise ValueError(
            f"output={output} is a pipe or a device, but records are moved into place when all are there; give the "
            "name of a file."
        )
    for final in (output, *run.finals, run.mark_path):
        for path in source.paths:
            if _is_same(final, path):
                raise ValueError(
                    f"output={output} is the input file {path}; answers would destroy the prompts. Give another name."
                )
    if is_parquet(output):
        check_pyarrow(output)


def _is_same(path: Path, other: Path) -> bool:
    """Whether two names mean one file, which need not exist yet."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)
