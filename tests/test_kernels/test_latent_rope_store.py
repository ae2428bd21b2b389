"""Norm, rotation and cache write of latents, with the turn of the queries: the bits of the kernels it stands for."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_store import latent_store_triton
from kernels.latent_rope_store import (
    _latent_rope_store_kernel,
    latent_rope_store,
    latent_rope_store_reference,
    latent_rope_store_triton,
)
from kernels.rmsnorm import norm_tile, rmsnorm_triton, tile_of_many
from kernels.rope import rope_triton_
from kernels.tiles import num_multiprocessors
from kernels.turn_heads import Rope
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_as_separate, assert_same_bits, rel_norm
from tests.paged_cache import draw
from tests.test_kernels.test_rope import angle_table, exact


def operands(num_tokens, heads, latent, rotated, dtype, device, *, interleaved, nope=24, page=16):
    """q_pe is the tail of wider heads; the cache is NaN; every fifth token has no slot."""
    q_THC = draw(num_tokens, heads, nope + rotated, dtype=dtype, device=device)
    kv_TX = draw(num_tokens, latent + rotated, dtype=dtype, device=device, seed=1)
    norm_L = (1 + 0.3 * draw(latent, seed=2)).to(device, dtype)
    table = torch.full((52, rotated), torch.nan, device=device)
    table[:50] = angle_table(50, rotated).to(device)
    generator = torch.Generator().manual_seed(3)
    num_blocks = -(-num_tokens // page) + 2
    slots_T = torch.randperm(num_blocks * page, generator=generator)[:num_tokens]
    slots_T[3::5] = -1
    positions_T = torch.randint(0, 50, (num_tokens,), generator=generator)
    cache_NPX = torch.full((num_blocks, page, latent + rotated), torch.nan, dtype=dtype, device=device)
    rope = Rope(positions_T.to(device), table, interleaved)
    return q_THC, (kv_TX, norm_L, 1e-6, rope, cache_NPX, slots_T.to(device))


def separate(q_pe_THR, kv_TX, norm_L, eps, rope, cache_NPX, slots_T) -> None:
    """The kernels one after another."""
    latent = norm_L.shape[0]
    latent_TL, k_pe_TR = rmsnorm_triton(kv_TX[:, :latent], norm_L, eps), kv_TX[:, latent:].clone()
    for x_THR in (q_pe_THR, k_pe_TR[:, None]):
        rope_triton_(x_THR, rope.positions_T, rope.cos_sin_PR, interleaved=rope.interleaved)
    latent_store_triton(latent_TL, k_pe_TR, cache_NPX, slots_T)


def check_against_separate(q_THC, args, rotated) -> None:
    """The queries' other entries and the rows of kv stay as they were."""
    wanted_q, wanted_cache, kv_before = q_THC.clone(), args[4].clone(), args[0].clone()
    separate(wanted_q[..., -rotated:], *args[:4], wanted_cache, args[5])
    latent_rope_store_triton(q_THC[..., -rotated:], *args)
    assert_same_as_separate(q_THC, wanted_q)
    assert_same_as_separate(args[4], wanted_cache)
    assert_same_bits(args[0], kv_before)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "latent", "rotated"),
    [
        pytest.param(16, 512, 64, id="deepseek-v2-lite"),
        pytest.param(128, 512, 64, id="deepseek-v3-several-blocks-of-heads"),
        pytest.param(3, 40, 12, id="odd-sizes"),
        pytest.param(1, 16, 2, id="one-pair"),
    ],
)
def test_kernel_has_the_bits_of_the_separate_kernels(backend, heads, latent, rotated, interleaved):
    q_THC, args = operands(5, heads, latent, rotated, backend.dtype, backend.device, interleaved=interleaved)
    check_against_separate(q_THC, args, rotated)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 11])
def test_kernel_for_numbers_of_tokens(backend, num_tokens):
    q_THC, args = operands(num_tokens, 2, 32, 8, backend.dtype, backend.device, interleaved=True)
    check_against_separate(q_THC, args, 8)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("rotated", [16, 12], ids=["aligned", "odd-rows"])
