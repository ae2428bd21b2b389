"""The sampling kernel against its reference, Philox's published vectors, and the distribution it should draw from."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import sample
from kernels.sample import (
    Words,
    gumbel_reference,
    philox_reference,
    sample_argmax,
    sample_argmax_reference,
    sample_argmax_triton,
)
from tests.aot import ARCHS, aot, compile_ahead

INF = math.inf
# Random123's known answers for philox4x32-10: counter, key, words.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
VOCAB = (
    pytest.param(1, id="V1-no-choice"),
    pytest.param(127, id="V127-below-a-run"),
    pytest.param(513, id="V513-one-above-a-run"),
    pytest.param(2049, id="V2049-one-above-a-tile"),
    pytest.param(8193, id="V8193-one-above-a-part"),
)


def rows(batch: int, vocab_size: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits rounded to `dtype` (so that equal ones occur), some temperatures zero, wide seeds and positions."""
    generator = torch.Generator().manual_seed(7)
    logits_BV = torch.randn(batch, vocab_size, generator=generator).mul(3).to(dtype).float()
    temperature_B = torch.tensor([0.0, 1.0, 0.3, 2.5] * batch)[:batch]
    seed_B = torch.tensor([5, -1, 2**62 + 3, -(2**63)] * batch)[:batch]
    position_B = torch.tensor([0, 3, 2**32 + 1, 77] * batch)[:batch] + torch.arange(batch)
    return (
        logits_BV.to(device),
        temperature_B.to(device),
        seed_B.to(device),
        position_B.to(device),
    )


def test_philox_gives_the_published_words() -> None:
    for counter, key, words in KNOWN:
        counter_1 = Words(*(torch.tensor([word]) for word in counter))
        got = philox_reference(counter_1, torch.tensor([key[0]]), torch.tensor([key[1]]))
        assert tuple(int(word) for word in got) == words


@triton.jit
def _philox_kernel(counter_ptr, key_ptr, out_ptr, N: tl.constexpr, philox: tl.constexpr):
    at = tl.arange(0, N)
    c0 = tl.load(counter_ptr + at).to(tl.uint32)
    c1 = tl.load(counter_ptr + N + at).to(tl.uint32)
    c2 = tl.load(counter_ptr + 2 * N + at).to(tl.uint32)
    c3 = tl.load(counter_ptr + 3 * N + at).to(tl.uint32)
    k0 = tl.load(key_ptr + at).to(tl.uint32)
    k1 = tl.load(key_ptr + N + at).to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + at, w0.to(tl.int64))
    tl.store(out_ptr + N + at, w1.to(tl.int64))
    tl.store(out_ptr + 2 * N + at, w2.to(tl.int64))
    tl.store(out_ptr + 3 * N + at, w3.to(tl.int64))


def test_the_kernels_philox_has_the_references_bits(backend) -> None:
    generator = torch.Generator().manual_seed(1)
    counter_4N = torch.randint(0, 2**32, (4, 64), generator=generator)
    key_2N = torch.randint(0, 2**32, (2, 64), generator=generator)
    for at, (counter, key, _) in enumerate(KNOWN):
        counter_4N[:, at], key_2N[:, at] = torch.tensor(counter), torch.tensor(key)
    got_4N = torch.empty(4, 64, dtype=torch.int64, device=backend.device)
    _philox_kernel[(1,)](counter_4N.to(backend.device), key_2N.to(backend.device), got_4N, N=64, philox=sample._philox)
    want_4N = torch.stack(philox_reference(Words(*counter_4N), *key_2N))
    assert torch.equal(got_4N.cpu(), want_4N)
    assert tuple(got_4N[:, 2].tolist()) == KNOWN[2][2]


@triton.jit
def _perturbed_kernel(
    x_ptr, word_ptr, out_ptr, temperature, N: tl.constexpr, FAST: tl.constexpr, perturb: tl.constexpr
):
    at = tl.arange(0, N)
    word = tl.load(word_ptr + at).to(tl.uint32)
    tl.store(out_ptr + at, perturb(tl.load(x_ptr + at), word, temperature, tl.div_rn(1.0, temperature), FAST))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1000.0])
