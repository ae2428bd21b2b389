"""The sampler against transformers' processors, hand-worked edits, and itself one row at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moe.engine.logprobs import to_records, token_logprobs
from moe.engine.penalties import LogitEdits, TokenCounts
from moe.engine.request import Logprob, SamplingParams
from moe.engine.sampler import Sampler, SampleResult, SampleRow, SamplingBatch, _thresholds
from tests.compare import host_never_waits

INF = math.inf


def row(position: int = 5, prompt: Sequence[int] = (1,), output: Sequence[int] = (), **params) -> SampleRow:
    seed = params.pop("row_seed", 11)
    eos_ids = params.pop("eos_ids", ())
    return SampleRow(SamplingParams(**params), seed, position, prompt, output, eos_ids)


def sample(logits_BV: Tensor, rows: Sequence[SampleRow], device: str = "cpu") -> SampleResult:
    batch = SamplingBatch.build(rows, device)
    return Sampler(logits_BV.shape[1]).sample(logits_BV.to(device), batch)


def processed(logits_BV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The logits that the draw sees: edited and cut."""
    batch = SamplingBatch.build(rows, "cpu")
    x_BV = logits_BV.clone()
    if batch.edits is not None:
        batch.edits.apply_(x_BV)
    threshold_B = _thresholds(x_BV, batch)
    return x_BV if threshold_B is None else x_BV.masked_fill(x_BV < threshold_B.unsqueeze(1), -INF)


def logits(batch: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(seed)).mul(3)


