"""Requests in flight stay at their number, and the two times are taken from the right moments, by a clock of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch import bench
from launch.bench_engine import Prompt
from launch.bench_serving import serve, serving_prompts
from moe.engine.engine import Engine


class StepEngine:
    """A stand-in: every step gives each request one more token, and takes a second."""

    def __init__(self, error: str | None = None) -> None:
        self.now, self.error = 0.0, error
        self.running: dict[str, tuple[int, int]] = {}
        self.most = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add_request(self, request: Any, *, stream: bool) -> None:
        assert stream
        self.running[request.request_id] = (0, request.params.max_tokens)
        self.most = max(self.most, len(self.running))

    def step(self) -> list[Any]:
        self.now += 1.0
        outputs = []
        for request_id, (done, wanted) in list(self.running.items()):
            self.running[request_id] = (done + 1, wanted)
            finished = done + 1 == wanted
            if finished:
                del self.running[request_id]
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    error=self.error,
                    finished=finished,
                    outputs=[SimpleNamespace(token_ids=[7] * (done + 1))],
                )
            )
        return outputs


def test_times_and_concurrency() -> None:
    """Two in flight, outputs of 3, 5 and 2: the third arrives when the first has ended."""
    engine = StepEngine()
    prompts = [Prompt([1], 3), Prompt([1], 5), Prompt([1], 2)]
    served = serve(cast(Engine, engine), prompts, 2, "x", clock=lambda: engine.now)
    assert engine.most == 2
    assert served.output_tokens == 10 and served.seconds == 5.0
    assert served.ttft == [1.0, 1.0, 1.0]
    assert served.per_token == [1.0, 1.0, 1.0]


def test_a_request_that_fails_ends_the_bench() -> None:
    with pytest.raises(ValueError, match="x-0 did not run: too long"):
        serve(cast(Engine, StepEngine("too long")), [Prompt([1], 3)], 1, "x")


def test_prompts_of_a_case_do_not_change() -> None:
    mixed = serving_prompts(1000, "mixed", 50)
    assert [len(each.token_ids) for each in mixed] == [len(each.token_ids) for each in serving_prompts(9, "mixed", 50)]
    assert min(len(each.token_ids) for each in mixed) >= 64 and max(len(each.token_ids) for each in mixed) <= 4096
    assert all(len(each.token_ids) == each.num_outputs == 128 for each in serving_prompts(1000, "short", 3))


def test_a_tiny_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "set_up_logging", lambda console: None)
    words = ["workload=serving", "model=demo", "device=cpu", "lengths=tiny", "concurrency=2", "cache.num_blocks=64"]
    assert bench.main([*words, "engine.max_model_len=128"]) == 0
    out = capsys.readouterr().out
    assert "tiny x2" in out and "ttft p99 ms" in out and "tpot p50 ms" in out
