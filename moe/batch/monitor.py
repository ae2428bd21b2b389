"""What a job says of itself in its report folder, while it runs and at its end.

Knows progress records and counters; no engine, no HTML: what it gathers is one JSON-ready record, which
`report_files.py` writes in each form.

Memory is bounded whatever the job's length: a series of fixed size, and of each kind of error the first few lines.
A fault here is a warning. It never ends a job.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from configs.schema import Config, changed_keys
from moe.batch.report import JobReport, Progress
from moe.batch.report_files import write_report
from moe.batch.series import Series
from moe.engine.memory_plan import MemoryPlan
from moe.engine.stats import EngineStats
from moe.version import __version__

KEPT_NOTES = 20  # of each kind of error: enough to see what is wrong; the output has them all
KEPT_KINDS = 40
MESSAGE_CHARS = 500
LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
COUNTERS = ("lines_done", "lines_failed", "output_tokens", "computed_prompt_tokens", "cached_tokens", "preemptions")
GAUGES = ("running", "waiting", "kv_use")
FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ErrorNote:
    """One error record. `origin`: file:line, where more than the number tells where the line is."""

    number: int
    origin: str | None
    id: Any
    kind: str
    message: str


class ErrorLog:
    """Errors counted by kind, with the first notes of each. Can be sent to another rank and merged there."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.notes: dict[str, list[ErrorNote]] = {}

    def add(self, note: ErrorNote) -> None:
        """Count one; keep it while there are few of its kind."""
        self.counts[note.kind] += 1
        if note.kind not in self.notes and len(self.notes) >= KEPT_KINDS:
            return
        kept = self.notes.setdefault(note.kind, [])
        if len(kept) < KEPT_NOTES:
            kept.append(note)

    def merge(self, other: ErrorLog) -> None:
        """Take in what another rank met; the kept notes are those of the lowest lines."""
        self.counts.update(other.counts)
        for kind, notes in other.notes.items():
            kept = sorted([*self.notes.get(kind, []), *notes], key=lambda note: note.number)
            self.notes[kind] = kept[:KEPT_NOTES]

    def as_list(self, origin: str | None) -> list[dict[str, Any]]:
        """JSON-ready, the most frequent kind first. `origin`: the file of lines that name none."""
        return [
            {
                "kind": kind,
                "count": count,
                "lines": [
                    {
                        "number": note.number,
                        "origin": note.origin or (None if origin is None else f"{origin}:{note.number}"),
                        "id": None if note.id is None else str(note.id)[:MESSAGE_CHARS],
                        "message": note.message[:MESSAGE_CHARS],
                    }
                    for note in sorted(self.notes.get(kind, []), key=lambda note: note.number)
                ],
            }
            for kind, count in self.counts.most_common()
        ]