CUTS = (
    pytest.param({"temperature": 0.7}, id="temperature"),
    pytest.param({"top_k": 7}, id="top_k"),
    pytest.param({"top_k": 1}, id="top_k-one"),
    pytest.param({"top_k": 5000}, id="top_k-beyond-the-vocabulary"),
    pytest.param({"top_p": 0.8}, id="top_p"),
    pytest.param({"top_p": 1e-6}, id="top_p-only-the-best"),
    pytest.param({"min_p": 0.1}, id="min_p"),
    pytest.param({"min_p": 1.0}, id="min_p-only-the-best"),
    pytest.param({"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02}, id="all"),
    pytest.param({"temperature": 0.4, "top_k": 2000, "top_p": 0.95}, id="top_k-by-sorting"),
    pytest.param({"repetition_penalty": 1.3, "top_p": 0.9}, id="repetition"),
    pytest.param({"repetition_penalty": 0.8}, id="repetition-that-encourages"),
)


def transformers_logits(logits_BV: Tensor, ids_BL: Tensor, params: dict) -> Tensor:
    """In the order of transformers' generate: penalty, temperature, top_k, top_p, min_p."""
    steps = LogitsProcessorList()
    if "repetition_penalty" in params:
        steps.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    steps.append(TemperatureLogitsWarper(params.get("temperature", 1.0)))
    if "top_k" in params:
        steps.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        steps.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        steps.append(MinPLogitsWarper(params["min_p"]))
    return steps(ids_BL, logits_BV.double())


@pytest.mark.parametrize("params", CUTS)
def test_kept_tokens_and_probabilities_are_those_of_transformers(params: dict) -> None:
    logits_BV = logits(6, 3001)
    ids_BL = torch.randint(0, 3001, (6, 30), generator=torch.Generator().manual_seed(3))
    rows = [row(prompt=ids[:20].tolist(), output=ids[20:].tolist(), **params) for ids in ids_BL]
    ours_BV = processed(logits_BV, rows) / params.get("temperature", 1.0)
    theirs_BV = transformers_logits(logits_BV, ids_BL, params)
    assert torch.equal(ours_BV.isfinite(), theirs_BV.isfinite())
    assert torch.allclose(ours_BV.double().softmax(1), theirs_BV.softmax(1), rtol=1e-4, atol=1e-9)


def test_equal_logits_at_the_cut_are_all_kept() -> None:
    logits_BV = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = [0, 1, 1, 1, 0]
    for params in ({"top_k": 2}, {"top_p": 0.6}):
        assert processed(logits_BV, [row(**params)]).isfinite().int().tolist() == [kept]


def test_presence_and_frequency_count_the_output_only() -> None:
    """Hand-worked: prompt 0 0 1, output 1 1 2; presence 0.5, frequency 0.25."""
    edited = processed(
        torch.zeros(1, 4), [row(prompt=[0, 0, 1], output=[1, 1, 2], presence_penalty=0.5, frequency_penalty=0.25)]
    )
    assert edited.tolist() == [[0.0, -1.0, -0.75, 0.0]]


def test_repetition_counts_prompt_and_output() -> None:
    """Hand-worked: positive logits are divided, negative ones multiplied, unseen ones kept."""
    edited = processed(torch.tensor([[2.0, -2.0, 2.0, -2.0]]), [row(prompt=[0], output=[1], repetition_penalty=2.0)])
    assert edited.tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_bias_comes_before_the_penalties() -> None:
    edited = processed(torch.tensor([[0.0, 1.0]]), [row(prompt=[0], logit_bias={0: 4.0}, repetition_penalty=2.0)])
    assert edited.tolist() == [[2.0, 1.0]]


def test_logit_bias_forces_and_forbids() -> None:
    logits_BV = torch.tensor([[0.0, 5.0, 1.0]]).repeat(2, 1)
    rows = [row(temperature=0, logit_bias={"2": 100}), row(temperature=0, logit_bias={1: -100})]
    assert sample(logits_BV, rows).ids_B.tolist() == [2, 2]


def test_min_tokens_masks_what_ends_the_text_until_reached() -> None:
    logits_BV = torch.tensor([[9.0, 8.0, 7.0, 0.0]])
    params = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [1], "eos_ids": (0,)}
    for output, want in (([], 2), ([3], 2), ([3, 3], 0)):
        assert sample(logits_BV, [row(output=output, **params)]).ids_B.tolist() == [want]
    # EOS that is ignored ends nothing, so it may be drawn.
    assert sample(logits_BV, [row(ignore_eos=True, **params)]).ids_B.tolist() == [0]


def test_greedy_takes_the_lowest_of_equals_and_is_not_cut() -> None:
    logits_BV = torch.tensor([[1.0, 4.0, 4.0]])
    assert sample(logits_BV, [row(temperature=0, top_k=1, top_p=0.1)]).ids_B.tolist() == [1]
    assert sample(logits_BV, [row(temperature=1e-6)]).ids_B.tolist() == [1]


def test_a_seed_beyond_63_bits_is_its_two_complement() -> None:
    batch = SamplingBatch.build([row(row_seed=2**64 - 1), row(row_seed=-1)], "cpu")
    assert batch.seed_B.tolist() == [-1, -1]


def test_tiny_and_huge_temperatures_draw_something() -> None:
    logits_BV = logits(2, 500)
    rows = [row(temperature=2e-5, top_p=0.9), row(temperature=1e6)]
    first, second = sample(logits_BV, rows).ids_B.tolist()
    assert first == int(logits_BV[0].argmax()) and 0 <= second < 500


def mixed_rows(count: int, vocab_size: int) -> list[SampleRow]:
    """Every parameter on and off in one batch."""
    rng = random.Random(5)
    rows = []
    for at in range(count):
        params: dict = {"temperature": rng.choice([0, 0.3, 1.0, 1.8, None])}
        for name, values in (
            ("top_k", [3, 50, 2000]),
            ("top_p", [0.5, 0.95]),
            ("min_p", [0.05, 0.3]),
            ("repetition_penalty", [1.2, 0.9]),
            ("presence_penalty", [0.7]),
            ("frequency_penalty", [-0.4, 1.1]),
            ("logit_bias", [{3: 2.5, 9: -100}]),
            ("logprobs", [0, 1, 5]),
        ):
            if rng.random() < 0.4:
                params[name] = rng.choice(values)
        if rng.random() < 0.3:
            params.update(min_tokens=100, stop_token_ids=[1, 2])
        ids = [rng.randrange(vocab_size) for _ in range(40)]
        cut = rng.randrange(1, 40)
        rows.append(row(position=at, prompt=ids[:cut], output=ids[cut:], row_seed=rng.randrange(2**64), **params))
    return rows


def check_batch_of_64_against_one_by_one(device: str, vocab_size: int) -> None:
    logits_BV = logits(64, vocab_size, seed=9)
    logits_BV[17] = logits_BV[17].round()  # many equal logits
    rows = mixed_rows(64, vocab_size)
    together = sample(logits_BV, rows, device)
    alone = [sample(logits_BV[at : at + 1].clone(), rows[at : at + 1], device) for at in range(64)]
    assert together.ids_B.tolist() == [int(result.ids_B) for result in alone]
    assert together.logprobs == [result.logprobs[0] if result.logprobs else None for result in alone]
    order = list(range(64))
    random.Random(1).shuffle(order)
    shuffled = sample(logits_BV[order], [rows[at] for at in order], device)
    assert shuffled.ids_B.tolist() == together.ids_B[order].tolist()


@pytest.mark.parametrize("vocab_size", [131, 2049])
def test_batch_of_64_mixed_rows_has_the_bits_of_one_by_one(vocab_size: int) -> None:
    check_batch_of_64_against_one_by_one("cpu", vocab_size)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [131, 2049, 151936])
