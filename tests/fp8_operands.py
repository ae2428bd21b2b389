"""Operands of the ragged fp8 products, and their check against fp64 of the dequantised operands, next to torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from kernels.quantize import (
    FP8,
    Quantized,
    QuantizedBlocks,
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
)
from tests.compare import assert_close_as_torch, max_rel
from tests.shapes import WILD_INDEX


def draw_blocks(slots: int, parts: int, rows: int, width: int, device: str, seed: int = 1) -> QuantizedBlocks:
    """A bundle of weights whose blocks differ in size."""
    generator = torch.Generator().manual_seed(seed)
    w_SPND = torch.randn(slots, parts, rows, width, generator=generator) / width**0.5
    w_SPND *= torch.linspace(0.5, 3.0, rows)[:, None] * torch.linspace(2.0, 0.5, width)
    q = quantize_blocks(w_SPND)
    return QuantizedBlocks(q.values.flatten(1, 2).to(device), q.scales.to(device))


def draw_rows(num_rows: int, width: int, device: str, seed: int = 0) -> Quantized:
    x_XD = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    q = quantize_rows(x_XD * torch.linspace(0.2, 5.0, num_rows)[:, None])
    return Quantized(q.values.to(device), q.scales.to(device))


def offsets_of(counts, device: str) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)


def plain(x: Quantized, w: QuantizedBlocks, counts, index, dtype: torch.dtype) -> torch.Tensor:
    """The used rows by plain torch on the dequantised operands in `dtype`, one cast less than the op's."""
    parts = w.scales.shape[1]
    x_RD = dequantize_rows(x)[index.long()].to(dtype)
    offsets, outputs = [0, *torch.tensor(counts).cumsum(0).tolist()], []
    for slot, (start, end) in enumerate(pairwise(offsets)):
        w_PND = dequantize_blocks(w.values[slot].unflatten(0, (parts, -1)), w.scales[slot]).to(dtype)
        y = x_RD[start:end] @ w_PND.flatten(0, 1).T
        if parts == 2:
            gate, up = y.to(torch.promote_types(dtype, torch.float32)).chunk(2, -1)
            y = functional.silu(gate) * up
        outputs.append(y)
    return torch.cat(outputs)


def check(run, counts, parts, width, columns, *, device, out_dtype, indexed, spare=5, **options) -> None:
    """Unused rows: their index is wild, rows of x that no index names and slots without rows are NaN."""
    used = sum(counts)
    w = draw_blocks(len(counts), parts, columns, width, device)
    for slot, count in enumerate(counts):
        if count == 0:
            w.values[slot] = torch.full(w.values[slot].shape, torch.nan).to(FP8).to(device)
            w.scales[slot] = torch.nan
    x = draw_rows(used + 5, width, device)
    if indexed:
        index = torch.randperm(used, generator=torch.Generator().manual_seed(2)).to(device) + 2
        index_R = torch.cat([index, torch.full((spare,), WILD_INDEX, device=device)]).to(torch.int32)
        x.scales[:, :2], x.scales[:, used + 2 :] = torch.nan, torch.nan
    else:
        index, index_R = torch.arange(used, device=device), None
        x.scales[:, used:] = torch.nan
    ours = run(
        x, w, offsets_of(counts, device), row_index_R=index_R, num_rows=used + spare, out_dtype=out_dtype, **options
    )
    assert ours.shape == (used + spare, columns) and ours.dtype == out_dtype
    if used:
        exact = plain(x, w, counts, index, torch.float64)
        torchs = plain(x, w, counts, index, torch.float32).to(out_dtype)
        assert_close_as_torch(ours[:used], torchs, exact, chain=width if out_dtype == torch.float32 else 0)
        assert max_rel(ours[:used, -1], exact[:, -1]) < 2e-2
