"""The file that a bench leaves: machine, rates of the card, figures. Knows JSON; measures nothing but the card's rates.

A run may be cut at any time. So the file is written again after every piece, whole each time, and says whether the run
came to its end.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from launch.figure import Figure, short
from launch.machine import clocks, machine_record
from launch.roofline import Ceilings, measure_ceilings
from moe.engine.whole_file import write_whole

logger = logging.getLogger("launch.bench")


def begin_record(
    device: torch.device, baselines: dict[str, Any], command: list[str], commit: str | None
) -> tuple[dict[str, Any], Ceilings]:
    """The head of a result file, and the card's rates: the recorded bandwidth where there is one (floors of different
    runs then compare), the product's rate from this run."""
    probe = measure_ceilings(device)
    record = machine_record(device, shlex.join(command), commit)
    known = baselines.get("ceilings", {}).get(record["device"])
    ceilings = probe
    if known is not None:
        ceilings = Ceilings(known["read_tb_s"] * 1e12, probe.flops_per_s, f"recorded bandwidth; {probe.source}")
    for name, each in (("ceilings", ceilings), ("probe", probe)):
        rates = {"tb_s": short(each.bytes_per_s / 1e12), "tflop_s": short(each.flops_per_s / 1e12)}
        record[name] = rates | {"source": each.source}
    logger.info(
        "floors: %.2f TB/s, %.1f TFLOP/s (probe: %.2f TB/s; %s)",
        ceilings.bytes_per_s / 1e12,
        ceilings.flops_per_s / 1e12,
        probe.bytes_per_s / 1e12,
        probe.source,
    )
    return record | {"baselines": baselines.get("source"), "engines": {}}, ceilings


def write_record(record: dict[str, Any], figures: Sequence[Figure], path: Path | None, *, complete: bool) -> None:
    """`complete`: nothing more is measured. `path` None: nothing is written."""
    if path is None:
        return
    record["clocks"]["after"] = clocks()
    whole = record | {"complete": complete, "figures": [figure.as_dict() for figure in figures]}
    write_whole(path, json.dumps(whole, indent=1) + "\n")
