"""Results into the buffers they came from: by hand, and the kernel against the reference, byte by byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import peer_combine
from kernels.combine import combine_triton
from kernels.peer_combine import _return_kernel, return_rows, return_rows_reference, return_rows_triton
from kernels.peer_flags import TOKEN_BITS
from kernels.peer_layout import RETURNED, PeerLayout
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits
from tests.one_process import OneProcess
from tests.test_kernels.conftest import Backend

# A program takes one token at a time, so there is no tile to fill or to exceed; the interpreter takes 5 ms for each.
TOKENS = (0, 1, 9, pytest.param(129, marks=pytest.mark.gpu))


def layout_of(
    *, sums: bool, num_ranks: int = 2, capacity: int = 8, width: int = 40, top_k: int = 2, dtype
) -> PeerLayout:
    return PeerLayout(num_ranks, capacity, width, top_k, dtype, dtype, sums)


def test_hand_worked() -> None:
    """Two ranks with one token each, K = 2; rank 1 holds both experts of rank 0's token and one of its own."""
    rows_XK = torch.tensor([[1, 0], [-1, 2]], dtype=torch.int32)
    y_RD = torch.tensor([[10.0, 20.0], [1.0, 2.0], [5.0, 6.0], [torch.nan, torch.nan]])
    for weights_XK, homes in (
        (None, ([[1.0, 2.0], [10.0, 20.0]], [None, [5.0, 6.0]])),
        (torch.tensor([[0.5, 0.25], [torch.nan, 2.0]]), ([None, [3.0, 6.0]], [None, [10.0, 12.0]])),
    ):
        ranks = OneProcess(layout_of(sums=weights_XK is not None, capacity=1, width=2, dtype=torch.float32), "cpu")
        return_rows(ranks.peers(1), ranks.layout, ranks.states[1][RETURNED], y_RD, rows_XK, weights_XK, 1)
        for buffer, home in zip(ranks.buffers, homes):
            for row_D, wanted in zip(ranks.layout.home_RD(buffer, 1), home):
                assert row_D.isnan().all() if wanted is None else row_D.tolist() == wanted
            assert ranks.layout.flags_N(buffer, RETURNED).tolist() == [0, 1 << TOKEN_BITS | 1]


def draw_rows(layout: PeerLayout, num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """About half of the pairs are elsewhere, and all of every fifth record; rows that nobody asks for are NaN, as are
    weights of pairs elsewhere; y is a view into wider, NaN rows."""
    generator = torch.Generator().manual_seed(seed)
    num_records, num_rows = layout.num_ranks * num_tokens, layout.num_ranks * num_tokens * layout.top_k
    row_XK = torch.randperm(num_rows, generator=generator).view(num_records, layout.top_k).int()
    row_XK[torch.rand(row_XK.shape, generator=generator) < 0.5] = -1
    row_XK[::5] = -1
    y_RD = torch.full((num_rows, layout.width + 8), torch.nan, dtype=layout.dtype)
    asked_R = row_XK[row_XK >= 0].long()
    y_RD[asked_R, : layout.width] = torch.randn(len(asked_R), layout.width, generator=generator).to(layout.dtype)
    weights_XK = torch.rand(row_XK.shape, generator=generator).masked_fill(row_XK < 0, torch.nan)
    return y_RD[:, : layout.width], row_XK, weights_XK if layout.sums else None


def compare_kernel(layout: PeerLayout, device: str, num_tokens: int, num_epochs: int = 2) -> None:
    """One launch of every rank, and once more: all bytes of all buffers. On a GPU sums are fused differently than on
    the CPU: there they have the bits of the combine kernel, in a test of their own."""
    ours, wanted = OneProcess(layout, device), OneProcess(layout, "cpu")
    for epoch in range(num_epochs):
        for rank in range(layout.num_ranks):
            rows = draw_rows(layout, num_tokens, seed=10 * epoch + rank)
            there = [None if each is None else each.to(device) for each in rows]
            return_rows_triton(ours.peers(rank), layout, ours.states[rank][RETURNED], *there, num_tokens)  # pyright: ignore
            return_rows_reference(wanted.peers(rank), layout, wanted.states[rank][RETURNED], *rows, num_tokens)
            assert ours.states[rank][RETURNED].progress_2.tolist() == [epoch + 1, 0]
    if not layout.sums or device == "cpu":
        ours.assert_same_bytes(wanted)


BOTH = pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_kernel_for_numbers_of_tokens(backend: Backend, num_tokens: int) -> None:
    """Without records too the peers get their signal."""
    sums = backend.dtype != torch.float32
    compare_kernel(layout_of(sums=sums, capacity=130, dtype=backend.dtype), backend.device, num_tokens, num_epochs=1)


@BOTH
@pytest.mark.parametrize(("width", "top_k"), [(96, 60), (2880, 8), (96, 1)], ids=str)
def test_kernel_for_widths_and_choices(backend: Backend, sums: bool, width: int, top_k: int) -> None:
    layout = layout_of(sums=sums, num_ranks=2, capacity=2, width=width, top_k=top_k, dtype=backend.dtype)
    compare_kernel(layout, backend.device, 2)


@BOTH
def test_few_programs(backend: Backend, sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes several pieces, and the last to end signals."""
    monkeypatch.setattr(peer_combine, "MOST_PROGRAMS", 3)
    compare_kernel(layout_of(sums=sums, num_ranks=3, dtype=backend.dtype), backend.device, 3)


def test_sums_have_the_bits_of_the_combine(backend: Backend) -> None:
    layout = layout_of(sums=True, width=200, top_k=8, dtype=backend.dtype)
    ranks = OneProcess(layout, backend.device)
    y_RD, row_XK, weights_XK = (each.to(backend.device) for each in draw_rows(layout, 8, seed=0) if each is not None)
    return_rows_triton(ranks.peers(0), layout, ranks.states[0][RETURNED], y_RD, row_XK, weights_XK, 8)
    sums_XD = combine_triton(y_RD, row_XK, weights_XK)
    here_X = (row_XK >= 0).any(dim=1)
    for home, buffer in enumerate(ranks.buffers):
        here_B = here_X[8 * home : 8 * home + 8]
        home_BD = layout.home_RD(buffer, 8)[:8]
        assert_same_bits(home_BD[here_B], sums_XD[8 * home : 8 * home + 8][here_B])
        assert home_BD[~here_B].isnan().all()


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    args: dict[str, object] = {"y_ptr": "*bf16", "row_ptr": "*i32", "weights_ptr": "*fp32"}
    args |= dict.fromkeys(("addresses_ptr", "progress_ptr"), "*i64")
    args |= dict.fromkeys(("num_tokens", "num_columns", "stride_y", "rank"), "i32")
    args |= {"home_at": "i64", "flags_at": "i64", "NUM_RANKS": 8, "PDL": arch >= 90}
    for sums in (False, True):
        for blocks in ({"TOP_K": 8, "BLOCK_K": 8, "BLOCK_D": 1024}, {"TOP_K": 60, "BLOCK_K": 64, "BLOCK_D": 128}):
            assert compile_ahead(_return_kernel, arch, args | blocks | {"SUMS": sums})
