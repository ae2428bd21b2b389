"""Parts of several ranks: who claims what, how parts become one file, what old parts mean."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, EngineConfig
from moe.batch.answers import AnswerFile
from moe.batch.lines import read_claimed, read_lines
from moe.batch.rank_job import FIRST_CLAIMS, RankJob, merge_parts, part_of, refuse_old_parts
from moe.engine.request import RequestOutput
from tests.test_batch.fakes import FakeEngine, FakeTokenizer

DATA = b'\xef\xbb\xbf{"prompt":"a"}\n\n{"prompt":"b"}\r\nnot json\n{"prompt":"c"}'


def test_claimed_records_are_those_of_all_lines() -> None:
    everything = list(read_lines(io.BytesIO(DATA)))
    claims = iter([1, 2, 7])
    assert list(read_claimed(io.BytesIO(DATA), None, lambda: next(claims))) == everything[1:3]
    assert next(claims, None) is None  # the third was past the end
    claims = iter([0, 2])
    assert list(read_claimed(io.BytesIO(DATA), 2, lambda: next(claims))) == everything[:1]  # a limit counts all lines


class InStepEngine(FakeEngine):
    """One rank's engine beside a queue that others take from: `running` places, the rest waits."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.expects_more = False
        self.joined = False
        self.max_num_seqs = places
        self.most_waiting = 0
        self.claimed_by_step: list[int] = []

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._left) - self.max_num_seqs)

    @property
    def has_unfinished(self) -> bool:
        return self.joined

    def join(self) -> None:
        self.joined = True

    def step(self) -> list[RequestOutput]:
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        self.claimed_by_step.append(len(self.requests) - sum(self.claimed_by_step))
        outputs = super().step() if self._left else []
        self.joined = bool(self._left) or self.expects_more
        return outputs


def run_alone(folder: Path, num_lines: int, places: int, **engine: Any) -> tuple[InStepEngine, Path]:
    source, fake, counter = folder / "in.jsonl", InStepEngine(places), itertools.count()
    source.write_text("".join(f'{{"prompt": "abcd", "max_tokens": {1 + i % 3}}}\n' for i in range(num_lines)))
    config = Config(engine=EngineConfig(**engine))
    job = RankJob(config, fake, FakeTokenizer(), "fake", lambda: next(counter))
    part = part_of(folder / "out.jsonl", 0)
    with AnswerFile.open(part, overwrite=True) as answers:
        job.run(source, answers)
    assert job.lines_written == num_lines and not fake.expects_more
    return fake, part


def test_lines_are_claimed_in_turns_and_never_far_ahead(tmp_path: Path) -> None:
    fake, part = run_alone(tmp_path, 100, places=32)
    assert fake.claimed_by_step[0] == FIRST_CLAIMS and max(fake.claimed_by_step) <= 32
    assert fake.most_waiting <= 2  # a sixteenth of the places
    lines = part.read_bytes().splitlines()
    assert [int(line.split(b"\t")[0]) for line in lines] == list(range(1, 101))


def test_long_prompts_are_dealt_out_by_their_tokens(tmp_path: Path) -> None:
    fake, _ = run_alone(tmp_path, 20, places=32, max_batched_tokens=10)
    assert fake.claimed_by_step[0] == 3  # of 4 tokens each: the third goes over the budget of a step


def test_parts_become_one_file_in_input_order(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    parts = [part_of(output, rank) for rank in range(3)]
    parts[0].write_bytes(b'2\t{"tab": "a\tb"}\n10\t{}\n')
    parts[1].write_bytes(b"")
    parts[2].write_bytes(b"1\t{1}\n3\t{3}\n")
    output.write_bytes(b"old content, much longer than what comes\n" * 9)
    assert merge_parts(parts, output) == 4
    assert output.read_bytes() == b'{1}\n{"tab": "a\tb"}\n{3}\n{}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    with pytest.raises(ValueError, match=r"out.jsonl.rank-0, .* cannot be seen here; all ranks need one folder"):
        merge_parts(parts, output)


def test_old_parts_are_refused_or_dropped(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    refuse_old_parts(output, overwrite=False)
    part_of(output, 3).write_bytes(b"1\t{}\n")
    with pytest.raises(
        ValueError, match=r"out.jsonl.rank-3 hold records of a run that did not end.*job.overwrite=true"
    ):
        refuse_old_parts(output, overwrite=False)
    refuse_old_parts(output, overwrite=True)
    assert not list(tmp_path.iterdir())
