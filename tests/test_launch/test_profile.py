"""launch.profile: sums over hand-made spans, names, the command line's errors, tables that are written one by one, and
on a GPU the demo itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.profile import Span, StepProfile, as_markdown, main, short_name, summarize, write_pieces


def test_overlapping_kernels_are_busy_once_and_counted_twice() -> None:
    """a 0..6, b 4..8, a 9..10 ms over two steps: 9 of 10 ms busy, a 7 ms in two launches, b 4 ms in one. Behind one
    another they add 6, 2 and, with the idle millisecond before it, 2."""
    spans = [Span("a", 0, 6e3), Span("b", 4e3, 8e3), Span("a", 9e3, 10e3)]
    each = summarize("t", 5.5, spans, 2)
    assert (each.span_ms, each.busy_ms) == (5.0, 4.5)
    assert [(k.name, k.launches, k.ms, k.added_ms) for k in each.kernels] == [
        ("a", 1.0, 3.5, 4.0),
        ("b", 0.5, 2.0, 1.0),
    ]
    text = as_markdown(each)
    assert "idle 0.50 ms (10.0%)" in text
    assert "| `a` | 1 | 3500.0 | 3.500 | 4.000 | 80.0% |" in text


def test_what_is_measured_is_written_before_the_next_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "p.md"

    def profiles() -> Iterator[StepProfile]:
        yield summarize("first", 5.5, [Span("a", 0, 6e3)], 1)
        assert result.read_text().startswith("head\n") and "## first" in result.read_text()
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        write_pieces("head", profiles(), result)
    assert "## first" in capsys.readouterr().out and "## first" in result.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["p.md"]


def test_names_of_templates_and_lambdas() -> None:
    assert short_name("_grouped_gemm_kernel") == "_grouped_gemm_kernel"
    assert short_name("void cutlass::Kernel2<cutlass_80_tensorop<128>>(cutlass::Params)") == "cutlass::Kernel2"
    assert short_name("nvjet_sm90_tst_64x8_64x16_1x2_h_bz_TNT") == "nvjet_sm90_tst_64x8_64x16_1x2_h_bz_TNT"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "model= is missing"),
        (["model=demo", "prefill=4096"], "prefill=4096 must be prompts x length"),
        (["model=demo", "batch=0"], "batch=0 is no whole number above 0"),
        (["model=demo", "engine.max_num_sqs=4"], "max_num_seqs"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.gpu
def test_the_demo_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Its decode steps run our grouped products, and the device's time adds up."""
    assert main(["model=demo", "load_format=auto", "engine.max_model_len=1024", "batch=3", "prefill=2x100"]) == 0
    out = capsys.readouterr().out
    assert "decode, 3 sequences" in out and "prefill, 2 prompts of 100" in out
    assert "grouped_gemm" in out
