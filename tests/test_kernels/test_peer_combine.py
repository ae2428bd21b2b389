"""Results home and their sums: by hand, the kernel against the reference, its bits against the kernels of one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import peer_combine
from kernels.combine import combine_norm_triton, combine_triton
from kernels.peer_combine import (
    NormAfter,
    Results,
    Tokens,
    combine_home_reference,
    combine_home_triton,
)
from kernels.peer_layout import PeerLayout
from kernels.tiles import num_multiprocessors
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_as_separate, assert_same_bits
from tests.one_process import OneProcess
from tests.test_kernels.conftest import Backend

# A program takes a token at a time, or a few of narrow rows; the interpreter takes 5 ms for each.
TOKENS = (0, 1, 9, pytest.param(129, marks=pytest.mark.gpu))
BOTH = pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])


Given = tuple[Results, Tokens, NormAfter | None]
"""Of one rank."""


def layout_of(
    *, sums: bool, num_ranks: int = 2, capacity: int = 8, width: int = 40, top_k: int = 2, dtype
) -> PeerLayout:
    return PeerLayout(num_ranks, capacity, width, top_k, dtype, dtype, sums)


def in_turns(ranks: OneProcess, run, given: list[Given], timeout_s: float = 60.0):
    """What all ranks get of one round: all of them send, then all of them sum."""
    for rank, (results, tokens, _) in enumerate(given):
        ranks.states[rank].progress_2[0] += 1  # as the round's dispatch does
        run(ranks.peers(rank), ranks.layout, ranks.states[rank], results, tokens, timeout_s, sums=False)
    return [
        run(ranks.peers(rank), ranks.layout, ranks.states[rank], results, tokens, timeout_s, after, sends=False)
        for rank, (results, tokens, after) in enumerate(given)
    ]


@BOTH
def test_hand_worked(sums: bool) -> None:
    """One token each, K = 2. Rank 1 holds both experts of rank 0's token; of its own the second choice, rank 0 the
    first."""
    ranks = OneProcess(layout_of(sums=sums, capacity=1, width=2, dtype=torch.float32), "cpu")
    nan = torch.nan
    rows = [torch.tensor([[-1, -1], [0, -1]]).int(), torch.tensor([[1, 0], [-1, 2]]).int()]
    y = [torch.tensor([[100.0, 200.0]]), torch.tensor([[10.0, 20.0], [1.0, 2.0], [5.0, 6.0], [nan, nan]])]
    weights_XK = torch.tensor([[0.5, 0.25], [1.0, 2.0]]) if sums else None
    homes = [[[1, -1]], [[0, 1]]] if sums else [[[0, 1]], [[0, 1]]]
    own = [torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0, 2.0]])]
    given: list[Given] = [
        (Results(y[rank], rows[rank], weights_XK), Tokens(torch.tensor(homes[rank]).int(), own[rank]), None)
        for rank in range(2)
    ]
    for out, wanted in zip(in_turns(ranks, combine_home_reference, given), ([3.0, 6.0], [110.0, 212.0])):
        assert out[0].tolist() == [wanted] and out[1] is None


class Round(NamedTuple):
    """One round of all ranks, and the same as one rank that holds all rows."""

    given: list[Given]
    rows_RD: list[Tensor]  # of each rank what home and combine work on: all its choices' rows, choice by choice
    row_TK: list[Tensor]


def draw_round(layout: PeerLayout, num_tokens: int, seed: int, *, norm: bool, device: str = "cpu") -> Round:
    """Every fifth token goes nowhere, some choices are of no expert; rows nobody asks for are NaN, as are weights of
    choices without a row; y is a view into wider, NaN rows, and so are the residuals."""
    generator = torch.Generator().manual_seed(seed)
    num_ranks, top_k, width = layout.num_ranks, layout.top_k, layout.width

    def wide(num_rows: int) -> Tensor:
        rows = torch.full((num_rows, width + 8), torch.nan, dtype=layout.dtype)
        rows[:, :width] = torch.randn(num_rows, width, generator=generator).to(layout.dtype)
        return rows.to(device)[:, :width]

    to_rank_XK = torch.randint(0, num_ranks, (num_ranks * num_tokens, top_k), generator=generator)
    to_rank_XK[torch.rand(to_rank_XK.shape, generator=generator) < 0.2] = -1
    to_rank_XK[::5] = -1
    weights_XK = torch.rand(to_rank_XK.shape, generator=generator).masked_fill(to_rank_XK < 0, torch.nan)
    y, rows_XK = [], []
    for rank in range(num_ranks):
        here_XK = to_rank_XK == rank
        row_XK = torch.full(here_XK.shape, -1)
        row_XK[here_XK] = torch.randperm(int(here_XK.sum()), generator=generator)
        y.append(wide(int(here_XK.sum()) + 1))
        rows_XK.append(row_XK.int().to(device))
    given, rows_RD, row_TK = [], [], []
    for rank in range(num_ranks):
        own = slice(rank * num_tokens, (rank + 1) * num_tokens)
        to_rank_TK, token_T1 = to_rank_XK[own], torch.arange(num_tokens)[:, None]
        home_TK = (token_T1 * top_k + torch.arange(top_k)).where(to_rank_TK >= 0, -1)
        if layout.sums:
            home_TK = (to_rank_TK * num_tokens + token_T1).where(to_rank_TK >= 0, -1)
            for k in range(1, top_k):
                home_TK[(to_rank_TK[:, :k] == to_rank_TK[:, k : k + 1]).any(dim=1), k] = -1
            home_TK = home_TK.gather(1, (home_TK < 0).int().argsort(dim=1, stable=True))
        after = None
        if norm:
            shared_BD = wide(num_tokens) if rank else None
            after = NormAfter(wide(num_tokens), wide(1)[0].contiguous(), 1e-6, shared_BD)
        all_weights_XK = weights_XK.to(device) if layout.sums else None
        tokens = Tokens(home_TK.int().to(device), weights_XK[own].contiguous().to(device))
        given.append((Results(y[rank], rows_XK[rank], all_weights_XK), tokens, after))
        rows_RD.append(torch.cat([y[other] for other in range(num_ranks)]))
        first_N = torch.tensor([0, *(len(each) for each in y)]).cumsum(0)
        row_TK.append(
            torch.stack([rows_XK[n][own].cpu() + first_N[n] for n in range(num_ranks)])
            .gather(0, to_rank_TK.clamp_min(0)[None])[0]
            .where(to_rank_TK >= 0, -1)
            .int()
            .to(device)
        )
    return Round(given, rows_RD, row_TK)


def to(device: str, given: list[Given]) -> list[Any]:
    """The same on a device, as strided as it was."""

    def moved(part: Any) -> Any:
        if part is None or isinstance(part, float):
            return part
        if isinstance(part, Tensor):
            if part.is_contiguous():
                return part.to(device)
            return torch.nn.functional.pad(part, (0, 8), value=torch.nan).to(device)[:, : part.shape[1]]
        return type(part)(*(moved(each) for each in part))

    return [tuple(moved(part) for part in of_rank) for of_rank in given]


def compare_kernel(layout: PeerLayout, device: str, num_tokens: int, *, norm: bool, num_epochs: int = 2) -> None:
    """The kernel gives what the reference gives, and for rows (not sums) one rank's bits."""
    ours, wanted = OneProcess(layout, device), OneProcess(layout, "cpu")
    for epoch in range(num_epochs):
        drawn = draw_round(layout, num_tokens, seed=epoch, norm=norm)
        given = to(device, drawn.given)
        expected = in_turns(wanted, combine_home_reference, drawn.given)
        found = in_turns(ours, combine_home_triton, given)
        for rank, (own, other) in enumerate(zip(found, expected, strict=True)):
            assert not ours.states[rank].faults_3N.any()
            for each, of_reference in zip(own, other, strict=True):
                assert (each is None) == (of_reference is None)
                if each is not None and of_reference is not None:
                    torch.testing.assert_close(each.cpu(), of_reference, rtol=2e-2, atol=2e-2, equal_nan=False)
            if not layout.sums:
                _, tokens, after = given[rank]
                rows_RD, row_TK = drawn.rows_RD[rank].to(device), drawn.row_TK[rank].to(device)
                if after is None:
                    assert_same_bits(own[0], combine_triton(rows_RD, row_TK, tokens.weights_BK))
                else:
                    of_one = combine_norm_triton(rows_RD, row_TK, tokens.weights_BK, *after)
                    for each, other_bits in zip([x for x in own if x is not None], of_one, strict=True):
                        assert_same_as_separate(each, other_bits)


