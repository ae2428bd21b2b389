"""Write the keys and values of a step into the paged cache: one row copy per token.

Knows slots (block * P + offset in the block) and rows; who owns a block is the allocator's affair. A slot of -1 writes
nothing. Two live tokens never share a slot.
"""
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import (
    assert_dtype,
    assert_last_contiguous,
    assert_same_device,
    assert_shape,
    next_power_of_2,
    uses_triton,
)
from kernels.dependent_launch import dependent_launch, wait_for_inputs

_MAX_BLOCK = 2048  # entries of a row that one program moves at once


def kv_store(k_TGC: Tensor, v_TGC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGC: Tensor, slot_mapping_T: Tensor) -> None:
    """cache[slot[t] // P, slot[t] % P] = row t, for keys and values. `kv_store_reference` is the definition.

    slot_mapping_T int64, -1: skip. The caches are views of one [N, 2, P, G, C] tensor; k and v may be strided views.
    """
    store = kv_store_triton if uses_triton(k_TGC) else kv_store_reference
    store(k_TGC, v_TGC, k_cache_NPGC, v_cache_NPGC, slot_mapping_T)


def latent_store(latent_TL: Tensor, k_pe_TR: Tensor, cache_NPX: Tensor, slot_mapping_T: Tensor) -> None:
    """cache[slot[t] // P, slot[t] % P] = (latent row t, rotary key row t), X = L + R. See `latent_store_reference`."""
    store = latent_store_triton if uses_triton(latent_TL) else latent_store_reference
    store(latent_TL, k_pe_TR, cache_NPX, slot_mapping_T)


def _check_store(
    k_TGC: Tensor, v_TGC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGC: Tensor, slot_mapping_T: Tensor
) -> None:
    num_tokens, num_heads, width = k_TGC.shape
    assert_shape("v_TGC", v_TGC, (num_tokens, num_heads, width))
    assert_shape("k_cache_NPGC", k_cache_NPGC, (None, None, num_heads, width))
    assert_shape("v_cache_NPGC", v_cache_NPGC, tuple(k_cache_NPGC.shape))
    assert_shape("slot_mapping_T", slot_mapping_T, (num_tokens,))
    assert_dtype("slot_mapping_T", slot_mapping_T, torch.int64)
    for name, x in (("k_TGC", k_TGC), ("v_TGC", v_TGC), ("k_cache_NPGC", k_cache_NPGC), ("v_cache_NPGC", v_cache_NPGC)):
        assert_last_contiguous(name, x)
        assert_dtype(name, x, k_cache_NPGC.dtype)
    assert_same_device(k_TGC, v_TGC=v_TGC, k_cache=k_cache_NPGC, v_cache=v_cache_NPGC, slot_mapping_T=slot_mapping_T)


def _check_latent_store(latent_TL: Tensor, k_pe_TR: Tensor, cache_NPX: Tensor, slot_mapping_T: Tensor) -> None:
    num_tokens = latent_TL.shape[0]
    assert_shape("k_pe_TR", k_pe_TR, (num_tokens, None))
    assert_shape("cache_NPX", cache_NPX, (None, None, latent_TL.shape[1] + k_pe_TR.shape[1]))
    assert_shape("slot_mapping_T", slot_mapping_T, (num_tokens,))
    assert_dtype("slot_mapping_T", slot_mapping_T, torch.int64)
    for name, x in (("latent_TL", latent_TL), ("k_pe_TR", k_pe_TR), ("cache_NPX", cache_NPX)):
        assert_last_contiguous(name, x)
        assert_dtype(name, x, cache_NPX.dtype)
    assert_same_device(latent_TL, k_pe_TR=k_pe_TR, cache_NPX=cache_NPX, slot_mapping_T=slot_mapping_T)


# k_cache[slot // P, slot % P, g, c] = k[t, g, c], the same for v; slot = slot_mapping[t], skipped where negative
#   k_ptr, v_ptr [T, G, C] and the caches [N, P, G, C], one dtype, any strides but the last; slots_ptr int64 [T]
#   grid (T,): a program owns one token, all its heads. Entries from G * C on are masked: the block is a power of two.


