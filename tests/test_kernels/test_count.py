"""Counting ids: by hand, against plain Python, and beside ids that are none."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kernels.count import _count_ids_kernel, count_ids_, count_ids_reference_, count_ids_triton_
from tests.aot import ARCHS, aot, compile_ahead
from tests.shapes import NUM_TOKENS


def test_by_hand():
    counts_E = torch.tensor([5, 0, 0], dtype=torch.int64)
    count_ids_(counts_E, torch.tensor([[0, 2], [2, -1], [3, 2**30]], dtype=torch.int32))
    assert counts_E.tolist() == [6, 0, 2]


@pytest.mark.parametrize("num_experts", [1, 3, 60, 257])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_kernel_and_reference_count_alike(backend, num_tokens, num_experts):
    """Ids of a strided view, some outside [0, E); counts are one row of many, its neighbours stay as they are."""
    generator = torch.Generator().manual_seed(num_tokens)
    wide = torch.randint(-2, num_experts + 2, (num_tokens, 5), generator=generator, dtype=torch.int32)
    ids_TK = wide.to(backend.device)[:, 1:4]
    known = Counter(id for id in ids_TK.flatten().tolist() if 0 <= id < num_experts)
    for run in (count_ids_triton_, count_ids_reference_):
        counts_LE = torch.full((3, num_experts), 7, dtype=torch.int64, device=backend.device)
        run(counts_LE[1], ids_TK)
        assert counts_LE[1].tolist() == [7 + known[expert] for expert in range(num_experts)]
        assert bool((counts_LE[[0, 2]] == 7).all())


def test_all_on_one(backend):
    counts_E = torch.zeros(4, dtype=torch.int64, device=backend.device)
    count_ids_triton_(counts_E, torch.full((1000, 1), 2, dtype=torch.int32, device=backend.device))
    assert counts_E.tolist() == [0, 0, 1000, 0]


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    args = {"counts_ptr": "*i64", "ids_ptr": "*i32", "num_ids": "i32", "num_counts": "i32", "BLOCK": 256}
    compile_ahead(_count_ids_kernel, arch, args)
