"""Rows into peers' buffers: by hand, against loops, and the kernel against the reference, byte by byte."""

from __future__ import annotations

import pytest
import torch

from kernels import peer_dispatch
from kernels.peer_dispatch import _send_kernel, send_rows, send_rows_reference, send_rows_triton
from kernels.peer_flags import TOKEN_BITS
from kernels.peer_layout import PeerLayout
from kernels.quantize import FP8, Quantized, quantize_rows_reference
from kernels.replica_choice import ReplicaColumns
from tests.aot import ARCHS, aot, compile_ahead
from tests.one_process import OneProcess, draw_ids, draw_replicas
from tests.shapes import HIDDEN

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]

# A program takes one token at a time, so there is no tile to fill or to exceed; the interpreter takes 5 ms for each.
TOKENS = (0, 1, 9, pytest.param(129, marks=pytest.mark.gpu))


def layout_of(
    *, num_ranks: int = 2, capacity: int = 8, width: int = 40, top_k: int = 2, row_dtype=torch.float32, sums=False
) -> PeerLayout:
    dtype = torch.bfloat16 if row_dtype == FP8 else row_dtype
    return PeerLayout(num_ranks, capacity, width, top_k, row_dtype, dtype, sums)


@pytest.mark.parametrize(("sums", "home_rows"), [(False, [0, 1]), (True, [0, 1])])
def test_worked_example(sums: bool, home_rows: list[int]) -> None:
    """The numbers of the module's docstring."""
    ranks = OneProcess(layout_of(sums=sums), "cpu")
    columns = torch.zeros(5, 1, dtype=torch.int32)
    replicas = ReplicaColumns(columns.clone(), columns.clone(), torch.ones(5, dtype=torch.int32))
    replicas.slots_EC[4], replicas.ranks_EC[2] = 1, 1
    x_BD, ids_BK = torch.arange(40.0)[None], torch.tensor([[4, 2]], dtype=torch.int32)
    weights_BK = torch.tensor([[0.5, 0.25]])
    for rank in range(2):
        home_BK = send_rows(
            ranks.peers(rank), ranks.layout, ranks.states[rank], x_BD + rank, ids_BK, weights_BK, replicas
        )
        assert home_BK.tolist() == [home_rows]
    for rank, slots in enumerate(([1, -1], [-1, 0])):
        buffer = ranks.buffers[rank]
        assert ranks.layout.slots_XK(buffer, 1).tolist() == [slots, slots]
        assert ranks.layout.rows_XD(buffer, 1).tolist() == [x_BD[0].tolist(), (x_BD[0] + 1).tolist()]
        assert ranks.layout.flags_N(buffer).tolist() == [1 << TOKEN_BITS | 1] * 2
        if sums:
            assert ranks.layout.weights_XK(buffer, 1).tolist() == [[0.5, 0.25]] * 2


def test_reference_against_loops() -> None:
    """Replica (t + rank) mod count; a row once per rank; sums come home in the order of the first choice on a rank."""
    for sums in (False, True):
        ranks = OneProcess(layout_of(num_ranks=3, capacity=20, top_k=4, sums=sums), "cpu")
        replicas, layout = draw_replicas(9, 3, "cpu"), ranks.layout
        for rank in range(3):
            ids_BK, x_BD = draw_ids(20, 9, 4, seed=rank), torch.randn(20, 40)
            weights_BK = torch.rand(20, 4)
            home_BK = send_rows_reference(
                ranks.peers(rank), layout, ranks.states[rank], x_BD, ids_BK, weights_BK, replicas
            )
            for token in range(20):
                expected = {peer: [-1] * 4 for peer in range(3)}
                firsts: dict[int, int] = {}
                home = [-1] * 4
                for k, expert in enumerate(ids_BK[token].tolist()):
                    if not 0 <= expert < 9:
                        continue
                    column = (token + rank) % int(replicas.count_E[expert])
                    peer = int(replicas.ranks_EC[expert, column])
                    expected[peer][k] = int(replicas.slots_EC[expert, column])
                    if not sums:
                        home[k] = token * 4 + k
                    elif peer not in firsts:
                        home[len(firsts)] = peer * 20 + token
                    firsts.setdefault(peer, k)
                assert home_BK[token].tolist() == home
                record = rank * 20 + token
                for peer, slots in expected.items():
                    buffer = ranks.buffers[peer]
                    assert layout.slots_XK(buffer, 20)[record].tolist() == slots
                    row_D = layout.rows_XD(buffer, 20)[record]
                    assert torch.equal(row_D, x_BD[token]) if peer in firsts else row_D.isnan().all()
                    if sums and peer in firsts:
                        assert torch.equal(layout.weights_XK(buffer, 20)[record], weights_BK[token])


