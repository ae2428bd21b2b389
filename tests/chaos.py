"""Ranks of a job that are killed, torn and refused space at random, and started again until the job is whole.

The job is the real one (launch.generate, journals, torchrun's environment, gloo); the engine in it is a stand-in whose
answers follow from each line's prompt and seed alone, so that a job of thousands of lines takes seconds.

    Chaos(folder, lines, seed).run(rounds)      # raises where a line is lost, doubled or changed
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import socket
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from configs.schema import Config
from expert_parallel.group import Ranks
from launch import generate, job_run
from moe.batch import journal_writer
from moe.batch.journal import JournalReader
from moe.batch.journal_writer import JournalWriter
from moe.batch.run_files import RunFiles
from moe.engine.agreement import Alone, Together
from moe.engine.request import CompletionOutput, Request, RequestOutput
from moe.engine.scheduler import Schedule
from moe.engine.stats import EngineStats
from tests.ranks import SERVER
from tests.test_batch.fakes import FakeTokenizer, jsonl, read_jsonl

FAULTS = ("kill", "kill", "torn", "torn", "full", "sigterm")
ENDED_S = 120.0


class StandInEngine:
    """In step with other ranks as the real one is: it agrees with them before each step. An answer takes some steps."""

    def __init__(self, config: Config, *, ranks: Ranks | None = None) -> None:
        several = ranks is not None and ranks.everyone.size > 1
        self.in_step = Together(ranks.everyone) if ranks is not None and several else Alone()
        self.stats = EngineStats(kv_blocks_total=8)
        self.tokenizer, self.plan = FakeTokenizer(), None
        self.parts = SimpleNamespace(device=torch.device("cpu"))
        self.scheduler = SimpleNamespace(running=(), waiting=())
        self.max_num_seqs, self.num_waiting = 8, 0
        self.expects_more = self.joined = False
        self.stop_wanted = self.stopped = 0
        self._left: deque[tuple[int, Request]] = deque()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._left) or self.joined

    def join(self) -> None:
        self.joined = isinstance(self.in_step, Together)

    def add_request(self, request: Request) -> None:
        self._left.append((1 + request.seed_of(0) % 4, request))
        self.num_waiting = max(0, len(self._left) - self.max_num_seqs)

    def step(self) -> list[RequestOutput]:
        unfinished = bool(self._left) or self.expects_more
        agreed = self.in_step.agree(
            Schedule(), unfinished=unfinished, wants_logits=False, num_seqs=0, stop=self.stop_wanted
        )
        self.stopped = agreed.stop
        self.joined = self.joined and agreed.unfinished and not agreed.stop
        if agreed.stop:
            return []
        running, self._left = self._left, deque()
        done = [self._answer(request) for steps, request in running if steps == 1]
        self._left.extend((steps - 1, request) for steps, request in running if steps > 1)
        self.num_waiting = max(0, len(self._left) - self.max_num_seqs)
        return done

    def conclude(self) -> None:
        """Nothing is left to do."""

    def count_experts(self) -> EngineStats:
        return self.stats

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, request: Request) -> RequestOutput:
        text = hashlib.sha256(f"{request.seed_of(0)} {request.prompt}".encode()).hexdigest()
        text *= 1 + request.seed_of(0) % 9
        ids = list(text.encode())
        output = CompletionOutput(0, text, ids, "stop")
        return RequestOutput(request.request_id, request.prompt, list(request.prompt_token_ids), [output], True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_main(
    words: list[str], rank: int, size: int, port: int, attempt: int, fault: str | None, after: int, log: str
) -> None:
    """One rank's process. `fault` comes with the `after`-th record of this rank."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    vars(job_run)["Engine"] = StandInEngine
    if fault is not None:
        _inject(fault, after)
    code = generate.main(words)
    os._exit(code)


