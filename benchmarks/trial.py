"""Drafts beside what is in use, in one run: `python benchmarks/trial.py drafts=NAME,NAME result=trial.json`.

A draft is a module of benchmarks/drafts/ that has not been measured yet, or not as far as it must be: `cases(device)`
yields its cases (drafts/case.py), `install()` puts it in the place of what is in use. First every form's results are
compared, then all forms take turns in replayed graphs.

    python benchmarks/trial.py                                         # what there is, with its first line
    python benchmarks/trial.py drafts=all seconds=0.3 result=trial.json
    python benchmarks/trial.py with=NAME,NAME workload=w2 model=dsv2-lite limit=1   # launch.bench, drafts in place

A draft that fails says so and the next one has its turn: device time is dear. The exit status is 1 if any failed.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's own folder is all that Python puts there

from launch import bench  # noqa: E402
from launch.machine import machine_record  # noqa: E402
from launch.replay import time_variants  # noqa: E402
from launch.words import own_words, refuse  # noqa: E402
from moe.engine.parts import resolve_device  # noqa: E402
from moe.engine.whole_file import write_whole  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.drafts.case import Case

FOLDER = ROOT / "benchmarks" / "drafts"
OWN_KEYS = {
    "drafts": "all, or some of them with commas: their cases",
    "with": "drafts that are put in place of what is in use; the other words are launch.bench's",
    "device": "auto, cuda or cpu",
    "seconds": "device time of each case's samples",
    "result": "a JSON file, written again after every case",
}


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if "def cases(" in path.read_text("utf-8"))


def load(name: str) -> Any:
    if name not in names():
        raise ValueError(f"draft {name} is unknown; there are {', '.join(names()) or 'none'}.")
    return importlib.import_module(f"benchmarks.drafts.{name}")


def tensors(result: object) -> Iterator[Tensor]:
    """Of a call's result, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from tensors(each)


@torch.inference_mode()
def differences(case: Case) -> dict[str, float]:
    """Of each draft: how far it is off, over the largest value; 0 where every bit is the same."""
    first, *others = case.forms
    off = dict.fromkeys(others, 0.0)
    for place, call in enumerate(case.forms[first]):
        wanted = list(tensors(call()))
        assert wanted, f"{case.name}: {first} returns no tensor"
        for name in others:
            given = list(tensors(case.forms[name][place]()))
            assert [each.shape for each in given] == [each.shape for each in wanted], f"{case.name}: shapes of {name}"
            off[name] = max(off[name], *itertools.starmap(distance, zip(wanted, given, strict=True)))
    return off


def distance(wanted: Tensor, given: Tensor) -> float:
    """0 for the same bits; infinite where one has a NaN that the other lacks."""
    assert wanted.dtype == given.dtype, f"{given.dtype} for {wanted.dtype}"
    if torch.equal(wanted.view(torch.uint8), given.view(torch.uint8)):
        return 0.0
    difference = (wanted.double() - given.double()).abs()
    off = difference.max() / wanted.double().abs().nan_to_num().max().clamp_min(1e-30)
    return float(off) if torch.isfinite(off) else float("inf")


def measure(name: str, device: torch.device, seconds: float, record: dict[str, Any], result: Path | None) -> bool:
    """All cases of a draft; False if one went wrong."""
    good = True
    for case in load(name).cases(device):
        row: dict[str, Any] = {"draft": name, "case": case.name}
        try:
            row["off"] = differences(case)
            row["same"] = all(off <= case.tolerance for off in row["off"].values())
            timings = time_variants(case.forms, device, seconds=seconds)
            row["us"] = {form: round(timing.median * 1e6, 2) for form, timing in timings.items()}
        except Exception as error:
            traceback.print_exc()
            row["error"] = str(error)[:500]
        good &= row.get("same", False) and "error" not in row
        times = "  ".join(f"{form} {us:.2f}" for form, us in row.get("us", {}).items())
        print(f"{name}: {case.name}: {times}  off {row.get('off', row.get('error'))}", flush=True)
        record["cases"].append(row)
        if result is not None:
            write_whole(result, json.dumps(record, indent=1) + "\n")
    return good


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1: a draft failed; 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        for name in names():
            docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) or ""
            print(f"{name}: {docstring.partition(chr(10) * 2)[0]}")
        return 0
    own = {name: text for name, _, text in (word.partition("=") for word in words)}
    try:
        if "with" in own:
            for name in own["with"].split(","):
                load(name).install()
            return bench.main([word for word in words if not word.startswith("with=")])
        own, rest = own_words(words, OWN_KEYS)
        if rest or "drafts" not in own:
            raise ValueError(f"{rest[0] if rest else 'drafts='} is unknown or missing; keys: {', '.join(OWN_KEYS)}.")
        wanted = names() if own["drafts"] == "all" else own["drafts"].split(",")
        modules = [load(name) for name in wanted]
        assert len(modules) == len(wanted)
        device, seconds = resolve_device(own.get("device", "auto")), float(own.get("seconds", "0.3"))
    except ValueError as error:
        return refuse(error)
    command = " ".join(["python benchmarks/trial.py", *words])
    record = machine_record(device, command, None) | {"cases": []}
    result = Path(own["result"]) if "result" in own else None
    good = [measure(name, device, seconds, record, result) for name in wanted]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