def test_noise_and_quotient_are_exact_to_a_few_bits(backend, temperature: float) -> None:
    """Over all magnitudes of u, its smallest and largest, and both sides of where the series ends."""
    generator = torch.Generator().manual_seed(2)
    exponents = torch.rand(4096, generator=generator, dtype=torch.float64) * 32
    word_N = (2.0**exponents).long().clamp(0, 2**32 - 1)
    word_N[:4] = torch.tensor([0, 2**32 - 1, 2**28 - 1, 2**28])
    x_N = torch.randn(4096, generator=generator) * 20
    x_N[4:6] = torch.tensor([-INF, 0.0])
    out_N = torch.empty(4096, device=backend.device)
    operands = (x_N.to(backend.device), word_N.to(backend.device), out_N)
    options: dict[str, Any] = {"N": 4096, "FAST": backend.device == "cuda", "perturb": sample._perturbed}
    _perturbed_kernel[(1,)](*operands, temperature, **options)
    u_N = ((word_N.float() + 0.5) * 2.0**-32).clamp_max(sample.LARGEST_BELOW_ONE).double()
    quotient_N = (x_N / torch.tensor(temperature)).double()
    wanted_N = quotient_N - (-torch.log1p(-u_N)).log()
    assert out_N[4] == -INF
    finite = x_N.isfinite()
    assert float((out_N.cpu().double() - wanted_N)[finite].abs().max()) < 1.5e-5
    if temperature == 1.0:
        return
    # Where the noise is smallest against it, the quotient's own bits show.
    alone_N = torch.full((4096,), 2**32 - 2**30, dtype=torch.int64).to(backend.device)  # -log(-log(1/4)), about -0.3
    big_N = (x_N * 1e6).to(backend.device)
    _perturbed_kernel[(1,)](big_N, alone_N, out_N, temperature, **options)
    wanted_N = (big_N.cpu().double() / temperature) - math.log(-math.log(0.25))
    error_N = (out_N.cpu().double() - wanted_N).abs()
    assert bool((error_N[finite] < 3e-7 * wanted_N[finite].abs() + 5e-7).all())  # and the noise's own


@pytest.mark.parametrize("vocab_size", VOCAB)
def test_kernel_draws_the_references_ids(backend, vocab_size: int) -> None:
    args = rows(4, vocab_size, *backend)
    got_B = sample_argmax_triton(*args)
    assert torch.equal(got_B.cpu(), sample_argmax_reference(*(x.cpu() for x in args)))


def test_a_whole_vocabulary(backend) -> None:
    """Qwen3's 151936 ids, 75 tiles: one greedy row and one drawn. One dtype is enough for the slow interpreter."""
    if backend.dtype is torch.float16:
        pytest.skip("covered in fp32")
    args = rows(2, 151936, *backend)
    assert torch.equal(sample_argmax_triton(*args).cpu(), sample_argmax_reference(*(x.cpu() for x in args)))


def test_strided_rows_and_no_rows(backend) -> None:
    logits_BV, *rest = rows(4, 129, *backend)
    wide_BW = torch.full((4, 200), math.nan, device=backend.device)  # what lies between the rows is not theirs
    wide_BW[:, :129] = logits_BV
    assert torch.equal(sample_argmax_triton(wide_BW[:, :129], *rest), sample_argmax_triton(logits_BV, *rest))
    assert sample_argmax_triton(logits_BV[:0], *(x[:0] for x in rest)).shape == (0,)


@pytest.mark.parametrize("times", [1, 2], ids=["few rows", "many rows"])
def test_what_one_part_holds_counts_for_the_row(backend, times: int) -> None:
    """NaN, +inf, the largest, and ties across the parts of a row, however it is cut: every part has its say."""
    logits_5V = torch.zeros(5, 2 * sample.PART_TILES * sample.TILE + 100)
    logits_5V[0, -1] = math.nan
    logits_5V[1, 9000] = INF
    logits_5V[2] = -INF
    logits_5V[2, -100] = -3.0
    logits_5V[3, [8191, 8192, 16384]] = 1.0
    keys = torch.arange(5)
    args = [torch.cat([x] * times).to(backend.device) for x in (logits_5V, torch.zeros(5), keys, keys)]
    assert (5 * times > sample.FEW_ROWS) == (times == 2)
    assert sample_argmax_triton(*args).tolist() == [-1, -1, 16384, 8191, 0] * times


def test_ids_go_where_they_are_asked_to(backend) -> None:
    """To each row's entry, and to each row's place; of rows that name one, which are padding, any's."""
    args = rows(4, 2049, *backend)
    wanted = sample_argmax_reference(*(x.cpu() for x in args)).tolist()
    on_gpu = backend.device == "cuda"
    for pinned in {False, on_gpu}:
        ids = torch.full((7,), -7, pin_memory=True) if pinned else torch.full((7,), -7, device=backend.device)
        at_B, places_B = (torch.tensor(each, device=backend.device) for each in ([3, 2, 5, 6], [5, 0, 6, 6]))
        drawn = sample.Drawn(ids, at_B, torch.full((7,), -7, device=backend.device), places_B)
        if on_gpu:
            sample.sample_argmax_into(drawn, *args)
            torch.cuda.synchronize()
        else:
            sample_argmax_triton(*args, drawn)
        check_drawn(drawn, wanted)


def test_reference_ids_go_where_they_are_asked_to() -> None:
    args = rows(4, 2049, "cpu", torch.float32)
    drawn = sample.Drawn(
        torch.full((7,), -7), torch.tensor([3, 2, 5, 6]), torch.full((7,), -7), torch.tensor([5, 0, 6, 6])
    )
    sample.sample_argmax_into(drawn, *args)
    check_drawn(drawn, sample_argmax_reference(*args).tolist())


