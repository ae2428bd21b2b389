"""Norm, rotation and cache write of queries, keys and values at once: the same bits as the kernels it stands for."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_store import kv_store_triton
from kernels.qk_rope_store import (
    HeadsTile,
    _qk_rope_store_kernel,
    heads_tile,
    qk_rope_store,
    qk_rope_store_reference,
    qk_rope_store_triton,
)
from kernels.rmsnorm import rmsnorm_triton
from kernels.rope import rope_triton_
from kernels.tiles import num_multiprocessors
from kernels.turn_heads import HeadNorms, Rope
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_as_separate, assert_same_bits, rel_norm
from tests.paged_cache import draw
from tests.test_kernels.test_rope import angle_table, exact


def operands(num_tokens, heads, kv_heads, width, rotated, dtype, device, *, norms, interleaved, page=16):
    """q, k and v are cut out of one projection's rows; caches are NaN; every fifth token has no slot."""
    qkv = draw(num_tokens, heads + 2 * kv_heads, width, dtype=dtype, device=device)
    q_THC, k_TGC, v_TGC = qkv.split((heads, kv_heads, kv_heads), dim=1)
    weights = [1 + 0.3 * draw(width, seed=seed) for seed in (1, 2)]
    table = torch.full((52, rotated), torch.nan, device=device)
    table[:50] = angle_table(50, rotated).to(device)
    generator = torch.Generator().manual_seed(3)
    num_blocks = -(-num_tokens // page) + 2
    slots_T = torch.randperm(num_blocks * page, generator=generator)[:num_tokens]
    slots_T[3::5] = -1
    positions_T = torch.randint(0, 50, (num_tokens,), generator=generator)
    cache = torch.full((num_blocks, 2, page, kv_heads, width), torch.nan, dtype=dtype, device=device)
    head_norms = HeadNorms(*(w.to(device, dtype) for w in weights), 1e-6) if norms else None
    rope = Rope(positions_T.to(device), table, interleaved)
    return q_THC, k_TGC, v_TGC, head_norms, rope, cache[:, 0], cache[:, 1], slots_T.to(device)


def separate(q_THC, k_TGC, v_TGC, norms, rope, k_cache, v_cache, slots_T):
    """The kernels one after another."""
    if norms is None:
        q_THC, k_TGC = q_THC.clone(), k_TGC.clone()
    else:
        q_THC, k_TGC = (
            rmsnorm_triton(q_THC, norms.q_C, norms.eps),
            rmsnorm_triton(k_TGC, norms.k_C, norms.eps),
        )
    for x_THC in (q_THC, k_TGC):
        rope_triton_(x_THC, rope.positions_T, rope.cos_sin_PR, interleaved=rope.interleaved)
    kv_store_triton(k_TGC, v_TGC, k_cache, v_cache, slots_T)
    return q_THC


def check_against_separate(args) -> None:
    caches = [x.clone() for x in args[5:7]]
    before = [x.clone() for x in args[:3]]
    wanted_THC = separate(*args[:5], *caches, args[7])
    ours_THC = qk_rope_store_triton(*args)
    assert ours_THC.is_contiguous()
    assert_same_as_separate(ours_THC, wanted_THC)
    for ours, wanted in zip(args[5:7], caches):
        assert_same_as_separate(ours, wanted)
    for ours, wanted in zip(args[:3], before):
        assert_same_bits(ours, wanted)


SHAPES = [
    pytest.param(4, 2, 64, 64, id="whole-heads"),
    pytest.param(9, 3, 48, 24, id="half-of-an-odd-head-and-an-odd-block-of-heads"),
    pytest.param(32, 4, 128, 128, id="qwen3"),
    pytest.param(2, 1, 40, 2, id="one-pair"),
]


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "rotated"), SHAPES)
def test_kernel_has_the_bits_of_the_separate_kernels(backend, heads, kv_heads, width, rotated, norms, interleaved):
    args = operands(
        4, heads, kv_heads, width, rotated, backend.dtype, backend.device, norms=norms, interleaved=interleaved
    )
    check_against_separate(args)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 11])