def test_batch_of_64_mixed_rows_has_the_bits_of_one_by_one_on_gpu(vocab_size: int) -> None:
    check_batch_of_64_against_one_by_one("cuda", vocab_size)


def test_thresholds_have_the_same_bits_alone() -> None:
    """The ids could agree by luck; the cuts themselves must be equal."""
    logits_BV, rows = logits(64, 2049, seed=2), mixed_rows(64, 2049)
    together_BV = processed(logits_BV, rows)
    for at in range(64):
        assert torch.equal(together_BV[at : at + 1], processed(logits_BV[at : at + 1].clone(), rows[at : at + 1]))


@pytest.mark.gpu
def test_sampling_does_not_wait_for_the_device() -> None:
    logits_BV = logits(64, 2049).cuda()
    batch = SamplingBatch.build(mixed_rows(64, 2049), "cuda")
    sampler = Sampler(2049)
    want = sampler.sample(logits_BV, batch).ids_B.tolist()
    with host_never_waits():
        ids_B = sampler.sample(logits_BV, batch).ids_B
    assert ids_B.tolist() == want


def test_C14_bad_rows_give_minus_one_and_leave_the_others_alone() -> None:
    """Case C14: 7 real rows and one of NaN; arg-max would give token 0. Also one NaN, +inf, and a NaN under a mask."""
    logits_BV = logits(8, 97)
    rows = [row(position=at, temperature=0.9 if at % 2 else 0, top_p=0.9, logprobs=2) for at in range(8)]
    clean = sample(logits_BV[:7], rows[:7])
    bad_BV = logits_BV.clone()
    bad_BV[7] = math.nan
    result = sample(bad_BV, rows)
    assert result.ids_B.tolist() == [*clean.ids_B.tolist(), -1]
    assert clean.logprobs is not None and result.logprobs == [*clean.logprobs, {}]
    for value in (math.nan, INF):
        bad_BV = logits_BV.clone()
        bad_BV[2, 40] = value
        bad_BV[3, 5] = value
        covered = [
            replace(r, params=replace(r.params, min_tokens=9), eos_ids=(5,)) if at == 3 else r
            for at, r in enumerate(rows)
        ]
        ids = sample(bad_BV, covered).ids_B.tolist()
        assert ids[2] == ids[3] == -1 and ids[4:7] == clean.ids_B.tolist()[4:]
    nothing_BV = torch.full((1, 97), -INF)
    for params in ({"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert sample(nothing_BV, [row(**params)]).ids_B.tolist() == [-1]


def test_minus_infinity_in_some_entries_is_an_ordinary_row() -> None:
    logits_BV = torch.full((4, 50), -INF)
    logits_BV[:, 20] = 1.0
    rows = [row(temperature=0), row(top_k=5), row(top_p=0.5), row(min_p=0.1, repetition_penalty=1.5, prompt=[4])]
    assert sample(logits_BV, rows).ids_B.tolist() == [20] * 4


def test_C08_penalties_and_random_stream_continue_where_they_were() -> None:
    """Case C08, the sampler's part: after an eviction at any step, drawing on from prompt and output gives the same."""
    table_VV = logits(40, 40, seed=4)
    params = SamplingParams(temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.3, top_p=0.95)
    prompt = [3, 1, 4, 1, 5]

    def run(output: list[int], steps: int, *, keep_counts: bool) -> list[int]:
        output = list(output)
        counts = TokenCounts(prompt, output) if keep_counts else None
        for _ in range(steps):
            last = (prompt + output)[-1]
            one = SampleRow(params, 77, len(prompt) + len(output), prompt, output, counts=counts)
            token_id = int(sample(table_VV[last : last + 1], [one]).ids_B)
            output.append(token_id)
            if counts is not None:
                counts.extend([token_id])
        return output

    whole = run([], 40, keep_counts=True)
    assert len(set(whole)) > 5
    for evicted_at in (1, 16, 39):
        assert run(whole[:evicted_at], 40 - evicted_at, keep_counts=False) == whole


def test_another_seed_or_position_draws_differently() -> None:
    logits_BV = torch.zeros(1, 1000)
    ids = {int(sample(logits_BV, [row(row_seed=s, position=p)]).ids_B) for s in range(5) for p in range(5)}
    assert len(ids) >= 20  # 25 draws from 1000


def test_counts_grow_as_the_output_does() -> None:
    counts = TokenCounts([7, 7, 8])
    counts.extend([8, 9, *range(100, 140), 9])
    ids, numbers = counts.arrays()
    got = dict(zip(ids.tolist(), numbers.tolist()))
    assert got == {7: 0, 8: 1, 9: 2, **dict.fromkeys(range(100, 140), 1)}
    assert counts.num_output == 43


def test_rows_without_edits_keep_their_bits() -> None:
    assert LogitEdits.build([], [], [], torch.device("cpu")) is None
    logits_BV = logits(2, 64)
    edited = processed(logits_BV, [row(), row(repetition_penalty=1.5, prompt=[1, 2])])
    assert torch.equal(edited[0], logits_BV[0]) and not torch.equal(edited[1], logits_BV[1])


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Penalties, temperature and cuts do not show in them."""
    logits_BV = logits(3, 200)
    rows = [row(logprobs=3, temperature=0.2, top_k=2), row(), row(logprobs=0, temperature=0, logit_bias={7: 50})]
    result = sample(logits_BV, rows)
    want_BV = logits_BV.double().log_softmax(1)
    assert result.logprobs is not None and result.logprobs[1] is None
    first, last = result.logprobs[0], result.logprobs[2]
    assert first is not None and last is not None
    chosen = int(result.ids_B[0])
    top = logits_BV[0].topk(3).indices.tolist()
    assert list(first) == [chosen, *[i for i in top if i != chosen]]
    for token_id, entry in first.items():
        assert entry.logprob == pytest.approx(float(want_BV[0, token_id]), abs=1e-6)
        assert entry.rank == int((logits_BV[0] > logits_BV[0, token_id]).sum()) + 1
    assert list(last) == [7] and last[7].logprob == pytest.approx(float(want_BV[2, 7]), abs=1e-6)


def test_equal_logits_rank_by_id() -> None:
    tensors = token_logprobs(torch.tensor([[0.0, 1.0, -0.0, 1.0]]), torch.tensor([2]), 4)
    assert tensors.top_ids_RN.tolist() == [[1, 3, 0, 2]]
    assert tensors.ranks_R.tolist() == [4]


def test_prompt_logprobs() -> None:
    logits_TV = logits(3, 50)
    records = to_records(Sampler(50).prompt_tensors(logits_TV, [4, 0, 49], 1), [1] * 3)
    want_TV = logits_TV.log_softmax(1)
    for at, (token_id, record) in enumerate(zip([4, 0, 49], records)):
        best = int(logits_TV[at].argmax())
        assert set(record) == {token_id, best}
        assert isinstance(record[token_id], Logprob) and record[best].rank == 1
        assert record[token_id].logprob == pytest.approx(float(want_TV[at, token_id]), abs=1e-5)


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 9), []).ids_B.shape == (0,)
