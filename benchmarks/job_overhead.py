"""What the job around the engine costs, with an engine that only hands out answers.

    python benchmarks/job_overhead.py lines=200000 repeat=5

Time per line is the processor time of a whole job, all threads, less that of the same engine without a job. On a busy
machine processor time grows too. `yardstick_us` tells by how much: the time of one json.dumps of 100 numbers, taken all
along the job; `quiet_us_per_line` is what the job would take where that is 5 us, as on a quiet core. Memory is read
while it runs. Passes take turns, each in a fresh process; the median counts. `parts=true` names the functions that
take the time.

Keys: lines, line_bytes (of the prompt), answer_tokens, form (plain or openai), order (file or prefix), repeat, parts,
folder (where files are made; a temporary one by default). The figures go to the screen, and last as one line of JSON.
"""

from __future__ import annotations

import cProfile
import gc
import io
import json
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's own folder is all that Python puts there

from configs.checks import freeze  # noqa: E402
from configs.schema import Config  # noqa: E402
from moe.batch.job import Job  # noqa: E402
from moe.batch.journal import Header  # noqa: E402
from moe.batch.journal_writer import JournalWriter  # noqa: E402
from moe.batch.ledger import Ledger  # noqa: E402
from moe.batch.monitor import Monitor  # noqa: E402
from moe.batch.output import put_together  # noqa: E402
from moe.batch.report import JobReport, Progress  # noqa: E402
from moe.batch.run_files import RunFiles  # noqa: E402
from moe.batch.sources import Source, job_lines  # noqa: E402
from moe.engine.request import CompletionOutput, Request, RequestOutput, SamplingParams  # noqa: E402
from moe.engine.stats import EngineStats  # noqa: E402

AT_A_TIME = 256  # answers that the stub has in progress
YARDSTICK_TIMES, QUIET_YARDSTICK_US = 16, 5.0
SAMPLES = 40  # readings of memory over a job
DEFAULTS = {
    "lines": 100_000,
    "line_bytes": 400,
    "answer_tokens": 100,
    "form": "plain",
    "order": "file",
    "repeat": 3,
    "parts": False,
    "folder": "",
    "only": "",
}


class Yardstick:
    """How long a fixed piece of work takes, all along some other work. `seconds` were spent on it in all."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._times = 0
        self._numbers = list(range(100))

    def take(self) -> None:
        begin = time.thread_time()
        for _ in range(YARDSTICK_TIMES):
            json.dumps(self._numbers)
        self.seconds += time.thread_time() - begin
        self._times += YARDSTICK_TIMES

    @property
    def one(self) -> float:
        return self.seconds / self._times


class StubTokenizer:
    """Encodes nothing: every prompt is the same ids."""

    generation_defaults: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self._ids = list(range(64))

    def encode_prompt(self, text: str) -> list[int]:
        return self._ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> list[int]:
        return self._ids


class StubEngine:
    """Every step ends the eldest AT_A_TIME requests, all with the same text."""

    max_num_seqs = AT_A_TIME
    num_waiting = expects_more = stop_wanted = stopped = 0
    joined = False

    def __init__(self, answer_tokens: int) -> None:
        self.stats = EngineStats(kv_blocks_total=1024)
        self._waiting: dict[str, Request] = {}
        self._ids = list(range(answer_tokens))
        self._text = "word " * answer_tokens

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def join(self) -> None:
        pass

    def abort(self, request_id: str) -> bool:
        return False

    def add_request(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def step(self) -> list[RequestOutput]:
        self.stats.steps += 1
        ended = list(self._waiting.values())[:AT_A_TIME]
        outputs = []
        for request in ended:
            del self._waiting[request.request_id]
            answer = CompletionOutput(0, self._text, self._ids, "stop")
            outputs.append(RequestOutput(request.request_id, None, request.prompt_token_ids, [answer], finished=True))
        self.stats.output_tokens += len(outputs) * len(self._ids)
        return outputs


def write_input(path: Path, options: Mapping[str, Any]) -> None:
    """Lines that differ in their id and the beginning of their prompt."""
    filler = "lorem ipsum " * (options["line_bytes"] // 12 + 1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(options["lines"]):
            prompt = f"{number} {filler}"[: options["line_bytes"]]
            record: dict[str, Any] = {"id": f"line-{number}", "prompt": prompt, "max_tokens": 100}
            if options["form"] == "openai":
                body = {"model": "stub", "messages": [{"role": "user", "content": prompt}], "max_tokens": 100}
                url = "/v1/chat/completions"
                record = {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(record) + "\n")


def run_bare(options: Mapping[str, Any]) -> dict[str, float]:
    """The stub alone: making requests, and handing out answers."""
    engine, ids = StubEngine(options["answer_tokens"]), StubTokenizer().encode_prompt("")
    params, yardstick = SamplingParams(), Yardstick()
    gc.freeze()
    begin = time.process_time()
    for start in range(0, options["lines"], AT_A_TIME):
        for number in range(start, min(start + AT_A_TIME, options["lines"])):
            engine.add_request(Request(f"line-{number}", ids, params))
        engine.step()
        yardstick.take()
    return {"seconds": time.process_time() - begin - yardstick.seconds, "yardstick": yardstick.one}


def run_job(source: Path, output: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """One job in this process: processor seconds of its parts, and resident MiB over its course."""
    config = Config()
    config.input, config.output, config.job.order = str(source), str(output), options["order"]
    config.job.report = str(output.with_name("report"))
    freeze(config)
    memory: list[float] = []
    every = max(options["lines"] // SAMPLES, 1)
    engine, monitor = StubEngine(options["answer_tokens"]), Monitor(config, [])

    yardstick = Yardstick()

    def look(progress: Progress) -> None:
        monitor.step(progress)
        yardstick.take()
        if progress.lines_done >= every * len(memory):
            memory.append(resident_mib())

    files, fingerprint, ledger = RunFiles(output), {"stub": "1"}, Ledger()
    gc.freeze()  # as launch.generate does
    begin, wall = time.process_time(), time.perf_counter()
    lines = ledger.pending(job_lines(config, Source.open(config)))
    with JournalWriter(files.journal_path(1, 0), Header(1, 0, fingerprint)) as journal:
        job = Job(config, engine, StubTokenizer(), "stub", on_error=monitor.error)
        job.run(lines, journal, look)
    answered = time.process_time() - begin
    assert put_together(files, fingerprint, ledger) == 0, "lines failed"
    seconds, wall = time.process_time() - begin, time.perf_counter() - wall
    report = JobReport.of(
        engine.stats, model="stub", device="none", answered=job.lines_read, failed=0, seconds=job.seconds
    )
    monitor.finish(report, outcome="complete")
    written = sum(1 for _ in output.open("rb"))
    assert written == options["lines"], f"{written} records of {options['lines']} lines"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    # The first readings are of a job that fills its window.
    settled = memory[len(memory) // 5]
    return {
        "seconds": seconds - yardstick.seconds,
        "output_seconds": seconds - answered,
        "wall": wall - yardstick.seconds,
        "yardstick": yardstick.one,
        "settled_mib": settled,
        "end_mib": memory[-1],
        "peak_mib": peak,
    }


def resident_mib() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def in_fresh_process(options: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """One pass in a process of its own."""
    words = [f"{name}={value}" for name, value in (options | changed).items()]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def less(
    jobs: Sequence[dict[str, float]], bares: Sequence[dict[str, float]], of: Callable[[dict[str, float]], float]
) -> list[float]:
    """What the jobs take more than the stub alone."""
    return [of(job) - of(bare) for job, bare in zip(jobs, bares, strict=True)]


def show_parts(source: Path, output: Path, options: Mapping[str, Any]) -> None:
    """The functions that take the time. The profiler's own cost makes calls look dearer than they are."""
    profile = cProfile.Profile()
    profile.runcall(run_job, source, output, options)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    print(text.getvalue())


