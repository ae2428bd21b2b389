"""Write the keys and values of a step into the paged cache: one row copy per token.

Knows slots (block * P + offset in the block) and rows; who owns a block is the allocator's affair. A slot of -1 writes
nothing. Two live tokens never share a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape


def kv_store(k_TGC: Tensor, v_TGC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGC: Tensor, slot_mapping_T: Tensor) -> None:
    """cache[slot[t] // P, slot[t] % P] = row t, for keys and values. `kv_store_reference` is the definition.

    slot_mapping_T int64, -1: skip. The caches are views of one [N, 2, P, G, C] tensor; k and v may be strided views.
    """
    kv_store_reference(k_TGC, v_TGC, k_cache_NPGC, v_cache_NPGC, slot_mapping_T)


def latent_store(latent_TL: Tensor, k_pe_TR: Tensor, cache_NPX: Tensor, slot_mapping_T: Tensor) -> None:
    """cache[slot[t] // P, slot[t] % P] = (latent row t, rotary key row t), X = L + R. See `latent_store_reference`."""
    latent_store_reference(latent_TL, k_pe_TR, cache_NPX, slot_mapping_T)


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
