"""A cache in e4m3: what the stores write, and every kernel that reads it, against fp64 over the numbers it stands for.

The interpreter rounds casts to e4m3 wrongly, so there the stores write codes of another dtype, before rounding; it
reads e4m3 rightly, except NaN. Scales are NaN wherever nothing was written, and reach every result they touch.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import latent_rope_store, qk_rope_store
from kernels.attention_decode import attention_decode, attention_decode_reference
from kernels.attention_prefill import attention_prefill, attention_prefill_reference, attention_prefill_triton
from kernels.gather import LatentScaling, gather_paged_reference, gather_paged_triton
from kernels.kv_quantize import KVScales, store_rows_reference
from kernels.mla_decode import mla_decode, mla_decode_reference, mla_decode_triton
from kernels.quantize import FP8, TINIEST, fp8_scale, to_fp8
from tests.coded_attention import check_decode, decode, prefill
from tests.compare import assert_same_as_separate, assert_same_bits, max_rel, rel_norm
from tests.paged_cache import PagedCache, assert_accurate, dense_attention, draw, index, paged_cache, starts
from tests.test_kernels.test_latent_rope_store import operands as latent_operands
from tests.test_kernels.test_qk_rope_store import operands as head_operands

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
UNROUNDED = 2e-3  # codes of the interpreter's stores, in fp16


class Codes(NamedTuple):
    values: Tensor
    scales: Tensor


def coded(x: Tensor, parts: tuple[int, ...]) -> Codes:
    """The last dimension in parts of these widths, a scale for each; NaN where nothing was written."""
    pieces = x.float().split(parts, -1)
    scales = [fp8_scale(piece.abs().amax(-1)) for piece in pieces]
    values = torch.cat([to_fp8(piece, scale[..., None]) for piece, scale in zip(pieces, scales)], -1)
    return Codes(values, torch.stack(scales, -1))


def numbers(codes: Codes, parts: tuple[int, ...]) -> Tensor:
    """What the codes stand for, exactly."""
    pieces = codes.values.float().double().split(parts, -1)
    return torch.cat([piece * codes.scales[..., i : i + 1].double() for i, piece in enumerate(pieces)], -1)


def coded_cache(cache: PagedCache, parts: tuple[int, ...] | None = None) -> tuple[PagedCache, Tensor, Tensor]:
    """The cache in e4m3 with the scales of keys and values; `keys` and `values` become what is stored, in fp64."""
    k_parts, v_parts = (parts or (x.shape[-1],) for x in (cache.k_cache_NPGC, cache.v_cache_NPGV))
    k, v = coded(cache.k_cache_NPGC, k_parts), coded(cache.v_cache_NPGV, v_parts)
    keys = tuple(numbers(coded(x, k_parts), k_parts) for x in cache.keys)
    values = tuple(numbers(coded(x, v_parts), v_parts) for x in cache.values)
    return PagedCache(k.values, v.values, cache.block_tables_BM, cache.kv_lens_B, keys, values), k.scales, v.scales


GQA = [
    # page, heads, kv heads, width, value width, window, lens
    pytest.param(16, 4, 2, 32, 32, 0, [1, 0, 127, 129], id="around-a-tile"),
    pytest.param(17, 6, 2, 40, 24, 0, [3, 255, 257], id="odd-page-odd-widths-around-a-split"),
    pytest.param(16, 2, 1, 32, 32, 20, [5, 21, 300], id="window-across-splits"),
]
LARGE = pytest.param(16, 32, 4, 128, 128, 0, [1, 100, 1025, 3000], id="qwen3", marks=pytest.mark.gpu)


def gqa_case(page, heads, kv_heads, width, value_width, lens, dtype, device):
    sizes = {"page": page, "kv_heads": kv_heads, "width": width, "value_width": value_width}
    cache, k_NPG1, v_NPG1 = coded_cache(paged_cache(lens, **sizes, dtype=dtype, device=device))
    return cache, KVScales(k_NPG1[..., 0], v_NPG1[..., 0])


@pytest.mark.parametrize(("page", "heads", "kv_heads", "width", "value_width", "window", "lens"), [*GQA, LARGE])
def test_decode(backend, page, heads, kv_heads, width, value_width, window, lens):
    cache, scales = gqa_case(page, heads, kv_heads, width, value_width, lens, backend.dtype, backend.device)
    q_BHC = draw(len(lens), heads, width, dtype=backend.dtype, device=backend.device, seed=7)
    check_decode(q_BHC, cache, scales, window, TOLERANCE[backend.dtype])


@pytest.mark.parametrize(("page", "heads", "kv_heads", "width", "value_width", "window", "lens"), [*GQA, LARGE])
def test_prefill(backend, page, heads, kv_heads, width, value_width, window, lens):
    cache, scales = gqa_case(page, heads, kv_heads, width, value_width, lens, backend.dtype, backend.device)
    queries = [draw(n, heads, width, dtype=backend.dtype, device=backend.device, seed=b) for b, n in enumerate(lens)]
    first = [n // 3 for n in lens]
    ours, _ = prefill(attention_prefill_triton, queries, cache, scales, first, window)
    wanted, by_torch = (
        torch.cat(
            [
                dense_attention(q[n:], k, v, scale=0.2, query_offset=n, window=window, dtype=dtype)[0]
                for q, k, v, n in zip(queries, cache.keys, cache.values, first)
            ]
        )
        for dtype in (torch.float64, backend.dtype)
    )
    assert_accurate(ours.to(backend.dtype), by_torch, wanted)
    reference, _ = prefill(attention_prefill_reference, queries, cache, scales, first, window)
    assert max_rel(ours, reference) < TOLERANCE[backend.dtype]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device, dtype):
    lens = [1, 40, 127, 300, 17]
    cache, scales = gqa_case(16, 8, 2, 64, 64, lens, dtype, device)
    q_BHC = draw(len(lens), 8, 64, dtype=dtype, device=device, seed=7)
    together = decode(attention_decode, q_BHC, cache, scales, 0)
    queries = [draw(n, 8, 64, dtype=dtype, device=device, seed=b) for b, n in enumerate(lens)]
    whole = prefill(attention_prefill, queries, cache, scales, [0] * len(lens), 0).split(lens)
    cut = prefill(attention_prefill, queries, cache, scales, [n // 3 for n in lens], 0)
    assert not together.isnan().any() and not cut.isnan().any()
    assert_same_bits(cut, torch.cat([rows[n // 3 :] for rows, n in zip(whole, lens)]))
    for b in range(len(lens)):
        assert_same_bits(decode(attention_decode, q_BHC, cache, scales, 0, slice(b, b + 1)), together[b : b + 1])


MLA = [
    pytest.param(16, 4, 64, 16, [1, 0, 127, 129], id="around-a-tile"),
    pytest.param(17, 16, 40, 24, [3, 255, 257], id="odd-page-odd-widths-around-a-split"),
    pytest.param(64, 128, 512, 64, [1, 100, 1025, 3000], id="deepseek-v3", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("page", "heads", "latent", "rope", "lens"), MLA)
def test_latents(backend, page, heads, latent, rope, lens):
    """Decode over the latents, and their way out of the cache for prefill; keys and latents have their own scales."""
    plain = paged_cache(lens, page=page, width=latent + rope, dtype=backend.dtype, device=backend.device)
    plain.k_cache_NPGC[..., latent:] *= 50
    plain.keys[0][..., latent:] *= 50
    for rows in plain.keys[1:]:
        rows[..., latent:] *= 50
    cache, scales_NP12, _ = coded_cache(plain, (latent, rope))
    cache_NPX, scales_NP2 = cache.k_cache_NPGC[:, :, 0], scales_NP12[:, :, 0]
    q_BHX = draw(len(lens), heads, latent + rope, dtype=backend.dtype, device=backend.device, seed=7)
    q_BHX[..., latent:] /= 50
    operands = (q_BHX[..., :latent], q_BHX[..., latent:], cache_NPX, cache.block_tables_BM, cache.kv_lens_B)
    bounds = {"scale": 0.2, "max_kv_len": max(lens), "scales_NP2": scales_NP2}
    ours = mla_decode_triton(*operands, **bounds)
    wanted, by_torch = (
        torch.cat(
            [
                dense_attention(q[None], k, k[..., :latent], scale=0.2, query_offset=k.shape[0] - 1, dtype=dtype)[0]
                for q, k in zip(q_BHX, cache.keys)
            ]
        )
        for dtype in (torch.float64, backend.dtype)
    )
    assert_accurate(ours, by_torch, wanted)
    assert max_rel(ours, mla_decode_reference(*operands, **bounds)) < TOLERANCE[backend.dtype]
    alone = [
        mla_decode(*(x[b : b + 1] if x is not cache_NPX else x for x in operands), **bounds) for b in range(len(lens))
    ]
    assert_same_bits(torch.cat(alone), mla_decode(*operands, **bounds))

    where = (cache.block_tables_BM, index([0] * len(lens), backend.device), starts(lens, backend.device))
    scaling = LatentScaling(scales_NP2, backend.dtype)
    rows_RX = torch.cat([keys[:, 0] for keys in cache.keys])
    for gather in (gather_paged_triton, gather_paged_reference):
        out_RX = torch.cat(gather(cache_NPX, *where, num_rows=sum(lens) + 3, latent=latent, scaling=scaling), dim=1)
        assert_same_bits(out_RX[: sum(lens)], rows_RX.float().to(backend.dtype))
        assert not out_RX[sum(lens) :].any()


def scales_for(cache_NPGC: Tensor) -> Tensor:
    return torch.full(cache_NPGC.shape[:3], torch.nan, device=cache_NPGC.device)


def assert_stored(codes: Tensor, scales: Tensor, plain: Tensor, *, rounded: bool) -> None:
    """Codes and scales of rows that a cache in the model dtype would hold as `plain`; what it does not hold is NaN.

    In fp32 on a GPU the two kernels may differ in a last bit (tests.compare), which moves a code that lies between two.
    """
    wanted = coded(plain, (plain.shape[-1],))
    assert_same_as_separate(scales, wanted.scales[..., 0])
    known = ~plain.isnan().any(-1)
    if rounded and plain.dtype == torch.float32:
        ours, theirs = codes[known].float(), wanted.values[known].float()
        assert float((ours != theirs).float().mean()) < 1e-3 and max_rel(ours, theirs) < 0.13
    elif rounded:
        assert_same_bits(codes[known].float(), wanted.values[known].float())
    else:
        exactly = plain[known].double() / scales[known].double()[..., None]
        assert rel_norm(codes[known], exactly) < UNROUNDED and float(codes[known].abs().max()) <= 448.5


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rotated"),
    [
        pytest.param(4, 2, 64, 64, id="whole-heads"),
        pytest.param(9, 3, 48, 24, id="half-of-an-odd-head-and-an-odd-block-of-heads"),
        pytest.param(32, 4, 128, 128, id="qwen3"),
    ],
)
def test_the_store_writes_codes_and_scales(backend, heads, kv_heads, width, rotated, interleaved):
    """Of the very rows that the same kernel stores without scales; queries come out the same."""
    sizes = (6, heads, kv_heads, width, rotated, backend.dtype, backend.device)
    args = head_operands(*sizes, norms=True, interleaved=interleaved)
    args[2][1, 0] = 0.0  # a row of zeros
    plain_q = qk_rope_store.qk_rope_store_triton(*args)
    caches, rounded = args[5:7], backend.device == "cuda"
    codes = [torch.full_like(x, torch.nan, dtype=FP8 if rounded else torch.float16) for x in caches]
    scales = KVScales(*(scales_for(x) for x in caches))
    q_THC = qk_rope_store._launch(*args[:5], *codes, args[7], scales)
    assert_same_as_separate(q_THC, plain_q)
    for ours, of_rows, plain in zip(codes, scales[:2], caches):
        assert_stored(ours, of_rows, plain, rounded=rounded)


@pytest.mark.parametrize("latent", [32, pytest.param(512, marks=pytest.mark.gpu)])
def test_the_store_writes_codes_and_scales_of_latents(backend, latent):
    q_THC, args = latent_operands(7, 3, latent, 12, backend.dtype, backend.device, interleaved=True)
    rounded = backend.device == "cuda"
    latent_rope_store.latent_rope_store_triton(q_THC[..., -12:].clone(), *args)
    cache_NPX = args[4]
    codes_NPX = torch.full_like(cache_NPX, torch.nan, dtype=FP8 if rounded else torch.float16)
    scales_NP2 = torch.full((*cache_NPX.shape[:2], 2), torch.nan, device=backend.device)
    latent_rope_store.launch_latents(q_THC[..., -12:], *args[:4], codes_NPX, args[5], scales_NP2)
    for part, columns in enumerate((slice(0, latent), slice(latent, None))):
        assert_stored(codes_NPX[..., columns], scales_NP2[..., part], cache_NPX[..., columns], rounded=rounded)


def test_the_references_write_what_the_plain_ones_hold():
    for interleaved in (False, True):
        args = head_operands(6, 4, 2, 48, 24, torch.bfloat16, "cpu", norms=True, interleaved=interleaved)
        caches = args[5:7]
        codes = [torch.full_like(x, torch.nan, dtype=torch.float32).to(FP8) for x in caches]
        scales = KVScales(*(scales_for(x) for x in caches))
        plain_q = qk_rope_store.qk_rope_store(*args)
        assert_same_bits(qk_rope_store.qk_rope_store(*args[:5], *codes, args[7], scales), plain_q)
        for ours, of_rows, plain in zip(codes, scales[:2], caches):
            assert_stored(ours, of_rows, plain, rounded=True)
    q_THC, args = latent_operands(7, 3, 32, 12, torch.bfloat16, "cpu", interleaved=True)
    latent_rope_store.latent_rope_store(q_THC[..., -12:].clone(), *args)
    cache_NPX = args[4]
    codes_NPX = torch.full_like(cache_NPX, torch.nan, dtype=torch.float32).to(FP8)
    scales_NP2 = torch.full((*cache_NPX.shape[:2], 2), torch.nan)
    latent_rope_store.latent_rope_store(q_THC[..., -12:], *args[:4], codes_NPX, args[5], scales_NP2)
    for part, columns in enumerate((slice(0, 32), slice(32, None))):
        assert_stored(codes_NPX[..., columns], scales_NP2[..., part], cache_NPX[..., columns], rounded=True)


def test_worked_rows():
    """Largest 896 gives scale 2. Zeros stay zeros, a NaN stays NaN among its neighbours, an infinity spoils all."""
    x_TXC = torch.tensor([[[896.0, 4.0, -1.0]], [[0.0, 0.0, 0.0]], [[torch.nan, 448.0, 1.0]], [[torch.inf, 1.0, 0.0]]])
    cache_NPXC = torch.zeros(3, 2, 1, 3).to(FP8)
    scales_NPX = torch.full((3, 2, 1), torch.nan)
    store_rows_reference(x_TXC, cache_NPXC, scales_NPX, torch.tensor([5, 0, 2, 3]))
    numbers_SC = (cache_NPXC.float() * scales_NPX[..., None]).flatten(0, 2)
    assert numbers_SC[5].tolist() == [896.0, 4.0, -1.0] and float(scales_NPX[2, 1, 0]) == 2.0
    assert numbers_SC[0].tolist() == [0.0, 0.0, 0.0] and float(scales_NPX[0, 0, 0]) == float(
        torch.tensor(TINIEST) / 448
    )
    assert bool(numbers_SC[2, 0].isnan()) and numbers_SC[2, 1:].tolist() == [448.0, 1.0]
    assert bool(numbers_SC[3].isnan().all())
    assert bool(scales_NPX.flatten()[[1, 4]].isnan().all())  # slots that nobody wrote


def test_C49_a_scale_given_beforehand_is_used_and_saturates():
    """Amplitude 600 at scale 1 becomes 448; at scale 0.04 the round trip errs by at most half a step of e4m3."""
    x_TXC = torch.tensor([[[600.0, -600.0, 3.0]]])
    cache_NPXC = torch.zeros(1, 1, 1, 3).to(FP8)
    one_NPX = torch.ones(()).expand(1, 1, 1)
    store_rows_reference(x_TXC, cache_NPXC, one_NPX, torch.tensor([0]), given=True)
    assert cache_NPXC.float().flatten().tolist() == [448.0, -448.0, 3.0]
    x_TXC = draw(16, 2, 64)
    cache_NPXC, scale = torch.zeros(1, 16, 2, 64).to(FP8), torch.tensor(0.04)
    store_rows_reference(x_TXC, cache_NPXC, scale.expand(1, 16, 2), torch.arange(16), given=True)
    error = (cache_NPXC[0].float() * scale - x_TXC).abs()
    assert bool((error <= x_TXC.abs() * 2**-4 + 0.04 * 2**-10).all())
    assert float(scale) == pytest.approx(0.04)


def assert_given(codes: Tensor, scale: float, plain: Tensor, *, rounded: bool) -> int:
    """Codes under a given scale of rows that a plain cache holds as `plain`; returns how many are beyond it."""
    written = ~plain.isnan().all(-1)
    exactly = (plain[written].double() / scale).where(plain[written].isfinite(), torch.nan)
    assert_same_bits(codes[written].float().isnan(), exactly.isnan())
    wanted, ours = exactly.nan_to_num().clamp(-448, 448), codes[written].double().nan_to_num()
    bound = wanted.abs() * 2**-4 + 2**-10 if rounded else wanted.abs() * 2**-10 + 2**-14
    assert bool(((ours - wanted).abs() <= bound).all())
    assert bool(codes[~written].isnan().all()), "slots that nobody wrote"
    return int((plain[written].double().abs() / scale > 448).sum())


def test_C49_the_stores_use_given_scales_cut_and_count(backend):
    """Keys and values at scales that some entries pass, one of them infinite; latents and rotary keys likewise."""
    rounded = backend.device == "cuda"
    code = FP8 if rounded else torch.float16
    args = head_operands(6, 9, 3, 48, 24, backend.dtype, backend.device, norms=True, interleaved=False)
    args[2][2, 0, 0] = torch.inf
    qk_rope_store.qk_rope_store_triton(*args)
    saturated_1 = torch.zeros(1, dtype=torch.int64, device=backend.device)
    codes = [torch.full_like(x, torch.nan, dtype=torch.float32).to(code) for x in args[5:7]]
    given = [torch.tensor(x, device=backend.device).expand(args[5].shape[:3]) for x in (0.004, 0.002)]
    qk_rope_store._launch(*args[:5], *codes, args[7], KVScales(*given, given=True, saturated_1=saturated_1))
    beyond = [assert_given(x, s, plain, rounded=rounded) for x, s, plain in zip(codes, (0.004, 0.002), args[5:7])]
    assert int(saturated_1) == sum(beyond) and all(beyond)

    q_THC, latents = latent_operands(7, 3, 32, 12, backend.dtype, backend.device, interleaved=True)
    latent_rope_store.latent_rope_store_triton(q_THC[..., -12:].clone(), *latents)
    plain = latents[4]
    codes_NPX = torch.full_like(plain, torch.nan, dtype=torch.float32).to(code)
    scales_NP2 = torch.full((2,), 0.004, device=backend.device).expand(*plain.shape[:2], 2)
    saturated_1.zero_()
    given = (scales_NP2, True, saturated_1)
    latent_rope_store.launch_latents(q_THC[..., -12:], *latents[:4], codes_NPX, latents[5], *given)
    assert int(saturated_1) == assert_given(codes_NPX, 0.004, plain, rounded=rounded) > 0


def test_C49_the_references_cut_and_count_too():
    saturated_1 = torch.zeros(1, dtype=torch.int64)
    x_TXC = torch.tensor([[[600.0, -600.0, 448.0, torch.inf]], [[500.0, 1.0, torch.nan, 3.0]]])
    cache_NPXC = torch.zeros(1, 2, 1, 4).to(FP8)
    one_NPX = torch.ones(()).expand(1, 2, 1)
    store_rows_reference(x_TXC, cache_NPXC, one_NPX, torch.tensor([1, -1]), given=True, saturated_1=saturated_1)
    assert int(saturated_1) == 3, "the infinity counts, a row without a slot does not"
    assert cache_NPXC[0, 1, 0, :3].tolist() == [448.0, -448.0, 448.0] and bool(cache_NPXC[0, 1, 0, 3].isnan())


@pytest.mark.gpu
def test_a_scale_given_beforehand_on_the_gpu():
    args = head_operands(6, 4, 2, 64, 64, torch.bfloat16, "cuda", norms=True, interleaved=False)
    scales = KVScales(*(torch.tensor(x, device="cuda").expand(args[5].shape[:3]) for x in (0.04, 0.02)), given=True)
    results = []
    for store in (qk_rope_store.qk_rope_store_triton, qk_rope_store.qk_rope_store_reference):
        codes = [torch.zeros_like(x, dtype=torch.float32).to(FP8) for x in args[5:7]]
        store(*args[:5], *codes, args[7], scales)
        results.append(codes)
    assert rel_norm(results[0][0].float(), results[1][0].float()) < 2e-2  # a bf16 step apart may be a code apart
    assert_same_bits(results[0][1].float(), results[1][1].float())


def test_operands_that_do_not_fit_are_refused():
    cache, scales = gqa_case(16, 2, 1, 16, 16, [4], torch.float32, "cpu")
    q_BHC = draw(1, 2, 16)
    with pytest.raises(AssertionError, match="scales"):
        decode(attention_decode_reference, q_BHC, cache, scales._replace(k_NPG=scales.k_NPG[:, :1]), 0)
    with pytest.raises(AssertionError, match="without scales"):
        operands = (q_BHC, cache.k_cache_NPGC, cache.v_cache_NPGV, cache.block_tables_BM, cache.kv_lens_B)
        attention_decode_reference(*operands, scale=0.2, max_kv_len=4)
