"""Attention of one new token per sequence over its paged keys and values (grouped-query heads).

Knows pages, lengths and heads; knows neither layers nor requests.

    out_BHV[b, h] = sum over positions p of softmax_p(scale * q[b, h] . k[p]) * v[p]
    max(0, kv_len - window) <= p < kv_len   (without a window: 0 <= p < kv_len)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape
from kernels.kv_tiles import OnlineSoftmax, gather_kv_tile, tile_product

_REFERENCE_TILE = 128  # keys visited at once by the reference, at multiples of this position


def attention_decode(
    q_BHC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_kv_len: int,
) -> Tensor:
    """out_BHV in q's dtype. `attention_decode_reference` is the definition.

    block_tables_BM int32 (entries past kv_len are never used), kv_lens_B int32 (with the new token; 0 gives zeros),
    window 0: all positions. max_kv_len >= every kv_len; it bounds the work and does not change a bit of the result.
    """
    return attention_decode_reference(
        q_BHC,
        k_cache_NPGC,
        v_cache_NPGV,
        block_tables_BM,
        kv_lens_B,
        scale=scale,
        window=window,
        max_kv_len=max_kv_len,
    )


def _check_operands(
    q_BHC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGV: Tensor, block_tables_BM: Tensor, kv_lens_B: Tensor
) -> None:
    num_sequences, num_heads, width = q_BHC.shape
    num_blocks, page_size, num_kv_heads, _ = k_cache_NPGC.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} kv heads"
    assert_shape("k_cache_NPGC", k_cache_NPGC, (num_blocks, page_size, num_kv_heads, width))
    assert_shape("v_cache_NPGV", v_cache_NPGV, (num_blocks, page_size, num_kv_heads, None))
    assert_shape("block_tables_BM", block_tables_BM, (num_sequences, None))
    assert_shape("kv_lens_B", kv_lens_B, (num_sequences,))
    for name, x in (("block_tables_BM", block_tables_BM), ("kv_lens_B", kv_lens_B)):
        assert_dtype(name, x, torch.int32)
    for name, x in (("q_BHC", q_BHC), ("k_cache_NPGC", k_cache_NPGC), ("v_cache_NPGV", v_cache_NPGV)):
        assert_last_contiguous(name, x)
        assert_dtype(name, x, q_BHC.dtype)
    assert_same_device(
        q_BHC, k_cache=k_cache_NPGC, v_cache=v_cache_NPGV, block_tables_BM=block_tables_BM, kv_lens_B=kv_lens_B
    )


def attention_decode_reference(
    q_BHC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_kv_len: int,
) -> Tensor:
    """The definition, and the CPU's product path: fp32, tiles of keys at fixed positions, in order."""
    _check_operands(q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B)
    num_sequences, num_heads, width = q_BHC.shape
    num_kv_heads, value_width = v_cache_NPGV.shape[2:]
    group, device = num_heads // num_kv_heads, q_BHC.device
    q_BGMC = q_BHC.float().reshape(num_sequences, num_kv_heads, group, width)
    kv_lens_B = kv_lens_B.long()
    first_B = (kv_lens_B - window).clamp_min(0) if window else torch.zeros_like(kv_lens_B)
    state = OnlineSoftmax(num_sequences * num_kv_heads, group, value_width, device)
    head_G = torch.arange(num_kv_heads, device=device)
    for start in range(0, int(kv_lens_B.max()) if num_sequences else 0, _REFERENCE_TILE):
        live_b = ((kv_lens_B > start) & (first_B < start + _REFERENCE_TILE)).nonzero().flatten()
        if live_b.shape[0] == 0:
            continue
        position_bW = torch.arange(start, start + _REFERENCE_TILE, device=device).expand(live_b.shape[0], -1)
        valid_bW = (position_bW >= first_B[live_b, None]) & (position_bW < kv_lens_B[live_b, None])
        tables_bM = block_tables_BM[live_b]
        k_bGWC = gather_kv_tile(k_cache_NPGC, tables_bM, position_bW, valid_bW)
        v_bGWV = gather_kv_tile(v_cache_NPGV, tables_bM, position_bW, valid_bW)
        scores_IMW = tile_product(q_BGMC[live_b].flatten(0, 1), k_bGWC.flatten(0, 1).transpose(1, 2)) * scale
        scores_bGMW = scores_IMW.view(live_b.shape[0], num_kv_heads, group, _REFERENCE_TILE)
        scores_bGMW.masked_fill_(~valid_bW[:, None, None, :], float("-inf"))
        live_I = (live_b.unsqueeze(1) * num_kv_heads + head_G).flatten()
        state.add(live_I, scores_IMW, v_bGWV.flatten(0, 1))
    out_IMV, _ = state.result()
    return out_IMV.view(num_sequences, num_heads, value_width).to(q_BHC.dtype)
