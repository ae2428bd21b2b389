"""Plain lines every few seconds, with the rate of the time in between."""

from __future__ import annotations

import doctest
import io
import logging

import pytest
from rich.console import Console

from launch import console
from launch.console import ProgressView, print_report
from moe.batch import report
from moe.batch.report import JobReport, Progress
from moe.engine.stats import EngineStats


def progress(tokens: int) -> Progress:
    return Progress(9, 4, 1, tokens, 0.25, 2.0)


@pytest.mark.parametrize("module", [console, report])
def test_worked_examples(module: object) -> None:
    result = doctest.testmod(module)  # pyright: ignore[reportArgumentType]
    assert result.attempted > 0 and result.failed == 0


def test_a_plain_line_appears_only_when_the_last_is_old(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, "launch.console")
    with ProgressView(Console(file=io.StringIO())) as view:
        for seconds, tokens in [(104.0, 40), (110.0, 100), (112.0, 500), (120.0, 1100)]:
            now[0] = seconds
            view.update(progress(tokens), running=3, waiting=2)
    assert [record.getMessage() for record in caplog.records] == [
        f"4 lines done (1 failed), {rate} tokens/s, 3 running, 2 waiting, KV cache 25 %" for rate in (10, 100)
    ]


def test_the_summary_names_every_number() -> None:
    stats = EngineStats(kv_blocks_total=200, kv_blocks_peak=50, output_tokens=300, prompt_tokens=1234, cached_tokens=16)
    stats.ttft_seconds.extend([0.1, 0.2, 3.0])
    stats.expert_balance = 0.5
    made = JobReport.of(stats, model="m", device="cpu", answered=3, failed=1, seconds=2.0)
    shown = io.StringIO()
    print_report(Console(file=shown, width=100), made)
    for text in ("3 / 1", "1,234 (16)", "300", "150.0", "200 ms / 3.00 s", "25.0% of 200 blocks", "0.50 (1 is even)"):
        assert text in shown.getvalue(), text
    assert made.as_dict()["output_tokens_per_second"] == 150.0 and made.lines == 4