def main(words: Sequence[str]) -> None:
    options: dict[str, Any] = dict(DEFAULTS)
    for word in words:
        name, _, value = word.partition("=")
        if name not in options:
            raise SystemExit(f"{word}: the keys are {', '.join(DEFAULTS)}")
        kind = type(DEFAULTS[name])
        options[name] = value.lower() == "true" if kind is bool else kind(value)
    with tempfile.TemporaryDirectory(dir=options["folder"] or None) as folder:
        source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        if options["only"] == "bare":
            print(json.dumps(run_bare(options)))
            return
        write_input(source, options)
        if options["only"] == "job":
            print(json.dumps(run_job(source, output, options)))
            return
        if options["parts"]:
            show_parts(source, output, options)
    jobs, bares = [], []
    for _ in range(options["repeat"]):
        jobs.append(in_fresh_process(options, only="job", parts=False))
        bares.append(in_fresh_process(options, only="bare", parts=False))
    per_line = [per_job / options["lines"] * 1e6 for per_job in less(jobs, bares, lambda run: run["seconds"])]
    quiet = less(jobs, bares, lambda run: run["seconds"] / run["yardstick"] * QUIET_YARDSTICK_US)
    result = {
        **{name: options[name] for name in ("lines", "line_bytes", "answer_tokens", "form", "order", "repeat")},
        "us_per_line": statistics.median(per_line),
        "us_per_line_least": min(per_line),
        "us_per_line_most": max(per_line),
        "quiet_us_per_line": statistics.median(quiet) / options["lines"],
        "of_it_output": statistics.median(job["output_seconds"] for job in jobs) / options["lines"] * 1e6,
        "yardstick_us": statistics.median(job["yardstick"] for job in jobs) * 1e6,
        "wall_us_per_line": statistics.median(job["wall"] for job in jobs) / options["lines"] * 1e6,
        "stub_us_per_line": statistics.median(bare["seconds"] for bare in bares) / options["lines"] * 1e6,
        "settled_mib": statistics.median(job["settled_mib"] for job in jobs),
        "end_mib": statistics.median(job["end_mib"] for job in jobs),
        "peak_mib": statistics.median(job["peak_mib"] for job in jobs),
    }
    for name, value in result.items():
        print(f"{name:<20}{value:>14.2f}" if isinstance(value, float) else f"{name:<20}{value:>14}")
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
