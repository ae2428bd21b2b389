"""Draw a job's report again from its numbers: `python -m launch.report FOLDER` (or metrics.json itself).

The page is made anew beside the file, for example after an update, or where a fault kept it from being written. Exit
codes: 0 drawn; 1 it cannot be written; 2 no numbers of a job there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.words import asks_for_help
from moe.batch.page import render_page
from moe.batch.report_files import METRICS, PAGE
from moe.engine.whole_file import write_whole

OK, FAULT, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    asked = asks_for_help(words)
    if len(words) != 1 or asked:
        print(__doc__)
        return OK if asked else USAGE
    source = Path(words[0])
    if source.is_dir():
        source /= METRICS
    page = source.with_name(PAGE)
    try:
        write_whole(page, render_page(read_metrics(source)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"error: {page} cannot be written: {error.strerror}", file=sys.stderr)
        return FAULT
    print(page)
    return OK


def read_metrics(path: Path) -> dict[str, Any]:
    """The record of a job. ValueError where the file is none."""
    try:
        metrics = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give a folder of job.report.") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; give a folder of job.report.") from error
    if not isinstance(metrics, dict):
        raise ValueError(f"{path} holds no record of a job; give a folder of job.report.")
    return metrics


if __name__ == "__main__":
    sys.exit(main())
