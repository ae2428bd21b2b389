"""Paged caches for kernel tests: scattered pages, NaN in every unused slot, wild ids in every unused table entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.compare import assert_close_as_torch, max_rel
from tests.shapes import WILD_INDEX


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of several sequences: as the kernel sees them, and as plain rows per sequence."""

    k_cache_NPGC: Tensor
    v_cache_NPGV: Tensor
    block_tables_BM: Tensor
    kv_lens_B: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def index(values: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def starts(lens: Sequence[int], device: str = "cpu") -> Tensor:
    """0 and the running sums."""
    return index([sum(lens[:b]) for b in range(len(lens) + 1)], device)


def paged_cache(
    lens: Sequence[int],
    *,
    page: int,
    kv_heads: int = 1,
    width: int,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PagedCache:
    """Sequences of these lengths. Keys and values of one width are views of one [N, 2, P, G, C] tensor, as ours are."""
    pages = [-(-length // page) for length in lens]
    num_blocks = sum(pages) + 2
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    value_width = width if value_width is None else value_width
    if value_width == width:
        both = torch.full((num_blocks, 2, page, kv_heads, width), torch.nan, dtype=dtype, device=device)
        k_cache_NPGC, v_cache_NPGV = both[:, 0], both[:, 1]
    else:
        k_cache_NPGC = torch.full((num_blocks, page, kv_heads, width), torch.nan, dtype=dtype, device=device)
        # Values of another width than keys come as a slice of wider rows (MLA's expansion).
        wide = torch.full((num_blocks, page, kv_heads, value_width + 8), torch.nan, dtype=dtype, device=device)
        v_cache_NPGV = wide[..., 8:]
    tables = torch.full((len(lens), max(pages, default=0) + 2), WILD_INDEX, dtype=torch.int32)
    keys, values = [], []
    for b, length in enumerate(lens):
        keys.append(draw(length, kv_heads, width, dtype=dtype, device=device, seed=1000 + 2 * b + seed))
        values.append(draw(length, kv_heads, value_width, dtype=dtype, device=device, seed=1001 + 2 * b + seed))
        for logical in range(pages[b]):
            block, first = order.pop(), logical * page
            count = min(page, length - first)
            tables[b, logical] = block
            k_cache_NPGC[block, :count] = keys[b][first : first + count]
            v_cache_NPGV[block, :count] = values[b][first : first + count]
    return PagedCache(k_cache_NPGC, v_cache_NPGV, tables.to(device), index(lens, device), tuple(keys), tuple(values))


def dense_attention(
    q_QHC: Tensor,
    k_JGC: Tensor,
    v_JGV: Tensor,
    *,
    scale: float,
    query_offset: int,
    kv_start: int = 0,
    window: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(out_QHV, lse_QH) of one sequence by whole matrices in `dtype`: what the kernels are measured against."""
    group = q_QHC.shape[1] // k_JGC.shape[1]
    q, k, v = q_QHC.to(dtype), k_JGC.to(dtype), v_JGV.to(dtype)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores_HQJ = torch.einsum("qhc,jhc->hqj", q, k).to(torch.promote_types(dtype, torch.float32)) * scale
    query = query_offset + torch.arange(q.shape[0], device=q.device).unsqueeze(1)
    key = kv_start + torch.arange(k.shape[0], device=q.device)
    seen = (key <= query) & ((key > query - window) if window else True)
    scores_HQJ = scores_HQJ.masked_fill(~seen, -torch.inf)
    weights_HQJ = scores_HQJ.softmax(-1).nan_to_num(0.0).to(dtype)
    return torch.einsum("hqj,jhv->qhv", weights_HQJ, v), scores_HQJ.logsumexp(-1).T


def assert_accurate(ours: Tensor, torch_same_dtype: Tensor, exact_fp64: Tensor) -> None:
    """In 16 bits: at most 1.5 times torch's own error. In fp32, where both are a matter of summation order: 1e-5."""
    if ours.dtype == torch.float32:
        assert max_rel(ours, exact_fp64) < 1e-5, f"relative error {max_rel(ours, exact_fp64):.3e}"
    else:
        assert_close_as_torch(ours, torch_same_dtype, exact_fp64)
