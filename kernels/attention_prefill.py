"""Causal attention of prompt chunks over the paged cache: over all keys, or a part of them for attention_merge.py.

Knows pages, positions and heads; knows neither layers nor requests. Query i of sequence b stands at
query_offsets[b] + i, key j at kv_starts[b] + j; a query sees keys at its own position or before it, inside the window.

    out[i, h] = sum over seen j of softmax_j(scale * q[i, h] . k[j]) * v[j]
    lse[i, h] = ln of the sum over seen j of exp(scale * q[i, h] . k[j])
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from kernels.attention_prefill_hopper import attention_prefill_hopper, runs_on_hopper
from kernels.attention_prefill_int4 import attention_prefill_int4
from kernels.attention_prefill_tiles import attention_prefill_tiles
from kernels.checks import assert_dtype, assert_same_device, assert_shape, uses_triton
from kernels.kv_int4 import Int4Scales
from kernels.kv_quantize import KVScales
from kernels.kv_tiles import OnlineSoftmax, gather_kv_tile, tile_product
from kernels.paged_kv import check_paged_kv
from kernels.prefill_order import PIECE_ROWS, heads_of_piece

_REFERENCE_QUERIES = 32  # the reference's query block, at multiples of this position
_REFERENCE_TILE = 64  # keys visited at once by the reference, at multiples of this position


@overload
def attention_prefill(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_query_len: int,
    max_kv_len: int,
    kv_starts_B: Tensor | None = None,
    scales: KVScales | Int4Scales | None = None,
    k_rest_NPR: Tensor | None = None,
    pieces_I: Tensor | None = None,
    out_THV: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_prefill(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_query_len: int,
    max_kv_len: int,
    kv_starts_B: Tensor | None = None,
    scales: KVScales | Int4Scales | None = None,
    k_rest_NPR: Tensor | None = None,
    pieces_I: Tensor | None = None,
    out_THV: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention_prefill(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_query_len: int,
    max_kv_len: int,
    kv_starts_B: Tensor | None = None,
    scales: KVScales | Int4Scales | None = None,
    k_rest_NPR: Tensor | None = None,
    pieces_I: Tensor | None = None,
    out_THV: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_THV in q's dtype, or with return_lse (out_THV fp32, lse_TH fp32). `attention_prefill_reference` defines it.

    Rows query_starts[b] : query_starts[b + 1] of q are the chunk of sequence b; kv_lens[b] keys are reachable through
    its row of the table (entries past them are never used). Index tensors int32; kv_starts None: all start at 0;
    window 0: no window; scales: of caches in e4m3 or int4; k_rest_NPR: the last columns of every head's key, of which
    the cache holds the others; out_THV: where the result goes, contiguous; None: a new tensor. A query that sees no key
    gives out 0, lse -inf.
    max_query_len and max_kv_len bound the work, pieces_I orders it (prefill_order.py; None: as it comes): no bit of the
    result depends on them.
    """
    result_THV, lse_TH = (attention_prefill_triton if uses_triton(q_THC) else attention_prefill_reference)(
        q_THC,
        k_cache_NPGC,
        v_cache_NPGV,
        block_tables_BM,
        query_starts_B1,
        query_offsets_B,
        kv_lens_B,
        scale=scale,
        window=window,
        max_query_len=max_query_len,
        max_kv_len=max_kv_len,
        kv_starts_B=kv_starts_B,
        scales=scales,
        k_rest_NPR=k_rest_NPR,
        pieces_I=pieces_I,
        out_dtype=torch.float32 if return_lse else q_THC.dtype,
        out_THV=out_THV,
    )
    return (result_THV, lse_TH) if return_lse else result_THV


def _check_operands(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    kv_starts_B: Tensor,
    scales: KVScales | Int4Scales | None,
    k_rest_NPR: Tensor | None = None,
) -> None:
    key_width = q_THC.shape[2]
    if k_rest_NPR is not None:
        assert_shape("k_rest_NPR", k_rest_NPR, (*k_cache_NPGC.shape[:2], None))
        assert k_rest_NPR.dtype == k_cache_NPGC.dtype, f"one key in {k_cache_NPGC.dtype} and {k_rest_NPR.dtype}"
        key_width -= k_rest_NPR.shape[2]
    check_paged_kv(q_THC, k_cache_NPGC, v_cache_NPGV, scales, key_width)
    num_sequences = block_tables_BM.shape[0]
    indices = {
        "block_tables_BM": (block_tables_BM, (num_sequences, None)),
        "query_starts_B1": (query_starts_B1, (num_sequences + 1,)),
        "query_offsets_B": (query_offsets_B, (num_sequences,)),
        "kv_lens_B": (kv_lens_B, (num_sequences,)),
        "kv_starts_B": (kv_starts_B, (num_sequences,)),
    }
    for name, (x, shape) in indices.items():
        assert_shape(name, x, shape)
        assert_dtype(name, x, torch.int32)
    assert_same_device(
        q_THC, k_cache=k_cache_NPGC, v_cache=v_cache_NPGV, **{name: x for name, (x, _) in indices.items()}
    )


