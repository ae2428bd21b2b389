"""Drafts beside what is in use, in one run: `python benchmarks/trial.py drafts=NAME,NAME result=trial.json`.

A draft is a module of benchmarks/drafts/ that has not been measured yet, or not as far as it must be: `cases(device)`
yields its cases (drafts/case.py), `install()` puts it in the place of what is in use. First every form's results are
compared, then all forms take turns in replayed graphs.

    python benchmarks/trial.py                                         # what there is, with its first line
    python benchmarks/trial.py drafts=all seconds=0.3 result=trial.json
    python benchmarks/trial.py with=NAME,NAME workload=w2 model=dsv2-lite limit=1   # launch.bench, drafts in place

A draft that changes too much for that is a patch, whose first lines say what it is, what is predicted and what to run
with and without it.

Every draft has a process of its own, `jobs` at a time: one compiles while another measures, one measures at a time, and
one that breaks the device's context leaves the others alone. The exit status is 1 if any failed.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import importlib
import itertools
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    "jobs": "so many drafts at a time",
    "limit": "seconds that a draft may take",
    "result": "a JSON file, written again after every draft",
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
def compile_forms(case: Case) -> None:
    """By one call of each: milliseconds of the device while another process may be measuring, and all the compiling."""
    for calls in case.forms.values():
        calls[0]()


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
    """0 for the same bits and for nothing else; infinite where one has a NaN that the other lacks."""
    assert wanted.dtype == given.dtype, f"{given.dtype} for {wanted.dtype}"
    if torch.equal(wanted.view(torch.uint8), given.view(torch.uint8)):
        return 0.0
    difference = (wanted.double() - given.double()).abs()
    off = difference.max() / wanted.double().abs().nan_to_num().max().clamp_min(1e-30)
    return max(float(off), sys.float_info.min) if torch.isfinite(off) else float("inf")


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time measures."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(name: str, device: torch.device, seconds: float, lock: Path) -> Iterator[dict[str, Any]]:
    """A row for each case of a draft; what goes wrong is in it, and the next case has its turn."""
    for case in load(name).cases(device):
        row: dict[str, Any] = {"draft": name, "case": case.name, "good": False}
        try:
            compile_forms(case)
            with alone(lock):
                row["off"] = differences(case)
                timings = time_variants(case.forms, device, seconds=seconds)
            row["us"] = {form: round(timing.median * 1e6, 2) for form, timing in timings.items()}
            row["good"] = all(off <= case.tolerance for off in row["off"].values())
        except Exception as error:
            traceback.print_exc()
            row["error"] = str(error)[:500]
        yield row


def measure_apart(name: str, device: torch.device, seconds: float, lock: Path, limit: float) -> list[dict[str, Any]]:
    """The same in a process of its own: rows that it has printed before it broke or ran into the limit, and how."""
    words = [f"drafts={name}", f"device={device.type}", f"seconds={seconds}", f"lock={lock}"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            command = [sys.executable, __file__, *words]
            status = subprocess.run(command, stdout=out, stderr=errors, timeout=limit, check=False).returncode
            broke = None if status in (0, 1) else f"exit status {status}"  # 1: a row says what is wrong
        except subprocess.TimeoutExpired:
            status, broke = 1, f"cut after {limit:g} s"
        out.seek(0)
        errors.seek(0)
        rows = [json.loads(line) for line in out if line.startswith("{")]
        if broke or (status and all(row["good"] for row in rows)):
            rows.append({"draft": name, "case": "", "good": False, "error": broke or f"exit status {status}"})
        if status:
            print(f"{name}: {errors.read()[-6000:]}", file=sys.stderr, flush=True)
    return rows


def show(row: dict[str, Any]) -> None:
    times = "  ".join(f"{form} {us:.2f}" for form, us in row.get("us", {}).items())
    word = "" if row["good"] else f"  WRONG {row.get('error', '')}"
    print(f"{row['draft']}: {row['case']}: us {times}  off {row.get('off')}{word}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1: a draft failed; 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        for name in names():
            docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) or ""
            print(f"{name}: {docstring.partition(chr(10) * 2)[0]}")
        for patch in sorted(FOLDER.glob("*.patch")):
            print(f"git apply {patch.relative_to(ROOT)}: {patch.read_text('utf-8').partition(chr(10) * 2)[0]}")
        return 0
    try:
        in_place, of_bench = own_words(words, ("with",))
        if in_place:
            for name in in_place["with"].split(","):
                load(name).install()
            return bench.main(of_bench)
        own, rest = own_words(words, (*OWN_KEYS, "lock"))
        if rest or "drafts" not in own:
            raise ValueError(f"{rest[0] if rest else 'drafts='} is unknown or missing; keys: {', '.join(OWN_KEYS)}.")
        wanted = names() if own["drafts"] == "all" else own["drafts"].split(",")
        if unknown := set(wanted) - set(names()):
            raise ValueError(f"draft {min(unknown)} is unknown; there are {', '.join(names()) or 'none'}.")
        device, seconds = resolve_device(own.get("device", "auto")), float(own.get("seconds", "0.3"))
        jobs, limit = int(own.get("jobs", "4")), float(own.get("limit", "120"))
    except ValueError as error:
        return refuse(error)
    if "lock" in own:  # one of measure_apart's
        rows = []
        for row in itertools.chain.from_iterable(measure(name, device, seconds, Path(own["lock"])) for name in wanted):
            print(json.dumps(row), flush=True)
            rows.append(row)
        return 0 if all(row["good"] for row in rows) else 1
    record = machine_record(device, " ".join(["python benchmarks/trial.py", *words]), None) | {"cases": []}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        given = (device, seconds, Path(folder) / "lock", limit)
        for ended in as_completed([pool.submit(measure_apart, name, *given) for name in wanted]):
            record["cases"] += ended.result()
            for row in ended.result():
                show(row)
            if "result" in own:
                write_whole(Path(own["result"]), json.dumps(record, indent=1) + "\n")
    return 0 if all(row["good"] for row in record["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
