"""Decode attention that takes the step's own keys and values along, beside the two launches that define it.

Knows `attention_decode` and `qk_rope_store`, and no machine that they run on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention_decode import attention_decode
from kernels.attention_decode_rows import stores_new
from kernels.new_rows import NewRows
from kernels.qk_rope_store import qk_rope_store
from kernels.turn_heads import HeadNorms, Rope
from tests.compare import assert_same_bits
from tests.paged_cache import draw, paged_cache


def check_new_rows(
    lens: Sequence[int],
    heads: int,
    kv_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    norms: bool = True,
    interleaved: bool = False,
    window: int = 0,
    rotated: int = 128,
    not_stored: Sequence[int] = (),
) -> None:
    """Caches and result have the same bits. The caches hold NaN where the new rows go; the rows `not_stored` read there
    what an earlier step left. A length of 0 is a row without a token."""
    qkv = draw(len(lens), heads + 2 * kv_heads, 128, dtype=dtype, device=device, seed=7)
    q_BHC, k_BGC, v_BGC = qkv.split((heads, kv_heads, kv_heads), dim=1)
    weights = (1 + 0.3 * draw(128, seed=seed) for seed in (1, 2))
    head_norms = HeadNorms(*(w.to(device, dtype) for w in weights), 1e-6) if norms else None
    positions_B = torch.tensor(lens, device=device) - 1
    rope = Rope(positions_B.clamp_min(0), draw(max(lens), rotated, device=device, seed=3), interleaved)
    results: list[tuple[Tensor, ...]] = []
    for along in (False, True):
        cache = paged_cache(lens, page=16, kv_heads=kv_heads, width=128, dtype=dtype, device=device)
        caches = (cache.k_cache_NPGC, cache.v_cache_NPGV)
        block_B = cache.block_tables_BM.long().gather(1, (positions_B.clamp_min(0) // 16)[:, None])[:, 0]
        slots_B = torch.where(positions_B < 0, -1, block_B * 16 + positions_B % 16)
        slots_B[list(not_stored)] = -1
        for x in caches:
            x[slots_B[slots_B >= 0] // 16, slots_B[slots_B >= 0] % 16] = torch.nan
        q, new = q_BHC, NewRows(k_BGC, v_BGC, head_norms, rope, slots_B)
        assert stores_new(q, *caches, None, new)
        if not along:
            q, new = qk_rope_store(q, k_BGC, v_BGC, head_norms, rope, *caches, slots_B, None), None
        tables = (cache.block_tables_BM, cache.kv_lens_B)
        out_BHC = attention_decode(
            q, *caches, *tables, scale=128**-0.5, window=window, max_kv_len=max(lens), new=new
        )  # fmt: skip
        results.append((out_BHC, *caches))
    for apart, ours in zip(*results):
        assert_same_bits(ours, apart)
    assert not results[0][0].isnan().any()
