"""The files of job.report: where they go, and writing them whole. Knows a folder and the three forms of one record.

FOLDER/metrics.json   everything that is known, for programs; `python -m launch.report FOLDER` draws from it again
FOLDER/metrics.prom   the numbers in Prometheus' text form, for a node exporter's textfile collector
FOLDER/report.html    the same for people
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe.batch.page import render_page
from moe.batch.prometheus import prometheus_text
from moe.engine.whole_file import write_whole

PAGE, METRICS, PROMETHEUS = "report.html", "metrics.json", "metrics.prom"
_FILE_ENDINGS = (".json", ".jsonl", ".html", ".htm", ".prom")


def check_report_folder(report: str, others: Mapping[str, Path]) -> Path:
    """The folder of job.report, which need not exist yet. ValueError where it cannot be made or written to, or where a
    file that is written into it is one of `others` (key of the command line: path)."""
    folder = Path(report)
    where = f"job.report={report}"
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ValueError(f"{where} is a file; give a folder: {PAGE}, {METRICS} and {PROMETHEUS} go into it.")
    exists = os.path.isdir(folder)
    if not exists and folder.suffix.lower() in _FILE_ENDINGS:
        raise ValueError(
            f"{where} looks like the name of a file; give a folder, for example job.report={folder.with_suffix('')}: "
            f"{PAGE}, {METRICS} and {PROMETHEUS} go into it."
        )
    closest = folder if exists else folder.absolute().parent
    if not os.path.isdir(closest):
        raise ValueError(f"{where} cannot be made: {closest} is no folder.")
    if not os.access(closest, os.W_OK | os.X_OK):
        raise ValueError(f"{where}: {closest} cannot be written to; give another folder, or change its rights.")
    for name in (PAGE, METRICS, PROMETHEUS):
        for key, other in others.items():
            if os.path.realpath(folder / name) == os.path.realpath(other):
                raise ValueError(f"{where}: its {name} is the {key} file, which it would destroy; give another folder.")
    return folder


def write_report(folder: Path, metrics: Mapping[str, Any]) -> None:
    """Write the three files, each whole. The numbers come first: where the page cannot be made, it can be drawn from
    them later."""
    folder.mkdir(exist_ok=True)
    write_whole(folder / METRICS, json.dumps(metrics, indent=1) + "\n")
    write_whole(folder / PROMETHEUS, prometheus_text(metrics))
    write_whole(folder / PAGE, render_page(metrics))