def _inject(fault: str, after: int) -> None:
    """Hooks what the process itself does, so that no clock decides when it happens."""
    append, write, count = JournalWriter.append, os.write, [0]

    def counting(self: JournalWriter, *args: Any) -> None:
        append(self, *args)
        count[0] += 1
        if count[0] == after and fault in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        if count[0] == after and fault == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)

    def full(file: int, data: Any) -> int:
        if file > 2 and count[0] >= after:
            write(file, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    JournalWriter.append = counting  # type: ignore[method-assign]
    if fault == "full":
        journal_writer.os.write = full  # type: ignore[assignment]


class Chaos:
    """A job of `num_lines` lines in `folder`, and the records that were ever whole in a journal."""

    def __init__(self, folder: Path, num_lines: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.num_lines = folder, num_lines
        lines = [{"id": f"line {i}", "prompt": f"prompt {i}", "temperature": 0.7} for i in range(num_lines)]
        for i in range(7, num_lines, 100):
            lines[i] = {"id": f"line {i}", "prompt": i}  # a bad one
        (folder / "in.jsonl").write_bytes(jsonl(*lines))
        self.whole: dict[int, bytes] = {}
        self.faults: list[str] = []

    def words(self, output: str) -> list[str]:
        return [f"input={self.folder}/in.jsonl", f"output={self.folder}/{output}", "engine.device=cpu"]

    def run(self, rounds: int, sizes: tuple[int, ...] = (2,)) -> None:
        """So many rounds with a fault each, one without; then everything is checked."""
        per_round = self.num_lines // (rounds + 1)
        codes = self._round(self.words("undisturbed.jsonl"), 1, None, 0)
        assert codes == [generate.SOME_FAILED], self.log()
        words = self.words("out.jsonl")
        for number in range(rounds):
            size, fault = self.random.choice(sizes), self.random.choice(FAULTS)
            after = self.random.randint(per_round // (4 * size), per_round // size)
            codes = self._round(words, size, fault, number, after)
            self.faults.append(f"{fault} on {size} ranks after {after}: {codes}")
            if fault == "sigterm":
                assert codes == [generate.BY_SIGNAL + signal.SIGTERM] * size, self.log()
            else:
                assert all(code not in (generate.OK, generate.SOME_FAILED) for code in codes), self.log()
            assert not (self.folder / "out.jsonl").exists(), self.log()
            self._remember()
            if fault == "torn":
                self._tear()
        codes = self._round(words, self.random.choice(sizes), None, rounds)
        assert set(codes) == {generate.SOME_FAILED}, self.log()
        self._check()

    def _round(self, words: list[str], size: int, fault: str | None, attempt: int, after: int = 0) -> list[int]:
        """Start all ranks, one of them with the fault; their exit codes (a signal's number, negative)."""
        port, victim = free_port(), self.random.randrange(size)
        log = str(self.folder / "log.txt")
        processes = [
            SERVER.Process(
                target=rank_main,
                args=(words, rank, size, port, attempt, fault if rank == victim else None, after, log),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(ENDED_S)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert None not in codes, f"a rank did not end: {codes}\n{self.log()}"
        return [code for code in codes if code is not None]

    def _remember(self) -> None:
        """What is whole in any journal now must be in the output as it is."""
        for journal in RunFiles(self.folder / "out.jsonl").journals():
            for entry in JournalReader(journal.path):
                assert self.whole.get(entry.number, entry.record) == entry.record, f"line {entry.number} changed"
                self.whole[entry.number] = entry.record

    def _tear(self) -> None:
        """Cut the newest journal's end, or damage it; what that costs is forgotten."""
        journal = RunFiles(self.folder / "out.jsonl").journals()[-1]
        content = journal.path.read_bytes()
        header = content.index(b"\n") + 1  # synced before the first record is written: no crash tears it
        cut = content[: max(header, len(content) - self.random.randint(1, 200))]
        journal.path.write_bytes(cut + self.random.choice((b"", bytes(40), b"{torn", b"\n")))
        self.whole = {}
        self._remember()

    def _check(self) -> None:
        output, expected = (self.folder / name for name in ("out.jsonl", "undisturbed.jsonl"))
        records = read_jsonl(output)
        assert [record["id"] for record in records] == [f"line {i}" for i in range(self.num_lines)], self.log()
        lines = output.read_bytes().split(b"\n")
        for number, record in self.whole.items():
            assert lines[number - 1] + b"\n" == record, f"line {number} was finished and changed"
        assert output.read_bytes() == expected.read_bytes(), self.log()
        assert not list(self.folder.glob("*.journal-*")), "journals are left"

    def log(self) -> str:
        """What happened, for a failing test."""
        return "\n".join([*self.faults, (self.folder / "log.txt").read_text(errors="replace")[-8000:]])
