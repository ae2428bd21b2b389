"""Operands of MLA decode for the drafts' cases: latents in scattered pages, NaN behind every sequence, wild ids behind
every last page."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.checks import cdiv
from launch.replay import rotation_length

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of `mla_decode`."""


def spread(number: int, low: int, high: int) -> list[int]:
    """Lengths at even steps of their logarithm, the longest first, as a step's rows come."""
    return [round(high * (low / high) ** (index / (number - 1))) for index in range(number)]


def rotation(
    lens: Sequence[int], num_heads: int, page: int, bound: int, device: torch.device, width: tuple[int, int] = (512, 64)
) -> list[Operands]:
    """As many as read more than a cache holds."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_calls = rotation_length(sum(lens) * sum(width) * dtype.itemsize) if device.type == "cuda" else 2
    kv_lens_B = torch.tensor(list(lens), dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(sum(lens))
    found: list[Operands] = []
    for _ in range(num_calls):
        cache_NPX, table_BM = _pages(lens, page, bound, sum(width), dtype, device, generator)
        q_BHX = torch.empty(len(lens), num_heads, sum(width), dtype=dtype, device=device).normal_()
        found.append((q_BHX[..., : width[0]], q_BHX[..., width[0] :], cache_NPX, table_BM, kv_lens_B))
    return found


def _pages(
    lens: Sequence[int],
    page: int,
    bound: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    counts = [cdiv(length, page) for length in lens]
    cache_NPX = torch.empty(sum(counts) + 1, page, width, dtype=dtype, device=device).normal_()
    cache_NPX[-1] = torch.nan
    order_N = torch.randperm(sum(counts), generator=generator).to(torch.int32)
    table_BM = torch.full((len(lens), cdiv(bound, page)), 0x7FFFFFFF, dtype=torch.int32)
    used = 0
    for sequence, count in enumerate(counts):
        table_BM[sequence, :count] = order_N[used : used + count]
        used += count
    ends = [(int(table_BM[b, n - 1]), lens[b] % page) for b, n in enumerate(counts) if n and lens[b] % page]
    if ends:
        last_I, length_I = (torch.tensor(each, device=device) for each in zip(*ends, strict=True))
        behind_IP = torch.arange(page, device=device) >= length_I[:, None]
        cache_NPX[last_I] = cache_NPX[last_I].masked_fill(behind_IP[..., None], torch.nan)
    return cache_NPX, table_BM.to(device)