def _place(out_THV: Tensor | None, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if out_THV is None:
        return torch.empty(shape, dtype=dtype, device=device)
    assert_shape("out_THV", out_THV, shape)
    assert_dtype("out_THV", out_THV, dtype)
    assert out_THV.is_contiguous(), "out_THV must lie together in memory"
    return out_THV


def whole_keys(k_cache_NPGC: Tensor, k_rest_NPR: Tensor) -> Tensor:
    """The cache of keys whose last columns lie apart, as one."""
    rest_NPGR = k_rest_NPR.unsqueeze(2).expand(-1, -1, k_cache_NPGC.shape[2], -1)
    return torch.cat([k_cache_NPGC, rest_NPGR], dim=3)


def piece_queries(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    scales: KVScales | Int4Scales | None,
    k_rest_NPR: Tensor | None = None,
) -> int | None:
    """Queries of a piece in the list that `attention_prefill` takes of such operands; None: it reads no list.

    By their device, dtypes and places in memory: q_THC may be without rows, whose number decides nothing.
    """
    if not _on_hopper(q_THC, k_cache_NPGC, v_cache_NPGV, scales, k_rest_NPR):
        return None
    return PIECE_ROWS // heads_of_piece(q_THC.shape[1], k_cache_NPGC.shape[2])


def _on_hopper(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    scales: KVScales | Int4Scales | None,
    k_rest_NPR: Tensor | None,
) -> bool:
    return scales is None and runs_on_hopper(q_THC, k_cache_NPGC, v_cache_NPGV, k_rest_NPR)


def attention_prefill_triton(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_query_len: int,
    max_kv_len: int,
    kv_starts_B: Tensor | None = None,
    scales: KVScales | Int4Scales | None = None,
    k_rest_NPR: Tensor | None = None,
    pieces_I: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out_THV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_prefill` as one launch: (out_THV in `out_dtype`, lse_TH fp32). Only the Hopper kernel reads a key's
    columns from two places; for the others they are put together first."""
    hopper = _on_hopper(q_THC, k_cache_NPGC, v_cache_NPGV, scales, k_rest_NPR)
    if k_rest_NPR is not None and not hopper:
        k_cache_NPGC, k_rest_NPR = whole_keys(k_cache_NPGC, k_rest_NPR), None
    key_starts_B = kv_lens_B if kv_starts_B is None else kv_starts_B
    indices = (block_tables_BM, query_starts_B1, query_offsets_B, kv_lens_B, key_starts_B)
    _check_operands(q_THC, k_cache_NPGC, v_cache_NPGV, *indices, scales, k_rest_NPR)
    num_tokens, num_heads, width = q_THC.shape
    int4 = isinstance(scales, Int4Scales)
    value_width = width if int4 else v_cache_NPGV.shape[3]
    out_THV = _place(out_THV, (num_tokens, num_heads, value_width), out_dtype, q_THC.device)
    lse_TH = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q_THC.device)
    if num_tokens == 0:
        return out_THV, lse_TH
    caches, chunks = (k_cache_NPGC, v_cache_NPGV), (query_starts_B1, query_offsets_B, kv_lens_B, kv_starts_B)
    operands = (q_THC, *caches, block_tables_BM, *chunks, out_THV, lse_TH)
    bounds = {"scale": scale, "window": window, "max_query_len": max_query_len}
    if int4:
        attention_prefill_int4(*operands, scales, **bounds)
    elif hopper:
        attention_prefill_hopper(*operands, k_rest_NPR, pieces_I, **bounds)
    else:
        attention_prefill_tiles(*operands, scales, **bounds)
    return out_THV, lse_TH


def attention_prefill_reference(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_query_len: int,
    max_kv_len: int,
    kv_starts_B: Tensor | None = None,
    scales: KVScales | Int4Scales | None = None,
    k_rest_NPR: Tensor | None = None,
    pieces_I: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out_THV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out_THV in `out_dtype`, lse_TH fp32): the definition, and the CPU's product path.

    An item is a block of 32 query positions of one sequence, aligned to position 0, rows outside the chunk empty; tiles
    of keys stand at fixed positions too, so that a row's bits do not depend on how the prompt was cut.
    """
    if k_rest_NPR is not None:
        k_cache_NPGC = whole_keys(k_cache_NPGC, k_rest_NPR)
    key_starts_B = torch.zeros_like(kv_lens_B) if kv_starts_B is None else kv_starts_B
    indices = (block_tables_BM, query_starts_B1, query_offsets_B, kv_lens_B, key_starts_B)
    _check_operands(q_THC, k_cache_NPGC, v_cache_NPGV, *indices, scales)
    num_tokens, num_heads, width = q_THC.shape
    int4 = isinstance(scales, Int4Scales)
    num_kv_heads, value_width = v_cache_NPGV.shape[2], width if int4 else v_cache_NPGV.shape[3]
    group, device = num_heads // num_kv_heads, q_THC.device
    rows = group * _REFERENCE_QUERIES
    of_keys, of_values = scales[:2] if scales else (None, None)
    sequence_I, query_IQ, row_IQ, inside_IQ = _query_blocks(query_starts_B1.long(), query_offsets_B.long())
    num_items = sequence_I.shape[0]
    if num_items == 0:
        lse_TH = torch.full((num_tokens, num_heads), float("-inf"), dtype=torch.float32, device=device)
        return _place(out_THV, (num_tokens, num_heads, value_width), out_dtype, device).zero_(), lse_TH
    q_IQHC = q_THC[row_IQ].float().masked_fill(~inside_IQ[..., None, None], 0.0)
    q_IGMQC = q_IQHC.view(num_items, _REFERENCE_QUERIES, num_kv_heads, group, width).permute(0, 2, 3, 1, 4)
    q_IGRC = q_IGMQC.reshape(num_items, num_kv_heads, rows, width)
    kv_start_I = key_starts_B.long()[sequence_I]
    kv_end_I = kv_start_I + kv_lens_B.long()[sequence_I]
    first_I = torch.maximum(kv_start_I, query_IQ[:, 0] - window + 1) if window else kv_start_I
    end_I = torch.minimum(kv_end_I, query_IQ[:, -1] + 1)
    state = OnlineSoftmax(num_items * num_kv_heads, rows, value_width, device)
    head_G = torch.arange(num_kv_heads, device=device)
    first_tile = int(first_I.min()) // _REFERENCE_TILE * _REFERENCE_TILE
    for start in range(first_tile, int(end_I.max()), _REFERENCE_TILE):
        live_i = ((end_I > start) & (first_I < start + _REFERENCE_TILE) & (first_I < end_I)).nonzero().flatten()
        if live_i.shape[0] == 0:
            continue
        key_iW = torch.arange(start, start + _REFERENCE_TILE, device=device).expand(live_i.shape[0], -1)
        valid_iW = (key_iW >= first_I[live_i, None]) & (key_iW < end_I[live_i, None])
        tables_iM, index_iW = block_tables_BM[sequence_I[live_i]], key_iW - kv_start_I[live_i, None]
        k_iGWC = gather_kv_tile(k_cache_NPGC, tables_iM, index_iW, valid_iW, of_keys, int4=int4)
        v_iGWV = gather_kv_tile(v_cache_NPGV, tables_iM, index_iW, valid_iW, of_values, int4=int4)
        scores = tile_product(q_IGRC[live_i].flatten(0, 1), k_iGWC.flatten(0, 1).transpose(1, 2)) * scale
        seen_iQW = valid_iW.unsqueeze(1) & (key_iW.unsqueeze(1) <= query_IQ[live_i].unsqueeze(2))
        if window:
            seen_iQW &= key_iW.unsqueeze(1) > query_IQ[live_i].unsqueeze(2) - window
        scores_iHQW = scores.view(live_i.shape[0], num_heads, _REFERENCE_QUERIES, _REFERENCE_TILE)
        scores_iHQW.masked_fill_(~seen_iQW.unsqueeze(1), float("-inf"))
        state.add((live_i.unsqueeze(1) * num_kv_heads + head_G).flatten(), scores, v_iGWV.flatten(0, 1))
    out_IRV, lse_IR = state.result()
    out_THV = _place(out_THV, (num_tokens, num_heads, value_width), out_dtype, device).zero_()
    lse_TH = lse_IR.new_full((num_tokens, num_heads), float("-inf"))
    by_query = (num_items, num_heads, _REFERENCE_QUERIES)
    out_THV[row_IQ[inside_IQ]] = out_IRV.view(*by_query, value_width).transpose(1, 2)[inside_IQ].to(out_dtype)
    lse_TH[row_IQ[inside_IQ]] = lse_IR.view(by_query).transpose(1, 2)[inside_IQ]
    return out_THV, lse_TH


def _query_blocks(query_starts_B1: Tensor, query_offsets_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cuts each chunk at multiples of 32 positions: (sequence_I, position_IQ, row_IQ, inside_IQ); outside: row 0."""
    device = query_starts_B1.device
    lens_B = query_starts_B1[1:] - query_starts_B1[:-1]
    first_block_B = query_offsets_B // _REFERENCE_QUERIES
    end_block_B = (query_offsets_B + lens_B + _REFERENCE_QUERIES - 1) // _REFERENCE_QUERIES
    num_blocks_B = (end_block_B - first_block_B).masked_fill(lens_B == 0, 0)
    sequence_I = torch.repeat_interleave(torch.arange(lens_B.shape[0], device=device), num_blocks_B)
    index_I = torch.arange(sequence_I.shape[0], device=device) - (num_blocks_B.cumsum(0) - num_blocks_B)[sequence_I]
    block_I = first_block_B[sequence_I] + index_I
    position_IQ = block_I.unsqueeze(1) * _REFERENCE_QUERIES + torch.arange(_REFERENCE_QUERIES, device=device)
    in_chunk_IQ = position_IQ - query_offsets_B[sequence_I, None]
    inside_IQ = (in_chunk_IQ >= 0) & (in_chunk_IQ < lens_B[sequence_I, None])
    row_IQ = (query_starts_B1[sequence_I, None] + in_chunk_IQ).masked_fill(~inside_IQ, 0)
    return sequence_I, position_IQ, row_IQ, inside_IQ
