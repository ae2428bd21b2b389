"""Two halves of a step in turns: which rows each has, in which order stages run, and that no bit tells."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import ParallelConfig
from moe.model.causal_lm import CausalLM
from moe.model.half_steps import split_step
from moe.model.load_model import load_model
from moe.model.overlap import HALVES_FROM_ROWS, Overlap, SideStream, Stages, choose_overlap, run_halves, run_through
from moe.model.step_input import DecodeBatch, PrefillBatch, StepInput, StepOfAll
from router.load import LoadCounter
from tests.compare import assert_same_bits
from tests.step_driver import StepDriver
from tests.tiny_models import write_variant

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Decode rows and chunks of each step: a chunk that both halves share, a cut between two sequences, a cut between decode
# rows and prompts, more decode rows than fit one half, decode alone, one row.
STEPS: tuple[tuple[Mapping[str, Sequence[int]], Mapping[str, int]], ...] = (
    ({"a": range(30, 75), "b": [7], "c": range(100, 110)}, {}),
    ({"d": range(50, 53)}, {"a": 1, "b": 2, "c": 3}),
    ({"e": range(60, 63), "c2": range(3)}, {"a": 4, "b": 5}),
    ({"e": range(63, 80)}, {"a": 4}),
    ({"f": [9]}, {"a": 6, "b": 7, "c": 8, "d": 9}),
    ({}, {"a": 1, "b": 2, "c": 3}),
    ({}, {"b": 1}),
)


OVERLAPS = (
    Overlap(halves_from=2),
    Overlap(shared=True),
    Overlap(shared=True, halves_from=9),
    Overlap(shared=True, decoding=True),
)


def make(folder: Path, overlap: Overlap, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = load_model(folder, dtype=dtype, device=device, max_model_len=128, mla_workspace_tokens=64)
    model.overlap = overlap
    model.load = LoadCounter(model.config.num_layers, model.config.moe.num_experts, device)
    return model


def answers(model: CausalLM) -> list[dict[str, Tensor]]:
    driver = StepDriver(model)
    return [driver.run(prefill=prefill, decode=decode) for prefill, decode in STEPS]


@pytest.mark.parametrize("variant", ["mixtral-window", "deepseek_v3"])
def test_halves_have_the_bits_of_the_whole(variant: str, tmp_path: Path) -> None:
    """deepseek_v3 has a dense layer, shared experts, and prompts of more than one round of its workspace."""
    write_variant(tmp_path, variant)
    model = make(tmp_path, Overlap())
    assert model.load is not None
    whole, load = answers(model), model.load.snapshot()
    for overlap in OVERLAPS:
        model.overlap = overlap
        model.load.reset()
        assert_same_answers(answers(model), whole)
        assert torch.equal(model.load.snapshot(), load)


def assert_same_answers(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert got.keys() == wanted.keys()
        for name, rows_XV in wanted.items():
            assert_same_bits(got[name], rows_XV)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["mixtral-window", "deepseek_v3"])
def test_on_a_second_stream_too(variant: str, tmp_path: Path) -> None:
    write_variant(tmp_path, variant, dtype="bfloat16")
    whole = answers(make(tmp_path, Overlap(), CUDA, torch.bfloat16))
    for overlap in OVERLAPS:
        model = make(tmp_path, overlap, CUDA, torch.bfloat16)
        for _ in range(3):  # memory of the first time is given out again in the second
            assert_same_answers(answers(model), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [Overlap(shared=True), Overlap(halves_from=2)], ids=["shared", "halves"])
def test_the_second_stream_is_captured(overlap: Overlap, tmp_path: Path) -> None:
    """Decode rows through a graph that forks and joins, replayed with other tokens and lengths."""
    write_variant(tmp_path, "deepseek_v3", dtype="bfloat16")
    prompts = {name: range(10 * at, 10 * at + 5 + at) for at, name in enumerate("abcdefg")}
    tokens = [{name: 7 * step + at for at, name in enumerate(prompts)} for step in range(4)]
    expected: list[Tensor] = []
    driver = StepDriver(make(tmp_path, Overlap(), CUDA, torch.bfloat16))
    driver.run(prefill=prompts)
    for step in tokens:
        expected.append(torch.cat(list(driver.run(decode=step).values())))

    model = make(tmp_path, overlap, CUDA, torch.bfloat16)
    driver = StepDriver(model)
    driver.run(prefill=prompts)
    steps = [driver.plan([(name, [token]) for name, token in step.items()], len(step)) for step in tokens]
    fixed = with_bound(steps[-1], 64)
    places = tensors_of(fixed)
    kept = [tensor.clone() for tensor in places]
    fixed.slot_mapping_T.fill_(-1)  # the runs that make the graph write nothing
    with torch.inference_mode():
        model.forward(fixed, driver.kv_caches)
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            logits_BV = model.forward(fixed, driver.kv_caches)
    for step, expected_BV in zip(steps, expected, strict=True):
        values = kept if step is steps[-1] else tensors_of(step)
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
        graph.replay()
        junk = torch.full((2**20,), torch.nan, device=CUDA)  # in whatever memory the capture gave back
        assert_same_bits(logits_BV, expected_BV)
        del junk


def with_bound(step: StepInput, bound: int) -> StepInput:
    assert step.decode is not None
    return replace(step, decode=replace(step.decode, max_kv_len=bound))


def tensors_of(step: StepInput) -> list[Tensor]:
    assert step.decode is not None
    return [step.token_ids_T, step.positions_T, step.slot_mapping_T, *vars(step.decode).values()][:5]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(num_decode=st.integers(0, 7), lens=st.lists(st.integers(1, 6), max_size=4), more=st.integers(0, 5))
def test_every_row_is_in_one_half_with_its_keys(num_decode: int, lens: list[int], more: int) -> None:
    num_tokens, others = num_decode + sum(lens), num_decode + sum(lens) + more
    step = step_of(num_decode, lens, StepOfAll(others, True) if more else None)
    halves = split_step(step)
    assert [half.most_rows for half in halves] == [-(-others // 2), others // 2]
    assert [half.token_ids_T.shape[0] for half in halves] == [-(-num_tokens // 2), num_tokens // 2]
    assert all(half.any_prefill == step.any_prefill for half in halves)
    for name in ("token_ids_T", "positions_T", "slot_mapping_T"):
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(step, name))
    assert [row for half in halves for row in keys_of(half)] == keys_of(step)
    for half in halves:
        if half.prefill is not None:
            assert min(half.prefill.query_lens_host) > 0 and half.prefill.max_query_len == max(
                half.prefill.query_lens_host
            )
            assert half.prefill.max_kv_len == max(half.prefill.kv_lens_host)


def step_of(num_decode: int, lens: list[int], of_all: StepOfAll | None) -> StepInput:
    """Sequence b has table entry b and begins at position 10 * b."""
    ends = [10 * b + length for b, length in enumerate(lens)]
    positions = [99 + b for b in range(num_decode)] + [
        10 * b + row for b, length in enumerate(lens) for row in range(length)
    ]
    positions_T = torch.tensor(positions, dtype=torch.int64)
    decode = prefill = None
    if num_decode:
        kv_lens_B = torch.arange(100, 100 + num_decode, dtype=torch.int32)
        decode = DecodeBatch(torch.arange(500, 500 + num_decode)[:, None], kv_lens_B, 200)
    if lens:
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        prefill = PrefillBatch(
            torch.arange(len(lens))[:, None],
            starts,
            torch.arange(0, 10 * len(lens), 10, dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            max(lens),
            max(ends),
            tuple(lens),
            tuple(ends),
        )
    return StepInput(
        positions_T * 3, positions_T, positions_T * 2, num_decode, decode, prefill, positions_T, of_all=of_all
    )


def keys_of(step: StepInput) -> list[tuple[int, int, int]]:
    """Of each row: its position, its sequence's table, and how many keys it sees; from the device's own numbers."""
    rows: list[tuple[int, int, int]] = []
    if step.decode is not None:
        assert step.decode.kv_lens_B.shape[0] == step.num_decode
        rows += zip(
            step.positions_T.tolist(), step.decode.block_tables_BM[:, 0].tolist(), step.decode.kv_lens_B.tolist()
        )
    if step.prefill is not None:
        prefill, positions = step.prefill, step.positions_T[step.num_decode :].tolist()
        starts, offsets = prefill.query_starts_B1.tolist(), prefill.query_offsets_B.tolist()
        assert starts[-1] == len(positions) and prefill.block_tables_BM.shape[0] == len(offsets)
        for b, (start, stop) in enumerate(itertools.pairwise(starts)):
            assert offsets[b] + stop - start == prefill.kv_lens_B[b] == prefill.kv_lens_host[b]
            assert prefill.query_lens_host[b] == stop - start
            for row in range(start, stop):
                assert positions[row] == offsets[b] + row - start
                rows.append((positions[row], int(prefill.block_tables_BM[b, 0]), positions[row] + 1))
    return rows


def test_indices_of_halves_begin_aligned() -> None:
    """Where they do not, each alignment is another kernel, compiled in the midst of a run."""
    for half in split_step(step_of(0, [2, 1, 2, 5], None)):
        assert half.prefill is not None
        indices = ("block_tables_BM", "query_starts_B1", "query_offsets_B", "kv_lens_B")
        assert [getattr(half.prefill, name).data_ptr() % 16 for name in indices] == [0] * 4


def test_stages_run_in_turns_as_drawn() -> None:
    told: list[str] = []

    def stages(half: str, num_layers: int) -> Stages:
        for layer in range(num_layers):
            for stage in ("attention", "dispatch", "experts", "combine"):
                told.append(f"{half} {stage} {layer}")
                yield
        return torch.full((1,), num_layers)

    ends = run_halves(stages("A", 2), stages("B", 2), 2, SideStream(CPU))
    assert [int(end) for end in ends] == [2, 2]
    assert ", ".join(told) == (
        "A attention 0, A dispatch 0, B attention 0, A experts 0, B dispatch 0, A combine 0, "
        "A attention 1, B experts 0, A dispatch 1, B combine 0, B attention 1, A experts 1, B dispatch 1, A combine 1, "
        "B experts 1, B combine 1"
    )
    told.clear()
    assert int(run_through(stages("A", 1))) == 1 and len(told) == 4


@pytest.mark.parametrize(
    ("keys", "num_ranks", "device", "expected"),
    [
        ({}, 2, CUDA, Overlap(shared=True)),
        ({}, 2, CPU, Overlap()),
        ({}, 1, CUDA, Overlap(shared=True, decoding=True)),
        ({"overlap": "shared"}, 1, CUDA, Overlap(shared=True, decoding=True)),
        ({}, 1, CPU, Overlap()),
        ({"overlap": "none"}, 1, CUDA, Overlap()),
        ({"overlap": "shared"}, 2, CPU, Overlap()),
        ({"overlap": "none"}, 2, CUDA, Overlap()),
        ({"overlap": "halves"}, 1, CUDA, Overlap(shared=True, decoding=True)),
        ({"overlap": "halves"}, 2, CPU, Overlap(halves_from=HALVES_FROM_ROWS)),
        ({"overlap": "halves", "overlap_rows": 7}, 3, CUDA, Overlap(shared=True, halves_from=7)),
    ],
)
def test_what_is_chosen(keys: dict[str, Any], num_ranks: int, device: torch.device, expected: Overlap) -> None:
    assert choose_overlap(ParallelConfig(**keys), num_ranks, device) == expected


def test_one_rank_takes_shared_experts_aside_in_steps_without_prompts() -> None:
    overlap = choose_overlap(ParallelConfig(), 1, CUDA)
    assert overlap.shared_in(prompts=False) and not overlap.shared_in(prompts=True)
    assert str(overlap) == "shared experts beside routed ones in steps of decoding rows alone"
    assert Overlap(shared=True).shared_in(prompts=True) and not Overlap().shared_in(prompts=False)
