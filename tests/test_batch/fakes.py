"""An engine and a tokenizer that answer at once and predictably, and a whole job on them: for tests of everything
around them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import Config
from moe.batch.job import Job
from moe.batch.journal import Header
from moe.batch.journal_writer import JournalWriter
from moe.batch.ledger import Ledger
from moe.batch.output import put_together
from moe.batch.report import Progress
from moe.batch.resume import begin_run, made_from
from moe.batch.run_files import RunFiles
from moe.batch.sources import Source, job_lines
from moe.engine.request import CompletionOutput, Logprob, Request, RequestOutput
from moe.engine.stats import EngineStats


class FakeTokenizer:
    """One id per character. A chat reads `role:content` for each message; a system message is refused."""

    def __init__(self, **defaults: Any) -> None:
        self.generation_defaults: Mapping[str, Any] = defaults
        self.chats: list[dict[str, Any]] = []

    def encode_prompt(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> list[int]:
        if messages[0]["role"] == "system":
            raise ValueError("the chat template refused the messages: no system role")
        self.chats.append({"tools": tools, **options})
        return self.encode_prompt("|".join(f"{message['role']}:{message['content']}" for message in messages))


class FakeEngine:
    """Answers each request with its prompt in capitals, after as many steps as max_tokens says (default 1).

    A prompt of more than 1000 ids comes back with an error; one that holds "!" ends with finish_reason "error".
    """

    def __init__(self, max_num_seqs: int = 256) -> None:
        self.stats = EngineStats(kv_blocks_total=8)
        self.max_num_seqs = max_num_seqs
        self.expects_more = self.joined = False
        self.stop_wanted = self.stopped = 0
        self.requests: list[Request] = []
        self.most_running = 0
        self.finished: list[str] = []
        self._left: dict[str, int] = {}
        self._by_id: dict[str, Request] = {}
        self._aborted: list[str] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._left)

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._left) - self.max_num_seqs)

    def join(self) -> None:
        """Alone there is nobody to join."""

    def abort(self, request_id: str) -> bool:
        self._aborted.append(request_id)
        self._left[request_id] = 1
        return True

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self._by_id, "an id was used twice"
        self.requests.append(request)
        self._by_id[request.request_id] = request
        self._left[request.request_id] = request.params.max_tokens or 1
        self.most_running = max(self.most_running, len(self._left))

    def step(self) -> list[RequestOutput]:
        assert self._left, "a step without requests"
        self.stats.steps += 1
        done = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            if self._left[request_id] == 0:
                del self._left[request_id]
                self.finished.append(request_id)
                done.append(self._answer(self._by_id[request_id]))
        return done

    def _answer(self, request: Request) -> RequestOutput:
        prompt_ids = list(request.prompt_token_ids)
        text = "".join(chr(i) for i in prompt_ids).upper()
        error, reason = None, "abort" if request.request_id in self._aborted else "stop"
        if len(prompt_ids) > 1000:
            error, reason = "the prompt has too many tokens", "error"
        elif "!" in text:
            reason = "error"
        ids = [ord(char) for char in text]
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [{i: Logprob(-0.5, 1, chr(i)), 0: Logprob(-1.5, 2, "\0")} for i in ids]
        outputs = [
            CompletionOutput(index, text, ids, reason, None, logprobs=logprobs) for index in range(request.params.n)
        ]
        self.stats.output_tokens += len(ids) * request.params.n
        rejected = error is not None
        return RequestOutput(request.request_id, request.prompt, prompt_ids, outputs, True, 3, None, error, rejected)


def run_job(
    config: Config,
    engine: Any = None,
    tokenizer: Callable[[], Any] | None = FakeTokenizer,
    *,
    on_step: Callable[[Progress], None] | None = None,
    stop: Callable[[], int] = lambda: 0,
    fingerprint: dict[str, str] | None = None,
) -> tuple[Job, Ledger]:
    """A whole run on one rank, as `launch` has it: what is there, lines, journal, output unless it was stopped."""
    assert config.output is not None
    files, fingerprint = RunFiles(Path(config.output), config.job.shards), fingerprint or {"a": "1"}
    start = begin_run(files, fingerprint, config.job, overwrite=config.job.overwrite)
    lines = start.ledger.pending(job_lines(config, Source.open(config)))
    job = Job(config, engine or FakeEngine(), tokenizer() if tokenizer else None, "fake")
    with JournalWriter(files.journal_path(start.run, 0), Header(start.run, 0, fingerprint)) as journal:
        job.run(lines, journal, on_step, stop)
    if not job.stopped:
        put_together(files, made_from(fingerprint, config.job), start.ledger)
    return job, start.ledger


def jsonl(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Records of a file that is split at byte 0x0A alone."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
