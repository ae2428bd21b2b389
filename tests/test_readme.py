"""The README's examples do what it says: lines are answered in its form, its Python runs, its links exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch import generate

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def block(language: str, number: int = 0) -> str:
    """The text of a fenced block."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[number]


def shape(value: Any) -> Any:
    """Names and types of a record, whatever its texts and however many tokens; an error's message stays."""
    if isinstance(value, dict):
        return {name: item if name in ("message", "type") else shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value if isinstance(item, dict)]
    return type(value).__name__


def test_lines_in_give_the_lines_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "set_up_logging", lambda console, **_: None)
    (tmp_path / "in.jsonl").write_text(block("json") + '{"id": "e", "promt": "And it"}\n')
    words = ["input=in.jsonl", "output=out.jsonl", "engine.device=cpu", "cache.num_blocks=64", "sampling.max_tokens=8"]
    assert generate.main(words) == generate.SOME_FAILED
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    shown = [json.loads(line) for line in block("json", 1).splitlines()]
    assert shape([answers[0], answers[1], answers[4]]) == shape(shown)
    assert "error" not in answers[2] and answers[3]["response"]["status_code"] == 200


def test_the_python_example(capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python")
    assert 'LLM(model="demo", ' in code
    exec(code.replace('model="demo", ', 'model="demo", device="cpu", cpu_gb=0.1, '), {})
    shown = capsys.readouterr().out
    assert len(re.findall(r" (?:length|stop)$", shown, re.MULTILINE)) == 2 and shown.splitlines()[-1].strip()


def test_make_targets_and_links_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+(?:-[a-z]+)?)", README)) <= targets
    named = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`([\w./-]+/|[\w/-]+\.(?:txt|py|md|jsonl))`", README)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert len(named) > 10 and not missing, missing
