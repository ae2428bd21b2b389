"""What the runner keeps from step to step changes nothing but its own work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moe.engine.request import Request, SamplingParams
from moe.engine.sampler import SampleRow, SamplingBatch
from tests.test_engine.fake_network import make_engine, make_parts

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "seed": 2, "logprobs": 2},
    {"temperature": 1.2, "top_p": 0.7, "seed": 3},
    {"temperature": 1.0, "min_p": 0.1, "seed": 4},
    {"temperature": 0.0},
)


def answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, params: Sequence[dict[str, Any]], *, keep: bool, **keys: Any
):
    """(ids and logprobs of every request, how many batches of parameters were built, steps)."""
    built: list[int] = []
    build = SamplingBatch.build

    def counted(rows: Sequence[SampleRow], device: Any) -> SamplingBatch:
        built.append(len(rows))
        return build(rows, device)

    engine = make_engine(make_parts(folder), **keys)
    monkeypatch.setattr(SamplingBatch, "build", counted)
    for index, each in enumerate(params):
        sampling = SamplingParams(max_tokens=12 + 5 * index, ignore_eos=True, **each)
        engine.add_request(Request(f"r{index}", [10 + index] * (3 + 4 * index), sampling))
    outputs = {}
    while engine.has_unfinished:
        if not keep:
            engine.runner._last_batch = None
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
    engine.close()
    monkeypatch.setattr(SamplingBatch, "build", build)
    told = {name: (output.token_ids, output.logprobs) for name, output in outputs.items()}
    return told, len(built), engine.stats.steps


@pytest.mark.parametrize("keys", [{}, {"force_preempt_every": 3}, {"num_blocks": 14, "block_size": 4}])
def test_kept_parameters_draw_what_new_ones_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, int]
) -> None:
    fresh, built_fresh, steps = answers(tmp_path, monkeypatch, PARAMS, keep=False, **keys)
    kept, built_kept, _ = answers(tmp_path, monkeypatch, PARAMS, keep=True, **keys)
    assert kept == fresh and len(kept) == len(PARAMS)
    assert built_kept < built_fresh <= steps


def test_edits_that_follow_the_output_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties change with every token, min_tokens with their number: one such row has all built again."""
    params = [*PARAMS, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.5, "frequency_penalty": 0.3}]
    fresh, built_fresh, _ = answers(tmp_path, monkeypatch, params, keep=False)
    kept, built_kept, _ = answers(tmp_path, monkeypatch, params, keep=True)
    assert kept == fresh and built_kept == built_fresh