def test_many_tokens_have_the_bits_of_few(backend, rotated, interleaved):
    """Many at once, and the same in two launches that take the tile of few."""
    multiprocessors = num_multiprocessors(torch.device(backend.device))
    num_tokens = 64 * multiprocessors + 3
    assert (norm_tile(512)[0], tile_of_many(num_tokens, 512, multiprocessors)[0]) == (2, 8)
    assert tile_of_many(num_tokens // 2 + 1, 512, multiprocessors)[0] == 2
    q_THC, args = operands(num_tokens, 3, 512, rotated, backend.dtype, backend.device, interleaved=interleaved)
    wanted_q, wanted_cache = q_THC.clone(), args[4].clone()
    for rows in (slice(0, num_tokens // 2), slice(num_tokens // 2, None)):
        rope = args[3]._replace(positions_T=args[3].positions_T[rows])
        latent_rope_store_triton(
            wanted_q[rows, :, -rotated:], args[0][rows], *args[1:3], rope, wanted_cache, args[5][rows]
        )
    latent_rope_store_triton(q_THC[..., -rotated:], *args)
    assert_same_bits(q_THC, wanted_q)
    assert_same_bits(args[4], wanted_cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_against_fp64(dtype):
    q_THC, args = operands(9, 3, 32, 8, dtype, "cpu", interleaved=True)
    kv_TX, norm_L, eps, rope, cache_NPX, slots_T = args
    wanted_q = exact(q_THC[..., -8:], rope.positions_T, rope.cos_sin_PR, interleaved=True)
    wanted_k = exact(kv_TX[:, None, -8:], rope.positions_T, rope.cos_sin_PR, interleaved=True)[:, 0]
    wide = kv_TX[:, :32].double()
    wanted_c = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * norm_L.double()
    latent_rope_store(q_THC[..., -8:], *args)
    bound = 1e-6 if dtype == torch.float32 else 6e-3  # norm, weight and turn each round to bf16: 2^-9 a time
    assert rel_norm(q_THC[..., -8:], wanted_q) < bound
    stored = slots_T >= 0
    rows = cache_NPX[slots_T[stored] // 16, slots_T[stored] % 16]
    assert rel_norm(rows[:, :32], wanted_c[stored]) < bound
    assert rel_norm(rows[:, 32:], wanted_k[stored]) < bound
    assert int(torch.isnan(cache_NPX).sum()) == cache_NPX.numel() - rows.numel()


def test_operands_that_do_not_fit_are_refused():
    q_THC, args = operands(3, 2, 32, 8, torch.float32, "cpu", interleaved=True)
    with pytest.raises(AssertionError, match="L \\+ R = 44 wide"):
        latent_rope_store_reference(q_THC[..., -12:], *args)


@aot
@pytest.mark.parametrize(
    ("arch", "cached", "given"),
    [
        *((arch, "bf16", False) for arch in ARCHS),
        *((arch, "fp8e4nv", given) for arch in ARCHS if arch >= 89 for given in (False, True)),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_compiles(arch, cached, given, interleaved):
    for tokens in (1, 4) if interleaved else (1,):
        sizes = {"BLOCK_R": 2 * tokens, "TOKENS": tokens}
        assert compile_ahead(_latent_rope_store_kernel, arch, compiled(arch, cached, given, interleaved) | sizes)


def compiled(arch, cached="bf16", given=False, interleaved=True):
    """What the kernel is compiled for, without the queries' product."""
    pointers = dict.fromkeys(("q_pe_ptr", "kv_ptr", "weight_ptr"), "*bf16") | {"cache_ptr": f"*{cached}"}
    pointers |= {"scales_ptr": None if cached == "bf16" else "*fp32", "saturated_ptr": "*i64" if given else None}
    indices = {"positions_ptr": "*i64", "slots_ptr": "*i64", "table_ptr": "*fp32", "eps": "fp32"}
    names = ("num_tokens", "num_heads", "stride_qt", "stride_qh", "stride_kt", "stride_cn", "stride_cp")
    names += ("stride_sn", "stride_sp")
    blocks = {"PAGE": 16, "LATENT": 512, "HALF": 32, "BLOCK_L": 512, "BLOCK_H": 16, "BLOCK_P": 32, "GIVEN": given}
    none = dict.fromkeys(("nope_ptr", "w_ptr", "y_ptr")) | dict.fromkeys(("stride_nt", "stride_nh"), "i32")
    none |= {"NOPE": 0, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 16}
    names = dict.fromkeys(names, "i32")
    return pointers | indices | names | blocks | none | {"INTERLEAVED": interleaved, "PDL": arch >= 90}