@triton.jit
def _kv_store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    page_size,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    stride_kcn,
    stride_kcp,
    stride_kcg,
    stride_vcn,
    stride_vcp,
    stride_vcg,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    page, offset = slot // page_size, slot % page_size
    for start in range(0, NUM_HEADS * WIDTH, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        head, column = entry // WIDTH, entry % WIDTH
        live = (entry < NUM_HEADS * WIDTH) & (slot >= 0)
        k = tl.load(k_ptr + token * stride_kt + head * stride_kg + column, mask=live)
        v = tl.load(v_ptr + token * stride_vt + head * stride_vg + column, mask=live)
        k_place = page * stride_kcn + offset * stride_kcp + head * stride_kcg + column
        v_place = page * stride_vcn + offset * stride_vcp + head * stride_vcg + column
        tl.store(k_cache_ptr + k_place, k, mask=live)
        tl.store(v_cache_ptr + v_place, v, mask=live)


def kv_store_triton(
    k_TGC: Tensor, v_TGC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGC: Tensor, slot_mapping_T: Tensor
) -> None:
    """`kv_store` as one launch."""
    _check_store(k_TGC, v_TGC, k_cache_NPGC, v_cache_NPGC, slot_mapping_T)
    num_tokens, num_heads, width = k_TGC.shape
    if num_tokens == 0:
        return
    _kv_store_kernel[(num_tokens,)](
        k_TGC,
        v_TGC,
        k_cache_NPGC,
        v_cache_NPGC,
        slot_mapping_T,
        k_cache_NPGC.shape[1],
        *k_TGC.stride()[:2],
        *v_TGC.stride()[:2],
        *k_cache_NPGC.stride()[:3],
        *v_cache_NPGC.stride()[:3],
        NUM_HEADS=num_heads,
        WIDTH=width,
        BLOCK=min(_MAX_BLOCK, next_power_of_2(num_heads * width)),
        **dependent_launch(k_TGC),
    )


# cache[slot // P, slot % P] = (latent[t], k_pe[t]); slot = slot_mapping[t], skipped where negative
#   latent_ptr [T, L], k_pe_ptr [T, R], cache_ptr [N, P, L + R], one dtype; slots_ptr int64 [T]
#   grid (T,): a program owns one token. Entries from L + R on are masked: the block is a power of two.


@triton.jit
def _latent_store_kernel(
    latent_ptr,
    k_pe_ptr,
    cache_ptr,
    slots_ptr,
    page_size,
    stride_lt,
    stride_rt,
    stride_cn,
    stride_cp,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    entry = tl.arange(0, BLOCK)
    in_latent, live = entry < LATENT, (entry < LATENT + ROPE) & (slot >= 0)
    latent = tl.load(latent_ptr + token * stride_lt + entry, mask=live & in_latent)
    k_pe = tl.load(k_pe_ptr + token * stride_rt + entry - LATENT, mask=live & (entry >= LATENT))
    place = (slot // page_size) * stride_cn + (slot % page_size) * stride_cp + entry
    tl.store(cache_ptr + place, tl.where(in_latent, latent, k_pe), mask=live)


def latent_store_triton(latent_TL: Tensor, k_pe_TR: Tensor, cache_NPX: Tensor, slot_mapping_T: Tensor) -> None:
    """`latent_store` as one launch."""
    _check_latent_store(latent_TL, k_pe_TR, cache_NPX, slot_mapping_T)
    num_tokens, latent = latent_TL.shape
    if num_tokens == 0:
        return
    _latent_store_kernel[(num_tokens,)](
        latent_TL,
        k_pe_TR,
        cache_NPX,
        slot_mapping_T,
        cache_NPX.shape[1],
        latent_TL.stride(0),
        k_pe_TR.stride(0),
        *cache_NPX.stride()[:2],
        LATENT=latent,
        ROPE=k_pe_TR.shape[1],
        BLOCK=next_power_of_2(cache_NPX.shape[2]),
        **dependent_launch(latent_TL),
    )


def kv_store_reference(
    k_TGC: Tensor, v_TGC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGC: Tensor, slot_mapping_T: Tensor
) -> None:
    """The definition, and the CPU's product path."""
    _check_store(k_TGC, v_TGC, k_cache_NPGC, v_cache_NPGC, slot_mapping_T)
    written_T = slot_mapping_T >= 0
    slots_T = slot_mapping_T[written_T]
    place = (slots_T // k_cache_NPGC.shape[1], slots_T % k_cache_NPGC.shape[1])
    k_cache_NPGC[place] = k_TGC[written_T]
    v_cache_NPGC[place] = v_TGC[written_T]


def latent_store_reference(latent_TL: Tensor, k_pe_TR: Tensor, cache_NPX: Tensor, slot_mapping_T: Tensor) -> None:
    """The definition, and the CPU's product path."""
    _check_latent_store(latent_TL, k_pe_TR, cache_NPX, slot_mapping_T)
    written_T = slot_mapping_T >= 0
    slots_T = slot_mapping_T[written_T]
    rows_TX = torch.cat([latent_TL[written_T], k_pe_TR[written_T]], dim=1)
    cache_NPX[slots_T // cache_NPX.shape[1], slots_T % cache_NPX.shape[1]] = rows_TX
