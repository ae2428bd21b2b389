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


@pytest.mark.parametrize("width", [160, 70])
def test_a_bar_on_a_terminal_knows_the_end_once_lines_are_counted(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    shown: dict[int | None, str] = {}
    for total in (None, 44):
        screen = io.StringIO()
        terminal = Console(file=screen, force_terminal=True, width=width, color_system=None)
        with ProgressView(terminal, total=lambda total=total: total, resumed=10, num_ranks=2) as view:
            now[0] += 1.0
            view.update(progress(40), running=3, waiting=2)
        shown[total] = " ".join(screen.getvalue().split())
    assert "14 lines done (1 failed)" in shown[None] and "%" not in shown[None].split("14 lines")[0]
    assert "32% 14 of about 44 lines done (1 failed), " in shown[44]
    for words in ("40 tokens/s,", "about 15 s left,", "3 running,", "2 waiting,", "on rank 0"):
        assert words in shown[44], words


def test_a_quiet_job_shows_nothing_but_warnings() -> None:
    shown = io.StringIO()
    quiet = Console(file=shown, force_terminal=False)
    before = logging.getLogger().handlers[:], [logging.getLogger(name).level for name in console.OURS]
    try:
        console.set_up_logging(quiet, quiet=True)
        with ProgressView(quiet, quiet=True) as view:
            view._every_s = 0.0
            view.update(progress(40), running=3, waiting=2)
        logging.getLogger("launch.generate").info("a word")
        logging.getLogger("moe.batch.monitor").warning("a warning")
    finally:
        logging.getLogger().handlers[:] = before[0]
        for name, level in zip(console.OURS, before[1]):
            logging.getLogger(name).setLevel(level)
    assert shown.getvalue().endswith(" a warning\n") and shown.getvalue().count("\n") == 1


def test_the_summary_names_every_number() -> None:
    stats = EngineStats(kv_blocks_total=200, kv_blocks_peak=50, output_tokens=300, prompt_tokens=1234, cached_tokens=16)
    for seconds in (0.1, 0.2, 3.0):
        stats.latencies.first_token.add(seconds)
    stats.expert_balance = 0.5
    made = JobReport.of(stats, model="m", device="cpu", answered=3, failed=1, seconds=2.0)
    shown = io.StringIO()
    print_report(Console(file=shown, width=100), made)
    for text in (
        "3 / 1",
        "1,234 (16)",
        "300",
        "150.0",
        " ms / 3.00 s / 3.00 s",
        "- / - / -",
        "25.0% of 200 blocks",
        "0.50 (1 is even)",
    ):
        assert text in shown.getvalue(), text
    assert made.ttft_median == pytest.approx(0.2, rel=0.022) and made.ttft_p95 == 3.0
    assert made.as_dict()["output_tokens_per_second"] == 150.0 and made.lines == 4