def check_drawn(drawn: sample.Drawn, wanted: list[int]) -> None:
    assert drawn.ids.tolist() == [-7, -7, wanted[1], wanted[0], -7, *wanted[2:]]
    *newest, padding = drawn.newest_P.tolist()
    assert newest == [wanted[1], -7, -7, -7, -7, wanted[0]] and padding in wanted[2:]


def special_rows(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of 600: NaN once, +inf once, all -inf, one finite, ties at 3 and 520; each greedy, then drawn."""
    logits_6V = torch.zeros(6, 600)
    logits_6V[0, 511] = math.nan
    logits_6V[1, 599] = INF
    logits_6V[2] = -INF
    logits_6V[3] = -INF
    logits_6V[3, 577] = -40.0
    logits_6V[4, [520, 3]] = 2.0
    logits_6V[5] = math.nan
    temperature = torch.tensor([0.0] * 6 + [0.7] * 6)
    seeds, positions = torch.arange(12), torch.arange(12)
    return logits_6V.repeat(2, 1).to(device), temperature.to(device), seeds.to(device), positions.to(device)


def check_special(ids: list[int]) -> None:
    assert ids[:6] == [-1, -1, -1, 577, 3, -1]
    assert ids[6:10] == [-1, -1, -1, 577] and ids[11] == -1
    assert 0 <= ids[10] < 600


def test_rows_that_cannot_be_sampled_give_minus_one(backend) -> None:
    check_special(sample_argmax_triton(*special_rows(backend.device)).tolist())


def test_reference_rows_that_cannot_be_sampled_give_minus_one() -> None:
    check_special(sample_argmax(*special_rows("cpu")).tolist())


def test_a_word_of_all_ones_still_draws() -> None:
    """u rounds to 1 there; without the clamp the noise is -inf, and a row with one possible token fails."""
    noise = gumbel_reference(torch.arange(3), torch.arange(3), 151936)
    assert bool(noise.isfinite().all())
    u = ((torch.tensor([2**32 - 1]).float() + 0.5) * 2.0**-32).clamp_max(sample.LARGEST_BELOW_ONE)
    assert float(u) < 1.0


def test_row_does_not_depend_on_the_others() -> None:
    args = rows(64, 2049, "cpu", torch.float32)
    together = sample_argmax(*args).tolist()
    alone = [int(sample_argmax(*(x[at : at + 1].clone() for x in args))) for at in range(64)]
    assert together == alone


def chi_square(counts: Counter[int], probabilities: list[float], draws: int) -> float:
    return sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(probabilities))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """5000 positions of one seed, 12 tokens: chi-square with 11 degrees of freedom exceeds 31.3 once in 1000."""
    logits_V = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.2, 1.5, -0.2, 0.9, 0.4, -1.5])
    draws = 5000
    ids = sample_argmax(
        logits_V.repeat(draws, 1),
        torch.full((draws,), temperature),
        torch.full((draws,), 1234),
        torch.arange(draws),
    )
    probabilities = torch.softmax(logits_V.double() / temperature, 0).tolist()
    assert chi_square(Counter(ids.tolist()), probabilities, draws) < 31.3


def test_seeds_draw_independently() -> None:
    """Neighbouring seeds at one position: uniform over 10 tokens; 27.9 is exceeded once in 1000 (9 degrees)."""
    draws = 5000
    ids = sample_argmax(
        torch.zeros(draws, 10), torch.ones(draws), torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    )
    assert chi_square(Counter(ids.tolist()), [0.1] * 10, draws) < 27.9


def test_the_stream_is_pinned() -> None:
    """A change of the stream's layout changes every sampled answer: it must be on purpose."""
    words = sample.words_reference(torch.tensor([42]), torch.tensor([7]), 4096)[0]
    counter = Words(*(torch.tensor([word]) for word in (512 + 5, 7, 0, 0)))  # v = 2048 + 2 * 512 + 5
    want = philox_reference(counter, torch.tensor([42]), torch.tensor([0]))
    assert int(words[2048 + 2 * 512 + 5]) == int(want.w2)


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    parts = {"score_ptr": "*fp32", "id_ptr": "*i32", "PDL": arch >= 90}
    args = {
        "logits_ptr": "*fp32",
        "temperature_ptr": "*fp32",
        "seed_ptr": "*i64",
        "position_ptr": "*i64",
        "vocab_size": "i32",
        "stride_b": "i64",
        "LANES": sample.LANES,
        "PART_TILES": sample.PART_TILES,
        "FAST": True,
    }
    assert compile_ahead(sample._sample_kernel, arch, args | parts)
    args = {"ids_ptr": "*i64", "num_parts": "i32", "PARTS": 32}
    places = dict.fromkeys(("at_ptr", "newest_ptr", "place_ptr"))
    assert compile_ahead(sample._best_part_kernel, arch, args | places | parts, num_warps=1)
    args |= dict.fromkeys(places, "*i64")
    assert compile_ahead(sample._best_part_kernel, arch, args | parts, num_warps=1)
