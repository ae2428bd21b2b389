"""Attention over caches of codes, in tests: asked as a step asks it, and its decode checked against dense numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.attention_decode import attention_decode_reference, attention_decode_triton
from kernels.kv_int4 import Int4Scales
from kernels.kv_quantize import KVScales
from tests.compare import max_rel
from tests.paged_cache import PagedCache, assert_accurate, dense_attention, index, starts

Scales = KVScales | Int4Scales


def decode(
    attend: Callable[..., Tensor],
    q_BHC: Tensor,
    cache: PagedCache,
    scales: Scales,
    window: int,
    rows: Any = slice(None),
) -> Tensor:
    """One of the forms of `attention_decode`, of these rows of a batch."""
    lens_B = cache.kv_lens_B[rows]
    operands = (q_BHC[rows], cache.k_cache_NPGC, cache.v_cache_NPGV, cache.block_tables_BM[rows], lens_B)
    return attend(*operands, scale=0.2, window=window, max_kv_len=int(lens_B.max()), scales=scales)


def check_decode(q_BHC: Tensor, cache: PagedCache, scales: Scales, window: int, tolerance: float) -> None:
    """The kernel against fp64, and against the reference. `cache.keys` and `.values` are the numbers of the codes."""
    ours = decode(attention_decode_triton, q_BHC, cache, scales, window)
    wanted, by_torch = (
        torch.cat(
            [
                dense_attention(q[None], k, v, scale=0.2, query_offset=k.shape[0] - 1, window=window, dtype=dtype)[0]
                for q, k, v in zip(q_BHC, cache.keys, cache.values)
            ]
        )
        for dtype in (torch.float64, q_BHC.dtype)
    )
    assert ours.dtype == q_BHC.dtype
    assert_accurate(ours, by_torch, wanted)
    assert max_rel(ours, decode(attention_decode_reference, q_BHC, cache, scales, window)) < tolerance


def prefill(
    attend: Callable[..., Any],
    queries: list[Tensor],
    cache: PagedCache,
    scales: Scales,
    first: list[int],
    window: int,
) -> Any:
    """One of the forms of `attention_prefill`, of each sequence's queries from its `first` on."""
    lens = [q.shape[0] - start for q, start in zip(queries, first)]
    device = cache.kv_lens_B.device
    return attend(
        torch.cat([q[start:] for q, start in zip(queries, first)]),
        cache.k_cache_NPGC,
        cache.v_cache_NPGV,
        cache.block_tables_BM,
        starts(lens, device),
        index(first, device),
        cache.kv_lens_B,
        scale=0.2,
        window=window,
        max_query_len=max(lens),
        max_kv_len=int(cache.kv_lens_B.max()),
        scales=scales,
    )
