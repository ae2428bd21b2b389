"""KV write: every row lands in its slot and nowhere else, whatever the strides; skipped rows write nothing."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_store import (
    _kv_store_kernel,
    _latent_store_kernel,
    kv_store,
    kv_store_reference,
    kv_store_triton,
    latent_store,
    latent_store_reference,
    latent_store_triton,
)
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits
from tests.paged_cache import draw
from tests.shapes import NUM_TOKENS


def slots_for(num_tokens: int, page: int, num_blocks: int, device: str) -> torch.Tensor:
    """Distinct random slots; every fifth token is skipped."""
    slots = torch.randperm(num_blocks * page, generator=torch.Generator().manual_seed(0))[:num_tokens]
    slots[3::5] = -1
    return slots.to(device)


def expected_cache(cache_NPX: torch.Tensor, rows_TX: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
    """Token by token."""
    cache_NPX = cache_NPX.clone()
    for row, slot in zip(rows_TX, slots_T.tolist()):
        if slot >= 0:
            cache_NPX[slot // cache_NPX.shape[1], slot % cache_NPX.shape[1]] = row
    return cache_NPX


def check_kv_store(store, num_tokens, page, heads, width, dtype, device):
    num_blocks = -(-num_tokens // page) + 2
    # Keys and values are slices of one projection's rows, the caches views of one tensor.
    qkv = draw(num_tokens, 3 * heads, width, dtype=dtype, device=device)
    k_TGC, v_TGC = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    cache = torch.full((num_blocks, 2, page, heads, width), torch.nan, dtype=dtype, device=device)
    slots = slots_for(num_tokens, page, num_blocks, device)
    wanted = torch.stack([expected_cache(cache[:, 0], k_TGC, slots), expected_cache(cache[:, 1], v_TGC, slots)], dim=1)
    store(k_TGC, v_TGC, cache[:, 0], cache[:, 1], slots)
    assert_same_bits(cache, wanted)


STORE_SHAPES = [
    pytest.param(16, 2, 32, id="page16-usual"),
    pytest.param(1, 1, 40, id="page1-odd-width"),
    pytest.param(17, 3, 24, id="page17-three-heads"),
    pytest.param(4, 20, 128, id="page4-row-longer-than-a-block"),
]


@pytest.mark.parametrize(("page", "heads", "width"), STORE_SHAPES)
def test_kernel_writes_each_row_into_its_slot(backend, page, heads, width):
    check_kv_store(kv_store_triton, 12, page, heads, width, backend.dtype, backend.device)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_kernel_for_numbers_of_tokens(backend, num_tokens):
    check_kv_store(kv_store_triton, num_tokens, 16, 1, 16, backend.dtype, backend.device)


@pytest.mark.parametrize("store", [kv_store, kv_store_reference])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("page", "heads", "width"), STORE_SHAPES)
def test_reference_writes_each_row_into_its_slot(store, num_tokens, page, heads, width):
    check_kv_store(store, num_tokens, page, heads, width, torch.bfloat16, "cpu")


def check_latent_store(store, num_tokens, page, latent, rope, dtype, device):
    num_blocks = -(-num_tokens // page) + 2
    wide = draw(num_tokens, latent + rope + 8, dtype=dtype, device=device)
    k_pe_TR = wide[:, latent : latent + rope]
    latent_TL = draw(num_tokens, latent, dtype=dtype, device=device, seed=1)
    cache = torch.full((num_blocks, page, latent + rope), torch.nan, dtype=dtype, device=device)
    slots = slots_for(num_tokens, page, num_blocks, device)
    wanted = expected_cache(cache, torch.cat([latent_TL, k_pe_TR], dim=1), slots)
    store(latent_TL, k_pe_TR, cache, slots)
    assert_same_bits(cache, wanted)


LATENT_SHAPES = [pytest.param(64, 512, 64, id="DeepSeek-V3"), pytest.param(17, 40, 24, id="odd")]


@pytest.mark.parametrize(("page", "latent", "rope"), LATENT_SHAPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 11])
def test_latent_kernel_writes_both_parts(backend, num_tokens, page, latent, rope):
    check_latent_store(latent_store_triton, num_tokens, page, latent, rope, backend.dtype, backend.device)


@pytest.mark.parametrize("store", [latent_store, latent_store_reference])
@pytest.mark.parametrize(("page", "latent", "rope"), LATENT_SHAPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_latent_reference_writes_both_parts(store, num_tokens, page, latent, rope):
    check_latent_store(store, num_tokens, page, latent, rope, torch.bfloat16, "cpu")


@pytest.mark.gpu
def test_C16_last_block_of_a_cache_above_two_to_the_31():
    """Block id x block stride above 2^31 elements, for keys, values, latents: the last slot is written, no other."""
    page, heads, width = 16, 8, 128
    num_blocks = 2**31 // (2 * page * heads * width) + 2
    cache = torch.zeros(num_blocks, 2, page, heads, width, dtype=torch.bfloat16, device="cuda")
    k_TGC, v_TGC = (draw(1, heads, width, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (0, 1))
    slots = torch.tensor([num_blocks * page - 1], device="cuda")
    kv_store(k_TGC, v_TGC, cache[:, 0], cache[:, 1], slots)
    assert_same_bits(cache[-1, 0, -1], k_TGC[0])
    assert_same_bits(cache[-1, 1, -1], v_TGC[0])
    written = k_TGC.count_nonzero() + v_TGC.count_nonzero()
    assert sum(part.count_nonzero() for part in cache.split(4096)) == written
    del cache
    num_blocks = 2**31 // (64 * 576) + 2
    cache_NPX = torch.zeros(num_blocks, 64, 576, dtype=torch.bfloat16, device="cuda")
    latent_TL, k_pe_TR = (draw(1, width, dtype=torch.bfloat16, device="cuda", seed=width) for width in (512, 64))
    latent_store(latent_TL, k_pe_TR, cache_NPX, torch.tensor([num_blocks * 64 - 1], device="cuda"))
    assert_same_bits(cache_NPX[-1, -1], torch.cat([latent_TL[0], k_pe_TR[0]]))
    written = latent_TL.count_nonzero() + k_pe_TR.count_nonzero()
    assert sum(part.count_nonzero() for part in cache_NPX.split(4096)) == written


@aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("aligned", [True, False])
def test_kernels_compile_ahead_of_time(arch, aligned):
    pointers = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
    strides = dict.fromkeys(("kt", "kg", "vt", "vg", "kcn", "kcp", "kcg", "vcn", "vcp", "vcg"), "i32")
    args = {**pointers, "slots_ptr": "*i64", "page_size": "i32", **{f"stride_{name}": t for name, t in strides.items()}}
    compile_ahead(
        _kv_store_kernel, arch, {**args, "NUM_HEADS": 8, "WIDTH": 96, "BLOCK": 1024, "PDL": arch >= 90}, aligned=aligned
    )
    pointers = dict.fromkeys(("latent_ptr", "k_pe_ptr", "cache_ptr"), "*bf16")
    strides = dict.fromkeys(("stride_lt", "stride_rt", "stride_cn", "stride_cp"), "i32")
    args = {**pointers, "slots_ptr": "*i64", "page_size": "i32", **strides}
    compile_ahead(
        _latent_store_kernel,
        arch,
        {**args, "LATENT": 512, "ROPE": 64, "BLOCK": 1024, "PDL": arch >= 90},
        aligned=aligned,
    )