def test_kernel_for_numbers_of_tokens(backend, num_tokens):
    args = operands(num_tokens, 2, 1, 16, 16, backend.dtype, backend.device, norms=True, interleaved=False)
    check_against_separate(args)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rotated", "tile"),
    [
        pytest.param(12, 3, 128, 64, HeadsTile(16, 4, 8, 4), id="tokens-stored-together"),
        pytest.param(64, 33, 128, 128, HeadsTile(32, 32, 1, 4), id="more-kv-heads-than-a-program"),
    ],
)
def test_many_tokens_have_the_bits_of_few(backend, heads, kv_heads, width, rotated, tile):
    """Many at once, and the same in two launches that take the tile of few."""
    multiprocessors = num_multiprocessors(torch.device(backend.device))
    num_tokens = -(-256 * multiprocessors // heads) + 3
    assert heads_tile(num_tokens, heads, kv_heads, width, multiprocessors) == tile
    assert heads_tile(num_tokens // 2 + 1, heads, kv_heads, width, multiprocessors).tokens == 1
    q_THC, k_TGC, v_TGC, norms, rope, k_cache, v_cache, slots_T = operands(
        num_tokens, heads, kv_heads, width, rotated, backend.dtype, backend.device, norms=True, interleaved=False
    )
    wanted, parts = [k_cache.clone(), v_cache.clone()], []
    for rows in (slice(0, num_tokens // 2), slice(num_tokens // 2, None)):
        rope_of_part = rope._replace(positions_T=rope.positions_T[rows])
        part = (q_THC[rows], k_TGC[rows], v_TGC[rows], norms, rope_of_part, *wanted, slots_T[rows])
        parts.append(qk_rope_store_triton(*part))
    ours = qk_rope_store_triton(q_THC, k_TGC, v_TGC, norms, rope, k_cache, v_cache, slots_T)
    assert_same_bits(ours, torch.cat(parts))
    assert_same_bits(k_cache, wanted[0])
    assert_same_bits(v_cache, wanted[1])


def test_heads_keep_their_tile_where_more_rows_would_lie_in_other_threads():
    """8 rows of 64 entries are 4 for each of 128 threads; of more rows a thread would load 8."""
    assert heads_tile(2**20, 32, 4, 64, 132) == heads_tile(1, 32, 4, 64, 132) == HeadsTile(8, 8, 1, 4)
    assert heads_tile(2**20, 32, 4, 128, 132) == HeadsTile(32, 4, 8, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_reference_against_fp64(dtype, interleaved):
    """Norm and turn in fp64; the cache takes what it is told, the operands stay as they were."""
    args = operands(9, 3, 2, 24, 16, dtype, "cpu", norms=True, interleaved=interleaved)
    q_THC, k_TGC, v_TGC, norms, rope, k_cache, v_cache, slots_T = args
    before = [x.clone() for x in (q_THC, k_TGC, v_TGC)]
    out_THC = qk_rope_store(*args)

    def plain(x_THC, weight_C):
        wide = x_THC.double()
        wide = wide / (wide.square().mean(-1, keepdim=True) + norms.eps).sqrt() * weight_C.double()
        return exact(wide, rope.positions_T, rope.cos_sin_PR, interleaved=interleaved)

    bound = 1e-6 if dtype == torch.float32 else 6e-3  # norm, weight and turn each round to bf16: 2^-9 a time
    assert rel_norm(out_THC, plain(q_THC, norms.q_C)) < bound
    stored = slots_T >= 0
    place = (slots_T[stored] // 16, slots_T[stored] % 16)
    assert rel_norm(k_cache[place], plain(k_TGC, norms.k_C)[stored]) < bound
    assert_same_bits(v_cache[place], v_TGC[stored])
    assert int(torch.isnan(v_cache).sum()) == v_cache.numel() - v_cache[place].numel()
    for now, then in zip((q_THC, k_TGC, v_TGC), before):
        assert_same_bits(now, then)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bits_do_not_depend_on_the_tokens_beside(device):
    q_THC, k_TGC, v_TGC, norms, rope, k_cache, v_cache, slots_T = operands(
        65, 8, 2, 128, 128, torch.bfloat16, device, norms=True, interleaved=False
    )
    whole = qk_rope_store(q_THC, k_TGC, v_TGC, norms, rope, k_cache, v_cache, slots_T)
    k_whole = k_cache.clone()
    for token in (0, 32, 64):
        one = slice(token, token + 1)
        alone = qk_rope_store(
            q_THC[one],
            k_TGC[one],
            v_TGC[one],
            norms,
            rope._replace(positions_T=rope.positions_T[one]),
            k_cache,
            v_cache,
            slots_T[one],
        )
        assert_same_bits(alone, whole[one])
    assert_same_bits(k_cache, k_whole)


def test_operands_that_do_not_fit_are_refused():
    args = list(operands(3, 2, 1, 16, 16, torch.float32, "cpu", norms=True, interleaved=False))
    args[5] = args[5].bfloat16()
    with pytest.raises(AssertionError, match="share one dtype"):
        qk_rope_store_reference(*args)


@aot
@pytest.mark.parametrize(
    ("arch", "cached", "given"),
    [
        *((arch, "bf16", False) for arch in ARCHS),
        *((arch, "fp8e4nv", False) for arch in ARCHS if arch >= 89),
        *((arch, "fp8e4nv", True) for arch in ARCHS if arch >= 89),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_compiles(arch, cached, given, normed, interleaved):
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), f"*{cached}")
    pointers |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), None if cached == "bf16" else "*fp32")
    pointers["saturated_ptr"] = "*i64" if given else None
    weights = dict.fromkeys(("q_weight_ptr", "k_weight_ptr"), "*bf16" if normed else None)
    indices = {"positions_ptr": "*i64", "slots_ptr": "*i64", "table_ptr": "*fp32", "eps": "fp32"}
    names = ("qt", "qh", "kt", "kg", "vt", "vg", "kcn", "kcp", "kcg", "vcn", "vcp", "vcg", "sn", "sp", "sg")
    names = (*(f"stride_{name}" for name in names), "num_tokens", "num_heads", "num_kv_heads", "page_size")
    blocks = {"BLOCK_C": 128, "BLOCK_P": 32, "HALF": 32, "WIDTH": 128, "INTERLEAVED": interleaved, "GIVEN": given}
    args = pointers | weights | indices | dict.fromkeys(names, "i32") | blocks | {"PDL": arch >= 90}
    for num_tokens in (1, 8192) if normed and interleaved else (1,):
        tile = heads_tile(num_tokens, 32, 4, 128, 132)
        sizes = {"BLOCK_H": tile.block_h, "BLOCK_G": tile.block_g, "TOKENS": tile.tokens}
        assert compile_ahead(_qk_rope_store_kernel, arch, args | sizes, num_warps=tile.num_warps)