def compare_kernel(
    layout: PeerLayout, device: str, num_tokens: int, *, num_epochs: int = 2, one_rank: bool = False
) -> None:
    """One launch of every rank, once more with other routing: all bytes of all buffers."""
    ours, wanted = OneProcess(layout, device), OneProcess(layout, "cpu")
    num_experts = 70
    replicas = draw_replicas(num_experts, layout.num_ranks, "cpu")
    if one_rank:
        replicas.ranks_EC.fill_(layout.num_ranks - 1)
    on_device = ReplicaColumns(*(each.to(device) for each in replicas))
    generator = torch.Generator().manual_seed(0)
    for epoch in range(num_epochs):
        for rank in range(layout.num_ranks):
            wide_BD = torch.randn(num_tokens, layout.width + 8, generator=generator)
            ids_BK = draw_ids(num_tokens, num_experts, layout.top_k, seed=10 * epoch + rank)
            weights_BK = torch.rand(num_tokens, layout.top_k, generator=generator)
            x_BD = wide_BD[:, : layout.width].to(layout.dtype)
            x = quantize_rows_reference(x_BD) if layout.row_dtype == FP8 else x_BD
            x_there = Quantized(*(each.to(device) for each in x)) if isinstance(x, Quantized) else x.to(device)
            home_BK = send_rows_triton(
                ours.peers(rank),
                layout,
                ours.states[rank],
                x_there,
                ids_BK.to(device),
                weights_BK.to(device),
                on_device,
            )
            meant_BK = send_rows_reference(
                wanted.peers(rank), layout, wanted.states[rank], x, ids_BK, weights_BK, replicas
            )
            assert torch.equal(home_BK.cpu(), meant_BK)
            assert ours.states[rank].progress_2.tolist() == [epoch + 1, 0]
    ours.assert_same_bytes(wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_kernel_for_numbers_of_tokens(device: str, num_tokens: int) -> None:
    """Without tokens too the peers get their signal."""
    compare_kernel(layout_of(capacity=130, sums=True), device, num_tokens, num_epochs=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", HIDDEN)
@pytest.mark.parametrize("row_dtype", [torch.float32, torch.float16, FP8], ids=str)
def test_kernel_for_widths_and_dtypes(device: str, width: int, row_dtype: torch.dtype) -> None:
    compare_kernel(layout_of(width=width, row_dtype=row_dtype, sums=True), device, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_ranks", "top_k"), [(1, 8), (3, 1), (5, 6), (2, 60)])
def test_kernel_for_ranks_and_choices(device: str, num_ranks: int, top_k: int) -> None:
    for sums in (False, True):
        compare_kernel(layout_of(num_ranks=num_ranks, top_k=top_k, sums=sums), device, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_everything_to_one_rank_by_few_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes several pieces, and the last to end signals."""
    monkeypatch.setattr(peer_dispatch, "MOST_PROGRAMS", 3)
    compare_kernel(layout_of(num_ranks=3, width=2880, top_k=4, sums=True), device, 3, one_rank=True)


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    pointers = ("ranks_ptr", "slots_ptr", "count_ptr", "ids_ptr", "home_row_ptr")
    args: dict[str, object] = {"weights_ptr": "*fp32"}
    args |= dict.fromkeys(pointers, "*i32")
    args |= dict.fromkeys(("addresses_ptr", "progress_ptr"), "*i64")
    args |= dict.fromkeys(("num_tokens", "num_columns", "num_experts", "num_replicas", "stride_x", "rank"), "i32")
    args |= dict.fromkeys(("slots_at", "weights_at", "scales_at", "rows_at"), "i64")
    args |= {"NUM_RANKS": 8, "TOP_K": 8, "BLOCK_K": 8, "PDL": arch >= 90}
    fp8 = {"x_ptr": "*i8", "scales_ptr": "*fp32", "BLOCK_D": 4096, "BLOCK_G": 64}
    fp8 |= dict.fromkeys(("num_scales", "stride_scale_g", "stride_scale_t"), "i32")
    bf16 = {"x_ptr": "*bf16", "scales_ptr": None, "BLOCK_D": 2048, "BLOCK_G": 1}
    bf16 |= dict.fromkeys(("num_scales", "stride_scale_g", "stride_scale_t"), "i32")
    for sums in (False, True):
        for kind in (fp8, bf16):
            assert compile_ahead(_send_kernel, arch, args | kind | {"SUMS": sums}, aligned=kind is bf16)