@BOTH
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_kernel_for_numbers_of_tokens(backend: Backend, num_tokens: int, sums: bool) -> None:
    layout = layout_of(sums=sums, capacity=130, dtype=backend.dtype)
    compare_kernel(layout, backend.device, num_tokens, norm=backend.dtype == torch.float32, num_epochs=1)


@BOTH
@pytest.mark.parametrize(("width", "top_k"), [(96, 22), (2880, 8), (96, 1)], ids=str)
def test_kernel_for_widths_and_choices(backend: Backend, sums: bool, width: int, top_k: int) -> None:
    """2880 columns are more than are taken at a time, and fill no tile."""
    layout = layout_of(sums=sums, capacity=2, width=width, top_k=top_k, dtype=backend.dtype)
    compare_kernel(layout, backend.device, 2, norm=True)


@BOTH
def test_few_programs_and_three_ranks(backend: Backend, sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes several tokens; rows of 1,200 columns go one at a time."""
    monkeypatch.setattr(peer_combine, "num_multiprocessors", lambda device: 1)
    compare_kernel(layout_of(sums=sums, num_ranks=3, width=1200, dtype=backend.dtype), backend.device, 7, norm=True)


@BOTH
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_many_tokens(backend: Backend, sums: bool, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that every program of the smaller kind takes several pairs of them, each pair behind one flag; a row's
    columns go in two parts."""
    num_tokens = 1401 if backend.device == "cuda" else 11  # a CPU counts as one multiprocessor
    monkeypatch.setattr(peer_combine, "_FLAG_BYTES", 50_000)
    monkeypatch.setattr(peer_combine, "_FLAGS", num_tokens // 2)
    programs = (peer_combine.WARPS - peer_combine.SENDING_ROWS) // 4 * num_multiprocessors(torch.device(backend.device))
    assert num_tokens > 2 * programs
    layout = layout_of(sums=sums, num_ranks=num_ranks, capacity=num_tokens, width=1160, dtype=backend.dtype)
    compare_kernel(layout, backend.device, num_tokens, norm=False, num_epochs=1)


@BOTH
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_few_tokens_and_many_have_the_same_bits(backend: Backend, sums: bool, norm: bool) -> None:
    """The first tokens of many, summed by the smaller programs where there is no norm, and alone by the larger ones."""
    num_tokens, num_few = (900, 5) if backend.device == "cuda" else (7, 3)
    top_k = 8 if backend.device == "cuda" else 2
    layout = layout_of(sums=sums, capacity=num_tokens, width=2200, top_k=top_k, dtype=backend.dtype)
    many = to(backend.device, draw_round(layout, num_tokens, seed=0, norm=norm).given)
    few = []
    for results, tokens, after in many:
        of_ranks = [slice(num_tokens * home, num_tokens * home + num_few) for home in range(2)]
        rows_XK = torch.cat([results.packed_row_XK[each] for each in of_ranks])
        weights_XK = None
        if results.weights_XK is not None:
            weights_XK = torch.cat([results.weights_XK[each] for each in of_ranks])
        home_BK = tokens.home_row_BK[:num_few].clone()
        if sums:
            home_BK[home_BK >= num_tokens] -= num_tokens - num_few  # row r * B + t, of another B
        own = Tokens(home_BK, tokens.weights_BK[:num_few].contiguous())
        if after is not None:
            shared_BD = None if after.shared_BD is None else after.shared_BD[:num_few]
            after = after._replace(residual_BD=after.residual_BD[:num_few], shared_BD=shared_BD)
        few.append((Results(results.y_RD, rows_XK, weights_XK), own, after))
    found = in_turns(OneProcess(layout, backend.device), combine_home_triton, many)
    for whole, part in zip(found, in_turns(OneProcess(layout, backend.device), combine_home_triton, few), strict=True):
        for of_many, of_few in zip(whole, part, strict=True):
            assert (of_few is None) == (of_many is None)
            if of_few is not None and of_many is not None:
                assert_same_bits(of_few, of_many[:num_few])


@BOTH
def test_what_does_not_come_is_noted(backend: Backend, sums: bool) -> None:
    """Rank 1 of 3 sends nothing: the others end, and know it; a later wait ends at once."""
    layout = layout_of(sums=sums, num_ranks=3, dtype=backend.dtype)
    ranks = OneProcess(layout, backend.device)
    given = to(backend.device, draw_round(layout, 2, seed=0, norm=False).given)
    for rank in (0, 2):
        ranks.states[rank].progress_2[0] += 1
        results, tokens, _ = given[rank]
        combine_home_triton(ranks.peers(rank), layout, ranks.states[rank], results, tokens, 60.0, sums=False)
    results, tokens, _ = given[0]
    for timeout_s in (0.02, 1e6):
        ranks.states[0].faults_3N.zero_()
        combine_home_triton(ranks.peers(0), layout, ranks.states[0], results, tokens, timeout_s, sends=False)
        torch.cuda.synchronize() if backend.device == "cuda" else None
        assert ranks.states[0].faults_3N.tolist() == [[0] * 3, [0] * 3, [0, 1, 0]]
        assert ranks.states[0].stopped_1.tolist() == [1]


def test_who_sends_nothing_is_noted_by_the_reference() -> None:
    layout = layout_of(sums=False, num_ranks=3, dtype=torch.float32)
    ranks = OneProcess(layout, "cpu")
    ranks.states[0].progress_2[0] += 1
    results, tokens, _ = draw_round(layout, 2, seed=0, norm=False).given[0]
    combine_home_reference(ranks.peers(0), layout, ranks.states[0], results, tokens, 0.01, sends=False)
    assert ranks.states[0].faults_3N.tolist() == [[0] * 3, [0] * 3, [0, 1, 1]]


@aot
@pytest.mark.parametrize("arch", ARCHS)
@BOTH
def test_compiles(arch: int, sums: bool) -> None:
    args: dict[str, object] = {"row_ptr": "*i32", "weights_ptr": "*fp32", "home_row_ptr": "*i32"}
    args |= {"home_weights_ptr": "*fp32"}
    args |= dict.fromkeys(("addresses_ptr", "progress_ptr", "stopped_ptr", "faults_ptr"), "*i64")
    args |= dict.fromkeys(("y_ptr", "shared_ptr", "residual_ptr", "norm_ptr", "out_ptr", "sum_ptr"), "*bf16")
    sizes = ("num_tokens", "num_columns", "stride_y", "stride_shared", "stride_residual")
    args |= dict.fromkeys((*sizes, "rank", "num_senders", "flag_tiles"), "i32") | {
        "eps": "fp32",
        "done_at": "i64",
        "home_at": "i64",
        "limit": "i64",
    }
    args |= {"NUM_RANKS": 8, "SUMS": sums, "CLOCK": True, "PDL": arch >= 90}
    whole = {"TOP_K": 8, "BLOCK_R": 1, "BLOCK_D": 2048, "ROW_D": 8192}
    narrow = {"TOP_K": 22, "BLOCK_R": 8, "BLOCK_D": 128, "ROW_D": 128}
    plain = dict.fromkeys(("shared_ptr", "residual_ptr", "norm_ptr", "sum_ptr"))
    compile_ahead(peer_combine._home_kernel, arch, args | whole, num_warps=8)
    compile_ahead(peer_combine._home_kernel, arch, args | whole | plain | {"BLOCK_D": 1024}, num_warps=4)
    # A short wait and a small buffer are 32-bit numbers.
    short = dict.fromkeys(("limit", "done_at", "home_at"), "i32")
    compile_ahead(peer_combine._home_kernel, arch, args | narrow | plain | short)
