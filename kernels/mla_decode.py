"""Absorbed latent attention (MLA) of one new token per sequence: all heads read one latent and one rotary key a position.

Knows pages, lengths and heads; the projections into and out of the latent space are the model's affair.

    s[p] = scale * (q_latent[b, h] . c[p] + q_pe[b, h] . k_pe[p])
    o_latent[b, h] = sum over p < kv_len of softmax_p(s) * c[p]
    cache row p = (c[p] of width L, k_pe[p] of width R), X = L + R
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape
from kernels.kv_tiles import OnlineSoftmax, gather_kv_tile, tile_product

_REFERENCE_TILE = 128  # keys visited at once by the reference, at multiples of this position


def mla_decode(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
) -> Tensor:
    """o_latent_BHL in q's dtype. `mla_decode_reference` is the definition.

    block_tables_BM int32 (entries past kv_len are never used), kv_lens_B int32 (with the new token; 0 gives zeros).
    max_kv_len >= every kv_len; it bounds the work and does not change a bit of the result.
    """
    return mla_decode_reference(
        q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B, scale=scale, max_kv_len=max_kv_len
    )


def _check_operands(
    q_latent_BHL: Tensor, q_pe_BHR: Tensor, cache_NPX: Tensor, block_tables_BM: Tensor, kv_lens_B: Tensor
) -> None:
    num_sequences, num_heads, latent = q_latent_BHL.shape
    assert_shape("q_pe_BHR", q_pe_BHR, (num_sequences, num_heads, None))
    assert_shape("cache_NPX", cache_NPX, (None, None, latent + q_pe_BHR.shape[2]))
    assert_shape("block_tables_BM", block_tables_BM, (num_sequences, None))
    assert_shape("kv_lens_B", kv_lens_B, (num_sequences,))
    for name, x in (("block_tables_BM", block_tables_BM), ("kv_lens_B", kv_lens_B)):
        assert_dtype(name, x, torch.int32)
    for name, x in (("q_latent_BHL", q_latent_BHL), ("q_pe_BHR", q_pe_BHR), ("cache_NPX", cache_NPX)):
        assert_last_contiguous(name, x)
        assert_dtype(name, x, q_latent_BHL.dtype)
    assert_same_device(
        q_latent_BHL, q_pe_BHR=q_pe_BHR, cache_NPX=cache_NPX, block_tables_BM=block_tables_BM, kv_lens_B=kv_lens_B
    )


def mla_decode_reference(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
) -> Tensor:
    """The definition, and the CPU's product path: fp32, tiles of keys at fixed positions, in order."""
    _check_operands(q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
    num_sequences, num_heads, latent = q_latent_BHL.shape
    q_BHX = torch.cat([q_latent_BHL, q_pe_BHR], dim=2).float()
    kv_lens_B = kv_lens_B.long()
    state = OnlineSoftmax(num_sequences, num_heads, latent, q_BHX.device)
    for start in range(0, int(kv_lens_B.max()) if num_sequences else 0, _REFERENCE_TILE):
        live_b = (kv_lens_B > start).nonzero().flatten()
        position_bW = torch.arange(start, start + _REFERENCE_TILE, device=q_BHX.device).expand(live_b.shape[0], -1)
        valid_bW = position_bW < kv_lens_B[live_b, None]
        rows_bWX = gather_kv_tile(cache_NPX.unsqueeze(2), block_tables_BM[live_b], position_bW, valid_bW).squeeze(1)
        scores_bHW = tile_product(q_BHX[live_b], rows_bWX.transpose(1, 2)) * scale
        scores_bHW.masked_fill_(~valid_bW.unsqueeze(1), float("-inf"))
        state.add(live_b, scores_bHW, rows_bWX[..., :latent])
    out_BHL, _ = state.result()
    return out_BHL.to(q_latent_BHL.dtype)
