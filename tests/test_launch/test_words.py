"""Values of the benches' own words, and what is said of wrong ones."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from launch.words import check_rest, flag, number_above_zero, output_file, positive, positives, split_list, unknown_word

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def test_values(tmp_path: Path) -> None:
    own = {"tokens": "1,8,", "seconds": "0.5", "parts": "false", "result": str(tmp_path / "r.json")}
    assert split_list("a,,b") == ("a", "b")
    assert positives(own, "tokens", (3,)) == (1, 8) and positives(own, "other", (3,)) == (3,)
    assert number_above_zero(own, "seconds", float, 1.0) == 0.5 and number_above_zero(own, "rounds", int, None) is None
    assert flag(own, "parts", True) is False and flag(own, "other", True) is True
    assert output_file(own, "result") == tmp_path / "r.json" and output_file(own, "picture") is None


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda: positive("tokens", "-1"), "tokens=-1 is no whole number above 0."),
        (lambda: positives({"tokens": "1,0"}, "tokens", ()), "tokens=0 is no whole number above 0."),
        (lambda: number_above_zero({"seconds": "nan"}, "seconds", float, 1), "seconds=nan must be a number above 0."),
        (lambda: number_above_zero({"rounds": "x"}, "rounds", int, 1), "rounds=x must be a number above 0."),
        (lambda: flag({"parts": "yes"}, "parts", True), "parts=yes must be true or false."),
        (
            lambda: output_file({"result": "/"}, "result"),
            "result=/ cannot be written: it is a folder; give the name of a",
        ),
        (
            lambda: output_file({"result": "/none/r"}, "result"),
            "result=/none/r cannot be written: there is no folder /n",
        ),
    ],
)
def test_wrong_values(read, text: str) -> None:
    with pytest.raises(ValueError) as error:
        read()
    assert str(error.value).startswith(text)


def test_the_rest_is_of_launch_generate() -> None:
    """A key that neither has is told with the nearest of both; what a flag hands over may hold anything."""
    own = ("tokens",)
    check_rest(["model=x", "engine.max_num_seqs=3", "--input", "modle=y.jsonl", "--set=a=b", "sampling={n:2}"], own)
    for key, nearest in (("token", "tokens"), ("engine.max_num_seq", "engine.max_num_seqs"), ("n", "sampling.n")):
        with pytest.raises(ValueError, match=f"unknown key '{key}'; did you mean '{nearest}'"):
            check_rest(["--input=a", f"{key}=3"], own)


def test_a_word_of_a_command_without_other_keys() -> None:
    keys = ("tokens", "seeds")
    assert str(unknown_word("token=3", keys, "x")) == "token=3 is no key of x; did you mean tokens=?"
    assert str(unknown_word("verbose", keys, "x")) == "verbose is no key of x; the keys are tokens, seeds."


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(LAUNCH.glob("*.py")) if "\ndef main(" in path.read_text("utf-8")]
)
def test_every_command_says_what_it_is_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked with the rest of a command line before it, too, whose keys nobody looks at then."""
    module = importlib.import_module(f"launch.{name}")
    for words in (["--help"], ["shapes=none", "-h"]):
        assert module.main(words) == 0
        said = capsys.readouterr()
        assert f"python -m launch.{name}" in said.out and not said.err
