"""Counts by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.round_counts import _counts_kernel, round_counts, round_counts_reference, round_counts_triton
from tests.aot import ARCHS, aot, compile_ahead

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


def test_hand_worked() -> None:
    pairs, records = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    rows_TK = torch.tensor([[0, -1], [1, 2]], dtype=torch.int32)
    assert round_counts(pairs, records, rows_TK, 2, 5).tolist() == [3, 1, 2, 1, 3, 2, 5]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(1, 0), (3, 7), (5, 1500)])
def test_kernel(num_ranks: int, num_tokens: int, device: str) -> None:
    """Ranks that fill no power of two, no rows, and rows of more than one block; the count need not fit the offsets."""
    generator = torch.Generator().manual_seed(num_tokens)
    offsets = [torch.randint(0, 50, (num_ranks + 1,), generator=generator).cumsum(0).int() for _ in range(2)]
    rows_TK = torch.randint(-1, 2, (num_tokens, 3), generator=generator).int()
    wanted = round_counts_reference(*offsets, rows_TK, num_tokens, 9)
    found = round_counts_triton(*(each.to(device) for each in (*offsets, rows_TK)), num_tokens, 9)
    assert found.tolist() == wanted.tolist()


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    args: dict[str, object] = {f"{name}_ptr": "*i32" for name in ("pair_offsets", "record_offsets", "row", "out")}
    args |= dict.fromkeys(("num_rows", "num_taken", "num_left", "num_ranks"), "i32")
    compile_ahead(_counts_kernel, arch, {**args, "BLOCK_N": 8, "BLOCK": 4096, "PDL": arch >= 90}, num_warps=8)
