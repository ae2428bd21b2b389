"""The report as a person sees it: in a real browser, which runs nothing, fetches nothing and complains of nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, find_browser
from tests.metrics_record import EVIL, EXPERTS, LAYERS, make_monitor, make_record, run_job


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(find_browser()) as opened:
        yield opened


def keep_picture(browser: Browser, name: str, tmp_path: Path) -> bytes:
    """A picture of the page, left in SORTYARD_PICTURES where that is set."""
    path = Path(os.environ.get("SORTYARD_PICTURES", tmp_path)) / name
    browser.take_picture(path)
    return path.read_bytes()


def test_everything_is_on_the_page(browser: Browser, tmp_path: Path) -> None:
    make_record(tmp_path / "report")
    page = tmp_path / "report" / "report.html"
    browser.open(page)
    text = browser.ask("document.body.innerText")
    for words in (
        "complete, some lines failed",
        "some/model",
        "of 10,000",
        "Output tokens/s",
        "Prompt tokens/s",
        "KV cache in use",
        "Preemptions so far",
        "Time to first token",
        "Between tokens",
        "Whole answer",
        "P50",
        "P99",
        "prefix hit rate",
        "invalid_line: 45 lines",
        "25 more are in the output.",
        "prompts.jsonl:8",
        f"across, {EXPERTS}",
        f"down, {LAYERS}",
        "experts moved between ranks",
        "4 times rebalanced, 1.5 s",
        "51.6 GB",
        "1,720 copies at 43.0 GB/s",
        "waited for experts",
        "9,100 of 10,000 that had tokens",
        "guesses that came true",
        "all of it (used: the whole process, with its libraries)",
        "python -m launch.generate model=some/model",
        "engine.max_batched_tokens",
        "torch 2.",
    ):
        assert words in text, words
    assert browser.ask("document.querySelectorAll('svg[role=img]').length") == 11
    assert browser.ask("document.querySelector('#experts image').getBoundingClientRect().width") > 800
    no_size = "[...document.querySelectorAll('svg')].filter(each => each.getBoundingClientRect().height < 60).length"
    assert browser.ask(no_size) == 0
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than its window"
    assert browser.ask("/NaN|undefined|Infinity/.test(document.documentElement.outerHTML)") is False
    link = browser.ask("document.querySelector('#errors a').href")
    assert link == Path.cwd().joinpath("prompts.jsonl").as_uri() + "#L1"
    assert browser.complaints == [] and set(browser.requests) <= {page.as_uri(), *data_addresses(browser)}
    keep_picture(browser, "report-light.png", tmp_path)


def data_addresses(browser: Browser) -> set[str]:
    """What is asked for but lies in the page itself."""
    return {address for address in browser.requests if address.startswith("data:")}


def test_text_of_users_is_shown_and_never_run(browser: Browser, tmp_path: Path) -> None:
    make_record(tmp_path / "report")
    browser.open(tmp_path / "report" / "report.html")
    assert browser.ask("document.title") == "some/model: complete, some lines failed"
    assert browser.ask("document.querySelectorAll('script').length + document.querySelectorAll('img').length") == 0
    assert EVIL in browser.ask("document.querySelector('#errors').innerText")
    assert EVIL.split("'")[0] in browser.ask("document.querySelector('#run').innerText")


def test_a_dark_page_is_dark_and_a_narrow_one_fits(browser: Browser, tmp_path: Path) -> None:
    make_record(tmp_path / "report")
    page = tmp_path / "report" / "report.html"
    browser.open(page)
    light = browser.ask("getComputedStyle(document.body).backgroundColor")
    browser.open(page, dark=True)
    assert light == "rgb(246, 247, 249)" and browser.ask("getComputedStyle(document.body).backgroundColor") != light
    ink = "getComputedStyle(document.querySelector('svg .tick')).fill"
    assert browser.ask(ink) == "rgb(154, 165, 177)", "the charts follow the page"
    keep_picture(browser, "report-dark.png", tmp_path)
    browser.open(page, width=420)
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "a telephone has to scroll sideways"


def test_a_job_that_did_nothing_has_no_empty_section(browser: Browser, tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path / "report")
    report = run_job(monitor, steps=0, failed=0, offloaded=False)
    monitor.finish(report, outcome="fault")
    browser.open(tmp_path / "report" / "report.html")
    text = browser.ask("document.body.innerText")
    assert "ended by a fault" in text and "Over time" not in text and "Latency" not in text
    assert "on the move" not in text
    empty = (
        "[...document.querySelectorAll('section')].filter(each => each.innerText.trim().split('\\n').length < 2).length"
    )
    assert browser.ask(empty) == 0
    assert browser.complaints == []