class Monitor:
    """A job's own record of itself. All methods are cheap; without job.report nothing is kept but errors.

    `words`: the command line. `rank`: of several, only the first writes; the others' errors are merged into `errors`.
    """

    def __init__(self, config: Config, words: Sequence[str], *, rank: int = 0) -> None:
        self.errors = ErrorLog()
        self._config = config
        self._words = list(words)
        self._folder = None if config.job.report is None or rank > 0 else Path(config.job.report)
        self._series = Series(COUNTERS, GAUGES)
        self._began = datetime.now(UTC)
        self._write_at = time.monotonic() + config.job.report_every_s
        self.lines_total: int | None = None  # of the whole job; may become known while it runs
        self._facts: dict[str, Any] = {"lines_resumed": 0, "ranks": 1, "plan": None, "fault": None}
        self._model, self._device = config.model, "no device yet"
        self._last: Progress | None = None
        self._source = config.input if isinstance(config.input, str) and config.input != "-" else None

    def start(
        self,
        *,
        model: str,
        device: str,
        lines_resumed: int = 0,
        plan: MemoryPlan | None = None,
        ranks: int = 1,
    ) -> None:
        """What is known once the model is loaded. `lines_resumed`: those that earlier runs have done."""
        self._model, self._device = model, device
        self._facts |= {"lines_resumed": lines_resumed, "ranks": ranks}
        self._facts["plan"] = None if plan is None else {**asdict(plan), "kv_bytes": plan.kv_bytes}

    def step(self, progress: Progress) -> None:
        """After every step of the engine; writes the files when job.report_every_s have passed."""
        if self._folder is None:
            return
        self._last, stats = progress, progress.stats
        self._series.add(
            progress.seconds,
            (
                progress.lines_done,
                progress.lines_failed,
                progress.output_tokens,
                stats.computed_prompt_tokens if stats is not None else 0,
                stats.cached_tokens if stats is not None else 0,
                stats.preemptions if stats is not None else 0,
            ),
            (
                stats.num_running if stats is not None else 0,
                stats.num_waiting if stats is not None else 0,
                progress.kv_use,
            ),
        )
        if time.monotonic() >= self._write_at:
            self._write(self._so_far(), "running")
            self._write_at = time.monotonic() + self._config.job.report_every_s

    def error(self, note: ErrorNote) -> None:
        """An error record was made."""
        self.errors.add(note)

    def finish(self, report: JobReport | None, *, outcome: str, fault: str | None = None) -> None:
        """The job is over: "complete", "some failed", "stopped" or "fault", which `fault` tells of. Without a report
        the numbers are those of the last step of this rank."""
        if self._folder is not None:
            self._facts["fault"] = fault
            self._write(report or self._so_far(), outcome)

    def _so_far(self) -> JobReport:
        """This rank's numbers as of the last step, with the lines of earlier runs."""
        last = self._last or Progress(0, 0, 0, 0, 0.0, 0.0)
        failed = self.errors.counts.total()
        return JobReport.of(
            last.stats or EngineStats(),
            model=self._model,
            device=self._device,
            answered=max(self._facts["lines_resumed"] + last.lines_done - failed, 0),
            failed=failed,
            seconds=last.seconds,
        )

    def _write(self, report: JobReport, outcome: str) -> None:
        assert self._folder is not None, "a report is written where job.report is set"
        try:
            write_report(self._folder, self._metrics(report, outcome))
        except Exception as error:  # whatever it is: the answers matter more
            logger.warning(
                "job.report=%s: the report is not written: %s: %s", self._folder, type(error).__name__, error
            )

    def _metrics(self, report: JobReport, outcome: str) -> dict[str, Any]:
        """Everything that the report shows, JSON-ready."""
        now = datetime.now(UTC)
        return {
            "format": FORMAT,
            "version": __version__,
            "command": shlex.join(["python", "-m", "launch.generate", *self._words]),
            "outcome": outcome,
            "began": self._began.isoformat(timespec="seconds"),
            "written": now.isoformat(timespec="seconds"),
            "folder": os.getcwd(),
            "output": self._config.output,
            **report.as_dict(),
            **self._facts,
            "lines_total": self.lines_total,
            "memory_used": _memory_used(),
            "errors": self.errors.as_list(self._source),
            "series": self._series.as_dict(),
            "versions": _versions(),
            "config": _as_dict(self._config),
            "changed_keys": list(changed_keys(self._config)),
        }


def _as_dict(section: Any) -> dict[str, Any]:
    """A config as nested dicts, without what freezing added to it."""
    values = ((item.name, getattr(section, item.name)) for item in fields(section))
    return {name: _as_dict(value) if is_dataclass(value) else value for name, value in values}


def _versions() -> dict[str, str]:
    found = {"sortyard": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"system": f"{platform.system()} {platform.machine()}"}


def _memory_used() -> dict[str, int]:
    """Largest use so far, in bytes: of this process, and of the device where there is one."""
    unit = 1 if sys.platform == "darwin" else 1024
    used = {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        used["device_peak"] = torch.cuda.max_memory_reserved()
    return used
